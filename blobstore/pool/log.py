"""The log of a table of a bucket as it is on this machine, where the engine reads it.

    tables/events/_delta_log/00000000000000000012.json                  a commit: made once, never changed
    tables/events/_delta_log/00000000000000000008.checkpoint.parquet    the state after a commit, where readers begin
    tables/events/_delta_log/_last_checkpoint                           which of these is new

The engine itself would list the log and read its entries for each look, and again for each commit. Here a look is one list
of what came after what is known, and each entry is fetched once by all processes that share a cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import deltalake
from deltalake.exceptions import DeltaError

from blobstore.core.errors import BlobStoreError, FileAccessError, PoolError
from blobstore.core.memory.mapped_file import named
from blobstore.pool.cache import FileCache
from blobstore.storage.objects import Entry, Objects

__all__ = ["Log"]

_LAST = "_last_checkpoint"
_READY = "ready"
_COMMIT = re.compile(r"[0-9]{20}\.json")
_ENTRY = re.compile(r"[0-9]{20}\.(json|checkpoint[a-z0-9.-]*\.parquet)")
_EACH = 8
"""After so many commits there is a checkpoint: who has no copies reads so many entries at most."""


class Log:
    """The log of one table, and its state that was seen last.

    Args:
        objects: of a bucket.
        cache: of entries that were fetched.
        table: its path below the pool.

    Attributes:
        delta: the state, as the engine has it. It cannot read the files of the table, which are not here.

    Raises:
        TableNotFoundError: there is no table.
        DeltaError: the log is malformed, here and in `look`.
        FileAccessError, TransferError: the store refuses, or there is no room for the copies, in any method.
    """

    def __init__(self, objects: Objects, cache: FileCache, table: str) -> None:
        self._objects, self._cache, self._prefix = objects, cache, f"{table}/_delta_log"
        with named(Path(tempfile.gettempdir())):
            self._place = Path(tempfile.mkdtemp(prefix="blobstore-"))
        self._end = weakref.finalize(self, shutil.rmtree, self._place, ignore_errors=True)
        self._opened = 0
        self._tag: str | None = None
        self._folder, self.delta = self._open()

    def look(self) -> None:
        """See the newest state.

        Raises:
            PoolError: the pool was removed and made anew since this was opened.
        """
        known = self.delta.version()
        commits = [entry for entry in self._entries(f"{known:020}") if _COMMIT.fullmatch(_name(entry))]
        numbers = list(map(_number, commits))
        newest = max(numbers, default=-1)
        if known in numbers and self._tag not in {None, commits[0].etag}:
            raise self._other()
        if numbers == list(range(known, newest + 1)) and known < newest <= known + 2 * _EACH:
            self._follow(commits[1:])
        if self.delta.version() < newest or known not in numbers:
            # what is between was removed or is damaged, or a checkpoint is nearer
            folder, delta = self._open()
            if delta.version() < max(known, newest):
                raise self._other()
            shutil.rmtree(self._folder.parent, ignore_errors=True)
            self._folder, self.delta = folder, delta
        self._tag = commits[-1].etag if self.delta.version() == newest else None

    def _follow(self, commits: Sequence[Entry]) -> None:
        """See commits that follow the known one, unless one is damaged, or the copies here are gone."""
        with contextlib.suppress(DeltaError, FileAccessError, FileNotFoundError):
            self._fetch(commits, self._folder)
            self.delta.update_incremental()

    def _other(self) -> PoolError:
        return PoolError(
            f"{self._objects.name(self._prefix)}: this is the log of another table by now; open the pool again"
        )

    def append(self, actions: Sequence[dict[str, Any]], operation: str = "WRITE") -> bool:
        """Make the commit that follows the state that was seen last, and see it.

        Args:
            actions: no other commit has the same.
            operation: what the log calls it.

        Returns:
            Whether it is made; otherwise another one may have come first.
        """
        version = self.delta.version() + 1
        mode = {"mode": "Append", "partitionBy": "[]"} if operation == "WRITE" else {}
        now = {"timestamp": int(time.time() * 1000), "operation": operation, "operationParameters": mode}
        content = "\n".join(json.dumps(action) for action in [{"commitInfo": now}, *actions]).encode()
        path, place = f"{self._prefix}/{version:020}.json", self._folder / f"{version:020}.json"
        ready = self._folder.parent / _READY
        _write(ready, content)  # while nothing is made yet: there may be no room
        tag = self._objects.makes(path, content)
        if tag is None and self._objects.get(path) != content:
            return False  # otherwise the answer was lost, and this one is there
        self._tag = None
        with contextlib.suppress(
            BlobStoreError, DeltaError, OSError
        ):  # the commit is there; a look does what fails here
            ready.replace(place)
            self.delta.update_incremental()
            if tag:
                self._copied(path, tag, len(content), lambda: content)
            if version % _EACH == 0:
                self.checkpoint()
        return True

    def checkpoint(self) -> None:
        """Let who reads the table begin at the state that was seen last."""
        self.delta.create_checkpoint()
        for file in [*self._folder.glob(f"{self.delta.version():020}.checkpoint*"), self._folder / _LAST]:
            self._objects.put(f"{self._prefix}/{file.name}", file.read_bytes())

    def close(self) -> None:
        """Remove the copies that only this one has."""
        self._end()

    def _open(self) -> tuple[Path, deltalake.DeltaTable]:
        """The state from the last checkpoint on, and where its entries are; from the first entry that is there on, fetched
        anew, if that cannot be read."""
        for attempt in (1, 2):
            self._opened += 1
            folder = self._place / str(self._opened) / "_delta_log"
            with named(folder):
                folder.mkdir(parents=True)
            last = self._objects.get(f"{self._prefix}/{_LAST}") if attempt == 1 else None
            if last is not None:
                _write(folder / _LAST, last)
            self._fetch(self._entries(_checkpoint(last)), folder, anew=attempt == 2)
            try:
                return folder, deltalake.DeltaTable(os.fspath(folder.parent))
            except DeltaError:
                if attempt == 2:
                    raise
        raise AssertionError("there are two attempts")

    def _entries(self, after: str) -> list[Entry]:
        """The entries of the log behind a name, in order."""
        entries = self._objects.list(self._prefix, after=f"{self._prefix}/{after}" if after else None)
        return sorted((entry for entry in entries if _ENTRY.fullmatch(_name(entry))), key=lambda entry: entry.path)

    def _fetch(self, entries: Iterable[Entry], folder: Path, *, anew: bool = False) -> None:
        """Copy entries to where the engine reads them; `anew`, if copies in the cache may be damaged."""
        for entry in entries:
            tag = entry.etag or f"of {entry.stored}"
            copy = self._copied(entry.path, tag, entry.size, partial(self._content, entry.path), anew=anew)
            with named(folder):
                shutil.copyfile(copy, folder / _name(entry))

    def _content(self, path: str) -> bytes:
        data = self._objects.get(path)
        if data is None:
            raise PoolError(f"{self._objects.name(path)}: this entry was listed, and is missing; try again")
        return data

    def _copied(self, path: str, tag: str, size: int, fetch: Callable[[], bytes], *, anew: bool = False) -> Path:
        """The copy of an entry in the cache. In another pool at the same place, an entry of this name is another one."""
        return self._cache.path(f"{self._objects.name(path)} {tag}", size, fetch, anew=anew)


def _write(place: Path, content: bytes) -> None:
    with named(place):
        place.write_bytes(content)


def _name(entry: Entry) -> str:
    return entry.path.rpartition("/")[2]


def _number(entry: Entry) -> int:
    return int(_name(entry)[:20])


def _checkpoint(last: bytes | None) -> str:
    """What the entries since the last checkpoint follow; nothing if there is none."""
    try:
        return "" if last is None else f"{int(json.loads(last)['version']):020}"
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return ""
