"""The elements of a blob: how wide they are, and the same values in a narrower or a wider type."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from blobstore.core.memory.layout import ScalarType

__all__ = ["cast", "element", "widen"]

_FLOATS = {"half", "float", "double", "bfloat16"}


def element(dtype: str) -> tuple[int, bool]:
    """Bytes of an element of this type, and whether it is a float; opaque bytes count as float32, which most are."""
    if not dtype:
        return 4, True
    kind = ScalarType.__members__.get(dtype.upper())
    width = 1 if kind is None else kind.itemsize
    return (width if width in {1, 2, 4, 8} else 1), dtype in _FLOATS


def cast(data: memoryview, dtype: str) -> memoryview:
    """Elements in float32 as the nearest ones in bfloat16 or float16; those in between go to the even one.

    Args:
        data: the elements.
        dtype: "bfloat16" or "half".
    """
    elements = np.frombuffer(data[: len(data) // 4 * 4], "<u4")
    if dtype == "half":
        with np.errstate(all="ignore"):
            halves = elements.view("<f4").astype("<f2").view("<u2")
        where = np.flatnonzero(np.isnan(elements.view("<f4")))
        if len(where):  # processors differ in what becomes of its bits
            unlike = elements[where]
            signs, rests = unlike >> np.uint32(16) & np.uint32(0x8000), unlike >> np.uint32(13) & np.uint32(0x3FF)
            halves[where] = signs | np.uint32(0x7C00) | np.maximum(rests, np.uint32(1))
        return memoryview(halves.view(np.uint8))  # type: ignore[arg-type]
    rounded = (elements >> np.uint32(16)) & np.uint32(1)
    rounded += elements
    rounded += np.uint32(0x7FFF)
    rounded >>= np.uint32(16)
    return memoryview(rounded.astype("<u2").view(np.uint8))  # type: ignore[arg-type]


def widen(data: memoryview, dtype: str) -> memoryview:
    """Elements in bfloat16 or float16 in float32; of what is not a number, all bits are kept.

    Args:
        data: the elements.
        dtype: "bfloat16" or "half".
    """
    elements = np.frombuffer(data[: len(data) // 2 * 2], "<u2")
    wide = _of_halves()[elements] if dtype == "half" else elements.astype("<u4") << np.uint32(16)
    return memoryview(wide.view(np.uint8))  # type: ignore[arg-type]


@functools.cache
def _of_halves() -> npt.NDArray[np.uint32]:
    """The bits in float32 of all numbers in float16: processors differ in what is not a number."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    exponents, fractions = halves >> 10 & 31, halves & 1023
    with np.errstate(all="ignore"):
        magnitudes = np.where(
            exponents == 0,
            (fractions.astype(np.float32) * np.float32(2**-24)).view(np.uint32),
            exponents + 112 << 23 | fractions << 13,
        )
    magnitudes = np.where(exponents == 31, 0x7F800000 | fractions << 13, magnitudes)
    signed: npt.NDArray[np.uint32] = (magnitudes | halves >> 15 << 31).astype("<u4")
    return signed
