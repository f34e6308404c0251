"""Packs: immutable objects with blobs one behind the other, written by many workers and read by ranges.

A pack begins with `BLOBPACK`, the version of this format (1) in four bytes, four zeros, and 16 random bytes. Each blob
begins at a multiple of 64. The name of a pack is its SHA-256. No two packs have the same name, even if they have the same
blobs: a collection may be about to delete the older one.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from blobstore.core.codec.blobs import (
    CHUNK,
    DecodeError,
    StoredChunk,
    check_encoding,
    cut,
    decode,
    encode,
    stored_chunks,
)
from blobstore.core.codec.choosing import NEAR_WORTH, best_planes, choose
from blobstore.core.codec.elements import cast
from blobstore.core.errors import DataChangedError, IntegrityError, PoolError
from blobstore.core.memory.mapped_file import map_file
from blobstore.pool.bases import KeptBase, KeptBases
from blobstore.pool.chunks import Chunk
from blobstore.pool.derived import derive, find_steps, made_size, split_steps
from blobstore.pool.distances import signature
from blobstore.pool.pieces import pieces_of
from blobstore.pool.pruned import find_pruning
from blobstore.pool.scan import SEED, FileRange, ScannedPart, checked
from blobstore.pool.tables import short_key
from blobstore.storage.objects import Objects

__all__ = [
    "Job",
    "Range",
    "Reader",
    "Stored",
    "pack_of",
    "pack_path",
    "write_pack",
]

_HEAD = struct.pack("<8sII", b"BLOBPACK", 1, 0)
_ALIGNMENT = 64
_SHA256 = 32
_NOTHING = memoryview(b"")
_KEEP = 1 << 22  # bytes of bases that a worker has at hand
_WINDOW, _NEAR = 1 << 18, 1 << 14
"""Of a bucket, such a piece of a pack is read at once, if not more than the second is asked for: a request costs as much time."""

_MAPS = 8  # packs of a folder, or files, that stay mapped: opening one takes longer than decoding a small blob
_MOST = 1 << 15  # a chunk of zeros takes about 50 bytes


Range = tuple[bytes, int, int]
"""Bytes of a pack: its name, an offset and a length."""


class Stored(NamedTuple):  # thousands are looked at for each new version
    """Where a content lies, and how: a row of the table of blobs."""

    digest: bytes
    size: int
    dtype: str
    shape: str
    encoding: str
    base: bytes | None
    pack: bytes
    offset: int
    length: int
    time: int
    check: bytes = b""
    sketch: bytes | None = None
    near_sketch: bytes | None = None
    piece_keys: Sequence[int] | None = None
    piece_places: Sequence[int] | None = None

    @classmethod
    def read(cls, row: tuple[Any, ...]) -> Stored:
        """A row of the table, which anybody may have written who writes to the pool.

        Raises:
            PoolError: it has values that cannot be.
        """
        self = cls(*row)
        names = {len(name) for name in (self.digest, self.pack, self.base) if name is not None}
        if not self.encoding or names != {_SHA256} or min(self.size, self.offset, self.length, self.time) < 0:
            raise PoolError(f"the table of blobs has a row with wrong values, of blob {self.digest.hex()}")
        return self

    @property
    def range(self) -> Range:
        """Where its bytes are."""
        return self.pack, self.offset, self.length

    def row(self) -> tuple[object, ...]:
        """The values of the columns, in order."""
        base_key = None if self.base is None else short_key(self.base)
        sketch = self.sketch or self.near_sketch
        return (*self, short_key(self.digest), base_key, signature(self.dtype, sketch) if sketch else None)


@dataclass(frozen=True)
class Job:
    """A blob to store.

    Attributes:
        part: the blob.
        base: the digest of a blob to store it against, and where that one is; None if there is none.
        steps: of a recipe that makes nearly these bytes of the base, as `derived` has them.
        base_shape: of the base, as it lies in memory.
        is_alone: nothing of its shape is like it.
        below: the base of the base, if that is a difference.
        others: what else the blob may be stored against; what makes most of its bytes is taken.
    """

    part: ScannedPart
    base: tuple[bytes, FileRange | Stored] | None = None
    steps: tuple[str, ...] = ()
    base_shape: str = ""
    is_alone: bool = False
    below: Stored | None = None
    others: tuple[Job, ...] = ()

    @property
    def tries(self) -> Iterator[Job]:
        """This one, and the others."""
        return itertools.chain([self], self.others)

    @property
    def needed(self) -> Iterator[bytes | None]:
        """The digests of all bases that the blob may be stored against, and of theirs."""
        for one in self.tries:
            yield one.base and one.base[0]
            yield one.base_of_base

    @property
    def base_of_base(self) -> bytes | None:
        """The digest of what the base is stored against; None if it is whole, or a new blob, or there is none."""
        return self.base[1].base if self.base is not None and isinstance(self.base[1], Stored) else None


def pack_path(pack: bytes) -> str:
    """The path of a pack below the pool."""
    name = pack.hex()
    return f"packs/{name[:2]}/{name}"


class _Coded(NamedTuple):
    """A chunk of a blob as a pack has it.

    Attributes:
        number: of the chunk.
        chunk: what is stored.
        error: for why it cannot be decoded.
    """

    number: int
    chunk: StoredChunk
    error: Callable[[DecodeError], IntegrityError]

    def alone(self, room: memoryview, _: memoryview) -> memoryview:
        """Its bytes, which need no base. This and the methods below are `Chunk.make`."""
        return self._decoded(None, room)

    def against(self, base: _Coded, kept: KeptBase | None, room: memoryview, base_room: memoryview) -> memoryview:
        """Its bytes, which are stored as a difference to a chunk of a base."""
        return self._decoded(base._of_base(kept, base_room), room)

    def cast(self, kind: str, kept: KeptBase | None, _: memoryview, room: memoryview) -> memoryview:
        """What its bytes are in a narrower type, as a chunk of a base."""
        return cast(self._of_base(kept, room), kind)

    def _of_base(self, kept: KeptBase | None, room: memoryview) -> memoryview:
        return self._decoded(None, room) if kept is None else kept.chunk(self.number, partial(self._decoded, None))

    def _decoded(self, base: memoryview | None, room: memoryview) -> memoryview:
        try:
            return self.chunk.decoded(base, room)
        except DecodeError as error:
            raise self.error(error) from None


class Reader:
    """Reads blobs of a pool, and compares their digests."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._maps: dict[tuple[str, int], memoryview] = {}

    def read(
        self,
        blob: Stored,
        base: memoryview | None = None,
        read: Mapping[Range, memoryview] = MappingProxyType({}),
        *,
        check: bool = True,
        room: memoryview | None = None,
        within: range | None = None,
    ) -> memoryview:
        """The bytes of a blob; of one that is stored as it is in a folder, a map of them.

        Args:
            blob: where it lies.
            base: the bytes of its base.
            read: what packs have, if it was read before.
            check: compare them with their digest. If not, the caller proves them by what is made of them.
            room: memory for them, if they have to be decoded; new memory if it is missing or too small.
            within: without a base and a check, only chunks with some of these bytes are decoded, and others are undefined.

        Raises:
            IntegrityError: they are damaged.
            PoolError: its pack is missing.
            FileAccessError, TransferError: the store refuses.
        """
        steps, encoding = split_steps(blob.encoding) if base is not None else ((), blob.encoding)
        factors = 0  # bytes of them, before what is encoded
        if base is not None and steps:
            _, factors = made_size(len(base), steps) or (0, 0)
            given = self.stored(blob, read.get(blob.range))[:factors] if factors else _NOTHING
            base = derive(base, steps, blob.size, given)
            if base is None:
                raise self._other_size(blob)
        if steps and not encoding and base is not None:
            data = base
        else:
            data = self._decoded(blob, encoding, base, read, factors, room, within)
        if len(data) != blob.size or (check and hashlib.sha256(data).digest() != blob.digest):
            raise IntegrityError(self._place(blob), f"the bytes of blob {blob.digest.hex()} are damaged")
        return data

    def chunks(
        self, blob: Stored, base: Stored | None, read: Mapping[Range, memoryview], bases: KeptBases
    ) -> Iterator[Chunk] | None:
        """The chunks of a blob in their order; they are not compared with its digest.

        Args:
            blob: where it lies.
            base: where its base lies.
            read: what packs have, if it was read before.
            bases: those that are kept.

        Returns:
            None if the whole base is needed at once, for `read`, or if it is a difference itself.

        Raises:
            As `read`; while chunks are taken and made, only `IntegrityError`.
        """
        if base is None:
            return (Chunk(one.chunk.size, one.alone) for one in self._coded(blob, None, read))
        steps, encoding = split_steps(blob.encoding)
        is_cast = len(steps) == 1 and steps[0].startswith("cast:") and not encoding
        if base.base is not None or not (is_cast or blob.encoding.startswith("near")):
            return None
        below = self._coded(base, None, read)
        kept = bases.get(base.digest, base.size) if base.encoding != "raw" else None
        if is_cast:
            if made_size(base.size, steps) != (blob.size, 0):
                raise self._other_size(blob)
            kind = steps[0].removeprefix("cast:")
            return (Chunk(one.chunk.size // 2, partial(one.cast, kind, kept)) for one in below)
        own = self._coded(blob, base.size, read)
        return (
            Chunk(one.chunk.size, partial(one.against, other, kept))
            for one, other in zip(own, below)  # noqa: B905 - of one size; `own` is looked at to its end
        )

    def _coded(self, blob: Stored, base_size: int | None, read: Mapping[Range, memoryview]) -> Iterator[_Coded]:
        """The chunks that a pack has for a blob; whether it has the blob is looked at here, and the rest as they are taken."""
        stored = self._stored(blob, blob.encoding, base_size, read)

        def chunks() -> Iterator[_Coded]:
            try:
                for number, chunk in stored_chunks(blob.encoding, blob.size, stored):
                    yield _Coded(number, chunk, partial(self._undecodable, blob))
            except DecodeError as error:
                raise self._undecodable(blob, error) from None

        return chunks()

    def _undecodable(self, blob: Stored, error: DecodeError) -> IntegrityError:
        return IntegrityError(self._place(blob), f"blob {blob.digest.hex()}: {error}")

    def _place(self, blob: Stored) -> str:
        return f"{self._objects.name(pack_path(blob.pack))} at byte {blob.offset}"

    def stored(self, blob: Stored, read: memoryview | None = None) -> memoryview:
        """The bytes that a pack has for a blob, as they are; they are not compared with anything."""
        path = pack_path(blob.pack)
        stored = self._range(path, blob.offset, blob.length) if read is None else read
        if stored is None:
            raise PoolError(f"{self._objects.name(path)}: the pack is missing; it has blob {blob.digest.hex()}")
        if len(stored) != blob.length:
            raise IntegrityError(
                self._objects.name(path), f"expected {blob.length} bytes at {blob.offset}, found {len(stored)}"
            )
        return stored

    def _range(self, path: str, start: int, length: int) -> memoryview | None:
        first, more = 0, sys.maxsize
        if self._objects.folder is None:
            if length > _NEAR:
                return self._objects.read(path, start, length)
            first, more = start // _WINDOW * _WINDOW, _WINDOW + _NEAR  # its neighbours are asked for soon
        there = self._maps.get((path, first))
        if there is None:
            there = self._objects.read(path, first, more)
            if there is None:
                return None
            kept = list(self._maps.items())[1 - _MAPS :]
            self._maps = dict([*kept, ((path, first), there)])  # a new one, because other threads read, too
        return there[start - first :][:length]

    def _decoded(
        self,
        blob: Stored,
        encoding: str,
        base: memoryview | None,
        read: Mapping[Range, memoryview],
        skipped: int,
        room: memoryview | None,
        within: range | None,
    ) -> memoryview:
        stored = self._stored(blob, encoding, None if base is None else len(base), read, skipped)
        if encoding == "raw":
            return stored
        try:
            if room is None or len(room) < blob.size:
                room = memoryview(np.empty(blob.size, np.uint8))  # type: ignore[arg-type]  # not written to before it is used
        except MemoryError:
            reason = f"there is no memory for the {blob.size} bytes of blob {blob.digest.hex()}"
            raise IntegrityError(self._place(blob), reason) from None
        room = room[: blob.size]
        try:
            for _ in decode(encoding, blob.size, stored, base, room, within):
                pass
        except DecodeError as error:
            raise self._undecodable(blob, error) from None
        return room.toreadonly()

    def _stored(
        self, blob: Stored, encoding: str, base_size: int | None, read: Mapping[Range, memoryview], skipped: int = 0
    ) -> memoryview:
        """What a pack has for a blob, but for its first bytes, if that can be as many bytes as the blob has."""
        if not check_encoding(encoding):
            raise PoolError(
                f"{self._objects.url}: blob {blob.digest.hex()} is stored as {blob.encoding!r}, which this version does not know"
            )
        stored = self.stored(blob, read.get(blob.range))[skipped:]
        if encoding.startswith("near") and base_size != blob.size:
            raise self._other_size(blob)
        if encoding != "raw" and blob.size > _MOST * (len(stored) + 1):
            raise IntegrityError(self._place(blob), f"{len(stored)} bytes cannot hold a blob of {blob.size}")
        return stored

    def _other_size(self, blob: Stored) -> IntegrityError:
        return IntegrityError(self._place(blob), f"blob {blob.digest.hex()} has a base of another size")


@dataclass
class _Worker:
    """What a worker has at hand: memory that is used again, because new memory takes as long as decoding; and maps.

    Attributes:
        reader: of the pool.
        sources: the files with the newest blobs, each mapped once and not for each blob.
        chunk: memory for what is read back.
        room, kept: memory for bases, and those that are in it.
    """

    reader: Reader
    sources: dict[str, memoryview] = field(default_factory=dict)
    chunk: memoryview = field(default_factory=lambda: memoryview(bytearray(CHUNK)))
    room: memoryview = field(default_factory=lambda: memoryview(np.empty(_KEEP, np.uint8)))  # type: ignore[arg-type]
    kept: dict[bytes, memoryview] = field(default_factory=dict)

    def view(self, source: FileRange) -> memoryview:
        """The bytes of a new blob."""
        if source.path not in self.sources:
            if len(self.sources) == _MAPS:
                self.sources.clear()
            self.sources[source.path] = map_file(source.path)
        return source.of(self.sources[source.path])

    def base(self, digest: bytes, where: FileRange | Stored, below: Stored | None) -> memoryview | None:
        """The bytes of a base, valid until the next call; None if it was collected meanwhile or is damaged: then nothing is
        stored against it."""
        if isinstance(where, FileRange):
            return self.view(where)
        if digest not in self.kept:
            used = sum(map(len, self.kept.values()))
            if used + where.size > _KEEP:
                self.kept.clear()
                used = 0
            try:
                base = None if below is None else self.reader.read(below, check=False)
                data = self.reader.read(where, base, check=False, room=self.room[used:])
            except (PoolError, IntegrityError):
                return None
            if checked(cut(data), where.check[:SEED]) != where.check:
                return None
            self.kept[digest] = data
        return self.kept[digest]


def write_pack(url: str, options: Mapping[str, str], jobs: Sequence[Job]) -> list[Stored]:
    """Store blobs in one new pack, and return their rows: what a worker does.

    Every blob is read back from what was encoded, and compared with what was scanned, before the pack gets its name.

    Raises:
        DataChangedError: a file changed since it was scanned.
        FileAccessError, TransferError: reading or writing fails.
    """
    objects = Objects(url, options)
    worker = _Worker(Reader(objects))
    return pack_of(objects, (_store(job, worker) for job in jobs))


_Bytes = bytes | memoryview


def pack_of(objects: Objects, items: Iterable[tuple[Stored, _Bytes]]) -> list[Stored]:
    """Write a pack of what blobs are stored as; their rows, in which the pack and the places are filled in."""
    rows: list[Stored] = []

    def pieces() -> Iterator[_Bytes]:
        yield _HEAD + secrets.token_bytes(16)
        end = len(_HEAD) + 16
        for row, stored in items:
            yield b"\0" * (-end % _ALIGNMENT)
            end += -end % _ALIGNMENT
            rows.append(row._replace(offset=end, length=len(stored)))
            yield stored
            end += len(stored)

    pack, _ = objects.store("packs", pieces(), pack_path)
    return [row._replace(pack=pack) for row in rows]


def _store(job: Job, worker: _Worker) -> tuple[Stored, bytes]:
    """A blob as it is stored, with its row."""
    part, data = job.part, worker.view(job.part.source)
    row = Stored(
        *(part.digest, len(data), part.dtype, part.shape, "raw", None, b"", 0, 0, int(time.time()), part.check)
    )
    job, made, is_enough = _best(job, worker, data)
    if made is not None and is_enough:
        return _against(made, job, row), made.factors
    fits = made is not None and len(made.data) == len(data)
    encoding, _ = choose(data, part.dtype, *((made.data, made.share) if made is not None and fits else ()))
    base = made.data if made is not None and encoding.startswith("near") else None
    stored = b"".join(encode(data, encoding, base))
    if checked(decode(encoding, len(data), memoryview(stored), base, worker.chunk), part.check[:SEED]) != part.check:
        raise DataChangedError(f"{part.source.path}: the file changed while it was added")
    if made is not None and base is not None:
        return _against(made, job, row, encoding), made.factors + stored
    if part.has_rows:
        kept = pieces_of(data, part.dtype, part.shape)
        row = row._replace(piece_keys=kept.keys.tolist(), piece_places=kept.places.tolist())
    return row._replace(encoding=encoding, sketch=part.sketch or None), stored


class _Made(NamedTuple):
    """What the steps of a job make of its base: without steps, that itself."""

    data: memoryview
    steps: tuple[str, ...] = ()
    factors: bytes = b""

    @property
    def share(self) -> float:
        """What the factors take, of its bytes."""
        return len(self.factors) / max(len(self.data), 1)


def _made(job: Job, worker: _Worker, data: memoryview) -> _Made | None:
    """What a blob may be stored against; None if there is nothing."""
    base = worker.base(*job.base, job.below) if job.base is not None else None
    found = None if base is None else find_steps(data, base, job.steps, job.base_shape)
    if base is None or found is None:
        return None
    steps, factors = found
    made = _derived(base, steps, factors, len(data))
    pruned = None if made is None or factors else find_pruning(data, made.data, job.part.dtype)
    return made if pruned is None else _derived(base, (*steps, pruned[0]), pruned[1], len(data))


def _derived(base: memoryview, steps: tuple[str, ...], factors: bytes, size: int) -> _Made | None:
    """What steps make of a base, as whoever reads the row makes it: of the text that the row has."""
    known, rest = split_steps("+".join(steps)) if steps else ((), "")
    data = derive(base, known, size, memoryview(factors)) if steps else base
    return None if data is None or rest else _Made(data, known, factors)


def _best(job: Job, worker: _Worker, data: memoryview) -> tuple[Job, _Made | None, bool]:
    """The one of the tries that makes most bytes of a blob, what it makes, and whether that is enough."""
    best, made, most = job, None, -1.0
    for one in job.tries:
        tried = _made(one, worker, data)
        if tried is None:
            continue
        if tried.steps and _is_enough(tried, one, data):
            return one, tried, True
        share = _equal(tried.data, data) if job.others else 0.0
        if share > most:
            best, made, most = one, tried, share
    return best, made, False


def _equal(made: memoryview, data: memoryview) -> float:
    """The share of the bytes that are the same."""
    if len(made) != len(data):
        return 0.0
    return np.count_nonzero(np.frombuffer(made, np.uint8) == np.frombuffer(data, np.uint8)) / max(len(data), 1)


def _is_enough(made: _Made, job: Job, data: memoryview) -> bool:
    """Whether a recipe makes a blob to the bit, and its factors take less than the blob itself would."""
    part = job.part  # its digest is only asked for where the fast check says that it will be the same
    if checked(cut(made.data), part.check[:SEED]) != part.check or hashlib.sha256(made.data).digest() != part.digest:
        return False
    return not made.factors or made.share < NEAR_WORTH * best_planes(data, part.dtype)[1]


def _against(made: _Made, job: Job, row: Stored, *then: str) -> Stored:
    """The row of a blob that follows from a base, with what comes after the steps."""
    # what is scaled or in another order says nothing about what is near to the base
    is_near = job.below is None and all(step.startswith(("cast:", "widen:")) for step in made.steps)
    return row._replace(
        encoding="+".join([*made.steps, *then]),
        base=job.base and job.base[0],
        near_sketch=job.part.sketch or None if is_near else None,
    )
