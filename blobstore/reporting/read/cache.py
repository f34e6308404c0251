"""What earlier runs found, so that an interrupted run continues, and a second run reads no blob again.

One SQLite file with one table. Findings about a file are stored under its path, size, times of change and inode; a file
that differs in one of them is read anew. Working copies, which processes change through maps, are not remembered. What was
proved about two contents is stored under their digests, so it holds wherever they are. Each row carries a digest of itself,
so damage is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import xxhash

from blobstore.core.errors import FileAccessError, LayoutError
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.regions.region import Region, RegionKind
from blobstore.core.regions.source import Identity
from blobstore.reporting.checked import MalformedError, hexadecimal, integer, items, text, texts
from blobstore.reporting.read.fingerprint import Fingerprint

__all__ = ["Cache", "default_path", "is_another_file"]

Found = TypeVar("Found")

_VERSION = 2
_APPLICATION = 0x626C6F62
"""Marks the file as ours in its first bytes, so that no other file is ever dropped."""
_TABLE = """
CREATE TABLE IF NOT EXISTS known (key TEXT PRIMARY KEY, path TEXT, body TEXT);
CREATE INDEX IF NOT EXISTS paths ON known (path);
"""
"""Of a proof the path is empty."""
_SETTLED_NS = 50_000_000
"""A file that changed this recently may change again under the same time, since clocks of file systems are coarse."""


def default_path() -> Path:
    """Where the command line keeps its cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blobstore" / "fingerprints.sqlite"


class Cache:
    """A fingerprint cache; a context manager.

    Every call takes effect at once, so that a killed run loses only the task at hand. No report depends on its cache:
    if it cannot be read or written, for example on a full disk, it remembers nothing more, and `trouble` says why. A
    damaged one is dropped and made anew.

    Args:
        path: the file, made if it is missing; None for a cache that remembers nothing.

    Attributes:
        trouble: why it could not be used; None if it could.

    Raises:
        FileAccessError: `path` is not a path, or leads to another kind of file, which is left alone.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.trouble: str | None = None
        self._base: sqlite3.Connection | None = None
        self._path = None if path is None else as_path(path)
        if self._path is not None:
            with self._working():
                if is_another_file(self._path):
                    raise FileAccessError(self._path, "another kind of file, no fingerprint cache")
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._open(self._path)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def regions(self, identity: Identity | None) -> tuple[str, list[Region], int] | None:
        """The format, the regions and the alignment of a file; None if it is unknown or has changed."""
        return self._look_up(_key("regions", identity), _regions) if _lasts(identity) else None

    def set_regions(
        self, identity: Identity | None, file_format: str, regions: Iterable[Region], alignment: int
    ) -> None:
        """Store a file, and forget what was known of an earlier one of this path."""
        if self._base is None or not _lasts(identity):
            return
        if max(identity.mtime_ns, identity.ctime_ns) > time.time_ns() - _SETTLED_NS:
            return
        key = _key("regions", identity)
        body = _sealed(key, [file_format, [_plain(region) for region in regions], alignment])
        with self._working() as base:
            base.execute("BEGIN IMMEDIATE")
            base.execute("DELETE FROM known WHERE path = ?", (identity.path,))
            base.execute("INSERT INTO known VALUES (?, ?, ?)", (key, identity.path, body))
            base.execute("COMMIT")

    def fingerprints(self, identity: Identity | None, start: int, stop: int, alike: bool) -> list[Fingerprint] | None:
        """Those of the blobs in a range of a file that `regions` knows; None if they are unknown."""
        for enough in ([True] if alike else [False, True]) if _lasts(identity) else []:
            remembered = self._look_up(_key("fingerprints", identity, start, stop, enough), _fingerprints)
            if remembered is not None:
                return remembered
        return None

    def set_fingerprints(
        self, identity: Identity | None, start: int, stop: int, alike: bool, fingerprints: Sequence[Fingerprint]
    ) -> None:
        """Store those of a range, if the file itself is known as it is now."""
        if self._base is None or not _lasts(identity):
            return
        key = _key("fingerprints", identity, start, stop, alike)
        body = _sealed(key, [astuple(item) for item in fingerprints])
        with self._working() as base:
            base.execute(
                "REPLACE INTO known SELECT ?, path, ? FROM known WHERE key = ?", (key, body, _key("regions", identity))
            )

    def proof(self, key: str) -> Any:
        """The result under a key, in a list of one, or None."""
        return self._look_up(_key("proof", None, key), lambda result: [result])

    def set_proof(self, key: str, result: Any) -> None:
        """Store a result, which is plain data; None for a proof that failed."""
        if self._base is not None:
            own = _key("proof", None, key)
            with self._working() as base:
                base.execute("REPLACE INTO known VALUES (?, '', ?)", (own, _sealed(own, result)))

    def _look_up(self, key: str, read: Callable[[Any], Found]) -> Found | None:
        """The contents of one row; None if there is no such row. A damaged row makes the cache a damaged one."""
        if self._base is None:
            return None
        with self._working() as base:
            row = base.execute("SELECT body FROM known WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            try:
                return read(_unsealed(key, row[0]))
            except (ValueError, LayoutError) as error:
                raise sqlite3.DatabaseError(f"a damaged row: {error}") from None
        return None

    @contextlib.contextmanager
    def _working(self) -> Iterator[sqlite3.Connection]:
        """Use the file. A damaged one is made anew; with one that cannot be used, the cache goes on without it."""
        try:
            try:
                yield self._base  # type: ignore[misc]  # callers have looked
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._make_anew()
        except (OSError, sqlite3.Error) as error:
            if isinstance(error, FileAccessError):
                raise
            self._close()
            self.trouble = f"{self._path}: no fingerprint cache: {error}"

    def _open(self, path: Path) -> None:
        self._base = base = sqlite3.connect(path, timeout=60, isolation_level=None)
        # the first thing that is written: what a full disk leaves of a new cache is still known as one
        base.execute(f"PRAGMA application_id = {_APPLICATION}")
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = OFF")  # a cache that is lost is made again
        if base.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            base.execute("DROP TABLE IF EXISTS known")
        base.executescript(_TABLE)
        base.execute(f"PRAGMA user_version = {_VERSION}")

    def _make_anew(self) -> None:
        assert self._path is not None  # noqa: S101 - a file was worked with
        self._close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)
        self._open(self._path)

    def _close(self) -> None:
        if self._base is not None:
            with contextlib.suppress(sqlite3.Error):
                self._base.close()
            self._base = None


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether an error comes from the contents of the file, and not from reading or writing it."""
    if isinstance(error, sqlite3.OperationalError):
        return str(error).startswith(("no such", "table ", "Could not decode"))
    return True


def is_another_file(path: Path) -> bool:
    """Whether the path leads to a file that was never a cache."""
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except FileNotFoundError:
        return False
    is_cache = head[:16] == b"SQLite format 3\0" and int.from_bytes(head[68:72], "big") == _APPLICATION
    return any(head) and not is_cache


def _lasts(identity: Identity | None) -> TypeGuard[Identity]:
    return identity is not None and identity.lasts


def _key(what: str, identity: Identity | None, *more: object) -> str:
    return json.dumps([what, *(identity[:5] if identity is not None else ()), *more])


_SEAL = 32


def _sealed(key: str, value: Any) -> str:
    """A value as text that `_unsealed` returns under the same key only."""
    body = json.dumps(value, separators=(",", ":"))
    return _seal(key, body) + body


def _unsealed(key: str, row: Any) -> Any:
    sealed = text(row)
    if sealed[:_SEAL] != _seal(key, sealed[_SEAL:]):
        raise MalformedError("its digest differs")
    return json.loads(sealed[_SEAL:])


def _seal(key: str, body: str) -> str:
    return xxhash.xxh3_128_hexdigest((key + body).encode())


def _plain(region: Region) -> list[Any]:
    layout = region.layout
    tensor = None if layout is None else [int(layout.scalar_type), layout.sizes, layout.dim_order]
    names = [region.keys, region.methods]
    return [region.kind.value, region.start, region.stop, *names, tensor, region.dtype, region.recorded]


def _regions(plain: Any) -> tuple[str, list[Region], int]:
    file_format, regions, alignment = items(plain, 3)
    return text(file_format), [_region(region) for region in items(regions)], max(integer(alignment), 1)


def _region(plain: Any) -> Region:
    kind, start, stop, keys, methods, tensor, dtype, recorded = items(plain, 8)
    layout = None
    if tensor is not None:
        scalar_type, sizes, order = items(tensor, 3)
        layout = TensorLayout(ScalarType(integer(scalar_type)), tuple(map(integer, items(sizes))), tuple(items(order)))
    place = integer(start), integer(stop)
    names = texts(keys), texts(methods)
    return Region(RegionKind(kind), *place, *names, layout, text(dtype), recorded=text(recorded))


def _fingerprints(plain: Any) -> list[Fingerprint]:
    fingerprints = []
    for item in items(plain):
        digest, fold, repeats, narrow, bands, needle = items(item, 6)
        pairs = [None if pair is None else (items(pair, 2)[0], items(pair, 2)[1]) for pair in (fold, needle)]
        fingerprints.append(
            Fingerprint(hexadecimal(digest, 32), pairs[0], text(repeats), narrow, text(bands), pairs[1])
        )
    return fingerprints
