"""The folder that a run writes to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from blobstore.disk.locks import exclusive
from blobstore.disk.recovery import recover
from blobstore.disk.staging import check_writable
from blobstore.errors import FileAccessError
from blobstore.memory.mapped_file import named

__all__ = ["folders", "output_folder"]


@contextlib.contextmanager
def output_folder(directory: Path, *, dry_run: bool = False) -> Iterator[None]:
    """Make a folder, keep other writers of programs out of it, and finish what a killed writer left.

    If an error is raised inside, a folder that was missing before is removed again. A dry run only checks that all this
    is possible, and keeps nobody out.
    """
    if dry_run:
        try:
            check_writable(directory)
        except OSError as error:
            raise FileAccessError(directory, error) from None
        yield
        return
    with named(directory), folders([directory]), exclusive(directory):
        recover(directory)
        yield


@contextlib.contextmanager
def folders(directories: Iterable[Path]) -> Iterator[None]:
    """Make folders. If an error is raised inside, those that were missing before are removed again."""
    made: list[Path] = []
    try:
        for directory in directories:
            try:
                for folder in [*reversed(directory.parents), directory]:
                    if not folder.exists():
                        made.append(folder)
                        folder.mkdir(exist_ok=True)
                if not directory.is_dir():
                    raise NotADirectoryError(20, os.strerror(20))
            except OSError as error:
                raise FileAccessError(directory, error) from None
        yield
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
