"""Which encoding stores a blob in the fewest bytes, judged by samples."""

from __future__ import annotations

from blobstore.core.codec.blobs import ENOUGH, near_encodings, plane_encodings, sample
from blobstore.core.codec.elements import element

__all__ = ["NEAR_WORTH", "best_difference", "best_planes", "choose"]

NEAR_WORTH = 0.6
"""A difference is stored if it takes less than this share of the planes; otherwise the blob is better a base for others."""

_WIDE_SAVES = 1 / 12
"""Or this share of a wide element less: planes and differences keep the same noise of its last bits, so shares say little."""


def choose(data: memoryview, dtype: str, base: memoryview | None = None, beside: float = 0.0) -> tuple[str, float]:
    """How to store a blob, and about which share of its bytes that takes.

    Args:
        data: the blob.
        dtype: as in `best_planes`.
        base: as many bytes that may be close to it.
        beside: the share of its bytes that has to be stored beside a difference.
    """
    near, remains = "raw", 1.0
    if base is not None:
        near, remains = best_difference(data, dtype, base)
        remains += beside
        if remains < ENOUGH:
            return near, remains
    encoding, share = best_planes(data, dtype)
    is_wide = element(dtype)[0] >= 4
    is_worth = remains < share * NEAR_WORTH or (is_wide and share - remains >= _WIDE_SAVES)
    return (near, remains) if near != "raw" and is_worth else (encoding, share)


def best_planes(data: memoryview, dtype: str) -> tuple[str, float]:
    """The smallest encoding of a blob by itself, and about which share of its bytes that takes.

    Args:
        data: the blob.
        dtype: of its elements; if it is empty, every width is tried.
    """
    possible = dict.fromkeys(one for width in _widths(dtype) for one in plane_encodings(width))
    return sample(data, tuple(possible))


def best_difference(data: memoryview, dtype: str, base: memoryview) -> tuple[str, float]:
    """The smallest encoding of a blob as a difference to one of the same size, and about which share of its bytes that takes."""
    _, floating = element(dtype)
    possible = dict.fromkeys(one for width in _widths(dtype) for one in near_encodings(width, floating=floating))
    return sample(data, tuple(possible), base)


def _widths(dtype: str) -> tuple[int, ...]:
    return (element(dtype)[0],) if dtype else (1, 2, 4)
