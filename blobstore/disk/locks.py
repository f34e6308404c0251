"""Locks on files and folders, held against other processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no locks that end with their process, so nothing is recovered there
    fcntl = None  # type: ignore[assignment]

from blobstore.memory.mapped_file import Descriptor, named

__all__ = ["HAS_LOCKS", "Lock", "exclusive", "lock_descriptor"]

HAS_LOCKS = fcntl is not None
"""Whether this system has locks that end with their process, so that files of a killed process can be recognized."""


class Lock(Descriptor):
    """A lock on a file or a folder; the system releases it when the process ends."""

    def take(self, path: Path, *, shared: bool = False, wait: bool = False) -> bool:
        """Take the lock.

        Returns:
            Whether no other process holds it; always true where the file system has no locks.

        Raises:
            OSError: the file cannot be opened.
        """
        return lock_descriptor(self.open(path, getattr(os, "O_NOFOLLOW", 0)), shared=shared, wait=wait)


def lock_descriptor(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file; False if another process has locked it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True  # this file system has no locks
    return True


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keep other processes that call this out of a folder; waits until the one that is in it leaves."""
    lock = Lock()
    try:
        with named(directory), contextlib.suppress(PermissionError):
            lock.take(Path(os.path.realpath(directory)), wait=True)
        yield
    finally:
        lock.close()
