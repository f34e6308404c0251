"""What earlier runs found, so that an interrupted run continues, and a second run reads no blob again.

One SQLite file. Findings about a file are stored under its path, size, times of change and inode; a file that differs
in one of them is read anew. Working copies, which processes change through maps, are not remembered. What was proved
about two contents is stored under their digests, so it holds wherever they are. What a report found in each part of its files is
stored under the report's scope. Each row carries a digest of itself, so damage is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import xxhash

from blobstore.core.errors import FileAccessError, LayoutError
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import as_path
from blobstore.reporting.checked import MalformedError, hexadecimal, integer, items, text, texts
from blobstore.reporting.fingerprint import Fingerprint
from blobstore.reporting.model import Region, RegionKind
from blobstore.reporting.source import Identity, stamp

__all__ = ["Cache", "LostError", "Snapshot", "default_path", "is_another_file", "lasting_stamp"]

Found = TypeVar("Found")

_VERSION = 1
_APPLICATION = 0x626C6F62
"""Marks the file as ours in its first bytes, so that no other file is ever dropped."""
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER, inode TEXT, body TEXT);
CREATE TABLE IF NOT EXISTS fingerprints (
    path TEXT, start INTEGER, stop INTEGER, alike INTEGER, body TEXT, PRIMARY KEY (path, start, stop, alike));
CREATE TABLE IF NOT EXISTS proofs (key TEXT PRIMARY KEY, body TEXT);
CREATE TABLE IF NOT EXISTS scopes (scope TEXT PRIMARY KEY, state INTEGER, used INTEGER);
CREATE TABLE IF NOT EXISTS parts (scope TEXT, number INTEGER, body TEXT, PRIMARY KEY (scope, number));
CREATE TABLE IF NOT EXISTS part_findings (scope TEXT, number INTEGER, body TEXT, PRIMARY KEY (scope, number));
CREATE TABLE IF NOT EXISTS part_tokens (scope TEXT, number INTEGER, body BLOB, PRIMARY KEY (scope, number));
"""
_NAMES = re.findall(r"EXISTS (\w+)", _TABLES)
_PARTS = ("parts", "part_findings", "part_tokens")
_SCOPES = 16
"""Of as many reports the parts are kept, of those that were made last."""
_SETTLED_NS = 50_000_000
"""A file that changed this recently may change again under the same time, since clocks of file systems are coarse."""


class LostError(Exception):
    """What was stored of an earlier report cannot be read."""


def _is_settled(identity: Identity, read: int) -> bool:
    return max(identity.mtime_ns, identity.ctime_ns) <= read - _SETTLED_NS


def lasting_stamp(identity: Identity | None, read: int) -> int:
    """The stamp of a file for what is stored about it; 0 if it may change without any other time of change.

    Args:
        identity: of the file.
        read: when reading it began, in nanoseconds since 1970.
    """
    return stamp(identity) if identity is not None and _is_settled(identity, read) else 0


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
        self._has_snapshots = False  # where readers would stop writers, nothing of a report is kept
        self._path = None if path is None else as_path(path)
        if self._path is not None:
            with self._working():
                if is_another_file(self._path):
                    raise FileAccessError(self._path, "another kind of file, no fingerprint cache")
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._open(self._path)

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def regions(self, identity: Identity | None) -> tuple[str, list[Region], int] | None:
        """The format, the regions and the alignment of a file; None if it is unknown or has changed."""
        if identity is None or not identity.lasts:
            return None
        condition = "SELECT body FROM files WHERE path = ? AND size = ? AND mtime_ns = ? AND ctime_ns = ? AND inode = ?"
        return self._look_up(condition, identity[:5], identity[:5], _regions)

    def set_regions(
        self, identity: Identity | None, file_format: str, regions: Iterable[Region], alignment: int
    ) -> None:
        """Store a file, and forget what was known of an earlier one of this path."""
        if identity is None or not identity.lasts or self._base is None:
            return
        if not _is_settled(identity, time.time_ns()):
            return
        body = _sealed(identity[:5], [file_format, [_plain(region) for region in regions], alignment])
        with self._working() as base:
            base.execute("BEGIN IMMEDIATE")
            base.execute("DELETE FROM fingerprints WHERE path = ?", (identity.path,))
            base.execute("REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", (*identity[:5], body))
            base.execute("COMMIT")

    def fingerprints(self, identity: Identity | None, start: int, stop: int, alike: bool) -> list[Fingerprint] | None:
        """Those of the blobs in a range of a file that `regions` knows; None if they are unknown."""
        if identity is None or not identity.lasts:
            return None
        for enough in [True] if alike else [False, True]:
            remembered = self._look_up(
                "SELECT fingerprints.body FROM fingerprints JOIN files USING (path) WHERE path = ? AND size = ? "
                "AND mtime_ns = ? AND ctime_ns = ? AND inode = ? AND start = ? AND stop = ? AND alike = ?",
                (*identity[:5], start, stop, enough),
                (*identity[:5], start, stop, enough),
                _fingerprints,
            )
            if remembered is not None:
                return remembered
        return None

    def set_fingerprints(
        self, identity: Identity | None, start: int, stop: int, alike: bool, fingerprints: Sequence[Fingerprint]
    ) -> None:
        """Store those of a range, if the file itself is known as it is now."""
        if identity is None or not identity.lasts or self._base is None:
            return
        body = _sealed((*identity[:5], start, stop, alike), [astuple(item) for item in fingerprints])
        with self._working() as base:
            base.execute(
                "REPLACE INTO fingerprints SELECT path, ?, ?, ?, ? FROM files "
                "WHERE path = ? AND size = ? AND mtime_ns = ? AND ctime_ns = ? AND inode = ?",
                (start, stop, alike, body, *identity[:5]),
            )

    def proof(self, key: str) -> Any:
        """The result under a key, in a list of one, or None."""
        return self._look_up("SELECT body FROM proofs WHERE key = ?", (key,), (key,), lambda result: [result])

    def set_proof(self, key: str, result: Any) -> None:
        """Store a result, which is plain data; None for a proof that failed."""
        if self._base is not None:
            body = _sealed((key,), result)
            with self._working() as base:
                base.execute("REPLACE INTO proofs VALUES (?, ?)", (key, body))

    def snapshot(self, scope: str | None) -> Snapshot | None:
        """The parts of the last report of a scope, as they are now; the caller closes it. None if there is no cache."""
        if scope is None or self._base is None or self._path is None or not self._has_snapshots:
            return None
        with self._working():
            return Snapshot(self._path, scope)
        return None

    def set_parts(
        self, snapshot: Snapshot, gone: Iterable[int], parts: Iterable[tuple[Any, Any, bytes]], first: int
    ) -> None:
        """Store parts in place of others, unless another process stored parts of this scope since the snapshot.

        Args:
            snapshot: what was known of the scope.
            gone: the numbers of the parts that are not there any more.
            parts: of each new one its digest, its findings, both plain data, and its tokens.
            first: its number; the others follow.
        """
        if self._base is None:
            return
        scope = snapshot.scope
        with self._working() as base:
            base.execute("BEGIN IMMEDIATE")
            state = base.execute("SELECT state FROM scopes WHERE scope = ?", (scope,)).fetchone()
            if (state[0] if state else 0) == snapshot.state:
                base.execute("REPLACE INTO scopes VALUES (?, ?, ?)", (scope, snapshot.state + 1, time.time_ns()))
                rows = [(scope, number) for number in gone]
                for table in _PARTS:
                    base.executemany(f"DELETE FROM {table} WHERE scope = ? AND number = ?", rows)  # noqa: S608
                for number, values in enumerate(parts, first):
                    for table, value in zip(_PARTS, values, strict=True):
                        body = _sealed((scope, number), value)
                        row = (scope, number, body)
                        base.execute(f"INSERT INTO {table} VALUES (?, ?, ?)", row)  # noqa: S608 - of this module
                old = "SELECT scope FROM scopes ORDER BY used DESC LIMIT -1 OFFSET ?"
                for (other,) in base.execute(old, (_SCOPES,)).fetchall():
                    for table in ("scopes", *_PARTS):
                        base.execute(f"DELETE FROM {table} WHERE scope = ?", (other,))  # noqa: S608
            base.execute("COMMIT")

    def lost(self, error: Exception) -> None:
        """Deal with what kept a snapshot from being read."""
        with self._working():
            raise error if isinstance(error, sqlite3.Error) else sqlite3.DatabaseError(f"a damaged row: {error}")

    def _look_up(
        self, query: str, values: Sequence[Any], key: Sequence[Any], read: Callable[[Any], Found]
    ) -> Found | None:
        """The contents of one row; None if there is no such row. A damaged row makes the cache a damaged one."""
        if self._base is None:
            return None
        with self._working() as base:
            row = base.execute(query, values).fetchone()
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
        self._has_snapshots = base.execute("PRAGMA journal_mode = WAL").fetchone()[0] == "wal"
        base.execute("PRAGMA synchronous = OFF")  # a cache that is lost is made again
        if base.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
            for table in _NAMES:
                base.execute(f"DROP TABLE IF EXISTS {table}")
        base.executescript(_TABLES)
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


class Snapshot:
    """The parts of one report, which stay as they are while other processes write. The caller closes it.

    Attributes:
        scope: what the report is of.
        state: changes whenever a part does.
    """

    def __init__(self, path: Path, scope: str) -> None:
        self.scope = scope
        self._base = sqlite3.connect(path, timeout=60, isolation_level=None)
        self._base.execute("BEGIN")
        row = self._base.execute("SELECT state FROM scopes WHERE scope = ?", (scope,)).fetchone()
        self.state: int = row[0] if row else 0

    def digests(self) -> Iterator[tuple[int, Any]]:
        """Of each part its number, and its digest.

        Raises:
            LostError: the cache is damaged or cannot be read; so do all methods.
        """
        return self._rows("parts")

    def findings(self) -> Iterator[tuple[int, Any]]:
        """Of each part its number, and its findings."""
        return self._rows("part_findings")

    def tokens(self) -> Iterator[tuple[int, bytes]]:
        """Of each part its number, and its tokens."""
        return self._rows("part_tokens")

    def close(self) -> None:
        """Forget it."""
        self._base.close()

    def _rows(self, table: str) -> Iterator[tuple[int, Any]]:
        query = f"SELECT number, body FROM {table} WHERE scope = ? ORDER BY number"  # noqa: S608 - of this module
        try:
            for number, body in self._base.execute(query, (self.scope,)):
                yield number, _unsealed((self.scope, number), body)
        except (sqlite3.Error, ValueError) as error:
            raise LostError(str(error)) from error


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
    numbers = (int.from_bytes(head[60:64], "big"), int.from_bytes(head[68:72], "big"))
    is_cache = head[:16] == b"SQLite format 3\0" and (numbers[1] == _APPLICATION or numbers == (1, 0))
    return any(head) and not is_cache


def _sealed(key: Sequence[Any], value: Any) -> str | bytes:
    """A value as text that `_unsealed` returns under the same key only; bytes as bytes."""
    if isinstance(value, bytes):
        return _seal(key, value).encode() + value
    body = json.dumps(value, separators=(",", ":"))
    return _seal(key, body.encode()) + body


def _unsealed(key: Sequence[Any], row: Any) -> Any:
    if isinstance(row, bytes):
        seal, sealed = row[:_SEAL].decode("ascii", "replace"), row[_SEAL:]
    else:
        seal, sealed = text(row)[:_SEAL], text(row)[_SEAL:].encode()
    if seal != _seal(key, sealed):
        raise MalformedError("its digest differs")
    return sealed if isinstance(row, bytes) else json.loads(sealed)


_SEAL = 32


def _seal(key: Sequence[Any], body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([*key]).encode() + body)


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
