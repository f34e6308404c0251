"""Comparing memory (R1): the operators of `bytes` are the oracle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.memory.buffers import first_difference, same_bytes

CHUNK = 1 << 20  # bytes that are compared at a time


@given(a=st.binary(max_size=40), b=st.binary(max_size=40), shift=st.integers(0, 7))
def test_short_buffers_compare_as_bytes_do(a, b, shift):
    """Buffers of any length and alignment."""
    moved = memoryview(bytearray(shift) + bytearray(b))[shift:]
    assert same_bytes(memoryview(a), moved) == (a == b)
    assert same_bytes(memoryview(b), moved)


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
@pytest.mark.parametrize("where", ["first", "chunk's end", "last"])
def test_a_single_flipped_bit_anywhere_is_seen(size, where):
    """Also at the border between two steps of the comparison, and in the odd bytes of the last one."""
    position = {"first": 0, "chunk's end": min(CHUNK, size) - 1, "last": size - 1}[where]
    data = bytes(range(256)) * (size // 256 + 1)
    other = bytearray(data[:size])
    assert same_bytes(memoryview(data)[:size], memoryview(other))
    other[position] ^= 1
    assert not same_bytes(memoryview(data)[:size], memoryview(other))


@given(a=st.binary(max_size=20), b=st.binary(max_size=20))
def test_the_first_difference_is_the_end_of_the_common_prefix(a, b):
    """The end of the shorter buffer counts; equal buffers have none."""
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert first_difference(memoryview(a), memoryview(b)) == (None if a == b else common)


def test_a_difference_behind_the_first_step_is_found():
    """Positions count from the start of the buffer, not of the step."""
    data = bytes(2 * CHUNK + 5)
    other = bytearray(data)
    other[CHUNK + 3] = 1
    assert first_difference(memoryview(data), memoryview(other)) == CHUNK + 3
