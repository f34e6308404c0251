"""To which blob a new one is closest, judged by samples of their elements, without reading either."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from blobstore.pool.derived import BYTES, likeness
from blobstore.pool.packs import Job, Stored, cast
from blobstore.pool.scan import Part, Source, element
from blobstore.pool.tables import Tables, short_key

__all__ = ["stored_rows", "with_bases"]

_COARSE = 16  # every so many elements of a sketch decide which are compared whole
_SHORT = 32
_PUSHED = 50  # as many rows the engine reads without those around them
_CANDIDATES = 4096  # of one kind, the newest
_NARROW = {"bfloat16", "half"}
_HOPELESS = 0.9  # of the bits of an element
_EARLIER = 32  # differences against a base, the newest
_CLEARLY = 0.8  # what is nearer by less may be so by the chance of the samples
_ALIKE = 0.5  # correlation; of blobs that have nothing to do with each other, that of a sketch is below a third
_KEYFRAME = 1 / 6  # of the bits of an element; a blob that is whole takes about four times as many
_COLUMNS = "b.digest, b.size, b.dtype, b.shape, b.encoding, b.base, b.pack, b.offset, b.length, b.time"
_UNMARKED = "NOT EXISTS (SELECT 1 FROM marks m WHERE m.pack = b.pack AND (m.digest = b.digest OR m.digest IS NULL))"

_Kind = tuple[str, str, int]
"""Type, shape and size: only blobs of one kind are compared."""

_Numbers = npt.NDArray[np.float64]


def stored_rows(tables: Tables, digests: Iterable[bytes], *, unmarked: bool = False) -> dict[bytes, Stored]:
    """The rows of contents, each the one with the fewest bytes, and of their bases. What is not stored is missing.

    Args:
        tables: the tables of the pool.
        digests: which contents.
        unmarked: only rows that no collection found unused.
    """
    wanted = set(digests)
    rows = _rows(tables, wanted, unmarked)
    bases = _rows(tables, {row.base for row in rows if row.base is not None}, unmarked)
    whole = {row.digest: row for row in [*rows, *bases] if row.base is None}
    there = {row.digest: row for row in rows if row.base is None or row.base in whole}
    # a base that is also asked for, and has a shorter row against another one, is read as its whole row
    needed = {row.base for row in there.values() if row.base is not None}
    return {**there, **{digest: whole[digest] for digest in needed}}


def _rows(tables: Tables, digests: set[bytes], unmarked: bool) -> list[Stored]:
    """The longest first.

    Their numbers in files are looked up first, by short keys: reading all digests of a large pool takes several times as
    long as the keys, and as what lies at a few numbers.
    """
    if not digests:
        return []
    keys = [(short_key(digest),) for digest in digests]
    where = "SELECT b.filename, b.file_row_number FROM blobs b SEMI JOIN wanted w ON b.key = w.a ORDER BY 1, 2"
    found: dict[str, list[int]] = defaultdict(list)
    for file, row in tables.query(where, wanted=keys):
        found[file].append(row)
    rows: list[Stored] = []
    for file, numbers in found.items():
        for first in range(0, len(numbers), _PUSHED):
            listed = ", ".join(map(str, numbers[first : first + _PUSHED]))
            condition = f"b.file_row_number IN ({listed})" + (f" AND {_UNMARKED}" if unmarked else "")
            rows += (
                Stored(*row)
                for row in tables.query(f"SELECT {_COLUMNS} FROM blobs b WHERE b.filename = ? AND {condition}", file)
            )
    return sorted((row for row in rows if row.digest in digests), key=lambda row: (-row.length, row.pack))


@dataclass(frozen=True)
class _Candidate:
    digest: bytes
    where: Source | Stored
    sketch: bytes
    is_cast: bool = False


def with_bases(tables: Tables, parts: Sequence[Part]) -> list[Job]:
    """How to store new blobs: each against the closest one that is stored whole, if there is one that is close.

    A base is never a difference itself. A blob of the same call can be a base for those that follow.

    A blob is stored whole although a base is close if it is a better base: the newest differences against that base would
    have saved a sixth of its bytes, all together, had they been stored against the new blob. In a series that drifts away,
    the last ones would have. Around a base of which fine-tunes go in all directions, none would: two of them are
    further from each other than from the base. What would have saved less than a fifth of itself does not count, nor what is
    close to another base by now; so the same differences do not ask for a second base.

    Args:
        tables: the tables of the pool.
        parts: the new blobs, each content once.
    """
    stored = _candidates(tables, parts)
    new: dict[_Kind, list[_Candidate]] = defaultdict(list)
    sets = {kind: _set(part, stored) for kind, part in {_kind(part): part for part in parts if part.sketch}.items()}
    short = {part.digest: _short(part, sets[_kind(part)]) for part in parts if part.sketch}
    earlier = _earlier(tables, {nearest.digest for found in short.values() if (nearest := found.nearest) is not None})
    jobs: list[Job] = []
    for part in parts:
        job = Job(part.source, part.digest, part.dtype, part.shape, part.sketch, part.check)
        if (weights := _quantized_from(part, stored, new)) is not None:
            job = replace(job, base=(weights.digest, weights.where), is_cast=True)
        elif part.sketch:
            found = short[part.digest].joined(_short(part, _set(part, new)))
            nearest = found.nearest
            differences = earlier[nearest.digest, part.dtype] if nearest is not None else []
            if nearest is None or found.would_save(differences) >= _KEYFRAME * found.bits:
                new[_kind(part)].append(_Candidate(part.digest, part.source, part.sketch))
            else:
                job = replace(job, base=(nearest.digest, nearest.where), is_cast=nearest.is_cast)
                differences.append(part.sketch)
        jobs.append(job)
    return jobs


def _candidates(tables: Tables, parts: Sequence[Part]) -> dict[_Kind, list[_Candidate]]:
    """Of each kind the newest blobs that are whole."""
    kinds = {_kind(part) for part in parts if part.sketch}
    kinds |= {("float", shape, 2 * size) for dtype, shape, size in kinds if dtype in _NARROW}
    kinds |= {kind for part in parts if part.sketch for kind in _weights_of(part)}
    found: dict[_Kind, list[_Candidate]] = defaultdict(list)
    if not kinds:
        return found
    rows = tables.query(
        f"""
        WITH newest AS (
            SELECT b.digest, b.pack FROM blobs b JOIN kinds k ON b.size = k.c AND b.shape = k.b AND b.dtype = k.a
            WHERE b.base IS NULL AND {_UNMARKED}
            QUALIFY {_CANDIDATES} >= row_number() OVER (PARTITION BY b.dtype, b.shape, b.size ORDER BY b.time DESC)
        )
        SELECT {_COLUMNS}, b.sketch FROM blobs b SEMI JOIN newest n ON b.digest = n.digest AND b.pack = n.pack
        WHERE b.sketch IS NOT NULL AND b.base IS NULL
        """,
        kinds=list(kinds),
    )
    for row in rows:
        blob = Stored(*row)
        found[_kind(blob)].append(_Candidate(blob.digest, blob, blob.sketch or b""))
    return found


def _earlier(tables: Tables, bases: Iterable[bytes]) -> dict[tuple[bytes, str], list[bytes]]:
    """The sketches of the newest differences against bases, the oldest first; for each base and type."""
    found: dict[tuple[bytes, str], list[bytes]] = defaultdict(list)
    if wanted := [(short_key(digest),) for digest in bases]:
        newest = f"""
            SELECT b.key, b.pack, b.time FROM blobs b JOIN wanted w ON b.base_key = w.a WHERE b.length > 0 AND {_UNMARKED}
            QUALIFY {_EARLIER} >= row_number() OVER (PARTITION BY b.base_key, b.dtype ORDER BY b.time DESC)
        """
        rows = tables.query(
            f"""
            WITH newest AS ({newest})
            SELECT b.base, b.dtype, b.near_sketch FROM blobs b SEMI JOIN newest n ON b.key = n.key AND b.pack = n.pack
            WHERE b.time >= (SELECT min(time) FROM newest) AND b.near_sketch IS NOT NULL AND b.base IS NOT NULL
            ORDER BY b.time
            """,
            wanted=wanted,
        )
        for base, dtype, sketch in rows:
            found[base, dtype].append(sketch)
    return found


def _weights_of(part: Part) -> Sequence[_Kind]:
    """The kinds of blobs in float32 that a blob may be quantized from: a number of each byte, or two."""
    if part.dtype not in BYTES or not part.shape:
        return ()
    rest, _, last = part.shape.rpartition(",")
    doubled = f"{rest},{2 * int(last)}" if rest else f"{2 * int(last)}"
    return ("float", part.shape, 4 * part.size), ("float", doubled, 8 * part.size)


def _quantized_from(part: Part, *among: Mapping[_Kind, Sequence[_Candidate]]) -> _Candidate | None:
    """The blob that a part may be quantized from."""
    if not part.sketch:
        return None
    kinds = _weights_of(part)
    wanted = 4 * len(part.sketch)  # every so many elements of both: the same ones
    found = [one for kind in kinds for each in among for one in each.get(kind, ()) if len(one.sketch) == wanted]
    if not found:
        return None
    weights = np.frombuffer(b"".join(one.sketch for one in found), "<f4").reshape(len(found), -1)
    alike = likeness(part.sketch, weights)
    best = int(np.argmax(alike))
    return found[best] if alike[best] > _ALIKE else None


@dataclass(frozen=True)
class _Set:
    """Possible bases of one kind of blobs, their sketches as rows of numbers, and a few of these, which are compared first."""

    bases: Sequence[_Candidate]
    numbers: _Numbers
    few: _Numbers


def _kind(blob: Part | Stored) -> _Kind:
    return blob.dtype, blob.shape, blob.size


def _set(part: Part, candidates: Mapping[_Kind, Sequence[_Candidate]]) -> _Set:
    """The possible bases of blobs of a part's kind."""
    size = len(part.sketch)
    bases = [one for one in candidates.get(_kind(part), ()) if len(one.sketch) == size]
    sketches = b"".join(one.sketch for one in bases)
    if part.dtype in _NARROW:
        wide = [one for one in candidates.get(("float", part.shape, 2 * part.size), ()) if len(one.sketch) == 2 * size]
        bases += [replace(one, is_cast=True) for one in wide]
        sketches += cast(memoryview(b"".join(one.sketch for one in wide)), part.dtype)
    numbers = _numbers(part, sketches)
    return _Set(bases, numbers, np.ascontiguousarray(_few(numbers)))


@dataclass(frozen=True)
class _Short:
    """The bases that are the closest to a blob, each with how far it is: bits for an element of a difference to it."""

    part: Part
    bases: Sequence[_Candidate]
    numbers: _Numbers
    distances: _Numbers

    @property
    def bits(self) -> int:
        """Of an element."""
        return 8 * element(self.part.dtype)[0]

    @property
    def nearest(self) -> _Candidate | None:
        """The closest of all, if it is close."""
        if not len(self.distances) or self.distances.min() >= _HOPELESS * self.bits:
            return None
        return self.bases[int(np.argmin(self.distances))]

    def joined(self, other: _Short) -> _Short:
        """With more bases."""
        numbers, distances = ((self.numbers, other.numbers), (self.distances, other.distances))
        return _Short(self.part, [*self.bases, *other.bases], np.concatenate(numbers), np.concatenate(distances))

    def would_save(self, sketches: Sequence[bytes]) -> float:
        """Bits for an element that differences against the nearest base would have saved against this blob, all together."""
        sketches = [one for one in sketches[-_EARLIER:] if len(one) == len(self.part.sketch)]
        if not sketches:
            return 0.0
        differences = _numbers(self.part, b"".join(sketches))
        against_this = _bits(differences, _numbers(self.part, self.part.sketch))
        now = np.full(len(sketches), np.inf)
        saved = 0.0
        for at in np.argsort(self.distances, kind="stable"):  # the nearest decides it nearly always
            now = np.minimum(now, _bits(differences, self.numbers[at]))
            saved = float((now - against_this)[against_this < _CLEARLY * now].sum())
            if saved < _KEYFRAME * self.bits:
                break
        return saved


def _short(part: Part, among: _Set) -> _Short:
    """The bases that are the closest to a part, of those of its kind."""
    bases, numbers = among.bases, among.numbers
    own = _numbers(part, part.sketch)
    if len(bases) > _SHORT:
        order = np.argpartition(_size(among.few, _few(own)), _SHORT)[:_SHORT]
        bases, numbers = [bases[at] for at in order], numbers[order]
    return _Short(part, bases, numbers, _bits(numbers, own))


def _numbers(part: Part, sketches: bytes) -> _Numbers:
    """Sketches of a part's kind as rows of numbers in the order of their values, exact enough to compare."""
    width, floating = element(part.dtype)
    elements = np.frombuffer(sketches, f"<u{width}").reshape(-1, len(part.sketch) // width)
    if not floating:
        return elements.astype(np.float64)
    magnitude = (elements & elements.dtype.type((1 << (8 * width - 1)) - 1)).astype(np.float64)
    numbers: _Numbers = np.where(elements >> elements.dtype.type(8 * width - 1), -magnitude, magnitude)
    return numbers


def _few(numbers: _Numbers) -> _Numbers:
    return numbers[:, :: max(numbers.shape[1] // _COARSE, 1)]


def _size(many: _Numbers, one: _Numbers) -> _Numbers:
    """The logarithms of differences: an order of rows that few elements give.

    The bits of a float, as an integer, are its logarithm, with a line between two powers of two.
    """
    differences = many - one
    np.abs(differences, out=differences)
    differences += 1
    logarithms = differences.view(np.int64)
    logarithms >>= 32
    sizes: _Numbers = logarithms.sum(axis=1)
    return sizes


def _bits(many: _Numbers, one: _Numbers) -> _Numbers:
    """How many bits an element of a difference takes: the entropy of their lengths, and the bits behind the first one."""
    if not len(many):
        return np.empty(0)
    lengths = np.frexp(np.abs(many - one))[1]  # of a number in binary; 0 for 0
    rows, most = len(lengths), int(lengths.max()) + 1
    counts = np.bincount((lengths + most * np.arange(rows)[:, None]).ravel(), minlength=rows * most)
    shares = counts.reshape(rows, most) / lengths.shape[1]
    entropy = -(shares * np.log2(shares, out=np.zeros_like(shares), where=shares > 0)).sum(axis=1)
    bits: _Numbers = entropy + lengths.mean(axis=1)  # a sign is one bit, and the first bit is known
    return bits
