"""The tables of a pool: what any engine can read of it, and the one place where a version appears.

Each is a Delta table below `tables/`. Rows are appended; a commit of a table is a file that can be created once, so no
lock is held by anyone.

    events   one row for each version that was added or dropped: the truth. A version is there if its id was added and not
             dropped. As in all tables, a row may be there twice.
    parts    the rows of all files of a version, under its id, and what the version needs otherwise
    blobs    where each content lies, and how it is stored. A content may have several rows
    marks    packs that a collection condemned: whoever adds treats what they have as missing. Rows with a digest are of
             earlier versions, and mean nothing any more
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from blobstore.core.disk.journal import sync_folder
from blobstore.core.errors import BlobStoreError, ClosedError, FileAccessError, PoolError, TransferError
from blobstore.core.memory.mapped_file import named
from blobstore.core.requirements import needed
from blobstore.pool.cache import FileCache
from blobstore.pool.promises import try_writing
from blobstore.storage.objects import Objects
from blobstore.storage.reasons import of_system, reason, refused

with needed("a pool needs deltalake and duckdb", "pool"):
    import deltalake
    import duckdb
    from arro3.core import Array, DataType, Field, Schema, list_array
    from arro3.core import Table as ArrowTable
    from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
    from deltalake.transaction import AddAction

    from blobstore.pool.log import Log

__all__ = ["BLOBS", "DESCRIPTION", "EVENTS", "MARKS", "PARTS", "Tables", "TakenError", "new_id"]

BLOBS, PARTS, EVENTS, MARKS = "blobs", "parts", "events", "marks"

DESCRIPTION = "pool.json"
"""What says that there is a pool, and its format."""

_TEXT, _BYTES, _NUMBER = DataType.utf8(), DataType.binary(), DataType.int64()
_NUMBERS = DataType.list(Field("element", _NUMBER, nullable=True))

_COLUMNS: dict[str, dict[str, Any]] = {
    BLOBS: {
        "digest": _BYTES,  # SHA-256 of the bytes
        "size": _NUMBER,
        "dtype": _TEXT,  # "float", "bfloat16", ...; empty for opaque bytes
        "shape": _TEXT,  # "384,1536"
        "encoding": _TEXT,  # as in blobstore/core/codec/blobs.py; before it, and a "+", steps of derived.py
        "base": _BYTES,  # the digest of another blob, or null
        "pack": _BYTES,  # the name of the object that has it
        "offset": _NUMBER,
        "length": _NUMBER,
        "time": _NUMBER,  # when it was stored, in seconds since 1970
        "check": _BYTES,  # of the bytes, as `scan.checked` makes it, by which a base is compared faster than by its digest
        "sketch": _BYTES,  # some of its elements; null if it is small, or a difference
        "near_sketch": _BYTES,  # the same of a difference: apart, because few of them are read
        "piece_keys": _NUMBERS,  # of a tensor that is whole, those that `pieces` keeps
        "piece_places": _NUMBERS,
        "key": _NUMBER,  # `short_key` of the digest: an engine reads these several times as fast
        "base_key": _NUMBER,  # the same of the base
        "signature": _NUMBER,  # of either sketch, as `distances.signature` makes it; null without one
    },
    PARTS: {
        "id": _TEXT,
        "name": _TEXT,
        "version": _TEXT,
        "file": _TEXT,  # empty if the version needs the blob for another one only
        "offset": _NUMBER,  # in the file; what no part covers is zeros
        "size": _NUMBER,
        "tensor": _TEXT,  # empty for what is not looked up by name
        "dtype": _TEXT,
        "shape": _TEXT,
        "order": _TEXT,  # the dim order, "0,2,3,1"; empty if it is contiguous
        "digest": _BYTES,
        "begun": _NUMBER,  # when the version was begun, in seconds since 1970
    },
    EVENTS: {
        "id": _TEXT,
        "kind": _TEXT,  # "add", "drop" or "abandon"
        "name": _TEXT,
        "version": _TEXT,
        "time": _NUMBER,  # seconds since 1970
        "files": _TEXT,  # JSON: name, size, SHA-256 and BLAKE3 of each file
    },
    MARKS: {"digest": _BYTES, "pack": _BYTES, "time": _NUMBER},
}

_OPTIONAL = {
    (BLOBS, "base"),
    (BLOBS, "sketch"),
    (BLOBS, "near_sketch"),
    (BLOBS, "piece_keys"),
    (BLOBS, "piece_places"),
    (BLOBS, "base_key"),
    (BLOBS, "signature"),
    (MARKS, "digest"),
}
"""What may be null."""

_SQL = {id(_TEXT): "VARCHAR", id(_BYTES): "BLOB", id(_NUMBER): "BIGINT", id(_NUMBERS): "BIGINT[]"}
_IMPOSSIBLE = {id(_TEXT): "''", id(_BYTES): "''::BLOB", id(_NUMBER): "-1"}
_FILE = re.compile(r"[A-Za-z0-9._-]{1,255}")
_DIGEST = re.compile(r"/?part-[0-9a-f-]{36}\.([0-9a-f]{32})\.")  # of the engine's own files, names say nothing
_CHECKPOINT = "50"  # commits, of a folder; `Log` makes those of buckets
_RETRIES = 20
_Numbers = npt.NDArray[np.int64]
_Answer = TypeVar("_Answer")
_PLACES = 1 << 40  # rows of a file, at the most
_FILTERED = 1 << 9  # rows that are looked for by their numbers; around so few, the engine reads nothing
_LOST = 3  # answers, until an error is one
_KEPT_HOURS = 24 * 7  # a reader may have listed a file before it was replaced
_SMALL = 1 << 22  # bytes; larger files of a table stay as they are
_SMALL_FILES = 16  # more of them are made one: whoever reads the table opens each of its files
_MOST_REPLACED = 64
_VACUUM = 512  # commits of a bucket's table after which replaced files are looked for, and those that are old removed
_TIDY, _TIDIED = "tidy", "tidied"
_TIDYING = 600 * 10**9  # nanoseconds after which whoever began has died


class TakenError(Exception):
    """Another commit with the same mark came first."""


@dataclass
class _Commit:
    """Rows that are appended once, however often that is tried.

    Attributes:
        table, rows: which, and what.
        action: the file that has them.
        marks: of the commit, and the numbers under which they were seen when it was decided on.
        was_sent: the store was asked for it, and did not answer yet.
    """

    table: str
    rows: Sequence[Sequence[Any]]
    action: Any
    marks: Mapping[str, int | None]
    was_sent: bool = False

    @property
    def is_in_doubt(self) -> bool:
        """Whether it may have been made, and must not be made again: without a mark, it may."""
        return self.was_sent and bool(self.marks)


def short_key(digest: bytes) -> int:
    """The first eight bytes of a digest as a little-endian number with a sign, by which few of many rows are found."""
    return int.from_bytes(digest[:8], "little", signed=True)


def new_id() -> str:
    """An id that no other version has."""
    return uuid.uuid4().hex


class Tables:
    """The tables of one pool, for one thread at a time.

    Args:
        cache: where files of the tables of a bucket are kept.

    Attributes:
        closed: whether `close` was called.

    Raises:
        ClosedError: it is closed, in any method.
        PoolError: there are other tables, or a newer format, here and in any method; or the store does not keep what a
            commit needs, in methods that change something.
        FileAccessError, TransferError: the store refuses.
    """

    def __init__(self, objects: Objects, cache: Path) -> None:
        self._objects, self._cache = objects, FileCache(cache)
        self._opened: dict[str, deltalake.DeltaTable] = {}
        self._logs: dict[str, Log] = {}
        self._later: set[str] = set()
        self._viewed: dict[str, tuple[int, list[Path]]] = {}
        self._database = duckdb.connect()
        self._database.execute("SET threads = 2; SET memory_limit = '400MB'; SET preserve_insertion_order = false")
        self._database.execute("SET enable_progress_bar = false")  # of slow queries, on standard output
        with contextlib.suppress(duckdb.CatalogException):  # of the first versions, which do not know these
            self._database.execute("SET parquet_metadata_cache = true")  # files of tables never change
            self._database.execute(f"SET dynamic_or_filter_threshold = {_FILTERED}")
        with named(Path("TMPDIR")):
            temporary = tempfile.gettempdir()
        self._database.execute(f"SET temp_directory = {_quoted(temporary)}")  # not below the working directory
        self._lock = threading.RLock()
        self._tried = False
        self.closed = False

    def create(self) -> None:
        """Make the tables that are missing."""
        for table in _COLUMNS:
            self._again(table, partial(self._create, table))

    def append(self, table: str, rows: Sequence[Sequence[Any]], once: Iterable[str] = ()) -> None:
        """Append rows in one commit.

        Args:
            table: which.
            rows: with a value for each column, in order.
            once: marks of this commit. `fresh` must have been called since the caller decided on it.

        Raises:
            TakenError: a commit with one of these marks came after the last call of `fresh`.
            TransferError: the store refuses. If it does not answer any more, the message says that the outcome is not known.
        """
        if not rows:
            return
        self._try_store()
        with self._lock, self._translated(table):
            marks = {mark: self._delta(table).transaction_version(mark) for mark in once}
        commit = _Commit(table, rows, self._written(table, rows), marks)
        try:
            self._again(table, partial(self._commit, commit))
        except TransferError as error:
            if not commit.is_in_doubt:
                raise
            raise TransferError(f"{error}; it is not known whether the last change was made") from None

    def delete(self, table: str, condition: str) -> None:
        """Delete the rows for which a condition of SQL holds; tried again if others change the table meanwhile."""
        self._try_store()

        def delete() -> bool:
            self.fresh(table)
            try:
                self._changed(table).delete(condition)
            except CommitFailedError:
                return False
            self.fresh(table)
            self._sync(table)
            return True

        self._again(table, delete)

    def tidy(self, *, always: bool = False) -> None:
        """Make few files of many small ones, and remove those that were replaced long ago."""
        self._try_store()
        for table in _COLUMNS:
            self._again(table, partial(self._tidy, table, always))

    def fresh(self, *tables: str) -> None:
        """Look at the newest state of these tables, or of all; queries are about the state that was seen last.

        They are looked at one after the other, in the given order, and others may change them in between. Of all tables, blobs
        come first, then parts, events and marks: `collecting` says why.
        """
        for table in tables or _COLUMNS:
            self._later.discard(table)
            self._again(table, partial(self._update, table))

    def prove(self) -> None:
        """Compare the copies of a bucket's files that are on this machine, for those who remove something: the disk may have
        damaged one, and its rows would be missing."""
        for table in _COLUMNS if self._objects.folder is None else ():
            with self._lock, self._translated(table):
                for path, size in _files(self._delta(table)).items():
                    self._proved_file(table, path, size)

    def later(self, *tables: str) -> None:
        """Look at the newest state of these tables when a query is about them, for those that saw what they look for before."""
        with self._lock:
            self._later.update(tables)

    def commits(self, *tables: str) -> tuple[int, ...]:
        """The numbers of the commits of these tables that were seen last; each commit's is one more than that before."""
        with self._lock:
            return tuple(self._delta(table).version() for table in tables)

    def seen(self, table: str, mark: str) -> bool:
        """Whether a commit with a mark is in the state that was seen last."""
        with self._lock, self._translated(table):
            return self._delta(table).transaction_version(mark) is not None

    def query(self, text: str, *values: Any, **given: Sequence[tuple[Any, ...]] | _Numbers) -> list[tuple[Any, ...]]:
        """The rows of a query over the tables, by their names, and over rows that are given.

        Each table also has the columns `filename` and `file_row_number`: where a row is in the state that was seen last.

        Args:
            text: SQL.
            values: for its question marks.
            given: tables of rows, of which all have the same number of bytes, texts or numbers; columns are a, b, c, ...
                An array of numbers is one with the column a.
        """
        return self._asked(lambda: self._answer(text, values).fetchall(), given)

    def numbers(self, text: str, **given: Sequence[tuple[Any, ...]] | _Numbers) -> list[_Numbers]:
        """The columns of a query without question marks as arrays: numbers without nulls, of which there are many."""
        columns = self._asked(lambda: self._answer(text, ()).fetchnumpy(), given)
        return [np.asarray(column, np.int64) for column in columns.values()]

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """No other thread looks at a newer state inside of a `with` block: what `place` gave means the same for `at`."""
        with self._lock:
            yield

    def place(self, table: str) -> str:
        """In SQL, where a row `b` of a table is in the state that is seen now, as a number for `at`."""
        if table in self._later:
            self.fresh(table)
        with self._lock:
            self._view(table)
        listed = ", ".join(_quoted(str(file)) for file in self._viewed[table][1])
        return f"(list_position([{listed}]::VARCHAR[], b.filename) - 1) * {_PLACES} + b.file_row_number"

    def at(self, table: str, columns: str, places: _Numbers, condition: str = "true") -> list[tuple[Any, ...]]:
        """Columns of rows `b` of a table at places, where a condition holds. Of other files nothing is read."""
        if not len(places):
            return []
        self._view(table)  # again, if a copy had to be fetched anew
        files = [str(file) for file in self._viewed[table][1]]
        wanted = [(files[place // _PLACES], place % _PLACES) for place in places.tolist()]
        named = ", ".join(_quoted(file) for file in {file for file, _ in wanted})
        return self.query(
            f"SELECT {columns} FROM {table} b SEMI JOIN places p ON b.filename = p.a AND b.file_row_number = p.b "
            f"WHERE b.filename IN ({named}) AND {condition}",
            places=wanted,
        )

    def _asked(
        self, answer: Callable[[], _Answer], given: Mapping[str, Sequence[tuple[Any, ...]] | _Numbers]
    ) -> _Answer:
        with self._lock:
            for name, rows in given.items():
                self._database.register(name, _arrow(rows))
            try:
                try:
                    return answer()
                except duckdb.Error:
                    if self._objects.folder is not None:
                        raise
                self._viewed.clear()
                self.prove()  # a copy is damaged, or was removed for want of room
                return answer()
            except duckdb.Error as error:
                raise PoolError(f"{self._objects.url}: a file of a table cannot be read: {reason(error)}") from None
            finally:
                for name in given:
                    self._database.unregister(name)

    def close(self) -> None:
        """Free memory."""
        with self._lock:
            self.closed = True
            self._database.close()
            self._opened.clear()
            for log in self._logs.values():
                log.close()
            self._cache.close()

    # ------------------------------------------------------------------------------------------------- the engine

    def _try_store(self) -> None:
        """Before the first change: whether the store keeps what a commit needs."""
        if not self._tried:
            try_writing(self._objects, DESCRIPTION)
            self._tried = True

    def _url(self, table: str) -> str:
        return f"{self._objects.url}/tables/{table}"

    def _options(self) -> dict[str, str] | None:
        return self._objects.options if self._objects.folder is None else None

    def _written(self, table: str, rows: Sequence[Sequence[Any]]) -> Any:
        """Store a file with rows, which a commit can add.

        The engine would write it, too. But if the store refuses that, the engine's own threads print a trace.
        """
        arrays = [
            _lists(column) if kind is _NUMBERS else Array(list(column), kind)
            for column, kind in zip(zip(*rows, strict=True), _COLUMNS[table].values(), strict=True)
        ]
        with self._lock:
            self._database.register("written", ArrowTable.from_arrays(arrays, schema=_schema(table)))
            try:
                return self._stored(table, "written")
            finally:
                self._database.unregister("written")

    def _stored(self, table: str, selected: str) -> Any:
        """Store a file with the rows of a query."""
        with tempfile.TemporaryDirectory(prefix="blobstore-") as folder:
            file = Path(folder) / "rows.parquet"
            try:
                copied = f"COPY {selected} TO {_quoted(os.fspath(file))} (FORMAT parquet, COMPRESSION zstd)"
                [(count,)] = self._database.execute(copied).fetchall()
            except duckdb.Error as error:
                raise FileAccessError(file, of_system(error) or reason(error)) from None
            with named(file):
                content = file.read_bytes()
        name, size = f"part-{uuid.uuid4()}.{_short_sha256(content)}.zstd.parquet", len(content)
        self._objects.put(f"tables/{table}/{name}", content)
        if self._objects.folder is None:
            self._cache.path(self._objects.name(f"tables/{table}/{name}"), size, lambda: content)
        now, counted = int(time.time() * 1000), json.dumps({"numRecords": count})
        return AddAction(
            path=name, size=size, partition_values={}, modification_time=now, data_change=True, stats=counted
        )

    def _commit(self, commit: _Commit) -> bool:
        if self._objects.folder is None:
            return self._commit_entry(commit)
        table = commit.table
        if commit.is_in_doubt and self._was_committed(table, commit.rows, list(commit.marks)):
            return True
        transactions = [deltalake.Transaction(mark, time.time_ns()) for mark in commit.marks]
        properties = deltalake.CommitProperties(max_commit_retries=_RETRIES, app_transactions=transactions or None)
        commit.was_sent = True
        try:
            self._delta(table).create_write_transaction(
                [commit.action], "append", _schema(table), commit_properties=properties
            )
        except CommitFailedError:
            self.fresh(table)
            commit.was_sent = False
            if not commit.marks:
                return False  # rows were deleted meanwhile, which the engine takes for rows that were read
            if not self._has(table, commit.rows):
                raise TakenError from None
        with contextlib.suppress(BlobStoreError):  # the rows are there
            self.fresh(table)
        self._sync(table)
        return True

    def _commit_entry(self, commit: _Commit) -> bool:
        """A commit of a table of a bucket. The entry names a file that no other one does, so it is never made twice."""
        log, now = self._log(commit.table), time.time_ns()
        actions = [_added(commit.action, changes=True)]
        actions += [{"txn": {"appId": mark, "version": now, "lastUpdated": now // 10**6}} for mark in commit.marks]
        for _ in range(_RETRIES):
            if any(log.delta.transaction_version(mark) != seen for mark, seen in commit.marks.items()):
                raise TakenError
            commit.was_sent = True
            if log.append(actions):
                return True
            commit.was_sent = False
            log.look()
        return False

    def _create(self, table: str) -> bool:
        deltalake.DeltaTable.create(
            self._url(table),
            schema=_schema(table),
            mode="ignore",
            name=f"blobstore.{table}",
            configuration={
                "delta.checkpointInterval": _CHECKPOINT,
                "delta.deletedFileRetentionDuration": f"interval {_KEPT_HOURS} hours",
            },
            storage_options=self._options(),
        )
        return True

    def _tidy(self, table: str, always: bool) -> bool:
        if not always and not self._is_untidy(self._delta(table)):  # in the state that was seen last
            return True
        self.fresh(table)
        if not always and not self._is_untidy(self._delta(table)):  # somebody else did it
            return True
        if self._objects.folder is None and not (always or self._may_have_old(table)):
            return self._tidy_bucket(table)
        delta = self._changed(table)
        # Of two that compact the same files, the engine lets both: every row would be there twice. So one says first that
        # it begins, in a commit that only one can make.
        begun = time.time_ns()
        with contextlib.suppress(CommitFailedError):  # somebody else does it
            self._mark(delta, _TIDY, begun)
            with contextlib.suppress(CommitFailedError):  # rows were deleted meanwhile
                delta.optimize.compact(target_size=None if always else _SMALL)
            self._mark(delta, _TIDIED, begun)
            delta.create_checkpoint()  # whoever reads the table begins here
            delta.vacuum(retention_hours=_KEPT_HOURS, dry_run=False)
            delta.cleanup_metadata()
        self.fresh(table)
        return True

    def _may_have_old(self, table: str) -> bool:
        """Whether it is time to look for replaced files of a table of a bucket, which takes hundreds of requests."""
        version: int = self._delta(table).version()
        return version >= _VACUUM and version % _VACUUM < 2 * _SMALL_FILES

    def _tidy_bucket(self, table: str) -> bool:
        """Make one file of the small files of a table of a bucket, of which there are copies here.

        Of two that do this, one finds that its files were replaced. Rows that others append meanwhile are in other files.
        """
        log = self._log(table)
        sizes = sorted((size, path) for path, size in _files(log.delta).items() if size < _SMALL)
        replaced = {path: size for size, path in sizes[:_MOST_REPLACED]}
        copies = ", ".join(_quoted(os.fspath(self._proved_file(table, path, size))) for path, size in replaced.items())
        columns = ", ".join(f'"{name}"' for name in _COLUMNS[table])
        added = self._stored(table, f"(SELECT {columns} FROM read_parquet([{copies}]))")
        now = time.time_ns() // 10**6
        gone = {"deletionTimestamp": now, "dataChange": False, "extendedFileMetadata": True, "partitionValues": {}}
        actions = [{"remove": {"path": path, **gone, "size": size}} for path, size in replaced.items()]
        actions.append(_added(added, changes=False))
        for _ in range(_RETRIES):
            if not replaced.keys() <= _files(log.delta).keys():
                break
            if log.append(actions, "OPTIMIZE"):
                return True
            log.look()
        self._objects.delete(f"tables/{table}/{added.path}")
        return True

    def _mark(self, delta: deltalake.DeltaTable, mark: str, number: int) -> None:
        """A commit without rows, after which `transaction_version` gives the number."""
        marked = deltalake.CommitProperties(app_transactions=[deltalake.Transaction(mark, number)])
        delta.create_write_transaction([], "append", delta.schema(), commit_properties=marked)
        delta.update_incremental()

    def _is_untidy(self, delta: deltalake.DeltaTable) -> bool:
        """Whether a table has many small files and nobody makes one of them, in the state that was seen last."""
        if sum(size < _SMALL for size in _files(delta).values()) <= _SMALL_FILES:
            return False
        begun, done = (delta.transaction_version(mark) or 0 for mark in (_TIDY, _TIDIED))
        return begun == done or time.time_ns() - begun > _TIDYING

    def _update(self, table: str) -> bool:
        if table not in self._opened and table not in self._logs:
            self._delta(table)  # in its newest state
            return True
        if self._objects.folder is None:
            self._log(table).look()
            return True
        delta = self._delta(table)
        if not self._is_newest(table, delta.version()):
            delta.update_incremental()
        return True

    def _is_newest(self, table: str, version: int) -> bool:
        """Whether a commit of a table in a folder is certainly the newest one; the engine would list all of them.

        They are numbered without gaps. Old ones are removed from the first on, so while this one is there, so is the next.
        """
        return self._entry(table, version).exists() and not self._entry(table, version + 1).exists()

    def _entry(self, table: str, version: int) -> Path:
        """The file of a commit of a table in a folder."""
        assert self._objects.folder is not None  # noqa: S101 - the caller asked
        return self._objects.folder / "tables" / table / "_delta_log" / f"{version:020}.json"

    def _again(self, table: str, step: Callable[[], bool]) -> None:
        """Call a function that reads or changes a table until it says that it is done.

        The engine does not repeat a commit whose answer was lost, because it could be there twice. Here it may: rows
        without a mark may be there twice.
        """
        lost = 0
        for _ in range(_RETRIES):
            with self._lock, self._translated(table):
                self._objects.check_no_link(f"tables/{table}/_delta_log")
                try:
                    if step():
                        return
                except (OSError, DeltaError) as error:
                    lost += 1
                    if lost == _LOST or self._objects.folder is not None or not refused(error):
                        raise
        raise PoolError(f"{self._url(table)}: others change the table all the time; try again later")

    def _was_committed(self, table: str, rows: Sequence[Sequence[Any]], marks: Sequence[str]) -> bool:
        """Whether rows are there after the answer to their commit was lost.

        Raises:
            TakenError: another commit with one of the marks is.
        """
        before = [self._delta(table).transaction_version(mark) for mark in marks]
        self.fresh(table)
        if self._has(table, rows):
            return True
        if before != [self._delta(table).transaction_version(mark) for mark in marks]:
            raise TakenError
        return False

    def _has(self, table: str, rows: Sequence[Sequence[Any]]) -> bool:
        """Whether rows are in the state that was seen last."""
        same = " AND ".join(f'"{column}" IS NOT DISTINCT FROM ?' for column in _COLUMNS[table])
        return all(self.query(f"SELECT 1 FROM {table} WHERE {same}", *row) for row in rows)

    def _answer(self, text: str, values: Sequence[Any]) -> Any:
        for table in _COLUMNS:
            if table in text:
                if table in self._later:
                    self.fresh(table)
                self._view(table)
        return self._database.execute(text, list(values))

    def _delta(self, table: str) -> deltalake.DeltaTable:
        if self.closed:
            raise ClosedError(f"{self._objects.url}: this pool is closed")
        if self._objects.folder is None:
            return self._log(table).delta
        if table not in self._opened:
            self._opened[table] = self._checked(table, deltalake.DeltaTable(self._url(table)))
        return self._opened[table]

    def _log(self, table: str) -> Log:
        """The log of a table of a bucket."""
        if self.closed:
            raise ClosedError(f"{self._objects.url}: this pool is closed")
        if table not in self._logs:
            log = Log(self._objects, self._cache, f"tables/{table}")
            self._checked(table, log.delta)
            self._logs[table] = log
        return self._logs[table]

    def _changed(self, table: str) -> deltalake.DeltaTable:
        """A table that the engine can change, in the state that was seen last; one of a bucket in its newest."""
        if self._objects.folder is None:
            return deltalake.DeltaTable(self._url(table), storage_options=self._objects.options)
        return self._delta(table)

    def _checked(self, table: str, delta: deltalake.DeltaTable) -> deltalake.DeltaTable:
        columns = [field.name for field in delta.schema().fields]
        if delta.metadata().name != f"blobstore.{table}" or columns != list(_COLUMNS[table]):
            raise PoolError(f"{self._url(table)}: this is a table of something else, with {', '.join(columns)}")
        return delta

    def _view(self, table: str) -> None:
        """Let the name of a table mean its files in the state that was seen last."""
        with self._translated(table):
            delta = self._delta(table)
            version = delta.version()
            if table in self._viewed and self._viewed[table][0] == version:
                return
            files = self._files(table, delta)
        if files:
            # Anybody who writes to the pool may have written them. Nulls could make any condition of ours false.
            listed = ", ".join(_quoted(str(file)) for file in files)
            columns = ", ".join(_column(table, name) for name in _COLUMNS[table])
            selected = f"SELECT {columns}, filename, file_row_number FROM read_parquet([{listed}], filename = true, file_row_number = true)"
        else:
            columns = ", ".join(f'NULL::{_SQL[id(kind)]} AS "{name}"' for name, kind in _COLUMNS[table].items())
            columns += ", NULL::VARCHAR AS filename, NULL::BIGINT AS file_row_number"
            selected = f"SELECT {columns} WHERE false"
        self._viewed[table] = -1, files  # if this fails, the name still means another state
        self._database.execute(f"CREATE OR REPLACE VIEW {table} AS {selected}")
        self._viewed[table] = version, files

    def _files(self, table: str, delta: deltalake.DeltaTable) -> list[Path]:
        """The files of a table as files that are here; those of a bucket are fetched once."""
        if self._objects.folder is not None:  # the engine gives their paths as those of URLs
            paths = [f"tables/{table}/{self._file_name(table, uri)}" for uri in delta.file_uris()]
            for path in paths:
                self._objects.check_no_link(path)
            return [self._objects.folder / path for path in paths]
        return [self._local_file(table, path, size) for path, size in _files(delta).items()]

    def _local_file(self, table: str, path: str, size: int, *, anew: bool = False) -> Path:
        """The copy of a file of a table of a bucket."""
        return self._local(f"tables/{table}/{self._file_name(table, path)}", size, anew=anew)

    def _proved_file(self, table: str, path: str, size: int) -> Path:
        """As `_local_file`, but a copy that is not what its name says is fetched again, and one whose name says nothing."""
        copy = self._local_file(table, path, size)
        with contextlib.suppress(OSError):  # of a disk with bad sectors, or another process had no room for it
            if _is_named(path, copy.read_bytes()):
                return copy
        return self._local_file(table, path, size, anew=True)

    def _file_name(self, table: str, path: str) -> str:
        """The name of a file of a table, by what its log says, which anybody may have written who writes to the pool."""
        name = path.rpartition(f"/tables/{table}/")[2]
        if not _FILE.fullmatch(name):  # it would be a pattern, or lead elsewhere
            raise PoolError(f"{self._url(table)}: the table has a file {name!r}, which cannot be one of its own")
        return name

    def _local(self, path: str, size: int, *, anew: bool) -> Path:
        def fetch() -> bytes:
            data = self._objects.get(path)
            if data is None:
                raise PoolError(f"{self._objects.name(path)}: the file of a table is missing")
            if len(data) != size:
                raise PoolError(f"{self._objects.name(path)}: expected {size} bytes, found {len(data)}")
            if not _is_named(path, data, without=True):
                raise PoolError(f"{self._objects.name(path)}: it is damaged; its SHA-256 is {_short_sha256(data)}...")
            return data

        return self._cache.path(self._objects.name(path), size, fetch, anew=anew)

    def _sync(self, table: str) -> None:
        """Bring a commit to the disk: its entry in the log, and the files that it names."""
        if self._objects.folder is None:
            return
        folder = self._objects.folder / "tables" / table
        newest = self._files(table, self._delta(table))[:1]
        for place in [*newest, self._entry(table, self._delta(table).version())]:
            with contextlib.suppress(FileNotFoundError), named(place):
                descriptor = os.open(place, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        with named(folder):
            sync_folder(folder)
            sync_folder(folder / "_delta_log")

    @contextlib.contextmanager
    def _translated(self, table: str) -> Iterator[None]:
        try:
            yield
        except TableNotFoundError:
            raise PoolError(f"{self._url(table)}: the table is missing; this is no pool, or a part of one") from None
        except DeltaError as error:
            if refused(error):
                raise TransferError(f"{self._url(table)}: {reason(error)}") from None
            if self._objects.folder is not None and (cause := of_system(error)) is not None:
                raise FileAccessError(self._url(table), cause) from None
            raise PoolError(f"{self._url(table)}: {reason(error)}") from None
        except OSError as error:
            if isinstance(error, FileAccessError | TransferError):
                raise
            if self._objects.folder is not None:
                raise FileAccessError(self._url(table), of_system(error) or reason(error)) from None
            raise TransferError(f"{self._url(table)}: {reason(error)}") from None


def _files(delta: deltalake.DeltaTable) -> dict[str, int]:
    """The files of a table, and their sizes."""
    added = delta.get_add_actions(flatten=True)
    return dict(zip(added["path"].to_pylist(), added["size_bytes"].to_pylist(), strict=True))


def _short_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _is_named(path: str, content: bytes, *, without: bool = False) -> bool:
    """Whether a file of a table has the content that its name says; `without`, if that says nothing."""
    match = _DIGEST.search(path)
    return without if match is None else match[1] == _short_sha256(content)


def _added(file: Any, *, changes: bool) -> dict[str, Any]:
    """A file as an entry of a log adds it; whether it has rows that were in no other one."""
    named = {"path": file.path, "partitionValues": {}, "size": file.size, "modificationTime": file.modification_time}
    return {"add": {**named, "dataChange": changes, "stats": file.stats}}


def _quoted(text: str) -> str:
    """A text in SQL."""
    return "'" + text.replace("'", "''") + "'"


def _column(table: str, name: str) -> str:
    """A column of a view: it has its type, and where no null can be, a value that cannot be in its place."""
    kind = id(_COLUMNS[table][name])
    typed = f'"{name}"::{_SQL[kind]}'
    # the engine finds rows by keys as they are in the files
    is_kept = (table, name) in _OPTIONAL or name == "key"
    return f'{typed} AS "{name}"' if is_kept else f'coalesce({typed}, {_IMPOSSIBLE[kind]}) AS "{name}"'


def _schema(table: str) -> Any:
    return Schema([Field(name, kind, nullable=True) for name, kind in _COLUMNS[table].items()])


def _lists(column: Sequence[Sequence[int] | None]) -> Any:
    ends = np.cumsum([0, *(len(one or ()) for one in column)], dtype="<i4")
    numbers = Array([number for one in column for number in one or ()], _NUMBER)
    nulls = Array([one is None for one in column], DataType.bool())
    return list_array(Array.from_numpy(ends), numbers, type=_NUMBERS, mask=nulls)


def _arrow(rows: Sequence[tuple[Any, ...]] | _Numbers) -> Any:
    if isinstance(rows, np.ndarray):
        return ArrowTable.from_arrays([Array.from_numpy(rows)], schema=Schema([Field("a", _NUMBER)]))
    kinds = {bytes: _BYTES, str: _TEXT, int: _NUMBER}
    columns = list(zip(*rows, strict=True))
    fields = [Field(name, kinds[type(column[0])]) for name, column in zip("abcdef", columns, strict=False)]
    arrays = [Array(list(column), field.type) for column, field in zip(columns, fields, strict=True)]
    return ArrowTable.from_arrays(arrays, schema=Schema(fields))
