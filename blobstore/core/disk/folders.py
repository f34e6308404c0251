"""Folders for outputs, which are gone again if writing fails."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from blobstore.core.errors import FileAccessError
from blobstore.core.memory.mapped_file import named

__all__ = ["check_room", "folders"]


def check_room(folder: Path, need: int, largest: Path, size: int, what: str) -> None:
    """Check that files of `need` bytes fit into a folder, which may be missing, before the first byte is written.

    The FileAccessError says how large the largest of them is, and what they are.
    """
    there = Path(os.path.abspath(folder))  # noqa: PTH100 - links stay
    while not there.exists() and there != there.parent:
        there = there.parent
    with named(folder):
        disk = os.statvfs(there)
    # Some file systems, such as those of networks, report no sizes at all: then nothing is refused.
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and need > free:
        reason = f"{what} needs {need} bytes, {size} of them for this file, and {free} are available"
        raise FileAccessError(largest, OSError(errno.ENOSPC, reason))


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
