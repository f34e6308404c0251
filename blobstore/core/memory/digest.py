"""Content addresses.

A blob's address is its length and its xxh3-128 (canonical, big-endian form, seed 0). xxh3 runs at memory speed, but
it does not resist a deliberate search for collisions. So the store compares bytes before it merges two blobs, and
`sha256` serves callers that must trust a file from elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import xxhash

__all__ = ["Digest", "digest", "sha256"]


class Digest(NamedTuple):
    """Content address of a blob.

    Attributes:
        nbytes: length of the blob in bytes.
        xxh3_128: the 16 bytes of its xxh3-128 in canonical (big-endian) order.
    """

    nbytes: int
    xxh3_128: bytes

    def __repr__(self) -> str:
        return f"<Digest {self}>"

    def __str__(self) -> str:
        return f"{self.xxh3_128.hex()}:{self.nbytes}"


def digest(data: memoryview | bytes) -> Digest:
    """The content address of `data`, a contiguous buffer of bytes, which is not copied."""
    return Digest(len(data), xxhash.xxh3_128_digest(data))


def sha256(data: memoryview | bytes) -> str:
    """Hexadecimal SHA-256 of `data`."""
    import hashlib

    return hashlib.sha256(data).hexdigest()
