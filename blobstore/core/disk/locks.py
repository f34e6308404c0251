"""Locks on files and folders, held against other processes."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no locks that end with their process, so nothing is recovered there
    fcntl = None  # type: ignore[assignment]

from blobstore.core.disk.names import temporary_beside
from blobstore.core.memory.mapped_file import Descriptor, named

__all__ = ["HAS_LOCKS", "Lock", "create_locked", "exclusive"]

_log = logging.getLogger(__name__)
_SILENCE = 1.0  # seconds of waiting after which the log says so

HAS_LOCKS = fcntl is not None
"""Whether this system has locks that end with their process, so that files of a killed process can be recognized."""


class Lock(Descriptor):
    """A lock on a file or a folder; the system releases it when the process ends."""

    def take(self, path: Path, *, shared: bool = False, wait: bool = False) -> bool:
        """Take the lock. If that takes a while, the log says which one it waits for.

        Returns:
            Whether no other process holds it; always true where the file system has no locks.

        Raises:
            OSError: the file cannot be opened.
        """
        descriptor = self.open(path, getattr(os, "O_NOFOLLOW", 0))
        taken = _lock(descriptor, shared=shared)
        if taken or not wait:
            return taken
        with _said(path):
            return _lock(descriptor, shared=shared, wait=True)


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    """Say in the log that the lock on a file is waited for, unless that ends soon: anyone who may read it can hold it."""
    timer = threading.Timer(_SILENCE, _log.warning, ("%s: waiting for another process, which has locked it", path))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> bool:
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


def create_locked(target: Path, create: Callable[[Path], int | None]) -> None:
    """Make a file or a folder with a temporary name beside `target`, and lock it, so that `recover` leaves it alone.

    Args:
        target: what has the folder.
        create: makes it under the name that it is given, and returns a descriptor of it; None if it is gone again. It is
            called once more if `recover` in another process removed what it made before that was locked here.
    """
    while True:
        path = temporary_beside(target)
        descriptor = create(path)
        if descriptor is not None and _lock(descriptor) and os.path.lexists(path):
            return
        with contextlib.suppress(OSError):  # the disk may have failed to say that it is there
            (Path.rmdir if path.is_dir() else Path.unlink)(path)


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
