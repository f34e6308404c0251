"""What earlier runs found, so that a run that was interrupted goes on, and a second run reads no blob again.

One SQLite file. What a file holds is kept under its path, size, time of change and inode; a file that differs in one
of them is looked at anew. What was proved about two contents is kept under their digests, so it holds wherever they
are.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Any

from blobstore.errors import FileAccessError
from blobstore.layout import TensorLayout
from blobstore.reporting.fingerprint import Fingerprint
from blobstore.reporting.model import Region, RegionKind
from blobstore.reporting.source import Identity

__all__ = ["Cache", "default_path"]

_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, inode TEXT, format TEXT, regions TEXT);
CREATE TABLE IF NOT EXISTS fingerprints (
    path TEXT, start INTEGER, stop INTEGER, alike INTEGER, body TEXT, PRIMARY KEY (path, start, stop, alike));
CREATE TABLE IF NOT EXISTS proofs (key TEXT PRIMARY KEY, body TEXT);
"""
_SETTLED_NS = 50_000_000
"""A file that changed this recently may change again without its time telling: clocks of file systems are coarse."""


def default_path() -> Path:
    """Where the command line keeps its cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blobstore" / "fingerprints.sqlite"


class Cache:
    """A fingerprint cache; a context manager.

    Every call takes effect at once, so that a run that is killed loses only what it was at.

    Args:
        path: the file, made if it is missing; None for a cache that remembers nothing.

    Raises:
        FileAccessError: it cannot be opened, or it is another kind of file.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._base: sqlite3.Connection | None = None
        if path is None:
            return
        base: sqlite3.Connection | None = None
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            base = sqlite3.connect(path, timeout=60, isolation_level=None)
            base.execute("PRAGMA journal_mode = WAL")
            base.execute("PRAGMA synchronous = OFF")  # a cache that is lost is made again
            if base.execute("PRAGMA user_version").fetchone()[0] != _VERSION:
                for table in ("files", "fingerprints", "proofs"):
                    base.execute(f"DROP TABLE IF EXISTS {table}")
            base.executescript(_TABLES)
            base.execute(f"PRAGMA user_version = {_VERSION}")
        except (OSError, sqlite3.Error) as error:
            if base is not None:
                base.close()
            raise FileAccessError(
                path, error if isinstance(error, OSError) else f"no fingerprint cache: {error}"
            ) from None
        self._base = base

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None

    def regions(self, identity: Identity | None) -> tuple[str, list[Region]] | None:
        """The format and the regions of a file; None if it is not known, or no longer the same."""
        if self._base is None or identity is None:
            return None
        row = self._base.execute(
            "SELECT format, regions FROM files WHERE path = ? AND size = ? AND mtime_ns = ? AND inode = ?", identity
        ).fetchone()
        return None if row is None else (row[0], [_region(item) for item in json.loads(row[1])])

    def set_regions(self, identity: Identity | None, file_format: str, regions: Iterable[Region]) -> None:
        """Remember a file; what was known of its predecessor is forgotten."""
        if self._base is None or identity is None or identity.mtime_ns > time.time_ns() - _SETTLED_NS:
            return
        body = json.dumps([_plain(region) for region in regions], separators=(",", ":"))
        self._base.execute("BEGIN IMMEDIATE")
        self._base.execute("DELETE FROM fingerprints WHERE path = ?", (identity.path,))
        self._base.execute("REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", (*identity, file_format, body))
        self._base.execute("COMMIT")

    def fingerprints(self, identity: Identity | None, start: int, stop: int, alike: bool) -> list[Fingerprint] | None:
        """Those of the blobs in a range of a file that `regions` knows; None if they are not known."""
        if self._base is None or identity is None:
            return None
        row = self._base.execute(
            "SELECT body FROM fingerprints JOIN files USING (path) WHERE path = ? AND size = ? AND mtime_ns = ? "
            "AND inode = ? AND start = ? AND stop = ? AND alike >= ?",
            (*identity, start, stop, alike),
        ).fetchone()
        return None if row is None else [_fingerprint(item) for item in json.loads(row[0])]

    def set_fingerprints(
        self, identity: Identity | None, start: int, stop: int, alike: bool, found: Sequence[Fingerprint]
    ) -> None:
        """Remember those of a range, if the file itself is known as it is now."""
        if self._base is None or identity is None:
            return
        body = json.dumps([astuple(item) for item in found], separators=(",", ":"))
        self._base.execute(
            "REPLACE INTO fingerprints SELECT path, ?, ?, ?, ? FROM files "
            "WHERE path = ? AND size = ? AND mtime_ns = ? AND inode = ?",
            (start, stop, alike, body, *identity),
        )

    def proof(self, key: str) -> Any:
        """What was proved under a key, in a list of one; None if nothing was tried."""
        if self._base is None:
            return None
        row = self._base.execute("SELECT body FROM proofs WHERE key = ?", (key,)).fetchone()
        return None if row is None else [json.loads(row[0])]

    def set_proof(self, key: str, result: Any) -> None:
        """Remember it; `result` is plain data, None for a proof that failed."""
        if self._base is not None:
            self._base.execute("REPLACE INTO proofs VALUES (?, ?)", (key, json.dumps(result)))


def _plain(region: Region) -> list[Any]:
    layout = region.layout
    tensor = None if layout is None else [int(layout.scalar_type), layout.sizes, layout.dim_order]
    return [region.kind.value, region.start, region.stop, region.keys, region.methods, tensor, region.dtype]


def _region(item: list[Any]) -> Region:
    kind, start, stop, keys, methods, tensor, dtype = item
    layout = None if tensor is None else TensorLayout(tensor[0], tuple(tensor[1]), tuple(tensor[2]))
    return Region(RegionKind(kind), start, stop, tuple(keys), tuple(methods), layout, dtype)


def _fingerprint(item: list[Any]) -> Fingerprint:
    digest, fold, repeats, narrow, bands, needle = item
    return Fingerprint(
        digest,
        None if fold is None else (fold[0], fold[1]),
        repeats,
        narrow,
        bands,
        None if needle is None else (needle[0], needle[1]),
    )
