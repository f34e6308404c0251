"""How far samples of blobs are from each other: what an element of a difference between them would take."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from blobstore.core.codec.elements import element

__all__ = [
    "Few",
    "Numbers",
    "apart_from",
    "bits",
    "few",
    "numbers",
    "signature",
    "signatures",
    "size",
    "smallest",
    "unit",
    "values",
]

_SIGNS = np.unpackbits(np.frombuffer(hashlib.shake_128(b"blobstore signatures").digest(64 * 256 // 8), np.uint8))
_SIGNED = _SIGNS.reshape(64, -1) * 2.0 - 1.0
_HUGE = 1e30  # larger numbers are no weights

_COARSE = 16  # every so many elements of a sketch decide which are compared whole

Numbers = npt.NDArray[np.floating[Any]]
Few = npt.NDArray[np.float32]


def numbers(dtype: str, sketches: bytes, length: int) -> Numbers:
    """Sketches as rows of numbers in the order of their values, exact enough to compare.

    Args:
        dtype: of their elements; empty for opaque bytes.
        sketches: one behind the other.
        length: bytes of each.
    """
    width, floating = element(dtype)
    elements = np.frombuffer(sketches, f"<u{width}").reshape(-1, length // width)
    exact = np.float32 if width <= 2 else np.float64  # half the memory takes half the time
    if not floating:
        plain: Numbers = elements.astype(exact)
        return plain
    magnitude = (elements & elements.dtype.type((1 << (8 * width - 1)) - 1)).view(f"<i{width}")
    signed: Numbers = np.where(elements.view(f"<i{width}") < 0, -magnitude, magnitude).astype(exact)
    return signed


def few(rows: Numbers) -> Few:
    """Some of the numbers of each row, which are compared first; a column for each row, because that is faster."""
    return np.ascontiguousarray(rows[:, :: max(rows.shape[1] // _COARSE, 1)].T, np.float32)


def size(many: Few, one: Few) -> npt.NDArray[np.int64]:
    """The logarithms of differences between columns and one column: an order of them that few elements give.

    The bits of a float, as an integer, are its logarithm, with a line between two powers of two.
    """
    differences = many - one[:, None]
    np.abs(differences, out=differences)
    differences += 1
    sizes: npt.NDArray[np.int64] = differences.view(np.int32).sum(axis=0, dtype=np.int64)
    return sizes


def smallest(values: npt.NDArray[Any], most: int) -> npt.NDArray[np.int64]:
    """Where the smallest numbers are, in their order, and the first of equal ones first: a part of a stable sort."""
    flat = values.ravel()
    at = np.arange(flat.size) if flat.size <= most else np.flatnonzero(flat <= np.partition(flat, most - 1)[most - 1])
    ordered: npt.NDArray[np.int64] = at[np.argsort(flat[at], kind="stable")[:most]]
    return ordered


def bits(many: Numbers, one: Numbers) -> Numbers:
    """How many bits an element of a difference takes: the entropy of their lengths, and the bits behind the first one."""
    if not len(many):
        return np.empty(0)
    apart = np.abs(many - one)  # whole numbers, of which the exponents are their lengths in binary; 0 for 0
    kind, shift, bias = ("<i4", 23, 126) if apart.dtype.itemsize == 4 else ("<i8", 52, 1022)
    lengths = np.maximum((apart.view(kind) >> shift) - bias, 0)
    rows, most = len(lengths), int(lengths.max()) + 1
    counts = np.bincount((lengths + most * np.arange(rows)[:, None]).ravel(), minlength=rows * most)
    shares = counts.reshape(rows, most) / lengths.shape[1]
    entropy = -(shares * np.log2(shares, out=np.zeros_like(shares), where=shares > 0)).sum(axis=1)
    taken: Numbers = entropy + lengths.mean(axis=1)  # a sign is one bit, and the first bit is known
    return taken


def unit(rows: Numbers) -> Numbers:
    """Rows with the mean 0 and the length 1, so that products are correlations; zeros where all numbers of a row are equal."""
    with np.errstate(all="ignore"):
        centred = rows - rows.mean(axis=1, keepdims=True)
        made: Numbers = centred / np.sqrt((centred * centred).sum(axis=1, keepdims=True))
        return np.nan_to_num(made, posinf=0.0, neginf=0.0)


def signature(dtype: str, sketch: bytes) -> int:
    """64 bits, of which those of two sketches differ by as many as the angle between them is wide: SimHash (Charikar, 2002,
    doi:10.1145/509907.509965). That of a blob in a narrower type is nearly the same. An integer with a sign, as in the tables.
    """
    [one] = signatures(values(dtype, sketch)[None])
    return int(one)


def signatures(rows: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """As `signature`, of rows of numbers."""
    with np.errstate(all="ignore"):
        rows = np.clip(np.nan_to_num(rows[:, :256].astype(np.float64)), -_HUGE, _HUGE)
    is_positive = (rows - rows.mean(axis=1, keepdims=True)) @ _SIGNED[:, : rows.shape[1]].T > 0
    return np.packbits(is_positive, axis=1).view(">i8")[:, 0].astype(np.int64)


def apart_from(
    signatures: npt.NDArray[np.int64], others: int | npt.NDArray[np.int64]
) -> npt.NDArray[np.unsignedinteger]:
    """By how many bits signatures differ from others."""
    counted: npt.NDArray[np.unsignedinteger] = _count_bits((signatures ^ others).view(np.uint64))
    return counted


def _counted_in_steps(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for shift, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
        words = (words & np.uint64(mask)) + (words >> np.uint64(shift) & np.uint64(mask))
    return words * np.uint64(0x0101010101010101) >> np.uint64(56)


_count_bits = getattr(np, "bitwise_count", _counted_in_steps)  # which numpy has from 2.0 on


def values(dtype: str, sketch: bytes) -> npt.NDArray[Any]:
    """The elements of a sketch as numbers."""
    width, floating = element(dtype)
    elements = np.frombuffer(sketch, f"<u{width}")
    if not floating:
        return elements
    if dtype == "bfloat16":
        return (elements.astype("<u4") << np.uint32(16)).view("<f4")
    return elements.view(f"<f{width}")
