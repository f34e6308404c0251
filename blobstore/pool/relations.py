"""To which blob a new one is closest, judged by samples of their elements, without reading either."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from blobstore.core.codec.elements import cast, element
from blobstore.pool.derivations import QUANTIZED, Candidate, Derivations, Kind, base_kinds, base_signatures
from blobstore.pool.derived import QUANT
from blobstore.pool.distances import Few, Numbers, apart_from, bits, few, numbers, signature, size
from blobstore.pool.packs import Job, Stored
from blobstore.pool.pruned import is_pruned
from blobstore.pool.scan import ScannedPart
from blobstore.pool.tables import BLOBS, Tables, short_key

__all__ = ["BLOB_COLUMNS", "CHAIN", "NARROW", "is_unmarked", "stored_rows", "with_bases"]

CHAIN = 3  # a content, its base, and the base of that
_SHORT = 32
_WHOLE, _NEAR = "b.base_key IS NULL", "b.base_key IS NOT NULL AND b.length > 0"
_NEWEST = 256  # of one kind
_ALIKE = 11  # bits of two signatures that differ: of unrelated blobs 32, of those that are worth a difference fewer
_BESIDE = 4  # bits by which others differ more than the nearest one
_MOST_ALIKE, _MOST_SOURCES = 8, 64  # of one kind, for each new blob; which of many fine-tunes is quantized, samples say
_AT_ONCE = 1 << 16  # pairs of signatures, which caches hold
NARROW = {"bfloat16", "half"}
_UNLIKE = 0.78  # of the bits of an element; what is further may be a part of something else
_HOPELESS = 0.9  # of the bits of an element
_EARLIER, _RECENT = 32, 8  # differences against a base, the newest
_CLEARLY = 0.8  # a smaller lead may be a chance of the samples
_FAR = 0.5  # of the bits of an element; what is nearer needs no recipe
_KEYFRAME = 1 / 6  # of the bits of an element; a blob that is whole takes about four times as many
BLOB_COLUMNS = "b.digest, b.size, b.dtype, b.shape, b.encoding, b.base, b.pack, b.offset, b.length, b.time, b.check"

_Column = npt.NDArray[np.int64]


def stored_rows(
    tables: Tables, digests: Iterable[bytes], *, unmarked: bool = False, gone: Container[bytes] = ()
) -> dict[bytes, Stored]:
    """The rows of contents, each the one with the fewest bytes, and of their bases and the bases of these. What is not stored
    is missing, and what needs more than these.

    Args:
        digests: which contents.
        unmarked: only rows of packs that are not condemned.
        gone: packs whose rows are taken if there are no others.
    """
    wanted = set(digests)
    every = _rows(tables, wanted, unmarked, gone)
    rows = [row for row in every if row.digest in wanted]
    whole = {row.digest: row for row in every if row.base is None}
    near = {row.digest: row for row in every if row.base in whole}
    there = {row.digest: row for row in rows if row.base is None or row.base in whole or row.base in near}
    # a base that is also asked for, and has a shorter row against another one, is read as its whole row if it has one
    there.update((digest, whole.get(digest) or near[digest]) for digest in _bases_of(there.values()))
    there.update((digest, whole[digest]) for digest in _bases_of(there.values()) if digest in whole)
    return there


def _bases_of(rows: Iterable[Stored]) -> set[bytes]:
    return {row.base for row in rows if row.base is not None}


def _rows(tables: Tables, digests: set[bytes], unmarked: bool, gone: Container[bytes]) -> list[Stored]:
    """The rows of contents, of their bases, and of the bases of these; those of packs that are gone and then the longest
    first: of several rows of a content, the last one counts.

    Their places are looked up first, by short keys: reading all digests of a large pool takes several times as long as the
    keys, and as what lies at a few places.
    """
    if not digests:
        return []
    wanted, places = {short_key(digest) for digest in digests}, [np.empty(0, np.int64)]
    seen: set[int] = set()
    with tables.still():
        while wanted and len(places) <= CHAIN:
            found, bases = tables.numbers(
                f"SELECT {tables.place(BLOBS)}, coalesce(b.base_key, b.key) FROM blobs b SEMI JOIN wanted w ON b.key = w.a",
                wanted=[(key,) for key in wanted],
            )
            places.append(found)
            seen |= wanted
            wanted = set(bases.tolist()) - seen
        condition = is_unmarked(tables) if unmarked else "true"
        rows = tables.at(BLOBS, BLOB_COLUMNS, np.concatenate(places), condition)
    return sorted(map(Stored.read, rows), key=lambda row: (row.pack not in gone, -row.length, row.pack))


def with_bases(
    tables: Tables, parts: Sequence[ScannedPart], slices: Mapping[bytes, tuple[Stored, tuple[str, ...]]]
) -> list[Job]:
    """How to store new blobs: each against the closest one that is stored whole, if there is one that is close.

    The base of a difference is whole; that of a recipe may be a difference to one that is whole. A blob of the same call that
    is whole can be a base for those that follow.

    A blob is stored whole although a base is close if it is a better base: the newest differences against that base would
    have saved a sixth of its bytes, all together, had they been stored against the new blob. In a series that drifts away,
    the last ones would have. Around a base of which fine-tunes go in all directions, none would: two of them are
    further from each other than from the base. What would have saved less than a fifth of itself does not count, nor what is
    close to another base by now; so the same differences do not ask for a second base.

    Args:
        parts: the new blobs.
        slices: by their digests, of which stored ones they are nearly slices, and the steps that take these.
    """
    choice = _Choice(tables, [part for part in parts if part.sketch], slices)
    jobs = {part.digest: choice.job(part) if part.sketch else Job(part) for part in sorted(parts, key=_rank)}
    return _with_bases_of_bases(tables, [jobs[part.digest] for part in parts])


def _with_bases_of_bases(tables: Tables, jobs: Sequence[Job]) -> list[Job]:
    """Jobs with the blobs that are needed to read their bases; without a base where these are gone."""
    below = {digest for job in jobs for one in job.tries if (digest := one.base_of_base) is not None}
    rows = {row.digest: row for row in _rows(tables, below, unmarked=True, gone=()) if row.base is None}

    def readable(job: Job) -> Iterator[Job]:
        for one in job.tries:
            if one.base_of_base is None:
                yield one
            elif one.base_of_base in rows:
                yield replace(one, below=rows[one.base_of_base])

    found: list[Job] = []
    for job in jobs:
        first, *others = [*readable(job)] or [Job(job.part)]
        found.append(replace(first, others=tuple(others)))
    return found


class _Choice:
    """Chooses bases for new blobs, one blob after the other: each that is stored whole can be a base for those that follow."""

    def __init__(
        self,
        tables: Tables,
        parts: Sequence[ScannedPart],
        slices: Mapping[bytes, tuple[Stored, tuple[str, ...]]],
    ) -> None:
        self._slices = slices
        stored = _candidates(tables, parts)
        sets = {kind: _set(part, stored) for kind, part in {_kind(part): part for part in parts}.items()}
        self._short = {part.digest: _short(part, sets[_kind(part)]) for part in parts}
        self._earlier = _recent_or_earlier(tables, self._short.values())
        self._derivations = Derivations(_sources(tables, [part for part in parts if self._short[part.digest].is_far]))
        self._new: dict[Kind, list[Candidate]] = defaultdict(list)
        self._new_sets: dict[Kind, _SketchedBases] = {}

    def job(self, part: ScannedPart) -> Job:
        """How to store a blob."""
        found = self._short[part.digest]
        kind = _kind(part)
        if kind not in self._new_sets:  # wide ones come before the narrow ones of which they may be bases
            self._new_sets[kind] = _set(part, self._new)
        if (among := self._new_sets[kind]).bases:
            found = found.joined(_short(part, among))
        derived = self._derivations.find(part) if found.is_far else []
        if derived and (QUANT in derived[0].steps or derived[0].share < found.share):
            first, *others = (Job(part, (one.base.digest, one.base.where), one.steps, one.shape) for one in derived)
            return replace(first, others=tuple(others))
        if part.digest in self._slices and found.is_far:
            base, steps = self._slices[part.digest]
            return Job(part, (base.digest, base), steps)
        nearest = found.nearest
        differences = self._earlier[nearest.digest, part.dtype] if nearest is not None else []
        if nearest is None or found.would_save(differences) >= _KEYFRAME * found.bits:
            whole = Candidate(part.digest, part.source, part.sketch, *kind)
            self._new[kind].append(whole)
            among.add(whole, _in_rows(part, part.sketch))
            self._derivations.add(whole)
            return Job(part, is_alone=found.share > _UNLIKE)
        differences.append(part.sketch)
        return Job(part, (nearest.digest, nearest.where), nearest.steps, is_alone=found.share > _UNLIKE)


def _rank(part: ScannedPart) -> int:
    """Which new blobs can be bases of others: weights in float32 of narrower ones, any of opaque bytes."""
    return 0 if part.dtype == "float" else 1 if part.dtype not in {"", *QUANTIZED} else 2 if part.dtype else 3


def _sources(tables: Tables, parts: Sequence[ScannedPart]) -> list[Candidate]:
    """Blobs from which these may follow, differences, too: the newest ones of a type, shape and size, and however old they are,
    those like what a part would follow from."""
    with tables.still():
        kinds = list(base_kinds(parts))
        shapes = (
            "SELECT DISTINCT b.dtype, b.shape, b.size FROM blobs b SEMI JOIN kinds k ON b.dtype = k.a AND b.size = k.b"
        )
        wanted = base_signatures(parts, tables.query(shapes, kinds=kinds) if kinds else ())
        chosen = [places for which in (_WHOLE, _NEAR) for places in _alike_or_new(tables, which, wanted, _MOST_SOURCES)]
        return _sketched(tables, np.concatenate(chosen)) if chosen else []


def _candidates(tables: Tables, parts: Sequence[ScannedPart]) -> dict[Kind, list[Candidate]]:
    """Of each kind the newest blobs that are whole, and however old they are, those like one of the parts."""
    with tables.still():
        wanted: dict[Kind, set[int]] = defaultdict(set)
        for part in parts:
            own = signature(part.dtype, part.sketch)
            for kind in _kinds(part):
                wanted[kind].add(own)
        chosen = _alike_or_new(tables, _WHOLE, wanted, _MOST_ALIKE)
        found: dict[Kind, list[Candidate]] = defaultdict(list)
        for one in _sketched(tables, np.concatenate(chosen)) if chosen else ():
            found[one.dtype, one.shape, one.size].append(one)
        return found


def _alike_or_new(tables: Tables, which: str, wanted: Mapping[Kind, Iterable[int]], most: int) -> list[_Column]:
    """The places of those blobs of each kind that are the newest, or whose signatures are like one of those wanted, `most` of each."""
    of_kind = f"b.size = k.c AND b.shape = k.b AND b.dtype = k.a WHERE {which}"
    stored = zip(_of_kinds(tables, of_kind, list(wanted)), wanted.values(), strict=True)
    return [
        places[_newest(times) | _alike(times, signatures, own, most)] for (places, times, signatures), own in stored
    ]


def _of_kinds(tables: Tables, which: str, kinds: Sequence[tuple[str | int, ...]]) -> Iterator[Sequence[_Column]]:
    """The places of the blobs of each kind, their times and their signatures.

    Args:
        tables: of the pool.
        which: the condition under which a blob is of a kind, and further ones.
        kinds: as it has them.
    """
    if not kinds:
        return
    text = f"SELECT k.{'abcd'[len(kinds[0])]}, {tables.place(BLOBS)}, b.time, coalesce(b.signature, 0) FROM blobs b"
    of, *columns = tables.numbers(
        f"{text} JOIN kinds k ON {which}", kinds=[(*kind, at) for at, kind in enumerate(kinds)]
    )
    order = np.argsort(of, kind="stable")
    for own in np.split(order, np.searchsorted(of[order], np.arange(1, len(kinds)))):
        yield [column[own] for column in columns]


def _newest(times: _Column) -> npt.NDArray[np.bool_]:
    """Whether each is one of the newest."""
    chosen = np.ones(len(times), bool)
    chosen[np.argpartition(times, -_NEWEST)[:-_NEWEST] if len(times) > _NEWEST else slice(0)] = False
    return chosen


def _alike(times: _Column, signatures: _Column, wanted: Iterable[int], most: int) -> npt.NDArray[np.bool_]:
    """Whether each signature is alike to one of those wanted: of each the nearest ones, the newest of these."""
    chosen, every = np.zeros(len(times), bool), np.array(list(wanted), np.int64)
    for some in np.array_split(every, min(every.size, every.size * times.size // _AT_ONCE) or 1):
        apart = apart_from(signatures, some[:, None])
        for own in apart[(apart <= _ALIKE).any(axis=1)]:
            alike = np.flatnonzero(own <= min(_ALIKE, own.min() + _BESIDE))
            chosen[alike[np.lexsort((-times[alike], own[alike]))[:most]]] = True
    return chosen


def _kinds(part: ScannedPart) -> list[Kind]:
    """The kinds of blobs that a new one may be close to."""
    wide = [("float", part.shape, 2 * part.size)] if part.dtype in NARROW else []
    return [_kind(part), *wide]


def is_unmarked(tables: Tables) -> str:
    """The condition that the pack of a row `b` of blobs is not condemned; where none is, it costs nothing."""
    if not tables.query("SELECT 1 FROM marks LIMIT 1"):
        return "true"
    return "NOT EXISTS (SELECT 1 FROM marks m WHERE m.pack = b.pack AND m.digest IS NULL)"


def _sketched(tables: Tables, places: _Column) -> list[Candidate]:
    """The blobs at places, but for those in condemned packs."""
    is_sketched = f"coalesce(b.sketch, b.near_sketch) IS NOT NULL AND {is_unmarked(tables)}"
    rows = tables.at(BLOBS, f"{BLOB_COLUMNS}, coalesce(b.sketch, b.near_sketch)", places, is_sketched)
    blobs = [Stored.read(row) for row in rows]
    return [Candidate(blob.digest, blob, blob.sketch or b"", *_kind(blob)) for blob in blobs]


def _recent_or_earlier(tables: Tables, every: Iterable[_Short]) -> dict[tuple[bytes, str], list[bytes]]:
    """Sketches of differences against the nearest bases of new blobs.

    In a series that drifts away, the newest differences are the most alike. Where a new blob would have saved nothing of those,
    the others are not read: they lie all over a table.
    """
    near = [(short, base.digest) for short in every if (base := short.nearest) is not None]
    sketches = _earlier(tables, {base for _, base in near}, _RECENT)
    drifting = {base for short, base in near if short.would_save(sketches[base, short.part.dtype]) > 0}
    sketches.update(_earlier(tables, drifting, _EARLIER))
    return sketches


def _earlier(tables: Tables, bases: Iterable[bytes], most: int) -> dict[tuple[bytes, str], list[bytes]]:
    """The sketches of the newest differences against bases, the oldest first; for each base and type."""
    with tables.still():
        found: dict[tuple[bytes, str], list[bytes]] = defaultdict(list)
        if wanted := [(short_key(digest),) for digest in bases]:
            newest = f"""
                SELECT {tables.place(BLOBS)} FROM blobs b JOIN wanted w ON b.base_key = w.a WHERE b.length > 0 AND {is_unmarked(tables)}
                QUALIFY {most} >= row_number() OVER (PARTITION BY b.base_key, b.dtype ORDER BY b.time DESC)
            """
            is_sketched = "b.near_sketch IS NOT NULL AND b.base IS NOT NULL"
            [places] = tables.numbers(newest, wanted=wanted)
            rows = tables.at(BLOBS, "b.time, b.base, b.dtype, b.near_sketch", places, is_sketched)
            for _, base, dtype, sketch in sorted(rows):
                found[base, dtype].append(sketch)
        return found


@dataclass
class _SketchedBases:
    """Possible bases of one kind of blobs, their sketches as rows of numbers, and a few of these, which are compared first."""

    bases: list[Candidate]
    numbers: Numbers
    few: Few

    def add(self, base: Candidate, rows: Numbers) -> None:
        """One more, and its sketch as a row."""
        self.bases.append(base)
        self.numbers = np.concatenate((self.numbers, rows))
        self.few = np.concatenate((self.few, few(rows)), axis=1)


def _kind(blob: ScannedPart | Stored) -> Kind:
    return blob.dtype, blob.shape, blob.size


def _set(part: ScannedPart, candidates: Mapping[Kind, Sequence[Candidate]]) -> _SketchedBases:
    """The possible bases of blobs of a part's kind."""
    length = len(part.sketch)
    bases = [one for one in candidates.get(_kind(part), ()) if len(one.sketch) == length]
    sketches = b"".join(one.sketch for one in bases)
    if part.dtype in NARROW:
        wide = [
            one for one in candidates.get(("float", part.shape, 2 * part.size), ()) if len(one.sketch) == 2 * length
        ]
        bases += [one._replace(steps=(f"cast:{part.dtype}",)) for one in wide]
        sketches += cast(memoryview(b"".join(one.sketch for one in wide)), part.dtype)
    if not bases:
        rows = _in_rows(part, b"")
        return _SketchedBases([], rows, few(rows))
    rows = numbers(part.dtype, sketches, length)
    return _SketchedBases(bases, rows, few(rows))


@dataclass(frozen=True)
class _Short:
    """The bases that are the closest to a blob, each with how far it is: bits for an element of a difference to it."""

    part: ScannedPart
    bases: Sequence[Candidate]
    numbers: Numbers
    distances: Numbers

    @property
    def bits(self) -> int:
        """Of an element."""
        return 8 * element(self.part.dtype)[0]

    @property
    def nearest(self) -> Candidate | None:
        """The closest of all, if it is close."""
        return self.bases[int(np.argmin(self.distances))] if self.share < _HOPELESS else None

    @property
    def share(self) -> float:
        """What remains of an element in a difference to the closest one; 1 if there is none."""
        return float(self.distances.min()) / self.bits if len(self.distances) else 1.0

    @property
    def is_far(self) -> bool:
        """Whether a recipe may be better than the closest one."""
        return self.part.dtype in QUANTIZED or self.share > _FAR or self._is_pruned

    @property
    def _is_pruned(self) -> bool:
        width, floating = element(self.part.dtype)
        return bool(self.part.dtype) and floating and is_pruned(np.frombuffer(self.part.sketch, f"<u{width}"))

    def joined(self, other: _Short) -> _Short:
        """With more bases."""
        rows, distances = ((self.numbers, other.numbers), (self.distances, other.distances))
        return _Short(self.part, [*self.bases, *other.bases], np.concatenate(rows), np.concatenate(distances))

    def would_save(self, sketches: Sequence[bytes]) -> float:
        """Bits for an element that differences against the nearest base would have saved against this blob, all together."""
        sketches = [one for one in sketches[-_EARLIER:] if len(one) == len(self.part.sketch)]
        if not sketches:
            return 0.0
        differences = _in_rows(self.part, b"".join(sketches))
        against_this = bits(differences, _in_rows(self.part, self.part.sketch))
        now = np.full(len(sketches), np.inf)
        saved = 0.0
        for at in np.argsort(self.distances, kind="stable"):  # the nearest decides it nearly always
            now = np.minimum(now, bits(differences, self.numbers[at]))
            saved = float((now - against_this)[against_this < _CLEARLY * now].sum())
            if saved < _KEYFRAME * self.bits:
                break
        return saved


def _short(part: ScannedPart, among: _SketchedBases) -> _Short:
    """The bases that are the closest to a part, of those of its kind."""
    bases, rows = among.bases, among.numbers
    own = _in_rows(part, part.sketch)
    if len(bases) > _SHORT:
        order = np.argpartition(size(among.few, few(own)[:, 0]), _SHORT)[:_SHORT]
        bases, rows = [bases[at] for at in order], rows[order]
    return _Short(part, bases, rows, bits(rows, own))


def _in_rows(part: ScannedPart, sketches: bytes) -> Numbers:
    """Sketches of a part's kind as rows of numbers."""
    return numbers(part.dtype, sketches, len(part.sketch))
