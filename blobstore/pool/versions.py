"""The versions of a pool: what was added and not dropped."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from blobstore.core.disk.names import is_plain_path
from blobstore.core.errors import PoolError
from blobstore.core.reprs import fields_line
from blobstore.pool.tables import EVENTS, Tables, TakenError

__all__ = ["Version", "described_files", "drop_version", "find_version", "live_versions", "parse_reference"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}(/[A-Za-z0-9][A-Za-z0-9._+-]{0,99}){0,7}")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LATEST = 1 << 33  # seconds since 1970; what is later is no time of a file either


class VersionFile(NamedTuple):
    """A file of a version: its path there, its size in bytes, and two digests in hexadecimal. What is read is compared with
    `blake3`; `sha256` is for releases and for people."""

    name: str
    size: int
    sha256: str
    blake3: str

    @classmethod
    def described(cls, one: Mapping[str, Any]) -> VersionFile:
        """A file as an event describes it; KeyError if something is missing."""
        return cls(*(one[field] for field in cls._fields))


@dataclass(frozen=True)
class Version:
    """A version of a pool.

    Attributes:
        id: that of its rows in the tables.
        time: when it was added, in seconds since 1970.
        files: by name.
    """

    __repr__ = fields_line

    name: str
    version: str
    id: str
    time: int
    files: tuple[VersionFile, ...]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.size for file in self.files)


def parse_reference(text: str) -> tuple[str, str]:
    """The name and the version of `name@version`.

    Raises:
        PoolError: it has another form.
    """
    name, at, version = text.rpartition("@")
    if not at or not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
        raise PoolError(
            f"{text!r} names no version: expected NAME@VERSION, both of letters, digits and . _ + -; a name may have parts "
            "with / between them"
        )
    return name, version


def live_versions(
    tables: Tables, name: str | None = None, version: str | None = None, *, newest: int | None = None
) -> list[Version]:
    """The versions that are there, or those of one name, by name, the oldest first.

    Args:
        name, version: only this one.
        newest: only so many, those that were added last.
    """
    rows = tables.query(
        "SELECT DISTINCT name, version, id, time, files FROM events WHERE kind = 'add' AND coalesce(name = ?, true) "
        "AND coalesce(version = ?, true) AND id NOT IN (SELECT id FROM events WHERE kind = 'drop') "
        "ORDER BY time DESC, version DESC LIMIT ?",
        name,
        version,
        newest if newest is not None else 1 << 62,
    )
    found = [_version(*row) for row in rows]
    return sorted(found, key=lambda one: (one.name, one.time, one.version))


def _version(name: str, version: str, identity: str, when: int, files: str) -> Version:
    """A version as an event has it, which anybody may have written who writes to the pool.

    Raises:
        PoolError: it has a name or a time that cannot be, or as `described_files`.
    """
    if not _NAME.fullmatch(name) or not _VERSION.fullmatch(version) or not 0 <= when < _LATEST:
        raise PoolError(f"an event of the pool adds {f'{name}@{version}'!r} at {when}, which cannot be")
    return Version(name, version, identity, when, tuple(map(VersionFile.described, described_files(files))))


def described_files(text: str) -> list[dict[str, Any]]:
    """The files that an event describes, which anybody who writes to the pool may have written.

    Returns:
        `name`, `size`, `sha256` and `blake3` of each; of one that was read from a bucket, `url` and `etag`, too.

    Raises:
        PoolError: they are no files of a version.
    """
    try:
        files: list[dict[str, Any]] = [dict(one) for one in json.loads(text)]
        values = [VersionFile.described(one) for one in files]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PoolError("an event of the pool describes no files") from None
    for one, (name, size, *digests) in zip(files, values, strict=True):
        if not isinstance(name, str) or not is_plain_path(name, anywhere=False):
            raise PoolError(f"an event of the pool names the file {name!r}, which leads out of its folder")
        if type(size) is not int or size < 0:
            raise PoolError(f"an event of the pool gives no size for {name!r}")
        if not all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests):
            raise PoolError(f"an event of the pool gives no SHA-256 or no BLAKE3 for {name!r}")
        if not all(isinstance(one.get(key, ""), str) for key in ("url", "etag")):
            raise PoolError(f"an event of the pool gives {name!r} a URL or an ETag that is none")
    return files


def find_version(tables: Tables, reference: str) -> Version:
    """A version by its name.

    Raises:
        PoolError: there is no such version.
    """
    name, version = parse_reference(reference)
    if found := live_versions(tables, name, version):
        return found[0]
    if versions := live_versions(tables, name, newest=5):
        there = ", ".join(one.version for one in versions)
        raise PoolError(f"there is no {reference} in the pool; of {name} there are {there}")
    names = sorted({one.name for one in live_versions(tables)})
    raise PoolError(f"there is no {name} in the pool; it has {', '.join(names[:5]) or 'no versions'}")


def drop_version(tables: Tables, reference: str) -> Version:
    """Let a version disappear. What it alone needs goes with the next collection.

    Raises:
        PoolError: there is no such version.
    """
    name, version = parse_reference(reference)
    tables.fresh(EVENTS)
    there = find_version(tables, reference)
    while True:
        try:
            row = (there.id, "drop", name, version, int(time.time()), "[]")
            tables.append(EVENTS, [row], once=[f"version {name}@{version}"])
        except TakenError:
            tables.fresh(EVENTS)
            # by others, or by this commit, whose answer was lost
            if all(one.id != there.id for one in live_versions(tables, name, version)):
                return there
            continue
        return there
