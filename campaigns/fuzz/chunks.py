"""The fuzzed function of the pool: a chunk of an encoded blob."""

from blobstore_runtime import _codec

from blobstore.core.codec import chunks
from blobstore.core.errors import PoolError
from campaigns.fuzz.answers import agree
from tests.core.codec.test_chunks import decoded

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
    made, native = (decoded(module, data[1:], encoding, SIZE, BASE) for module in (chunks, _codec))
    agree(made, native, "a chunk")
    if made is None:
        raise PoolError("no chunk of this encoding")
