"""Comparing memory without copying it."""

from __future__ import annotations

import numpy as np

from blobstore.core.memory.mapped_file import check_length

__all__ = ["LARGE", "address_of", "first_difference", "same_bytes"]

LARGE = 1 << 16
"""Bytes from which looking up whether memory was hashed already costs nothing beside hashing it."""

_CHUNK = 1 << 20  # bytes; the buffer of the comparison stays in the processor's cache
_SHORT = 1 << 10  # bytes; copying so few is faster than setting up a comparison


def address_of(view: memoryview) -> tuple[int, int]:
    """The address and the length of a view."""
    return (np.frombuffer(view, np.uint8).__array_interface__["data"][0] if len(view) else 0), len(view)


def same_bytes(a: memoryview, b: memoryview) -> bool:
    """Whether two contiguous byte views hold the same bytes. It runs at memory speed and takes a small, fixed buffer.

    Raises:
        FileAccessError: one of them belongs to a mapped file that was truncated.
    """
    if len(a) != len(b):
        return False
    if len(a) <= _SHORT:
        check_length(a)
        check_length(b)
        return bytes(a) == bytes(b)
    left, right = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    if left.size == 0 or left.ctypes.data == right.ctypes.data:
        return True
    for start in range(0, left.size, _CHUNK):
        check_length(a)
        check_length(b)
        if not np.array_equal(_words(left[start : start + _CHUNK]), _words(right[start : start + _CHUNK])):
            return False
    return True


def first_difference(a: memoryview, b: memoryview) -> int | None:
    """The index of the first byte that differs, which may be where the shorter view ends; None if they are equal.

    Raises:
        FileAccessError: one of them belongs to a mapped file that was truncated.
    """
    left, right = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    for start in range(0, min(left.size, right.size), _CHUNK):
        check_length(a)
        check_length(b)
        one, two = left[start : start + _CHUNK], right[start : start + _CHUNK]
        size = min(one.size, two.size)
        differ = one[:size] != two[:size]
        if differ.any():
            return start + int(np.argmax(differ))
    return None if left.size == right.size else min(left.size, right.size)


def _words(chunk: np.ndarray) -> np.ndarray:
    """The same bytes, eight at a time where the length allows it."""
    return chunk.view(np.uint64) if chunk.size % 8 == 0 else chunk
