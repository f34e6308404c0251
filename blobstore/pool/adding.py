"""Adding a version: read its files once, store what is new, and make it appear in one commit.

Tensors that are joined of stored ones become several parts first. What the tables say for that decides nothing else, unless
they are still the same after the next step.

The order of the steps keeps everything that a version needs, whoever collects meanwhile and whoever dies:

1. The rows of the parts are appended under a new id. They protect all their contents, stored or not.
2. The table of blobs is read after that, and then the marks. What is missing, or only in condemned packs, is stored.
3. The bases are protected by rows of their own, and everything is looked up again, unless nobody else has changed the
   tables of blobs and marks since. If anything is missing or in condemned packs by now, step 2 is repeated.
4. The event is appended: the version is there.

`collecting` has the other side, and why no order of both loses anything.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from blobstore.core.disk.progress import Progress
from blobstore.core.errors import PoolError
from blobstore.core.reprs import fields_line
from blobstore.pool.derived import needed_of_base
from blobstore.pool.executors import batches, run
from blobstore.pool.overlaps import find_overlaps, take_apart
from blobstore.pool.packs import Job, Stored, write_pack
from blobstore.pool.pieces import Pieces, pieces_of
from blobstore.pool.relations import stored_rows, with_bases
from blobstore.pool.scan import FileRange, PartTensor, ScannedFile, ScannedPart, scan
from blobstore.pool.tables import BLOBS, EVENTS, MARKS, PARTS, Tables, TakenError, new_id
from blobstore.pool.versions import Version, VersionFile, live_versions
from blobstore.storage.objects import Objects

__all__ = ["Added", "add_version", "refuse_existing"]

_PACKS = 4
_SMALLEST, _LARGEST = 1 << 23, 1 << 27
"""Bytes of the contents of a pack, about: a small version makes work for several workers, too."""

_ROUNDS = 10

_NO_FILE = ("", 0, 0, "", "", "", "")
"""File, place, tensor and layout of a part that is in no file."""


@dataclass(frozen=True)
class Added:
    """What adding a version did. All sizes are in bytes.

    Attributes:
        version: what was added.
        bytes: of its files.
        new: how many of its contents were not in the pool.
        new_bytes: of these contents.
        stored_bytes: what they take in packs.
    """

    __repr__ = fields_line

    version: Version
    bytes: int
    new: int
    new_bytes: int
    stored_bytes: int


def add_version(
    objects: Objects,
    tables: Tables,
    files: Sequence[tuple[str, str]],
    name: str,
    version: str,
    executor: Executor,
    progress: Progress | None = None,
    *,
    before: Sequence[ScannedFile] = (),
    origins: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Added:
    """Add files as a version.

    Args:
        files: paths, and their names in the version.
        executor: does the work; its workers must see the same files and the same pool.
        progress: called with bytes of files.
        before: more files, which an earlier version has read; all their contents are stored.
        origins: what the event says about files that come from a bucket, by their names.

    Raises:
        PoolError: the version is there already.
        FileAccessError, DataChangedError, TransferError: reading or writing fails; the version is not there then.
    """
    tables.fresh()
    refuse_existing(tables, name, version)
    scanned = sorted([*_scan(files, executor, progress), *before], key=lambda file: file.name)
    plan = _Plan.of(tables, _distinct(scanned), {})
    slices, taken_apart = _taken_apart(tables, plan, executor)
    if slices:
        scanned = [replace(file, parts=_parts_of(file, taken_apart)) for file in scanned]
        plan = _Plan.of(tables, _distinct(scanned), slices)
    identity = new_id()
    tables.append(PARTS, list(_part_rows(identity, name, version, scanned)))
    stored = _store(objects, tables, identity, (name, version), _distinct(scanned), slices, plan, executor, progress)
    listed = tuple(VersionFile(file.name, file.size, file.sha256, file.blake3) for file in scanned)
    described = [{**file._asdict(), **origins.get(file.name, {})} for file in listed]
    added = Version(name, version, identity, int(time.time()), listed)
    _appear(objects, tables, added, json.dumps(described))
    sizes = [(row.size, row.length) for row in stored]
    return Added(added, added.size, len(stored), sum(size for size, _ in sizes), sum(length for _, length in sizes))


def _appear(objects: Objects, tables: Tables, added: Version, files: str) -> None:
    """Append the event, unless somebody else adds the same version first, or a collection gives this one up."""
    name, version = added.name, added.version
    mark, end = f"version {name}@{version}", f"end {added.id}"
    for _ in range(_ROUNDS):
        tables.fresh(EVENTS)
        there = live_versions(tables, name, version)
        if any(one.id == added.id for one in there):
            return  # a commit whose answer was lost
        _refuse(there)
        if tables.seen(EVENTS, end):
            raise PoolError(
                f"{objects.url}: adding {name}@{version} took so long that a collection gave it up; add it again"
            )
        with contextlib.suppress(TakenError):
            tables.append(EVENTS, [(added.id, "add", name, version, added.time, files)], once=[mark, end])
            return
    raise PoolError(f"{objects.url}: {name}@{version} is being added and dropped by others all the time")


def refuse_existing(tables: Tables, name: str, version: str) -> None:
    """Check that a version is not there.

    Raises:
        PoolError: it is.
    """
    _refuse(live_versions(tables, name, version))


def _refuse(there: Sequence[Version]) -> None:
    if there:
        reference = f"{there[0].name}@{there[0].version}"
        raise PoolError(f"{reference} is in the pool already; versions do not change: drop it, or use another one")


def _scan(files: Sequence[tuple[str, str]], executor: Executor, progress: Progress | None) -> list[ScannedFile]:
    done: list[ScannedFile] = []
    nbytes = 0
    for result in run(executor, scan, files):
        done.append(result)
        nbytes += result.size
        if progress:
            progress("reading", nbytes, max(nbytes, 1))
    return done


def _part_rows(identity: str, name: str, version: str, scanned: Sequence[ScannedFile]) -> Iterator[tuple[Any, ...]]:
    begun = int(time.time())
    for file in scanned:
        for part in file.parts:
            place = identity, name, version, file.name, part.source.start, part.size
            for tensor in part.tensors or (PartTensor("", part.dtype, part.shape, part.order),):
                yield (*place, *tensor, part.digest, begun)


def _distinct(scanned: Iterable[ScannedFile]) -> dict[bytes, ScannedPart]:
    return {part.digest: part for file in scanned for part in file.parts}


_Slices = Mapping[bytes, tuple[bytes, tuple[str, ...]]]
"""By the digest of a content, of which stored one it is nearly a slice, and the steps that take this."""


def _taken_apart(tables: Tables, plan: _Plan, executor: Executor) -> tuple[_Slices, dict[bytes, list[ScannedPart]]]:
    """Slices among the new tensors and their parts; and of tensors that have several parts, these."""
    alone = [job.part for job in plan.jobs if job.is_alone and job.part.has_rows and job.part.source.path]
    pieces = dict(run(executor, _pieces, [(part,) for part in alone]))
    overlaps = zip(alone, find_overlaps(tables, alone, [pieces[part.digest] for part in alone]), strict=True)
    tasks = [(part, found) for part, found in overlaps if found]
    slices: dict[bytes, tuple[bytes, tuple[str, ...]]] = {}
    taken_apart: dict[bytes, list[ScannedPart]] = {}
    for digest, parts, of_parts in run(executor, take_apart, tasks):
        slices.update(of_parts)
        if len(parts) > 1:
            taken_apart[digest] = parts
    return slices, taken_apart


def _pieces(part: ScannedPart) -> tuple[bytes, Pieces]:
    return part.digest, pieces_of(part.source.view(), part.dtype, part.shape, dense=True)


def _parts_of(file: ScannedFile, taken_apart: Mapping[bytes, Sequence[ScannedPart]]) -> tuple[ScannedPart, ...]:
    """The parts of a file, some of them taken apart: where the same content is in it, and under its names there."""
    parts: list[ScannedPart] = []
    for part in file.parts:
        if part.digest not in taken_apart or not part.source.path:
            parts.append(part)
            continue
        end = part.source.start
        for one in taken_apart[part.digest]:
            source = FileRange(part.source.path, end, end + one.size)
            parts.append(replace(one, source=source, tensors=part.tensors))
            end = source.stop
    return tuple(parts)


@dataclass(frozen=True)
class _Plan:
    """What is stored, and how the rest will be, in one state of the tables.

    Attributes:
        state: numbers of the commits of blobs and marks.
        there: the rows of what is stored, and of bases.
        jobs: for the rest.
    """

    state: tuple[int, ...]
    there: Mapping[bytes, Stored]
    jobs: Sequence[Job]

    @classmethod
    def of(cls, tables: Tables, distinct: Mapping[bytes, ScannedPart], slices: _Slices) -> _Plan:
        """The plan in the state that was seen last."""
        state = tables.commits(BLOBS, MARKS)
        there = stored_rows(tables, distinct, unmarked=True)
        missing = [part for digest, part in distinct.items() if digest not in there]
        bases = stored_rows(tables, {base for base, _ in slices.values()}, unmarked=True)
        usable = {
            digest: (bases[base], steps)
            for digest, (base, steps) in slices.items()
            if base in bases and bases[base].base is None
        }
        return cls(state, there, with_bases(tables, missing, usable))


def _store(
    objects: Objects,
    tables: Tables,
    identity: str,
    called: tuple[str, str],
    distinct: Mapping[bytes, ScannedPart],
    slices: _Slices,
    plan: _Plan,
    executor: Executor,
    progress: Progress | None,
) -> list[Stored]:
    """Store what is missing, until nothing is. What was stored in this call."""
    written: list[Stored] = []
    bases = _Bases(tables, identity, called, set(distinct))
    alone = None
    for _ in range(_ROUNDS):
        tables.fresh(BLOBS, MARKS)
        before = tables.commits(BLOBS, MARKS)
        if before == alone:
            return written  # nobody else stored or marked anything since the look-up, which would find what was written
        if before != plan.state:
            plan = _Plan.of(tables, distinct, slices)
        if bases.protect(row.base for row in plan.there.values()):
            continue  # one of them may have been collected before this
        if not plan.jobs:
            return written
        bases.protect(digest for job in plan.jobs for digest in job.needed)
        written += _write(objects, tables, plan.jobs, executor, progress)
        alone = (before[0] + 1, before[1])
    raise PoolError(f"{objects.url}: blobs disappear as fast as they are stored")


def _check_at_hand(objects: Objects, parts: Iterable[ScannedPart]) -> None:
    """Raise PoolError if one is of a file that only an earlier version has read."""
    if not all(part.source.path for part in parts):
        raise PoolError(f"{objects.url}: contents of an earlier version were collected meanwhile; add this one again")


@dataclass
class _Bases:
    """Blobs that others are stored against: rows of the version's own protect those that are in none of its files.

    Attributes:
        protected: what has such a row, or is in a file.
    """

    tables: Tables
    identity: str
    called: tuple[str, str]
    protected: set[bytes]

    def protect(self, bases: Iterable[bytes | None]) -> bool:
        """Append rows for these; whether any were not protected yet."""
        new = sorted({base for base in bases if base is not None} - self.protected)
        now = int(time.time())
        self.tables.append(PARTS, [(self.identity, *self.called, *_NO_FILE, digest, now) for digest in new])
        self.protected.update(new)
        return bool(new)


def _write(
    objects: Objects, tables: Tables, jobs: Sequence[Job], executor: Executor, progress: Progress | None
) -> list[Stored]:
    _check_at_hand(objects, [job.part for job in jobs])
    total, done = sum(job.part.size for job in jobs), 0
    rows: list[Stored] = []
    ordered = sorted(jobs, key=_sliced_base)  # so that a worker decodes a base once
    enough = min(max(-(-total // _PACKS), _SMALLEST), _LARGEST)
    tasks = [(objects.url, objects.options, batch) for batch in batches(ordered, lambda job: job.part.size, enough)]
    for written in run(executor, write_pack, tasks):
        rows += written
        done += sum(row.size for row in written)
        if progress:
            progress("storing", done, total)
    tables.append(BLOBS, [row.row() for row in rows])
    return rows


def _sliced_base(job: Job) -> bytes:
    """The base of which a job needs a part; nothing if it needs all of one, or none."""
    is_slice = job.base is not None and job.steps and needed_of_base(job.steps[0]) is not None
    return job.base[0] if is_slice and job.base else b""
