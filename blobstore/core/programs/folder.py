"""The folder that a run writes to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from blobstore.core.disk.folders import folders
from blobstore.core.disk.kinds import check_folder_name
from blobstore.core.disk.locks import exclusive
from blobstore.core.disk.recovery import recover
from blobstore.core.disk.staging import check_writable
from blobstore.core.memory.mapped_file import named

__all__ = ["output_folder"]


@contextlib.contextmanager
def output_folder(directory: Path, *, dry_run: bool = False) -> Iterator[None]:
    """Make a folder, keep other writers of programs out of it, and finish what a killed writer left.

    If an error is raised inside, a folder that was missing before is removed again. A dry run only checks that all this is
    possible, and keeps nobody out.
    """
    check_folder_name(directory)
    if dry_run:
        check_writable(directory, directory)
        yield
        return
    with named(directory), folders([directory]), exclusive(directory):
        recover(directory)
        yield
