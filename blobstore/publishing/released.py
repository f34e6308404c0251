"""The releases that a folder or a bucket has, and the objects beside its pool."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blobstore.core.errors import PoolError
from blobstore.core.memory.digest import sha256
from blobstore.pool import Pool
from blobstore.pool.versions import Version, live_versions
from blobstore.releases.index.index import Index, Object, parse_index
from blobstore.releases.index.parts import Parts, parse_parts
from blobstore.releases.index.ways import WAYS, Ways, parse_ways
from blobstore.releases.sources.caching import cache_control
from blobstore.releases.sources.source import FILES, INDEX, LATEST
from blobstore.storage.objects import Objects

__all__ = [
    "Released",
    "lead_to_newest",
    "read_index",
    "read_released",
    "released_before",
    "store_pieces",
]

_BEFORE = (1, 2, 3, 4, 8)
"""Devices with the release before, the one before that, and so on, get differences."""

_TOGETHER = 3600
"""Publishing takes fewer seconds."""

_LOOKED_AT = 24  # newest versions of a name, of which some may not be released


@dataclass(frozen=True)
class Released:
    """A release.

    Attributes:
        version: of the pool.
        index, sha256: its index, and the digest of that.
        parts, ways: what it consists of, and in which forms that can be fetched.
    """

    version: Version
    index: Index
    sha256: str
    parts: Parts
    ways: Ways


def released_before(pool: Pool, version: Version) -> list[Version]:
    """The versions of a name to whose releases a new one stores differences, the newest first."""
    others = [one for one in live_versions(pool.tables, version.name, newest=_LOOKED_AT) if one.id != version.id]
    indexes = [(read, one) for one in others if (read := read_index(pool.objects, one)) is not None]
    indexes.sort(key=lambda one: one[0][1].published, reverse=True)
    return [indexes[back - 1][1] for back in _BEFORE if back <= len(indexes)]


def lead_to_newest(pool: Pool, version: Version) -> None:
    """Let "latest" be the newest release among a version and those that were added to the pool at about the same time.

    In a bucket nothing is locked. Who changes it looks again afterwards, and whoever looks last sees all of them.
    """
    place = f"{version.name}/{LATEST}/{INDEX}"
    while True:
        pool.tables.fresh()
        data = _newest_index(pool, version)
        if data is None or data == pool.objects.get(place):
            return
        pool.objects.put(place, data, cached=cache_control(place))


def _newest_index(pool: Pool, version: Version) -> bytes | None:
    versions = live_versions(pool.tables, version.name, newest=_LOOKED_AT)
    others = [one for one in versions if one.id != version.id and one.time > version.time - _TOGETHER]
    indexes = [read_index(pool.objects, one) for one in (version, *others)]
    published = [one for one in indexes if one is not None]
    return max(published, key=lambda one: one[1].published)[0] if published else None


def read_index(objects: Objects, version: Version) -> tuple[bytes, Index] | None:
    """The index of a version, and what it says; None if the version was not released.

    Raises:
        InvalidFileError: it is malformed.
    """
    place = f"{version.name}/{version.version}/{INDEX}"
    data = objects.get(place)
    if data is None:
        return None
    return data, parse_index(data, objects.name(place))


def read_released(objects: Objects, version: Version, data: bytes, index: Index) -> Released:
    """The release of a version with this index.

    Raises:
        InvalidFileError: it is malformed.
        PoolError: a part of it is missing.
    """
    digest = sha256(data)
    parts = parse_parts(_needed(objects, index.parts.path), index, objects.name(index.parts.path))
    place = f"{version.name}/{version.version}/{WAYS}"
    ways = parse_ways(_needed(objects, place), digest, parts, objects.name(place))
    return Released(version, index, digest, parts, ways)


def _needed(objects: Objects, path: str) -> bytes:
    """A small object that must be there.

    Raises:
        PoolError: it is not.
    """
    data = objects.get(path)
    if data is None:
        raise PoolError(f"{objects.name(path)}: this object is missing; a release needs it")
    return data


def store_pieces(objects: Objects, pieces: Iterable[bytes | memoryview]) -> Object:
    """Make an object below `files` of bytes that come in pieces."""
    digest, nbytes = objects.store(FILES, pieces, lambda digest: f"{FILES}/{digest.hex()}")
    return Object(digest.hex(), nbytes)
