"""Of which stored tensors a new one has rows or columns, and where: tensors that were cut, joined or distributed.

The pieces of a new tensor are looked up among those of all that are stored whole. A pair of equal pieces says by how much rows
and columns are moved from the stored tensor to the new one; pairs that agree are of one overlap. It reaches as far as both tensors
do, unless there are no pairs for long, or pairs that say something else.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blobstore.core.codec.elements import element
from blobstore.pool.packs import Stored
from blobstore.pool.pieces import LEAST, Pieces, row_length
from blobstore.pool.relations import BLOB_COLUMNS, NARROW, is_unmarked
from blobstore.pool.scan import ScannedPart, scan_parts
from blobstore.pool.slices import Slice
from blobstore.pool.tables import Tables

__all__ = ["SharedRows", "find_overlaps", "take_apart"]

_BASES = 4096  # those with the most pieces in common with a version
_LONG = 16  # times the distance between two pieces that are kept
_OTHERS = 5  # pairs that say something else
_LEAST = 1 << 13  # bytes of an overlap

_Places = npt.NDArray[np.int64]


class SharedRows(NamedTuple):
    """What a new tensor and a stored one have in common, or nearly.

    Attributes:
        start, stop: elements of the new one.
        base: the stored one.
        steps: of the recipe that takes them out of it; none if they are all of it.
    """

    start: int
    stop: int
    base: Stored
    steps: tuple[str, ...]


class _Shift(NamedTuple):
    """By how much a stored tensor is moved: where its first element is in a new one, whose rows may be shorter.

    Attributes:
        base: the stored one.
        row: elements of its rows; 1 if rows and columns do not matter, because it is moved as a whole.
        new_row: the same of the new one.
        down, left: rows and columns.
    """

    base: Stored
    row: int
    new_row: int
    down: int
    left: int

    @property
    def reach(self) -> tuple[int, int]:
        """The elements of the new tensor that there are in the stored one, if that is moved so."""
        rows = self.base.size // element(self.base.dtype)[0] // self.row
        return max(self.down, 0) * self.new_row, (self.down + rows) * self.new_row

    def overlap(self, start: int, stop: int, dtype: str) -> SharedRows | None:
        """The whole rows between two elements of the new tensor; None if there are none."""
        first, last = -(-start // self.new_row), stop // self.new_row
        if first >= last:
            return None
        width = element(self.base.dtype)[0]
        at = ((first - self.down) * self.row + self.left) * width
        if self.row == 1:
            taken = Slice(at, (last - first) * width, (last - first) * width, 1)
        else:
            taken = Slice(at, self.new_row * width, self.row * width, last - first)
        steps = () if taken.size == self.base.size else (taken.recipe,)
        if self.base.dtype != dtype:
            steps = (*steps, f"cast:{dtype}")
        return SharedRows(first * self.new_row, last * self.new_row, self.base, steps)


_Pairs = tuple[Stored, float, _Places, _Places]
"""A stored tensor, how far its pieces are apart, and the places of pairs: in the new one and in itself."""


def find_overlaps(tables: Tables, parts: Sequence[ScannedPart], pieces: Sequence[Pieces]) -> list[list[SharedRows]]:
    """The overlaps of new tensors, in order; none of a tensor that is nearly as large and as wide as its only one.

    Args:
        tables: of the pool.
        parts: the new tensors.
        pieces: of each, dense.
    """
    pairs = _pairs(tables, pieces) if parts else {}
    return [
        _Found(part, pairs[at], _apart(part, len(pieces[at].keys))).overlaps if at in pairs else []
        for at, part in enumerate(parts)
    ]


def _apart(blob: ScannedPart | Stored, pieces: int) -> float:
    """Elements from one piece that is kept to the next one, in the mean."""
    return blob.size / element(blob.dtype)[0] / max(pieces, 1)


def take_apart(
    part: ScannedPart, overlaps: Sequence[SharedRows]
) -> tuple[bytes, list[ScannedPart], dict[bytes, tuple[bytes, tuple[str, ...]]]]:
    """A new tensor as parts: its overlaps with stored ones, and what is between these.

    Returns:
        Its digest; the parts; and by their digests, of which stored tensors they are nearly slices, and by which steps.

    Raises:
        DataChangedError: the file changed since it was scanned.
    """
    width, end = element(part.dtype)[0], 0
    row = row_length(part.shape, part.size // width)
    pieces: list[tuple[int, str, SharedRows | None]] = []
    for one in (*overlaps, None):
        start = part.size // width if one is None else one.start
        if start > end:
            pieces.append((start, _shape(start - end, row), None))
        if one is not None:
            is_whole = one.base.size == (one.stop - one.start) * element(one.base.dtype)[0]
            pieces.append((one.stop, one.base.shape if is_whole else _shape(one.stop - one.start, row), one))
            end = one.stop
    cuts = [(stop * width, shape) for stop, shape, _ in pieces]
    cuts[-1] = part.size, cuts[-1][1]
    parts = scan_parts(part, cuts) if len(cuts) > 1 else [part]
    slices = {
        own.digest: (one.base.digest, one.steps)
        for own, (_, _, one) in zip(parts, pieces, strict=True)
        if one is not None
    }
    return part.digest, parts, slices


def _shape(count: int, row: int) -> str:
    return f"{count // row},{row}" if count % row == 0 else str(count)


def _pairs(tables: Tables, pieces: Sequence[Pieces]) -> dict[int, list[_Pairs]]:
    """Pairs of equal pieces, by the numbers of the new tensors."""
    keys = np.concatenate([one.keys for one in pieces] or [np.empty(0, np.int64)])
    places = np.concatenate([one.places for one in pieces] or [np.empty(0, np.int64)])
    owners = np.repeat(np.arange(len(pieces)), [len(one.keys) for one in pieces])
    order = np.argsort(keys, kind="stable")
    keys, places, owners = keys[order], places[order], owners[order]
    found: dict[int, list[_Pairs]] = defaultdict(list)
    for base, kept, base_keys, base_places in _bases(tables, np.unique(keys)):
        first, last = np.searchsorted(keys, base_keys), np.searchsorted(keys, base_keys, "right")
        times = last - first
        at = np.repeat(first - np.cumsum(times) + times, times) + np.arange(times.sum())
        there = np.repeat(base_places, times)
        for owner in np.unique(owners[at]):
            of_owner = owners[at] == owner
            found[int(owner)].append((base, _apart(base, kept), places[at[of_owner]], there[of_owner]))
    return found


def _bases(tables: Tables, keys: _Places) -> Iterator[tuple[Stored, int, _Places, _Places]]:
    """Stored tensors with pieces of these keys, how many pieces each has, and which of these they are."""
    if not len(keys):
        return
    rows = tables.query(
        f"""
        WITH kept AS (
            SELECT b.filename AS file, b.file_row_number AS row, unnest(b.piece_keys) AS key, unnest(b.piece_places) AS place
            FROM blobs b WHERE b.base_key IS NULL AND b.size >= {LEAST} AND len(b.piece_keys) = len(b.piece_places) AND {is_unmarked(tables)}
        ), found AS (
            SELECT file, row, list(key) AS keys, list(place) AS places FROM kept SEMI JOIN wanted w ON key = w.a
            WHERE place BETWEEN 0 AND 1::BIGINT << 50 GROUP BY file, row
            QUALIFY {_BASES} >= row_number() OVER (ORDER BY count(*) DESC)
        )
        SELECT {BLOB_COLUMNS}, len(b.piece_keys), f.keys, f.places
        FROM blobs b JOIN found f ON b.filename = f.file AND b.file_row_number = f.row
        """,
        wanted=keys,
    )
    for *row, kept, own, places in rows:
        yield Stored.read(tuple(row)), kept, np.array(own, np.int64), np.array(places, np.int64)


def _shifts(part: ScannedPart, base: Stored, new: _Places, old: _Places) -> Iterator[tuple[_Shift, _Places]]:
    """The shifts of pairs, each with the places of its pairs in the new tensor."""
    for (down,), at in _grouped(new, new - old):
        yield _Shift(base, 1, 1, down, 0), at
    row = row_length(base.shape, base.size // element(base.dtype)[0])
    new_row = row_length(part.shape, part.size // element(part.dtype)[0])
    if new_row < row:
        for (down, left), at in _grouped(new, new // new_row - old // row, old % row - new % new_row):
            if 0 <= left <= row - new_row:
                yield _Shift(base, row, new_row, down, left), at


def _grouped(places: _Places, *numbers: _Places) -> Iterator[tuple[list[int], _Places]]:
    """Places that have the same numbers, with these."""
    each = np.stack(numbers, 1)
    order = np.lexsort(each.T)
    each, places = each[order], places[order]
    ends = np.flatnonzero((np.diff(each, axis=0) != 0).any(axis=1)) + 1
    for at, group in zip([0, *ends], np.split(places, ends), strict=True):
        yield each[at].tolist(), np.unique(group)


class _Found:
    """The overlaps of a new tensor: shifts that many pairs have come first.

    Args:
        part: the new tensor.
        pairs: its pairs.
        apart: how far its own pieces are apart.

    Attributes:
        overlaps: in order.
    """

    def __init__(self, part: ScannedPart, pairs: Sequence[_Pairs], apart: float) -> None:
        self.overlaps: list[SharedRows] = []
        self._part = part
        self._width = element(part.dtype)[0]
        self._count = part.size // self._width
        row = row_length(part.shape, self._count)
        self._row = row if row < self._count else 1 << 6
        shifts = [
            (shift, _LONG * max(apart, base_apart), at)
            for base, base_apart, new, old in pairs
            if base.dtype == part.dtype or (base.dtype == "float" and part.dtype in NARROW)
            for shift, at in _shifts(part, base, new, old)
        ]
        every = np.unique(np.concatenate([at for _, _, at in shifts] or [np.empty(0, np.int64)]))
        for shift, tolerated, places in sorted(shifts, key=lambda one: -len(one[2])):
            if len(self._free(places)):
                self._add(shift, tolerated, places, np.setdiff1d(every, places))
        if len(self.overlaps) == 1 and self.overlaps[0].base.shape == part.shape and not self.overlaps[0].steps:
            self.overlaps.clear()  # this base is known, and is not near

    def _add(self, shift: _Shift, tolerated: float, places: _Places, others: _Places) -> None:
        for run in self._runs(self._free(places), others, tolerated):
            first, last = int(run[0]), int(run[-1])
            if not len(self._free(run[:1])):
                continue  # the one before reaches as far
            found = shift.overlap(*self._bounds(shift, first, last, others, tolerated), self._part.dtype)
            if found is not None and (found.stop - found.start) * self._width >= _LEAST:
                self.overlaps.insert(bisect([one.start for one in self.overlaps], found.start), found)

    def _free(self, places: _Places) -> _Places:
        """Those that are in no overlap."""
        for one in self.overlaps:
            places = places[(places < one.start) | (places >= one.stop)]
        return places

    def _runs(self, places: _Places, others: _Places, tolerated: float) -> list[_Places]:
        """Places of pairs between which there are no long gaps, few other pairs, and nothing that is found."""
        between = np.diff(np.searchsorted(others, places))
        before = np.searchsorted([one.start for one in self.overlaps], places)
        splits = np.flatnonzero((np.diff(places) > tolerated) | (between >= _OTHERS) | (np.diff(before) > 0)) + 1
        return np.split(places, splits)

    def _bounds(self, shift: _Shift, first: int, last: int, others: _Places, tolerated: float) -> tuple[int, int]:
        """How far an overlap reaches, of which there are pairs from one place to another: to the end of a row at least."""
        low, high = shift.reach
        low = max([low, *(one.stop for one in self.overlaps if one.stop <= first)])
        high = min([high, self._count, *(one.start for one in self.overlaps if one.start > last)])
        before, behind = others[(others >= low) & (others < first)], others[(others > last) & (others < high)]
        if first - low > tolerated or len(before) >= _OTHERS:
            is_close = len(before) and first - before[-1] <= tolerated
            low = self._upwards(int(before[-1]) + 1) if is_close else max(low, first // self._row * self._row)
        if high - last > tolerated or len(behind) >= _OTHERS:
            is_close = len(behind) and behind[0] - last <= tolerated
            high = int(behind[0]) // self._row * self._row if is_close else min(high, self._upwards(last + 1))
        return low, high

    def _upwards(self, place: int) -> int:
        """The next end of a row."""
        return -(-place // self._row) * self._row
