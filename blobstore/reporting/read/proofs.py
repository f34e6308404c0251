"""Reading two blobs, or a payload and what may be in it, to prove what their fingerprints suggest.

These functions run in workers: arguments and results are plain data. None of them takes memory in proportion to a
blob; local blobs are mapped, remote ones go through a temporary file.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from blobstore.core.memory.buffers import same_bytes
from blobstore.core.regions.source import CHUNK, open_source

__all__ = ["Spot", "count_differences", "find_order", "search_payload"]

Array = npt.NDArray[Any]

_SAMPLES = 64
_MAX_PERMUTED_RANK = 5
_TILES = (1, 2, 4, 8, 16, 32, 64)
_TILE_ORDERS = ((0, 2, 1, 3), (0, 2, 3, 1), (2, 0, 1, 3), (2, 0, 3, 1))
_BLOCK = 1 << 20
_MAX_HITS = 64


@dataclass(frozen=True)
class Spot:
    """A run of bytes of a file, as a worker needs to know it."""

    path: str
    start: int
    stop: int


def count_differences(left: Spot, right: Spot, width: int, limit: int) -> int | None:
    """How many elements of `width` bytes differ between two blobs of one size; None if more than `limit`."""
    count = 0
    with open_source(left.path) as a, open_source(right.path) as b:
        pieces = zip(a.chunks(left.start, left.stop), b.chunks(right.start, right.stop), strict=True)
        for one, two in pieces:
            count += int(np.count_nonzero(_elements(one, width) != _elements(two, width)))
            if count > limit:
                return None
    return count


def _elements(data: memoryview, width: int) -> Array:
    return np.frombuffer(data, f"V{width}" if width not in {1, 2, 4, 8} else f"u{width}")


def find_order(source: Spot, target: Spot, shape: Sequence[int], width: int) -> tuple[list[int], list[int]] | None:
    """How the elements of one blob have to be reordered to be those of the other.

    Args:
        source: a tensor.
        target: a blob of the same size.
        shape: extents of the source, from the outermost in memory to the innermost.
        width: bytes of an element.

    Returns:
        (factors, order) such that `source.reshape(factors).transpose(order)` has the elements of the target in their
        order, compared one by one; None if no such reordering of a known kind is found. Tried are permutations of
        the dimensions, and tiles of the tensor seen as a matrix.
    """
    with open_source(source.path) as a, open_source(target.path) as b:
        old = np.frombuffer(a.view(source.start, source.stop), f"u{width}")
        new = np.frombuffer(b.view(target.start, target.stop), f"u{width}")
        sampled = np.random.Generator(np.random.PCG64(old.size)).integers(0, old.size, _SAMPLES)
        expected = new[sampled]
        for factors, order in _orders(shape):
            moved = [factors[i] for i in order]
            strides = [math.prod(factors[i + 1 :]) for i in order]
            index = sum(at * s for at, s in zip(np.unravel_index(sampled, moved), strides, strict=True))
            if np.array_equal(old[index], expected):
                permuted = old.reshape(factors).transpose(order)
                if _same(permuted, new.reshape(moved)):
                    return list(factors), list(order)
    return None


def _orders(shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The reorderings to try, simple ones first."""
    solid = tuple(n for n in shape if n != 1)
    if 2 <= len(solid) <= _MAX_PERMUTED_RANK:
        orders = itertools.permutations(range(len(solid)))
        next(orders)  # as they are
        yield from ((solid, order) for order in orders)
    matrices = {(math.prod(solid[:i]), math.prod(solid[i:])) for i in range(1, len(solid))}
    for rows, columns in sorted(matrices):
        for high, wide in itertools.product(_TILES, _TILES):
            if not (rows % high or columns % wide or high == wide == 1):
                factors = (rows // high, high, columns // wide, wide)
                yield from ((factors, order) for order in _TILE_ORDERS)


def _same(left: Array, right: Array) -> bool:
    """Whether two arrays are equal, in blocks that fit in the cache whatever their strides."""
    if left.size <= _BLOCK:
        return bool(np.array_equal(left, right))
    # keep whole cache lines of the reordered side together: its innermost axis is cut last
    inner = int(np.argmin([stride if n > 1 else 1 << 62 for stride, n in zip(left.strides, left.shape, strict=True)]))
    sizes = [n if axis != inner or n <= 64 else n // 64 for axis, n in enumerate(left.shape)]
    axis = int(np.argmax(sizes))
    if left.shape[axis] == 1:
        axis = int(np.argmax(left.shape))
    half = left.shape[axis] // 2
    low, high = [slice(None)] * left.ndim, [slice(None)] * left.ndim
    low[axis], high[axis] = slice(0, half), slice(half, None)
    return _same(left[tuple(low)], right[tuple(low)]) and _same(left[tuple(high)], right[tuple(high)])


def search_payload(
    payload: Spot, window: tuple[int, int], needles: Sequence[tuple[int, int]], tensors: Sequence[Spot]
) -> list[tuple[int, int]]:
    """Find tensors that a payload holds byte for byte, at any multiple of four bytes from its start.

    Args:
        payload: where to look.
        window: the part of it in which the eight bytes may begin; a multiple of 4 from its start.
        needles: for each tensor, a place in it (a multiple of 4) and the eight bytes there as a little-endian number.
        tensors: what to look for.

    Returns:
        (index of a tensor, where in the payload it starts), each compared whole.
    """
    by_value: dict[int, list[int]] = {}
    for i, (_, value) in enumerate(needles):
        by_value.setdefault(value, []).append(i)
    size = payload.stop - payload.start
    tried: Counter[int] = Counter()
    hits: list[tuple[int, int]] = []
    with open_source(payload.path) as source:
        whole = source.view(payload.start, payload.stop)
        for at, value in _known_values(whole, window, np.array(sorted(by_value), np.uint64)):
            for i in by_value[value]:
                begin, nbytes = at - needles[i][0], tensors[i].stop - tensors[i].start
                if begin < 0 or begin + nbytes > size or tried[i] == _MAX_HITS:
                    continue
                tried[i] += 1
                if _is_at(tensors[i], whole[begin : begin + nbytes]):
                    hits.append((i, begin))
    return hits


def _known_values(
    whole: memoryview, window: tuple[int, int], values: npt.NDArray[np.uint64]
) -> Iterator[tuple[int, int]]:
    """Where in a window eight bytes are one of some values, which are sorted, and which one."""
    # two bytes of each decide which of them are looked up: nearly none
    table = np.zeros(1 << 16, np.bool_)
    table[(values & np.uint64(0xFFFF)).astype(np.int64)] = True
    for start in range(window[0], min(window[1], len(whole) - 7), CHUNK):
        piece = whole[start : min(start + CHUNK + 4, window[1] + 4, len(whole))]
        words = np.frombuffer(piece[: len(piece) // 4 * 4], "<u4")
        if len(words) < 2:
            continue
        likely = np.flatnonzero(table[words.view("<u2")[:-2:2]])
        pairs = words[likely].astype(np.uint64) | words[likely + 1].astype(np.uint64) << np.uint64(32)
        slot = np.minimum(np.searchsorted(values, pairs), len(values) - 1)
        known = values[slot] == pairs
        yield from zip((start + 4 * likely[known]).tolist(), pairs[known].tolist(), strict=True)


def _is_at(tensor: Spot, there: memoryview) -> bool:
    with open_source(tensor.path) as source:
        return same_bytes(there, source.view(tensor.start, tensor.stop))
