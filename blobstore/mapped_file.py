"""A whole file as memory, and what may be a path."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from blobstore.errors import FileAccessError, InvalidFileError

__all__ = ["Descriptor", "Paths", "as_path", "as_paths", "check_length", "map_file", "same_file"]

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One path, or several."""

# Each map holds a file descriptor, and processes may have few: thousands of slices of one file share its map. An inode
# is not used again while it is mapped, so these numbers tell one file from another.
_maps: weakref.WeakValueDictionary[tuple[int, int, int], mmap.mmap] = weakref.WeakValueDictionary()


def as_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Path:
    """What the caller gave as a path.

    Raises:
        FileAccessError: it is none: of another type, or with characters that no file name has.
    """
    reason = "not a path"
    try:
        decoded = os.fsdecode(path)
        if b"\0" not in os.fsencode(decoded):
            return Path(decoded)
        reason = "not a path: it has a null character"
    except (TypeError, UnicodeError):
        pass
    raise FileAccessError(repr(path), OSError(errno.EINVAL, reason))


def as_paths(paths: Paths) -> list[Path]:
    """What the caller gave as one path or several, as a list.

    Raises:
        FileAccessError: as `as_path`; or it is neither a path nor a collection of them.
    """
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
        return [as_path(paths)]  # which tells what is no path
    try:
        given = list(paths)
    except (TypeError, ValueError) as error:  # an array without dimensions, memory that was released
        raise FileAccessError(repr(paths), OSError(errno.EINVAL, f"not a path: {error}")) from None
    return [as_path(path) for path in given]


def map_file(path: str | os.PathLike[str], *, writable_copy: bool = False) -> memoryview:
    """Map a regular file and return its bytes.

    The view owns the map: the memory stays valid for as long as the view, or any slice of it or array over it, is
    referenced, also when the file is renamed, replaced or deleted meanwhile. A file that is *truncated in place*
    while it is mapped makes the operating system kill the process (SIGBUS) when the lost part is read; write a new
    file and rename it instead, as everything in blobstore does.

    Args:
        path: the file.
        writable_copy: map it private and writable: a write copies the page that it touches and never reaches the
            file. Otherwise the view is read-only.

    Raises:
        FileAccessError: it does not exist, may not be read, or is a directory or another thing without bytes.
        InvalidFileError: it is empty.
    """
    path = as_path(path)
    file = Descriptor()
    try:
        descriptor = file.open(path)
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise FileAccessError(path, OSError(errno.EISDIR, os.strerror(errno.EISDIR)))
        if not stat.S_ISREG(status.st_mode):
            raise FileAccessError(path, OSError(errno.EINVAL, "not a regular file"))
        if status.st_size == 0:
            raise InvalidFileError(path, "the file is empty")
        if writable_copy:
            return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY))
        identity = (status.st_dev, status.st_ino, status.st_size)
        shared = _maps.get(identity)
        if shared is None:
            shared = _maps[identity] = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        return memoryview(shared)
    except OSError as error:
        if isinstance(error, FileAccessError):
            raise
        raise FileAccessError(path, error) from None
    finally:
        file.close()


class Descriptor:
    """A file or a folder that is open for reading until this is closed or forgotten.

    The system's number goes into the list and out of it without a step of Python's in between, at which an exception of a
    signal handler could lose it.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def open(self, path: Path, flags: int = 0) -> int:
        """Open it, once.

        Raises:
            OSError: it cannot be opened.
        """
        flags |= os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        self._numbers.extend(map(os.open, [path], [flags]))
        return self._numbers[0]

    def close(self) -> None:
        deque(map(os.close, map(self._numbers.pop, [-1] * len(self._numbers))), maxlen=0)

    def __del__(self) -> None:
        self.close()


def check_length(path: str | os.PathLike[str], data: memoryview) -> None:
    """Tell whether a file is as long as it was when it was mapped, before a lost page is read.

    Args:
        path: what errors call the file.
        data: what `map_file` returned, or a part of it; any other memory is left alone.

    Raises:
        FileAccessError: it was truncated.
    """
    if isinstance(data.obj, mmap.mmap) and (found := data.obj.size()) < len(data.obj):
        reason = f"the file was truncated: it has {found} bytes, {len(data.obj)} are expected"
        raise FileAccessError(path, OSError(errno.EIO, reason))


def same_file(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> bool:
    """Whether two paths lead to one file, or would once they exist."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return Path(a).resolve() == Path(b).resolve()
