"""Content addresses (R1, B5); the oracles are the test vectors of xxHash, and hashlib."""

import hashlib

import numpy as np
import pytest

from blobstore.core.memory.digest import Digest, digest, sha256


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # XXH3_128bits of no bytes, from xxHash's own test vectors
        (b"", "99aa06d3014798d86001c324468d497f"),
        # `printf abc | xxhsum -H2`
        (b"abc", "06b05ab6733a618578af5f94892f3950"),
    ],
)
def test_an_address_is_the_length_and_the_canonical_xxh3_128(data, expected):
    """Big-endian with seed 0, so that other programs can compute it."""
    assert digest(data) == Digest(len(data), bytes.fromhex(expected))
    assert str(digest(data)) == f"{expected}:{len(data)}"


def test_equal_bytes_have_one_address_wherever_they_lie():
    """The type and the alignment of the memory make no difference."""
    array = np.arange(1000, dtype=np.float32)
    shifted = bytearray(1) + bytearray(array.tobytes())
    assert digest(array.view(np.uint8).data) == digest(memoryview(shifted)[1:]) == digest(array.tobytes())


def test_sha256_is_that_of_hashlib():
    """For files from elsewhere."""
    assert sha256(memoryview(b"weights")) == hashlib.sha256(b"weights").hexdigest()
