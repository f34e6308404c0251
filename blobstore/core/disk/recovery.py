"""Cleaning up after killed processes, and the scratch folders that are cleaned up in the same way."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from blobstore.core.disk.journal import Journal
from blobstore.core.disk.locks import HAS_LOCKS, Lock, create_locked
from blobstore.core.disk.names import JOURNAL, TEMPORARY
from blobstore.core.memory.mapped_file import named

__all__ = ["ScratchFolder", "recover"]


def recover(folder: Path) -> None:
    """Clean up what killed processes left in a folder: finish their groups of files, and remove their temporary files.

    Files of another user, or of a process that is still running, stay.

    Raises:
        FileAccessError: a group can neither be finished nor undone.
    """
    if not HAS_LOCKS:
        return
    try:
        with os.scandir(folder) as entries:
            hidden = [Path(one.path) for one in entries if one.name.startswith(".blobstore-") and not one.is_symlink()]
    except OSError:
        return
    # A list, so that each is tried.
    busy = [path for path in hidden if JOURNAL.fullmatch(path.name) and not _finish(path)]
    # The temporary files of another process's group have no lock while it finishes the group: leave them to it.
    if busy:
        return
    for path in hidden:
        if TEMPORARY.fullmatch(path.name):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a temporary file or folder, unless a process uses it."""
    with contextlib.suppress(OSError), _abandoned(path) as abandoned:
        if abandoned and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif abandoned:
            path.unlink()


def _finish(path: Path) -> bool:
    """Finish the group of a journal; False if a process of this user is working on it."""
    with named(path), contextlib.suppress(FileNotFoundError), _abandoned(path) as abandoned:
        if not abandoned:
            return path.lstat().st_uid != os.geteuid()
        journal = Journal.read(path)
        if journal is not None:
            if os.path.lexists(journal.folders[0] / path.name):
                journal.finish()
            for left in journal.leftovers(path.name):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def _abandoned(path: Path) -> Iterator[bool]:
    """Whether a file belongs to this user and no process has locked it; this process holds its lock in the meantime."""
    lock = Lock()
    try:
        yield path.lstat().st_uid == os.geteuid() and lock.take(path)
    finally:
        lock.close()


class ScratchFolder:
    """A temporary folder inside another; a context manager that gives its path and removes it at the end.

    If the process is killed, `recover` removes the folder.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self.path = directory, directory / "folder"
        self._lock = Lock()

    def __enter__(self) -> Path:
        recover(self._directory)
        create_locked(self.path, self._create)
        return self.path

    def _create(self, path: Path) -> int | None:
        self._lock.close()
        self.path = path
        path.mkdir(0o700)
        with contextlib.suppress(FileNotFoundError):
            return self._lock.open(path, getattr(os, "O_NOFOLLOW", 0))
        return None

    def __exit__(self, *exception: object) -> None:
        self._discard()

    def leave(self) -> None:
        """Keep the folder, for `recover`."""
        self._lock.close()
        del self._lock  # nothing is removed then

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self._discard()

    def _discard(self) -> None:
        """Remove the folder. Failures are ignored, because nothing needs it any more."""
        with contextlib.suppress(OSError):  # also of the system calls whose errors `rmtree` does not ignore
            if os.path.lexists(self.path):
                shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._lock.close()
