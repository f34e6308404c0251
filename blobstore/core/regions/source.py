"""The bytes of a file, wherever it is: a local file is mapped, a remote one is streamed.

A local map costs no anonymous memory and no copy. Of a remote file (any URL that fsspec knows) the head and the
table of contents are read into a sparse map of the file's size, in which the rest takes no memory; blobs are then
read once, in order, and not kept.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from blobstore.core.errors import DataChangedError, FileAccessError, InvalidFileError, MissingDependencyError
from blobstore.core.memory.mapped_file import map_file
from blobstore.core.requirements import needed

__all__ = ["CHUNK", "Identity", "RegionSource", "identify", "is_url", "needs_package", "open_source"]

CHUNK = 1 << 19
"""Bytes that are looked at in one go: they stay in the processor's cache from the first look to the last."""

_REMOTE_BLOCK = 1 << 23


# Extras of fsspec whose names are not those of the protocols
_FSSPEC_EXTRAS = {"az": "abfs", "https": "http", "s3a": "s3"}


def is_url(path: str) -> bool:
    """Whether fsspec must open it."""
    return "://" in path


def needs_package(path: str, error: ImportError) -> MissingDependencyError:
    """The error for a URL for whose protocol fsspec needs a package that is not installed."""
    protocol = path.partition("://")[0]
    extra = _FSSPEC_EXTRAS.get(protocol, protocol)
    extras = importlib.metadata.metadata("fsspec").get_all("Provides-Extra") or ()
    hint = f": pip install 'fsspec[{extra}]'" if extra in extras else ""
    return MissingDependencyError(f"{error}{hint}")


class Identity(NamedTuple):
    """Identifies a file with the bytes that it has now.

    Attributes:
        path: the file, without links.
        size: in bytes.
        mtime_ns, ctime_ns: when its bytes changed, which a program may set back, and when anything about it did, which
            no program can set. 0 for a remote file.
        inode: of a remote file what stands for it, such as an ETag.
        commits: how far the commits of a working copy are. Other processes change it through maps, and not every
            such change moves a time. Empty for every other file.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: str
    commits: str = ""

    @property
    def lasts(self) -> bool:
        """Whether a file with this identity has, at any later time, the bytes that it has now."""
        return not self.commits


def identify(path: str) -> Identity | None:
    """Look a file up without opening it; None if the file system says too little, or nothing."""
    try:
        if not is_url(path):
            return _local_identity(path)
        import fsspec

        system, inside = fsspec.core.url_to_fs(path)
        return _remote_identity(path, system.info(inside))
    except Exception:  # opening it raises an error that says what is wrong
        return None


def _local_identity(path: str) -> Identity:
    status, real = Path(path).stat(), os.path.realpath(path)
    # a name that cannot be decoded is escaped, because the cache stores text
    name = os.fsencode(real).decode("utf-8", "backslashreplace")
    inode = f"{status.st_dev}:{status.st_ino}"
    return Identity(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, inode, _commits(path, real))


def _commits(path: str, real: str) -> str:
    """The header of the file that lies beside a working copy, with its generation; see docs/runtime.md."""
    for beside in dict.fromkeys([f"{path}.commits", f"{real}.commits"]):
        try:
            with open(beside, "rb") as file:  # noqa: PTH123 - text stays text
                status = os.fstat(file.fileno())
                return f"{status.st_ino}:{status.st_mtime_ns}:{file.read(64).hex()}"
        except FileNotFoundError:
            continue
        except OSError as error:
            return str(error)
    return ""


def _remote_identity(path: str, information: dict[str, Any]) -> Identity | None:
    unique = [str(information[name]) for name in ("ETag", "etag", "ino", "md5Hash") if information.get(name)]
    stamps = [str(information[name]) for name in ("mtime", "LastModified", "last_modified") if information.get(name)]
    if not (unique or stamps) or information.get("size") is None:
        return None
    return Identity(path, int(information["size"]), 0, 0, ":".join([*unique, *stamps]))


class RegionSource:
    """An open file. The caller closes it; views that it returned stay valid.

    Attributes:
        path: as the caller named it.
        size: in bytes.
        identity: for the cache; None if the file system says too little.
    """

    path: str
    size: int
    identity: Identity | None

    def head(self, size: int) -> bytes:
        """The first bytes, at most `size`."""
        return b"".join(bytes(chunk) for chunk in self.chunks(0, min(size, self.size)))

    def chunks(self, start: int, stop: int, size: int = CHUNK) -> Iterator[memoryview]:
        """The bytes of a range, in pieces of `size`; a piece is valid until the next is asked for.

        Raises:
            FileAccessError: reading failed.
            DataChangedError: the file is shorter than when it was opened.
        """
        raise NotImplementedError

    def view(self, start: int, stop: int) -> memoryview:
        """A range as memory that is backed by a file, so that it takes no anonymous memory."""
        raise NotImplementedError

    def structure(self) -> memoryview:
        """The whole file as one view; of a remote file only what `fill` was called for, zeros elsewhere."""
        raise NotImplementedError

    def fill(self, start: int, stop: int) -> None:
        """Make a range of `structure()` readable; nothing to do for a local file."""

    def check_unchanged(self) -> None:
        """Raise DataChangedError if the file is not the one that was opened."""

    def close(self) -> None:
        """Free what is not in use by views."""

    def __enter__(self) -> RegionSource:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_source(path: str) -> RegionSource:
    """Open a local path or a URL.

    Raises:
        FileAccessError: it cannot be opened.
        InvalidFileError: it is empty.
        MissingDependencyError: it is a URL, and fsspec or what it needs for this URL is not installed.
    """
    return _Remote(path) if is_url(path) else _Local(path)


class _Local(RegionSource):
    def __init__(self, path: str) -> None:
        self.path = path
        self._data = map_file(path)
        self.size = len(self._data)
        self.identity = self._identify()

    def _identify(self) -> Identity:
        try:
            return _local_identity(self.path)
        except OSError as error:
            raise FileAccessError(self.path, error) from None

    def chunks(self, start: int, stop: int, size: int = CHUNK) -> Iterator[memoryview]:
        for at in range(start, stop, size):
            yield self._data[at : min(at + size, stop)]

    def view(self, start: int, stop: int) -> memoryview:
        return self._data[start:stop]

    def structure(self) -> memoryview:
        return self._data

    def check_unchanged(self) -> None:
        if self._identify() != self.identity or len(self._data) != self.size:
            raise DataChangedError(f"{self.path}: the file changed while it was read")

    def close(self) -> None:
        self._data = memoryview(b"")


class _Remote(RegionSource):
    def __init__(self, path: str) -> None:
        with needed("a URL needs fsspec", "report"):
            import fsspec
        self.path = path
        self._sparse: mmap.mmap | None = None
        self._spools: list[Any] = []
        self._file: Any = None
        try:
            self._system, self._inside = fsspec.core.url_to_fs(path)
            information = self._system.info(self._inside)
            if information["type"] == "directory":
                raise IsADirectoryError(path)
            self._file = self._system.open(self._inside, "rb", block_size=_REMOTE_BLOCK)
            self.size = int(information["size"])
        except ImportError as error:
            raise needs_package(path, error) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileAccessError(path, error if isinstance(error, OSError) else str(error)) from None
        if self.size == 0:
            self.close()
            raise InvalidFileError(path, "the file is empty")
        self.identity = _remote_identity(path, information)

    def chunks(self, start: int, stop: int, size: int = CHUNK) -> Iterator[memoryview]:
        try:
            self._file.seek(start)
            while start < stop:
                wanted = min(_REMOTE_BLOCK, stop - start)
                block = self._file.read(wanted)
                while len(block) < wanted:  # a file system may give less than was asked for
                    more = self._file.read(wanted - len(block))
                    if not more:
                        at = start + len(block)
                        raise DataChangedError(f"{self.path}: it ends at byte {at}, but had {self.size} bytes")
                    block += more
                view = memoryview(block)
                # pieces begin at multiples of `size`, so that elements are not cut apart
                for at in range(0, len(view), size):
                    yield view[at : at + size]
                start += len(block)
        except OSError as error:
            raise FileAccessError(self.path, error) from None

    def view(self, start: int, stop: int) -> memoryview:
        if start == stop:
            return memoryview(b"")
        spool = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the source; the map keeps its own handle
        self._spools.append(spool)
        try:
            for chunk in self.chunks(start, stop):
                spool.write(chunk)
            spool.flush()
        except OSError as error:
            raise FileAccessError(self.path, error) from None
        return memoryview(mmap.mmap(spool.fileno(), stop - start, access=mmap.ACCESS_READ))

    def structure(self) -> memoryview:
        if self._sparse is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._sparse = mmap.mmap(-1, self.size, flags=flags)
        return memoryview(self._sparse).toreadonly()

    def fill(self, start: int, stop: int) -> None:
        self.structure()
        assert self._sparse is not None  # noqa: S101 - structure() made it
        for chunk in self.chunks(start, min(stop, self.size)):
            self._sparse[start : start + len(chunk)] = bytes(chunk)
            start += len(chunk)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        for spool in self._spools:
            spool.close()
        self._sparse = None
