"""Short pieces of tensors, by which it is found which tensors have rows in common, or columns, wherever they are.

Pieces begin at every so many elements of a row. The key of a piece is the signs of its first numbers, which are the same in all float
types. Of a fine-tune, most keys are those of its base, because few numbers change their sign. So one index finds rows that are
equal and rows that are close.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blobstore.core.codec.elements import element

__all__ = ["LEAST", "Pieces", "pieces_of", "row_length"]

LEAST = 1 << 14
"""Bytes of the smallest tensor of which pieces are looked at."""

_SIGNS = 64
_LONGEST, _SHORTEST = 512, 16  # elements from one piece to the next
_ENOUGH = 64  # pieces of a tensor that are kept, about
_MOST_APART = 6  # of 2^6 pieces one is kept
_MIXED = 8  # signs of each kind: keys of sorted numbers or of padding say nothing
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio: products are spread evenly
_TOGETHER = 1 << 14
_COUNTS = np.unpackbits(np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2), axis=1).sum(axis=1)

_Numbers = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """Some pieces of a tensor.

    Attributes:
        keys: of each.
        places: the number of its first element in the tensor.
    """

    keys: _Numbers
    places: _Numbers


def row_length(shape: str, count: int) -> int:
    """Elements of a row: of the last dimension, and of those before it while that is short.

    Args:
        shape: as in the tables; of some that anybody may have written.
        count: of all elements.
    """
    length = 1
    for size in reversed(shape.split(",")):
        if length >= _SIGNS or not size.isdecimal() or len(size) > 15:
            break
        length *= int(size)
    return length if length and count % length == 0 and shape else count


def pieces_of(data: memoryview, dtype: str, shape: str, *, dense: bool = False) -> Pieces:
    """The pieces of a tensor that are kept: those whose keys are divided by a power of two, in a way.

    Args:
        data: its bytes.
        dtype, shape: as in the tables.
        dense: keep more, to look them up. Of what two tensors have in common, a dense one has all that the other one keeps.
    """
    width = element(dtype)[0]
    elements = np.frombuffer(data[: len(data) // width * width], f"<u{width}")
    row = row_length(shape, len(elements))
    length = min(row & -row, _LONGEST if row < len(elements) else _SIGNS)  # without rows, anything may begin anywhere
    if length < _SHORTEST:
        length = row
    if len(elements) < _SIGNS:
        return Pieces(np.empty(0, np.int64), np.empty(0, np.int64))
    rows = np.lib.stride_tricks.sliding_window_view(elements, _SIGNS)[::length]
    apart = math.log2(max(len(rows) / _ENOUGH, 1)) - (3 if dense else 0)
    shift = np.uint64(64 - min(max(int(apart), 0), _MOST_APART))
    found = [_kept(rows[first : first + _TOGETHER], shift) for first in range(0, len(rows), _TOGETHER)]
    keys = np.concatenate([one for one, _ in found])
    places = np.concatenate([at + number * _TOGETHER for number, (_, at) in enumerate(found)])
    keys, first = np.unique(keys, return_index=True)
    return Pieces(keys, places[first] * length)


def _kept(rows: npt.NDArray[np.unsignedinteger], shift: np.uint64) -> tuple[_Numbers, _Numbers]:
    """The keys of pieces that are kept, and which pieces these are."""
    keys = np.packbits(rows >= rows.dtype.type(1 << (8 * rows.itemsize - 1)), axis=1).view("<u8")[:, 0]
    at = np.flatnonzero(keys * _FACTOR >> shift == 0) if shift < 64 else np.arange(len(keys))
    negative = _COUNTS[keys[at].view("<u2").reshape(-1, 4)].sum(axis=1)
    at = at[(negative >= _MIXED) & (negative <= _SIGNS - _MIXED)]
    return keys[at].view("<i8"), at
