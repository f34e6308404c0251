"""A new file whose bytes go to the disk while more are written."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import threading
from pathlib import Path
from typing import Any

from blobstore.disk.progress import Progress

__all__ = ["Output"]

_SYNC = 1 << 26  # after this many bytes a sync starts in the background


class Output(io.FileIO):
    """A new file, synced in the background as it grows, so that little is left to wait for at the end.

    The descriptor belongs to this object from the moment it exists, so an exception never leaks it.

    Args:
        path: the file; nothing may exist there.
        mode: its permissions, before the umask.
        what: the name of the work that progress reports.
        total: about how many bytes will be written.
        progress: called after every write.

    Raises:
        OSError: the file exists, or cannot be created.
    """

    _syncing: threading.Thread | None = None

    def __init__(self, path: Path, mode: int, what: str, total: int, progress: Progress | None) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done = self._synced = 0
        self._failure: OSError | None = None
        # "x" is O_CREAT | O_EXCL, which does not follow a link either
        super().__init__(path, "x", opener=functools.partial(os.open, mode=mode))

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._done += written
        if self._done - self._synced >= _SYNC and not (self._syncing and self._syncing.is_alive()):
            self._synced = self._done
            self._syncing = threading.Thread(target=self._sync)
            with contextlib.suppress(RuntimeError):  # no more threads can be started: `sync` does all of it
                self._syncing.start()
        if self._progress:
            self._progress(self._what, min(self._done, self._total), self._total)
        return written

    def sync(self) -> None:
        """Wait until everything written is on the disk.

        Raises:
            OSError: the disk failed, now or during a sync in the background.
        """
        self._wait()
        if self._failure:  # the system reports a failure only once
            raise self._failure
        os.fsync(self.fileno())

    def close(self) -> None:
        self._wait()
        super().close()

    def _sync(self) -> None:
        try:
            getattr(os, "fdatasync", os.fsync)(self.fileno())
        except OSError as error:
            self._failure = error

    def _wait(self) -> None:
        if self._syncing and self._syncing.is_alive():
            self._syncing.join()
