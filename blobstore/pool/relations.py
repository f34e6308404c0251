"""To which blob a new one is closest, judged by samples of their elements, without reading either."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from blobstore.pool.packs import Job, Stored, cast
from blobstore.pool.scan import SKETCHED, Part, Source, element
from blobstore.pool.tables import Tables

__all__ = ["stored_rows", "with_bases"]

_COARSE = 16  # every so many elements of a sketch decide which are compared whole
_SHORT = 32
_CANDIDATES = 4096  # of one kind, the newest
_NARROW = {"bfloat16", "half"}
_HOPELESS = 0.9  # of the bits of an element
_COLUMNS = "b.digest, b.size, b.dtype, b.shape, b.encoding, b.base, b.pack, b.offset, b.length, b.sketch"
_UNMARKED = "NOT EXISTS (SELECT 1 FROM marks m WHERE m.pack = b.pack AND (m.digest = b.digest OR m.digest IS NULL))"

_Kind = tuple[str, str, int]
"""Type, shape and size: only blobs of one kind are compared."""


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
    """The longest first."""
    if not digests:
        return []
    condition = f"WHERE {_UNMARKED}" if unmarked else ""
    rows = tables.query(
        f"SELECT {_COLUMNS} FROM blobs b JOIN wanted w ON b.digest = w.a {condition} ORDER BY b.length DESC, b.pack",
        wanted=[(digest,) for digest in digests],
    )
    return [Stored(*row) for row in rows]


@dataclass(frozen=True)
class _Candidate:
    digest: bytes
    where: Source | Stored
    sketch: bytes
    is_cast: bool = False

    def narrowed(self, dtype: str) -> _Candidate:
        """The same in a narrower type."""
        return replace(self, sketch=bytes(cast(memoryview(self.sketch), dtype)), is_cast=True)


def with_bases(tables: Tables, parts: Sequence[Part]) -> list[Job]:
    """How to store new blobs: each against the closest one that is stored whole, if there is one that is close.

    A base is never a difference itself. A blob of the same call can be a base for those that follow.

    Args:
        tables: the tables of the pool.
        parts: the new blobs, each content once.
    """
    candidates = _candidates(tables, parts)
    jobs: list[Job] = []
    for part in parts:
        job = Job(part.source, part.digest, part.dtype, part.shape, part.sketch)
        if part.size >= SKETCHED and part.sketch:
            same = candidates[part.dtype, part.shape, part.size]
            wide = candidates["float", part.shape, 2 * part.size] if part.dtype in _NARROW else []
            nearest = _nearest(part, [*same, *(one.narrowed(part.dtype) for one in wide)])
            if nearest is None:
                same.append(_Candidate(part.digest, part.source, part.sketch))
            else:
                job = replace(job, base=(nearest.digest, nearest.where), is_cast=nearest.is_cast)
        jobs.append(job)
    return jobs


def _candidates(tables: Tables, parts: Sequence[Part]) -> dict[_Kind, list[_Candidate]]:
    kinds = {(part.dtype, part.shape, part.size) for part in parts if part.sketch}
    kinds |= {("float", shape, 2 * size) for dtype, shape, size in kinds if dtype in _NARROW}
    found: dict[_Kind, list[_Candidate]] = defaultdict(list)
    if not kinds:
        return found
    rows = tables.query(
        f"SELECT {_COLUMNS} FROM blobs b JOIN kinds k ON b.size = k.c AND b.shape = k.b AND b.dtype = k.a "
        f"WHERE b.sketch IS NOT NULL AND b.base IS NULL AND {_UNMARKED}",
        kinds=list(kinds),
    )
    for row in rows:
        stored = Stored(*row)
        candidates = found[stored.dtype, stored.shape, stored.size]
        if len(candidates) < _CANDIDATES:
            candidates.append(_Candidate(stored.digest, stored, stored.sketch or b""))
    return found


def _nearest(part: Part, candidates: Sequence[_Candidate]) -> _Candidate | None:
    candidates = [one for one in candidates if len(one.sketch) == len(part.sketch)]
    if not candidates:
        return None
    width, floating = element(part.dtype)
    own = _numbers(part.sketch, width, floating)
    if len(candidates) > _SHORT:
        step = max(len(own) // _COARSE, 1)
        coarse = np.stack([_numbers(one.sketch, width, floating)[::step] for one in candidates])
        order = np.argsort(_bits(coarse, own[::step]), kind="stable")[:_SHORT]
        candidates = [candidates[i] for i in order]
    bits = _bits(np.stack([_numbers(one.sketch, width, floating) for one in candidates]), own)
    best = int(np.argmin(bits))
    return candidates[best] if bits[best] < _HOPELESS * 8 * width else None


def _numbers(sketch: bytes, width: int, floating: bool) -> npt.NDArray[Any]:
    """The elements of a sketch as numbers in the order of their values, exact enough to compare."""
    elements = np.frombuffer(sketch, f"<u{width}")
    if not floating:
        return elements.astype(np.int64 if width < 8 else np.float64)
    sign = elements >> np.array(8 * width - 1, elements.dtype)
    magnitude = (elements & np.array((1 << (8 * width - 1)) - 1, elements.dtype)).astype(np.float64)
    numbers: npt.NDArray[Any] = np.where(sign == 1, -magnitude, magnitude)
    return numbers


def _bits(many: npt.NDArray[Any], one: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """About how many bits an element of a difference takes."""
    bits: npt.NDArray[Any] = np.log2(1 + np.abs(many - one)).mean(axis=-1) + (many != one).mean(axis=-1)
    return bits
