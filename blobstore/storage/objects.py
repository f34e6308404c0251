"""The objects of a pool: immutable files in a folder, or objects in a bucket."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from blobstore.core.disk.journal import sync_folder
from blobstore.core.errors import (
    BlobStoreError,
    DataChangedError,
    FileAccessError,
    PoolError,
    TransferError,
)
from blobstore.core.memory.mapped_file import as_path, map_file, named
from blobstore.core.requirements import needed
from blobstore.storage.reasons import may_succeed, no_bucket, of_system, reason

with needed("a pool needs obstore", "pool"):
    import obstore
    from obstore import exceptions as causes
    from obstore.store import LocalStore, from_url

__all__ = ["FULL", "PARALLEL", "REQUEST", "RESERVE", "TEMPORARY", "Entry", "Objects"]

RESERVE = "reserve"
"""What takes room in a local pool, which `drop` and `gc` use when the disk is full: they write a little to free much."""

_RESERVED = 1 << 20
FULL = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a disk without room."""

_REFUSED = frozenset("%*?[]\\^|")

TEMPORARY = ".new-"
"""How the names of files begin that are not objects yet."""

_NEVER_CHANGES = "max-age=31536000, immutable"
"""What caches may do with an object that is named by its digest."""

REQUEST = 1 << 23
"""Bytes of a bucket that are asked for at a time. A store gives each request some 50 MB/s and a client 30 seconds, so more
bytes at once would be slow, and fail on a slow line."""

PARALLEL = 8
"""How many requests are under way at a time."""

_ATTEMPTS = 3
_CLIENT = {"allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url", "timeout", "user_agent"}
_SWITCHES = {"allow_http", "allow_invalid_certificates"}
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Entry:
    """An object of a list.

    Attributes:
        path: below the pool.
        size: in bytes.
        stored: when it was, in seconds since 1970.
        etag: what the store calls its content; None if it does not.
    """

    path: str
    size: int
    stored: int
    etag: str | None


class Objects:
    """What lies below the URL of a pool.

    In a folder, links below it are not followed: others may write there, too, and could lead to what only this user may
    read, replace or remove.

    Args:
        url: a folder, or `s3://`, `gs://` or `az://` with a bucket and a path.
        options: of the store, such as `aws_endpoint`, of its client, such as `allow_http` or `timeout`, and `max_retries`;
            the environment's count where they are left out.

    Attributes:
        url: for messages, and for tables: an absolute path, or the URL.
        folder: of a local pool; None for a bucket.
        options: as given.

    Raises:
        PoolError: nothing opens such a URL.
        FileAccessError, TransferError: the store refuses, here or in any method.
    """

    def __init__(self, url: str | os.PathLike[str], options: Mapping[str, str] | None = None) -> None:
        self.options = dict(options or {})
        text = os.fspath(url)
        self.folder: Path | None = None
        if "://" not in text or text.startswith("file://"):
            self.folder = Path(os.path.abspath(as_path(text.removeprefix("file://"))))  # noqa: PTH100 - links stay
            self.url = os.fspath(self.folder)
            self._store: Any = None
            if refused := [character for character in self.url if character in _REFUSED or not character.isprintable()]:
                raise PoolError(
                    f"{self.url}: the path of a pool cannot have {refused[0]!r}, which the engines of its tables do not take"
                )
            return
        self.url = text.rstrip("/")
        client, retries, own = _sorted(self.url, self.options)
        try:
            self._store = from_url(self.url, config=own, client_options=client, retry_config=retries)
        except causes.UnknownConfigurationKeyError as error:
            raise PoolError(f"{self.url}: {reason(error)}") from None
        except (causes.BaseError, ValueError) as error:
            raise PoolError(f"{self.url}: this is no URL of a pool: {reason(error)}") from None

    def make(self) -> None:
        """Make the folder of a local pool."""
        if self.folder is not None:
            with named(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

    def name(self, path: str) -> str:
        """An object, or all of them, for messages."""
        return f"{self.url}/{path}" if path else self.url

    def get(self, path: str) -> bytes | None:
        """A whole small object; None if there is none."""
        return self._present(path, lambda: bytes(obstore.get(self._opened(), path).bytes()))

    def size(self, path: str) -> int | None:
        """Bytes of an object; None if there is no such object."""
        found = self.entry(path)
        return None if found is None else found.size

    def entry(self, path: str) -> Entry | None:
        """An object as in a list; None if there is no such object."""
        return self._present(path, lambda: _entry(obstore.head(self._opened(), path)))

    def read(self, path: str, start: int, length: int) -> memoryview | None:
        """A range of an object, of a local one as a map of it; None if there is no such object.

        What is there may be shorter than `length`, if the object is.
        """
        if self.folder is not None:
            place = self.folder / path
            self.check_no_link(path)
            if not os.path.isfile(place):  # noqa: PTH113 - raises nothing for a name that is too long
                return None
            return map_file(place)[start : start + length]
        if length <= REQUEST:
            return self._range(path, start, length)
        size = self.size(path)
        if size is None:
            return None
        whole = bytearray(max(min(length, size - start), 0))  # a damaged index may ask for anything
        with ThreadPoolExecutor(PARALLEL) as threads:
            starts = range(0, len(whole), REQUEST)
            for at, piece in zip(
                starts,
                threads.map(lambda at: self._range(path, start + at, min(REQUEST, len(whole) - at)), starts),
                strict=True,
            ):
                if piece is None:
                    return None
                whole[at : at + REQUEST] = piece
        return memoryview(whole).toreadonly()

    def _range(self, path: str, start: int, length: int) -> memoryview | None:
        if not length:  # which no header can ask for
            return memoryview(b"")
        try:
            return self._present(
                path, lambda: memoryview(obstore.get_range(self._opened(), path, start=start, length=length))
            )
        except TransferError as error:
            if "the store answers 416" in str(error):  # the object ends before the range begins
                return memoryview(b"")
            raise

    def put(self, path: str, content: bytes | Path, *, cached: str = "") -> None:
        """Store an object, complete or not at all.

        Args:
            path, content: of it.
            cached: what a bucket says to caches of it, as `Cache-Control`.
        """
        if self.folder is not None:
            # what a killed process leaves under such a name is removed with the files that a table does not have
            with self.spool(path, "new-") as spooled, named(self.folder / path):
                with _write_spooled(spooled) as file:
                    file.write(content.read_bytes() if isinstance(content, Path) else content)
                self.place(spooled, path)
            return
        attributes = {"Cache-Control": cached} if cached else None
        with self._translated(path):
            _tried(lambda: obstore.put(self._opened(), path, content, attributes=attributes))

    def create(self, path: str, content: bytes, *, cached: str = "") -> bool:
        """Store a small object, complete or not at all, if there is none.

        Args:
            path, content, cached: as in `put`.

        Returns:
            Whether the object that is there has this content.
        """
        for _ in range(_ATTEMPTS):
            self.makes(path, content, cached=cached)
            there = self.get(path)
            if there is not None:  # a conflict is reported in the same way as an object that is there
                break
        else:
            raise TransferError(f"{self.name(path)}: the store says that it is there, and does not have it")
        if self.folder is not None:
            self._sync(self.folder / path)
        return there == content

    def makes(self, path: str, content: bytes, *, cached: str = "") -> str | None:
        """Ask the store for a small object if there is none.

        Returns:
            Its ETag, or nothing if the store gives none; None if the store says that there is an object already.
        """
        self.check_no_link(path)
        attributes = {"Cache-Control": cached} if cached and self.folder is None else None
        with self._translated(path), contextlib.suppress(causes.AlreadyExistsError):
            made = _tried(lambda: obstore.put(self._opened(), path, content, mode="create", attributes=attributes))
            return made["e_tag"] or ""
        return None

    def reserve(self) -> None:
        """Keep some room for `with_reserve` in a local pool.

        Raises:
            FileAccessError: there is not so much.
        """
        if self.folder is None or os.path.lexists(self.folder / RESERVE):
            return
        try:
            self.put(RESERVE, os.urandom(_RESERVED))  # a file system may store other bytes in no room
        except FileAccessError as error:
            if error.errno not in FULL:
                raise
            reason = "the disk is full: drop versions, and free what they alone needed (blobstore pool gc)"
            raise FileAccessError(self.folder / RESERVE, OSError(error.errno, reason)) from None

    def with_reserve(self, function: Callable[[], _Result]) -> _Result:
        """What a function returns that frees room. If the disk is full, it is called again with the room that was kept."""
        try:
            return function()
        except FileAccessError as error:
            if error.errno not in FULL or self.folder is None or not os.path.lexists(self.folder / RESERVE):
                raise
        self.delete(RESERVE)
        return function()

    @contextlib.contextmanager
    def spool(self, path: str, prefix: str = TEMPORARY) -> Iterator[Path]:
        """A place for a new file, for `_write_spooled`, that `place` makes an object; it is removed if that did not happen."""
        if self.folder is None:
            folder = Path(tempfile.gettempdir())
            with named(folder):
                descriptor, temporary = tempfile.mkstemp(prefix=prefix, dir=folder)
            spooled = Path(temporary)
        else:
            spooled = (self.folder / path).with_name(f"{prefix}{secrets.token_hex(12)}")
            with named(spooled), self._parent(path, make=True) as parent:  # the umask applies, and is not asked for
                descriptor = os.open(spooled.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666, dir_fd=parent)
        os.close(descriptor)
        try:
            yield spooled
        finally:
            with contextlib.suppress(OSError):
                spooled.unlink(missing_ok=True)

    def store(
        self, folder: str, pieces: Iterable[bytes | memoryview], path: Callable[[bytes], str]
    ) -> tuple[bytes, int]:
        """Make an object of pieces, complete or not at all.

        Args:
            folder: for what is not complete yet.
            pieces: the object.
            path: gives its path, by its SHA-256.

        Returns:
            Its SHA-256, and its size.
        """
        hasher, nbytes = hashlib.sha256(), 0
        with self.spool(f"{folder}/new") as spooled:
            with named(spooled), _write_spooled(spooled) as file:
                for piece in pieces:
                    hasher.update(piece)
                    nbytes += file.write(piece)
            self.place(spooled, path(hasher.digest()))
        return hasher.digest(), nbytes

    def place(self, spooled: Path, path: str) -> None:
        """Make an object of a file in a spool, complete or not at all; its name says that it never changes."""
        if self.folder is None:
            self.put(path, spooled, cached=_NEVER_CHANGES)
            return
        place = self.folder / path
        with named(place), self._parent(path, make=True) as folder:
            os.replace(spooled, place.name, dst_dir_fd=folder)
        self._sync(place)

    def stream(self, path: str, etag: str | None) -> Iterator[bytes]:
        """A whole object in pieces.

        Raises:
            DataChangedError: it has another ETag than this, or is gone.
            TransferError: the store does not take the ETag that it gives.
        """
        options: Any = {} if etag is None else {"if_match": etag}
        try:
            for piece in _tried(lambda: obstore.get(self._opened(), path, options=options)).stream():
                yield bytes(piece)
        except (causes.PreconditionError, causes.NotFoundError, FileNotFoundError):
            if self._has_tag(path, etag):
                raise TransferError(f"{self.name(path)}: the store refuses its own ETag {etag} in If-Match") from None
            raise DataChangedError(f"{self.name(path)}: the object was replaced since it was listed") from None
        except Exception as error:
            raise self._failed(path, error) from None

    def _has_tag(self, path: str, etag: str | None) -> bool:
        try:
            return etag is not None and obstore.head(self._opened(), path)["e_tag"] == etag
        except (causes.BaseError, FileNotFoundError):
            return False

    def list(self, prefix: str, *, after: str | None = None) -> list[Entry]:
        """The objects below a prefix. Links are none.

        Args:
            prefix: a folder.
            after: of a bucket, only those whose paths follow this one.
        """
        if self.folder is None:
            with self._translated(prefix):
                return _tried(
                    lambda: [
                        _entry(item) for page in obstore.list(self._opened(), prefix, offset=after) for item in page
                    ]
                )
        self.check_no_link(prefix)
        top = self.folder / prefix
        if not os.path.isdir(top):  # noqa: PTH112 - as in `read`
            return []
        with named(top):
            return [
                Entry(path.relative_to(self.folder).as_posix(), status.st_size, int(status.st_mtime), None)
                for path, status in _walked(top)
            ]

    def delete(self, path: str) -> None:
        """Remove an object, if it is there."""
        if self.folder is None:
            self._present(path, lambda: obstore.delete(self._opened(), path))
            return
        place = self.folder / path
        with named(place), contextlib.suppress(FileNotFoundError), self._parent(path) as folder:
            os.unlink(place.name, dir_fd=folder)

    def check_no_link(self, path: str) -> None:
        """Check that nothing on the way from a local pool to an object is a link, nor the object itself.

        Raises:
            FileAccessError: it is one.
        """
        if self.folder is None:
            return
        place = self.folder
        for part in self._parts(path):
            place = place / part
            if os.path.islink(place):  # noqa: PTH114 - as above
                raise _is_link(place)

    def _parts(self, path: str) -> tuple[str, ...]:
        """The folders on the way to an object of a local pool, and its name."""
        parts = Path(path).parts
        if ".." in parts or Path(path).is_absolute():
            raise PoolError(f"{self.url}: {path!r} leads out of the pool")
        return parts

    @contextlib.contextmanager
    def _parent(self, path: str, *, make: bool = False) -> Iterator[int]:
        """A descriptor of the folder that has an object of a local pool, to which no link leads."""
        assert self.folder is not None  # noqa: S101 - the caller asked
        place, flags = self.folder, os.O_RDONLY | os.O_DIRECTORY
        folder = os.open(place, flags)
        try:
            for part in self._parts(path)[:-1]:
                place = place / part
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=folder)
                try:
                    inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
                except OSError:
                    if place.is_symlink():
                        raise _is_link(place) from None
                    raise
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def _present(self, path: str, function: Callable[[], _Result]) -> _Result | None:
        """What a function returns; None if there is no such object."""
        try:
            self.check_no_link(path)
            return _tried(function)
        except (causes.NotFoundError, FileNotFoundError) as error:
            if no_bucket(error):
                raise self._failed(path, error) from None
            return None
        except Exception as error:
            raise self._failed(path, error) from None

    @contextlib.contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._failed(path, error) from None

    def _opened(self) -> Any:
        if self._store is None:
            assert self.folder is not None  # noqa: S101 - a bucket has a store from the start
            if not self.folder.is_dir():
                raise FileAccessError(self.folder, "there is no such folder")
            self._store = LocalStore(self.folder, mkdir=True)
        return self._store

    def _sync(self, place: Path) -> None:
        with named(place):
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_folder(place.parent)

    def _failed(self, path: str, error: Exception) -> BlobStoreError:
        """The error of this library for one of the store."""
        if isinstance(error, BlobStoreError):
            return error
        if self.folder is not None:
            return FileAccessError(self.folder / path, of_system(error) or reason(error))
        return TransferError(f"{self.name(path)}: {reason(error)}")


def _sorted(url: str, options: Mapping[str, str]) -> tuple[Any, Any, Any]:
    """Options as the client, its retries and the store take them.

    Raises:
        PoolError: `max_retries` is no number.
    """
    client: dict[str, str | bool] = {}
    retries: dict[str, int] = {}
    own: dict[str, str] = {}
    for name, value in options.items():
        if name in _SWITCHES:
            client[name] = value.lower() == "true"
        elif name in _CLIENT:
            client[name] = value
        elif name == "max_retries":
            if not value.isdecimal():
                raise PoolError(f"{url}: max_retries must be a number, found {value!r}")
            retries[name] = int(value)
        else:
            own[name] = value
    return client or None, retries or None, own or None


def _tried(function: Callable[[], _Result]) -> _Result:
    """What a function returns that may be called again after it failed, whatever it did."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return function()
        except (causes.BaseError, FileNotFoundError) as error:
            if not may_succeed(error):
                raise
    return function()


def _walked(top: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files below a folder; what another collection removes meanwhile may be missing."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for folder, _, names, descriptor in os.fwalk(top, onerror=fail):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield Path(folder, name), status


def _entry(item: Any) -> Entry:
    return Entry(item["path"], item["size"], int(item["last_modified"].timestamp()), item["e_tag"])


@contextlib.contextmanager
def _write_spooled(spooled: Path) -> Iterator[BinaryIO]:
    """A file in a spool, to be written, and then synced; a link that took its place meanwhile is not followed."""
    with open(spooled, "r+b", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _is_link(place: Path) -> FileAccessError:
    return FileAccessError(place, OSError(errno.ELOOP, "this is a link; links in a pool are not followed"))
