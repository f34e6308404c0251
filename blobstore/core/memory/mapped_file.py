"""Files as memory, and the paths that callers pass."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from blobstore.core.errors import BlobStoreError, FileAccessError, InvalidFileError

__all__ = [
    "PIECE",
    "Descriptor",
    "Paths",
    "PrivateFile",
    "as_path",
    "as_paths",
    "check_length",
    "file_behind",
    "leads_into",
    "listed",
    "map_file",
    "named",
    "origin_of",
    "read_pieces",
    "same_file",
    "which_file",
]

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One path, or several."""

PIECE = 1 << 20
"""How many bytes are read at a time; few enough to stay in the processor's cache."""

_VIEWS = memoryview, np.ndarray
"""What can stand between a view and what holds its memory."""


class _Map(mmap.mmap):
    """A map of a whole file that knows its path, so that an error about any view of it can name the file.

    Attributes:
        path: the file, as given.
        place: its absolute path, whatever the folder of the process is now.
        modified: when the file was last changed, in nanoseconds, as it was when it was mapped.
        identity: device, inode, size and time of the last change; None if the map may differ from the file.
    """

    path: Path
    place: str
    modified: int
    identity: tuple[int, int, int, int] | None = None


# Each map holds a file descriptor, of which a process has few, so thousands of slices of one file share its map. An
# inode is not reused while it is mapped, so the numbers in the key identify the file.
_maps: weakref.WeakValueDictionary[tuple[str, int, int, int, int], _Map] = weakref.WeakValueDictionary()


def as_path(path: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> Path:
    """A caller's argument as a path.

    Raises:
        FileAccessError: it has another type, is empty, or has characters that no file name can have.
    """
    reason = "not a path"
    try:
        decoded = os.fsdecode(path)
        if not decoded:  # for pathlib, the current folder
            raise FileAccessError(repr(path), OSError(errno.ENOENT, os.strerror(errno.ENOENT)))
        if b"\0" not in os.fsencode(decoded):
            return Path(decoded)
        reason = "not a path: it has a null character"
    except (TypeError, UnicodeError):
        pass
    raise FileAccessError(repr(path), OSError(errno.EINVAL, reason))


def as_paths(paths: Paths) -> list[Path]:
    """A caller's argument, one path or several, as a list of paths.

    Raises:
        FileAccessError: as `as_path`; or the argument is neither a path nor a collection of paths.
    """
    return [as_path(path) for path in listed(paths)]


def listed(paths: Paths) -> list[str | os.PathLike[str]]:
    """A caller's argument, one path or several, as a list of the same objects.

    Raises:
        FileAccessError: iterating over it fails.
    """
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
        return [paths]
    try:
        return list(paths)
    except (TypeError, ValueError) as error:  # an array without dimensions, memory that was released
        raise FileAccessError(repr(paths), OSError(errno.EINVAL, f"not a path: {error}")) from None


def map_file(path: str | os.PathLike[str]) -> memoryview:
    """Map a regular file and return its bytes, read-only.

    The view owns the map: the memory stays valid for as long as the view, or any slice of it or array over it, is
    referenced, even if the file is renamed, replaced or deleted in the meantime. If a file is *truncated in place* while
    it is mapped, the operating system kills the process (SIGBUS) when it reads the lost part. `check_length` detects
    that beforehand; but a file should be replaced by renaming a new one, as everything in blobstore does.

    Args:
        path: the file.

    Raises:
        FileAccessError: it does not exist, is not readable, or is not a regular file.
        InvalidFileError: it is empty.
    """
    path = as_path(path)
    place = os.path.abspath(path)  # noqa: PTH100 - as pathlib's, and faster
    with contextlib.suppress(OSError, ValueError):  # of a file that is mapped already, nothing has to be opened
        if (known := _maps.get(_identity(place, os.stat(path)))) is not None:  # noqa: PTH116
            return memoryview(known)
    with _opened(path) as (descriptor, status):
        identity = _identity(place, status)
        shared = _maps.get(identity)
        if shared is None:
            shared = _maps[identity] = _Map(descriptor, status.st_size, access=mmap.ACCESS_READ)
            shared.path, shared.place, shared.modified = path, place, status.st_mtime_ns
            shared.identity = identity[1:]
        return memoryview(shared)


def _identity(place: str, status: os.stat_result) -> tuple[str, int, int, int, int]:
    return place, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def _opened(path: Path, *, empty: bool = False) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor of a regular file that is not empty, unless it may be, and its status; every OSError inside names the file."""
    file = Descriptor()
    try:
        with named(path):
            descriptor = file.open(path)
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if status.st_size == 0 and not empty:
                raise InvalidFileError(path, "the file is empty")
            yield descriptor, status
    finally:
        file.close()


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """A descriptor of a regular file, for reading. A pipe, a device or a socket is refused at once, not waited for.

    Raises:
        FileAccessError: it cannot be opened, or is no regular file; and for every OSError inside.
    """
    with _opened(path, empty=True) as (descriptor, _):
        yield descriptor


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Turn every OSError of the system inside into a FileAccessError that names the file that the caller asked for."""
    try:
        yield
    except BlobStoreError:  # some are OSErrors, and say what they are about
        raise
    except OSError as error:
        raise FileAccessError(path, error) from None


class Descriptor:
    """A file or a folder that is open for reading until this is closed or garbage-collected.

    The system's number goes into the list and out of it in C, so no exception of a signal handler can come in between
    and lose it.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def open(self, path: Path, flags: int = 0) -> int:
        """Open a file, once, and return its descriptor.

        Raises:
            OSError: the file cannot be opened.
        """
        flags |= os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        self._numbers.extend(map(os.open, [path], [flags]))
        return self._numbers[0]

    def close(self) -> None:
        """Close it. Failures are ignored, because nothing was written through it."""
        with contextlib.suppress(OSError):
            deque(map(os.close, map(self._numbers.pop, [-1] * len(self._numbers))), maxlen=0)

    def __del__(self) -> None:
        if hasattr(self, "_numbers"):  # an exception may have interrupted the constructor
            self.close()


def check_length(data: memoryview | np.ndarray) -> None:
    """Raise unless a file is still as long as it was when it was mapped, so that no lost page is read.

    Code that reads a whole blob, or much of one, calls this first. A file that was truncated earlier is then an error;
    only one that is truncated at that very moment still kills the process.

    Args:
        data: memory of a `map_file` or a `PrivateFile`, in whole or in part, or that of a numpy array over it. For any
            other memory nothing is checked.

    Raises:
        FileAccessError: the file was truncated.
    """
    owner = _owner(data)
    if isinstance(owner, _Map) and (found := owner.size()) < len(owner):
        reason = f"the file was truncated: it has {found} bytes, {len(owner)} are expected"
        raise FileAccessError(owner.path, OSError(errno.EIO, reason))


def _owner(data: memoryview | np.ndarray) -> object:
    """What holds the memory of a view."""
    owner: object = data
    while isinstance(owner, _VIEWS):
        owner = owner.obj if isinstance(owner, memoryview) else owner.base
    return owner


def origin_of(data: memoryview) -> tuple[str, int, int] | None:
    """Of which file a view is a map: its absolute path, its size, and when it was last changed, in nanoseconds.

    It is what was found when the file was mapped. None for other memory.
    """
    owner = _owner(data)
    return (owner.place, len(owner), owner.modified) if isinstance(owner, _Map) else None


@contextlib.contextmanager
def file_behind(data: memoryview) -> Iterator[tuple[int, int] | None]:
    """The file that a view is a map of, so that the system can copy its bytes.

    Yields:
        A descriptor, which is closed behind the block, and where the view begins in the file. None for other memory, and
        for a file that was replaced or changed since it was mapped.
    """
    owner = _owner(data)
    if not isinstance(owner, _Map) or owner.identity is None or not len(data):
        yield None
        return
    start = np.frombuffer(data, np.uint8).ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    file = Descriptor()
    try:
        try:
            descriptor = file.open(Path(owner.place))
            status = os.fstat(descriptor)
        except OSError:
            yield None
            return
        now = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        yield (descriptor, start) if now == owner.identity else None
    finally:
        file.close()


def give_back(data: memoryview) -> None:
    """Take the pages of a large view of a map from this process, which has read them once; the system keeps or drops them.

    They are there again when they are read. Of other memory, nothing is taken.
    """
    owner = _owner(data)
    if len(data) < PIECE or not isinstance(owner, _Map) or owner.identity is None:
        return
    start = np.frombuffer(data, np.uint8).ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # the pages of some processes are locked
        owner.madvise(mmap.MADV_DONTNEED, first, start + len(data) - first)


def read_pieces(data: memoryview) -> Iterator[bytes | memoryview]:
    """The bytes as copies of at most `PIECE` bytes, for a writer: what it hashes is what it writes.

    A page of a map is read right after the file's length was checked, and never while the writer waits for a disk, when
    the file may be truncated. A piece is valid until the next one is requested.

    Raises:
        FileAccessError: the bytes belong to a file that was truncated.
    """
    if len(data) <= PIECE:
        check_length(data)
        yield bytes(data)
        return
    room = memoryview(bytearray(PIECE))
    for start in range(0, len(data), PIECE):
        check_length(data)
        piece = room[: min(PIECE, len(data) - start)]
        piece[:] = data[start : start + PIECE]
        yield piece
    give_back(data)


class PrivateFile:
    """A file mapped privately and writable: a write copies the page that it touches and never reaches the file.

    Views own their maps, as with `map_file`, so they stay valid when this is closed.

    Args:
        path: the file.

    Attributes:
        path: the file, as given.
        data: its bytes.

    Raises:
        FileAccessError, InvalidFileError: as `map_file`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = as_path(path)
        with contextlib.ExitStack() as stack:
            self._descriptor, status = stack.enter_context(_opened(self.path))
            private = _Map(self._descriptor, status.st_size, access=mmap.ACCESS_COPY)
            private.path, private.place = self.path, os.path.abspath(self.path)  # noqa: PTH100
            private.modified = status.st_mtime_ns
            self.data = memoryview(private)
            self._stack = stack.pop_all()

    def again(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Map ranges of the file once more, each in pages of its own; nothing is read.

        Args:
            ranges: the first byte of each range and the first byte behind it; no range is empty.

        Raises:
            FileAccessError: the process has too many maps; Linux allows 65,530 by default.
        """
        page = mmap.ALLOCATIONGRANULARITY
        starts = [start // page * page for start, _ in ranges]
        sizes = [-(-(stop - first) // page) * page for first, (_, stop) in zip(starts, ranges, strict=True)]
        if not ranges:
            return []
        # Python's own maps would hold a file descriptor for each range. Instead, one reservation takes the pages of all
        # ranges; it is released as a whole when the last view is gone.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        views = []
        try:
            room = mmap.mmap(-1, sum(sizes), flags=flags)
            base, whole, at = np.frombuffer(room, np.uint8).ctypes.data, memoryview(room), 0
            for first, size, (start, stop) in zip(starts, sizes, ranges, strict=True):
                _map_at(base + at, size, self._descriptor, first)
                views.append(whole[at + start - first : at + stop - first])
                at += size
        except OSError as error:
            raise FileAccessError(self.path, error) from None
        return views

    def __enter__(self) -> PrivateFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


_MAP_FIXED = 0x10  # the same on Linux, macOS and the BSDs


def _map_at(address: int, size: int, descriptor: int, offset: int) -> None:
    """Map pages of a file, private and writable, over pages that this process has reserved."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
    if libc.mmap(address, size, protection, flags, descriptor, offset) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def which_file(path: str | os.PathLike[str]) -> tuple[int, int] | str:
    """Equal for two paths that lead to the same file, or would if it existed: device and inode, or else the real path."""
    try:
        status = os.stat(path)  # noqa: PTH116 - Path.stat cannot take all that os.PathLike can be
    except OSError:
        return os.path.realpath(path)
    return status.st_dev, status.st_ino


def leads_into(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a folder or into it, whatever links are on the way of both."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def same_file(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> bool:
    """Whether two paths lead to the same file, or would if it existed."""
    return which_file(a) == which_file(b)
