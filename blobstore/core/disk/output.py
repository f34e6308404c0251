"""Files whose bytes go to the disk while more are written."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

from blobstore.core.disk.progress import Progress
from blobstore.core.memory.mapped_file import check_length, file_behind, read_pieces

__all__ = ["EarlySync", "Output", "write_view"]

_SYNC = 1 << 26  # after this many bytes a sync starts in the background
_LARGE = 1 << 20  # shorter runs are gathered
_IMPOSSIBLE = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY}
"""The system cannot copy between these two files."""


class EarlySync:
    """Syncs a file in the background as it grows, so that little is left to wait for at the end.

    Args:
        descriptor: opens the file for one sync.
    """

    _thread: threading.Thread | None = None

    def __init__(self, descriptor: Callable[[], AbstractContextManager[int]]) -> None:
        self._descriptor = descriptor
        self._synced = 0
        self._failure: OSError | None = None

    def written(self, nbytes: int) -> None:
        """Call this when the file has so many bytes."""
        if nbytes - self._synced >= _SYNC and not (self._thread and self._thread.is_alive()):
            self._synced = nbytes
            self._thread = threading.Thread(target=self._sync, daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads can be started: `finish` does all of it
                self._thread.start()

    def finish(self) -> None:
        """Wait until everything written is on the disk.

        Raises:
            OSError: the disk failed, now or before.
        """
        self.wait()
        if self._failure:  # the system reports a failure only once
            raise self._failure
        with self._descriptor() as number:
            os.fsync(number)

    def wait(self) -> None:
        """Wait for a sync that goes on; the file may be closed then."""
        if self._thread and self._thread.is_alive():
            self._thread.join()

    def _sync(self) -> None:
        try:
            with self._descriptor() as number:
                getattr(os, "fdatasync", os.fsync)(number)
        except OSError as error:
            self._failure = error


class Output(io.FileIO):
    """A new file, synced in the background as it grows; OSError if something is there.

    The descriptor belongs to this object from the moment it exists, so an exception never leaks it. `progress` is told that
    `what` is being done, of about `total` bytes.
    """

    _early: EarlySync | None = None

    def __init__(self, path: Path, mode: int, what: str, total: int, progress: Progress | None) -> None:
        self._what, self._total, self._progress = what, total, progress
        self._done = 0
        # "x" is O_CREAT | O_EXCL, which does not follow a link either
        super().__init__(path, "x", opener=functools.partial(os.open, mode=mode))
        self._early = EarlySync(lambda: contextlib.nullcontext(self.fileno()))

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._written(written)
        return written

    def copy(self, descriptor: int, offset: int, nbytes: int) -> bool:
        """Let the system copy a part of another file.

        Args:
            descriptor: of the file.
            offset: where the part begins there.
            nbytes: its size.

        Returns:
            False if the system cannot do it, before anything was written.

        Raises:
            OSError: the disk failed, or the other file is too short.
        """
        copy = getattr(os, "copy_file_range", None)
        if copy is None:
            return False
        done = 0
        while done < nbytes:
            try:
                count = copy(descriptor, self.fileno(), min(nbytes - done, _SYNC), offset + done)
            except OSError as error:
                if done == 0 and error.errno in _IMPOSSIBLE:
                    return False
                raise
            if count == 0:
                raise OSError(errno.EIO, "a file that is copied was truncated")
            done += count
            self._written(count)
        return True

    def _written(self, nbytes: int) -> None:
        self._done += nbytes
        if self._early is not None:
            self._early.written(self._done)
        if self._progress:
            self._progress(self._what, min(self._done, self._total), self._total)

    def sync(self) -> None:
        """Wait until everything written is on the disk.

        Raises:
            OSError: the disk failed, now or during a sync in the background.
        """
        if self._early is not None:
            self._early.finish()

    def close(self) -> None:
        if self._early is not None:
            self._early.wait()
        super().close()


def write_view(file: BinaryIO, data: memoryview) -> None:
    """Write memory to a file of a `Staging`, or to any other. Large parts of a mapped file do not pass through this process.

    Raises:
        FileAccessError: the memory is that of a file that was truncated.
        OSError: the file cannot be written.
    """
    raw = getattr(file, "raw", None)
    if isinstance(raw, Output) and len(data) >= _LARGE:
        check_length(data)
        with file_behind(data) as place:
            if place is not None:
                file.flush()
                if raw.copy(*place, len(data)):
                    return
    for piece in read_pieces(data):
        file.write(piece)
