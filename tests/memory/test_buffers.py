"""Comparing memory: the operator of `bytes` decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.memory.buffers import same_bytes

CHUNK = 1 << 20  # what is compared at a time


@given(a=st.binary(max_size=40), b=st.binary(max_size=40), shift=st.integers(0, 7))
def test_short_buffers_compare_as_bytes_do(a, b, shift):
    """Of any length, and at any alignment."""
    moved = memoryview(bytearray(shift) + bytearray(b))[shift:]
    assert same_bytes(memoryview(a), moved) == (a == b)
    assert same_bytes(memoryview(b), moved)


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
@pytest.mark.parametrize("where", ["first", "chunk's end", "last"])
def test_a_single_flipped_bit_anywhere_is_seen(size, where):
    """Also where one step of the comparison ends and the next begins, and in the odd bytes of the last."""
    position = {"first": 0, "chunk's end": min(CHUNK, size) - 1, "last": size - 1}[where]
    data = bytes(range(256)) * (size // 256 + 1)
    other = bytearray(data[:size])
    assert same_bytes(memoryview(data)[:size], memoryview(other))
    other[position] ^= 1
    assert not same_bytes(memoryview(data)[:size], memoryview(other))


def test_nothing_equals_nothing_and_a_prefix_is_not_the_whole():
    """Lengths are compared first."""
    assert same_bytes(memoryview(b""), memoryview(b""))
    assert not same_bytes(memoryview(b"ab"), memoryview(b"abc"))
