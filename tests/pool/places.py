"""Where a pool can be, and what lies there, looked at without the code under test."""

import contextlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import obstore
from obstore.store import LocalStore

from blobstore.pool import Pool
from tests.pool.gateway import Gateway


@dataclass
class Place:
    """A folder, or a path in a bucket.

    Attributes:
        url: of the pool.
        cache: for files of its tables.
        store: what lies below it.
        options: of the pool.
    """

    url: str
    cache: Path
    store: Any
    options: dict[str, str] = field(default_factory=dict)

    @property
    def is_bucket(self) -> bool:
        """Whether it is in a bucket."""
        return "://" in self.url

    def open(self, *, create: bool = False, **options: str) -> Pool:
        """The pool, as a process opens it that knows nothing."""
        return Pool(self.url, create=create, cache=self.cache, **{**self.options, **options})

    def paths(self, prefix: str = "") -> list[str]:
        """The objects below a prefix, by name."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(item["path"] for page in obstore.list(self.store, prefix or None) for item in page)
        return []

    def packs(self) -> list[str]:
        """The packs."""
        return self.paths("packs")

    def stored_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(int(obstore.head(self.store, path)["size"]) for path in self.packs())

    def read(self, path: str) -> bytes:
        """An object."""
        return bytes(obstore.get(self.store, path).bytes())

    def write(self, path: str, content: bytes) -> None:
        """Replace an object, or make one."""
        obstore.put(self.store, path, content)

    def remove(self, prefix: str) -> None:
        """Remove an object, or all below a path."""
        obstore.delete(self.store, [path for path in self.paths() if path == prefix or path.startswith(f"{prefix}/")])


def folder(path: Path) -> Place:
    """A place in a folder."""
    path.mkdir(parents=True, exist_ok=True)
    return Place(str(path), path.parent / "cache", LocalStore(path, mkdir=True))


def bucket(gateway: Gateway, cache: Path) -> Place:
    """A new place in a bucket of its own."""
    name = gateway.bucket()
    return Place(f"s3://{name}/some/pool", cache, gateway.store(name, "some/pool"), gateway.options())


def copied(place: Place, gateway: Gateway | None, target: Path) -> Place:
    """A place with the same content."""
    if gateway is None:
        shutil.copytree(place.url, target)
        return folder(target)
    twin = bucket(gateway, target / "cache")
    for path in place.paths():
        twin.write(path, place.read(path))
    return twin
