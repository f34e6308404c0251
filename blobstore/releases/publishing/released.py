"""The releases that a folder or a bucket has, and the objects beside its pool."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

from blobstore.core.errors import FileAccessError, PoolError
from blobstore.core.memory.digest import sha256
from blobstore.pool import Pool
from blobstore.pool.objects import Objects
from blobstore.pool.versions import Version, live_versions
from blobstore.releases.index.index import Index, Object, parse_index
from blobstore.releases.index.parts import Parts, parse_parts
from blobstore.releases.index.ways import WAYS, Ways, parse_ways
from blobstore.releases.sources.source import FILES, INDEX

__all__ = ["UNUSED", "Released", "newest_index", "read_released", "released_before", "store_bytes", "store_pieces"]

_BEFORE = (1, 2, 3, 4, 8)
"""Devices with the release before, the one before that, and so on, get differences."""

UNUSED = "releases.json"
"""What a pool has from which releases are published: which objects beside it nothing refers to, and since when."""

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


def released_before(pool: Pool, version: Version) -> list[Released]:
    """The releases of a name to which a new one stores differences, the newest first."""
    others = [one for one in live_versions(pool.tables, version.name, newest=_LOOKED_AT) if one.id != version.id]
    indexes = [(index, one) for one in others if (index := _index(pool.objects, one)) is not None]
    indexes.sort(key=lambda one: one[0][1].published, reverse=True)
    chosen = [indexes[back - 1] for back in _BEFORE if back <= len(indexes)]
    return [_read(pool.objects, one, data, index) for (data, index), one in chosen]


def newest_index(pool: Pool, version: Version) -> bytes | None:
    """The index of the newest release among a version and those that were added to the pool at about the same time."""
    versions = live_versions(pool.tables, version.name, newest=_LOOKED_AT)
    indexes = [_index(pool.objects, one) for one in versions if one.time > version.time - _TOGETHER]
    published = [one for one in indexes if one is not None]
    return max(published, key=lambda one: one[1].published)[0] if published else None


def read_released(objects: Objects, version: Version) -> Released | None:
    """The release of a version; None if it was not released.

    Raises:
        InvalidFileError: it is malformed.
        PoolError: a part of it is missing.
    """
    read = _index(objects, version)
    return None if read is None else _read(objects, version, *read)


def _index(objects: Objects, version: Version) -> tuple[bytes, Index] | None:
    place = f"{version.name}/{version.version}/{INDEX}"
    data = objects.get(place)
    if data is None:
        return None
    return data, parse_index(data, objects.name(place))


def _read(objects: Objects, version: Version, data: bytes, index: Index) -> Released:
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


def store_bytes(objects: Objects, data: bytes) -> Object:
    """Make an object of some bytes."""
    return store_pieces(objects, [data])


def store_pieces(objects: Objects, pieces: Iterable[bytes | memoryview]) -> Object:
    """Make an object below `files` of bytes that come in pieces."""
    hasher, nbytes = hashlib.sha256(), 0
    with objects.spool(f"{FILES}/new") as spooled:
        try:
            with spooled.open("wb") as file:
                for piece in pieces:
                    hasher.update(piece)
                    nbytes += file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileAccessError(spooled, error) from None
        done = Object(hasher.hexdigest(), nbytes)
        objects.place(spooled, done.path)
    return done
