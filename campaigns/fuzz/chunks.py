"""The fuzzed function of the pool: a chunk of an encoded blob."""

from __future__ import annotations

from types import ModuleType

from blobstore_runtime import _codec

from blobstore.core.codec import chunks
from blobstore.core.errors import PoolError
from campaigns.fuzz.answers import agree

ENCODINGS = (
    *(f"planes:{width}" for width in (1, 2, 4, 8)),
    *(f"near:{kind}:{bits}" for kind in ("u1", "u2", "u4", "u8", "f2", "f4", "f8") for bits in (0, 2, 4)),
)
SIZE = 3000
"""Bytes of the chunk; runtime_bindings/tests/fuzz/codec_fuzz.cpp has the same, and the same base."""

BASE = bytes(at * 7 % 256 for at in range(SIZE))


def chunk(data: bytes) -> None:
    """The first byte says the encoding, and a chunk follows: numpy and C++ make the same bytes of it, or refuse it."""
    if not data:
        raise PoolError("there is no encoding")
    encoding = ENCODINGS[data[0] % len(ENCODINGS)]
    made = _decoded(chunks, data[1:], encoding)
    agree(made, _decoded(_codec, data[1:], encoding), "a chunk")
    if made is None:
        raise PoolError("no chunk of this encoding")


def _decoded(module: ModuleType, body: bytes, encoding: str) -> bytes | None:
    out = bytearray(SIZE)
    try:
        module.decode_chunk(memoryview(body), encoding, memoryview(BASE), memoryview(out))
    except ValueError:
        return None
    return bytes(out)
