"""Objects that are being fetched: a file with holes, and beside it the list of the ranges that it has.

The list has a line for each range that was written. It is not synced, so after a power failure it may promise bytes that
are not there; therefore nothing of a spool is used before its digest was compared. After a kill it is right, and the next
pull goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from blobstore.core.disk.output import EarlySync
from blobstore.core.memory.mapped_file import named, open_regular
from blobstore.releases.index.index import Object
from blobstore.releases.index.intervals import Intervals

__all__ = ["Spool"]

_LIST_LIMIT = 1 << 24
"""Bytes of a list that are read; what further lines say is fetched again."""


class Spool:
    """The bytes of an object as far as they are here. Threads write ranges, others wait for them.

    It keeps no file open, because a release may have more files than a process may open.

    Args:
        folder: where the file and its list are; what an earlier pull left there is used.
        wanted: the object.

    Attributes:
        wanted: as given.
        path: the file.
        whole: held by who fetches all of it, because the server has no ranges.
    """

    def __init__(self, folder: Path, wanted: Object) -> None:
        self.wanted, self.path = wanted, folder / wanted.sha256
        self._list = folder / f"{wanted.sha256}.ranges"
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self.whole = threading.Lock()
        self._there = self._read_list()

    def _read_list(self) -> Intervals:
        intervals = Intervals()
        with contextlib.suppress(OSError, ValueError), open_regular(self._list) as descriptor:
            length = min(os.lstat(self.path).st_size, self.wanted.size)
            for line in os.read(descriptor, _LIST_LIMIT).decode("ascii").splitlines():
                start, stop = map(int, line.split())
                if 0 <= start < stop <= length:
                    intervals.add(start, stop)
        return intervals

    @contextlib.contextmanager
    def _opened(self, path: Path, flags: int) -> Iterator[int]:
        with named(path):
            number = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(number).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                yield number
            finally:
                os.close(number)

    @property
    def present(self) -> int:
        """The number of bytes that are here."""
        with self._changed:
            return self._there.total

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges between two places that are not here."""
        with self._changed:
            return self._there.missing(start, stop)

    def write(self, at: int, data: bytes | memoryview) -> None:
        """Put bytes in their place."""
        with self._opened(self.path, os.O_WRONLY | os.O_CREAT) as number:
            left, place = memoryview(data), at
            while left:
                written = os.pwrite(number, left, place)
                left, place = left[written:], place + written
        with self._changed:
            self._there.add(at, at + len(data))
            self._changed.notify_all()

    def note(self, start: int, stop: int) -> None:
        """List a range that was written, for a later pull."""
        if start < stop:
            with self._opened(self._list, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as number:
                os.write(number, f"{start} {stop}\n".encode())

    def read(self, start: int, size: int) -> bytes:
        """Some bytes, once they are here; fewer only at the end.

        Raises:
            The error that ended the transfer, if they do not come.
        """
        stop = min(start + size, self.wanted.size)
        with self._changed:
            while self._there.end_from(start) < stop:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
        pieces = []
        with self._opened(self.path, os.O_RDONLY) as number:
            while start < stop:
                piece = os.pread(number, stop - start, start)
                if not piece:
                    raise OSError(errno.EIO, "the file was truncated")
                pieces.append(piece)
                start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def fail(self, error: BaseException) -> None:
        """Raise this error in all threads that wait."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def forget(self, start: int, stop: int) -> None:
        """A range turned out to be wrong."""
        with self._changed:
            self._there.remove(start, stop)
            left = "".join(f"{a} {b}\n" for a, b in self._there)
        with self._opened(self._list, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as number:
            os.write(number, left.encode())

    def early_sync(self) -> EarlySync:
        """Brings the file to the disk while it fills."""
        return EarlySync(lambda: self._opened(self.path, os.O_RDWR | os.O_CREAT))

    def take(self, place: Path) -> None:
        """Rename the file, which is complete and synced."""
        with named(place):
            if os.lstat(self.path).st_size > self.wanted.size:  # an earlier pull may have been wrong about its size
                os.truncate(self.path, self.wanted.size)
            os.replace(self.path, place)
        self._drop(self._list)

    def discard(self) -> None:
        """Remove the file."""
        self._drop(self._list)
        self._drop(self.path)

    @staticmethod
    def _drop(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
