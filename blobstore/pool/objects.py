"""The objects of a pool: immutable files in a folder, or objects in a bucket."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from blobstore.core.disk.journal import sync_folder
from blobstore.core.distribution import install
from blobstore.core.errors import BlobStoreError, FileAccessError, MissingDependencyError, PoolError, TransferError
from blobstore.core.memory.mapped_file import as_path, map_file, named

try:
    import obstore
    from obstore import exceptions as causes
    from obstore.store import LocalStore, from_url
except ImportError as error:
    raise MissingDependencyError(f"a pool needs obstore: {install('pool')}") from error

__all__ = ["TEMPORARY", "Objects"]

_REFUSED = frozenset("%*?[]\\^|")

TEMPORARY = ".new-"
"""How the names of files begin that are not objects yet."""


class Objects:
    """What lies below the URL of a pool.

    Args:
        url: a folder, or `s3://`, `gs://` or `az://` with a bucket and a path.
        options: of the store, such as `aws_endpoint`; the environment's count where they are left out.

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
        client: Any = {"allow_http": True} if self.options.get("allow_http", "").lower() == "true" else None
        configuration: Any = {key: value for key, value in self.options.items() if key != "allow_http"}
        try:
            self._store = from_url(self.url, config=configuration, client_options=client)
        except (causes.BaseError, ValueError) as error:
            raise PoolError(f"{self.url}: this is no URL of a pool: {_first_line(error)}") from None

    def make(self) -> None:
        """Make the folder of a local pool."""
        if self.folder is not None:
            with named(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

    def name(self, path: str) -> str:
        """An object, for messages."""
        return f"{self.url}/{path}"

    def get(self, path: str) -> bytes | None:
        """A whole small object; None if there is none."""
        try:
            return bytes(obstore.get(self._opened(), path).bytes())
        except (causes.NotFoundError, FileNotFoundError):
            return None
        except Exception as error:
            raise self._failed(path, error) from None

    def read(self, path: str, start: int, length: int) -> memoryview | None:
        """A range of an object, of a local one as a map of it; None if there is no such object.

        What is there may be shorter than `length`, if the object is.
        """
        if self.folder is not None:
            place = self.folder / path
            if not place.is_file():
                return None
            return map_file(place)[start : start + length]
        try:
            return memoryview(obstore.get_range(self._opened(), path, start=start, length=length))
        except (causes.NotFoundError, FileNotFoundError):
            return None
        except Exception as error:
            raise self._failed(path, error) from None

    def put(self, path: str, content: bytes | Path, *, create: bool = False) -> bool:
        """Store an object, complete or not at all; with `create` only if there is none, and say whether there was none."""
        try:
            obstore.put(self._opened(), path, content, mode="create" if create else "overwrite")
        except causes.AlreadyExistsError:
            return False
        except Exception as error:
            raise self._failed(path, error) from None
        if self.folder is not None:
            self._sync(self.folder / path)
        return True

    @contextlib.contextmanager
    def spool(self, path: str) -> Iterator[Path]:
        """A place for a new file that `place` makes an object; it is removed if that did not happen."""
        folder = Path(tempfile.gettempdir()) if self.folder is None else (self.folder / path).parent
        with named(folder):
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=TEMPORARY, dir=folder)
            os.close(descriptor)
        spooled = Path(name)
        try:
            yield spooled
        finally:
            with contextlib.suppress(OSError):
                spooled.unlink(missing_ok=True)

    def place(self, spooled: Path, path: str) -> None:
        """Make an object of a file in a spool, complete or not at all."""
        if self.folder is None:
            self.put(path, spooled)
            return
        place = self.folder / path
        with named(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            spooled.chmod(0o666 & ~_umask())
            os.replace(spooled, place)
        self._sync(place)

    def list(self, prefix: str) -> Iterator[tuple[str, int, int]]:
        """The objects below a prefix: path, size in bytes, and when they were stored, in seconds since 1970."""
        if self.folder is not None and not (self.folder / prefix).is_dir():
            return
        try:
            for page in obstore.list(self._opened(), prefix):
                for item in page:
                    yield item["path"], item["size"], int(item["last_modified"].timestamp())
        except Exception as error:
            raise self._failed(prefix, error) from None

    def delete(self, path: str) -> None:
        """Remove an object, if it is there."""
        try:
            obstore.delete(self._opened(), path)
        except (causes.NotFoundError, FileNotFoundError):
            pass
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
            return FileAccessError(self.folder / path, error if isinstance(error, OSError) else _first_line(error))
        if isinstance(error, causes.PermissionDeniedError | causes.UnauthenticatedError):
            return TransferError(f"{self.name(path)}: the store refuses these credentials: {_first_line(error)}")
        return TransferError(f"{self.name(path)}: {_first_line(error)}")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _first_line(error: Exception) -> str:
    """What a store's own error says first; the rest is its insides."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
