"""What is encoded comes back to the bit, and nothing else is taken for an encoded blob (P2, S3)."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.codec import blobs

PLAIN = ("raw", "planes:1", "planes:2", "planes:4", "planes:8")
NEAR = tuple(f"near:{kind}:{bits}" for kind in ("u1", "u2", "u4", "u8", "f2", "f4", "f8") for bits in (0, 2, 4))


def decoded(encoding: str, size: int, stored: bytes, base: bytes | None = None) -> bytes:
    view = None if base is None else memoryview(base)
    return b"".join(bytes(chunk) for chunk in blobs.decode(encoding, size, memoryview(stored), view))


def encoded(data: bytes, encoding: str, base: bytes | None = None) -> bytes:
    return b"".join(blobs.encode(memoryview(data), encoding, None if base is None else memoryview(base)))


@pytest.mark.parametrize("encoding", NEAR + PLAIN)
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_blobs_of_several_chunks(encoding: str, extra: int) -> None:
    random = np.random.default_rng(1)
    size = 2 * blobs.CHUNK + 64 + extra
    base = random.integers(0, 256, size, np.uint8)
    data = base.copy()
    data[random.integers(0, size, size // 100)] += 1
    other = base.tobytes() if encoding.startswith("near") else None
    stored = encoded(data.tobytes(), encoding, other)
    assert decoded(encoding, size, stored, other) == data.tobytes()
    with pytest.raises(blobs.DecodeError, match="behind the last chunk|expected"):
        decoded(encoding, size, stored + b"x", other)


def test_all_pairs_of_float16() -> None:
    """Each of 65,536 values against itself, its neighbors, and a value far away."""
    values = np.arange(1 << 16, dtype="<u2")
    for shift, encoding in itertools.product((0, 1, 2, 3, 30000), blobs.near_encodings(2, floating=True)):
        base = np.roll(values, shift)
        assert decoded(encoding, 1 << 17, encoded(values.tobytes(), encoding, base.tobytes()), base.tobytes()) == (
            values.tobytes()
        )


def test_small_differences_take_few_bits() -> None:
    """One step of the last bit, up or down or none, in the order of the values: also where the sign changes."""
    random = np.random.default_rng(2)
    base = random.standard_normal(1 << 18).astype("<f2")
    up = np.nextafter(base, np.float16(np.inf))
    data = np.where(random.random(len(base)) < 0.05, up, base).astype("<f2")
    stored = encoded(data.tobytes(), "near:f2:2", base.tobytes())
    entropy = -(0.05 * np.log2(0.05) + 0.95 * np.log2(0.95)) / 16
    assert len(stored) / data.nbytes < 1.8 * entropy


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_what_is_offered_is_known(width: int) -> None:
    near = [blobs.near_encodings(width, floating=floating) for floating in (True, False)]
    assert all(map(blobs.check_encoding, itertools.chain(blobs.plane_encodings(width), *near)))


@given(st.data(), st.sampled_from([one for one in PLAIN + NEAR if one != "raw"]))
def test_damage_is_an_error_or_other_bytes(draw: st.DataObject, encoding: str) -> None:
    """Never another exception, and never another number of bytes; the digest finds the rest."""
    data = draw.draw(st.binary(min_size=1, max_size=600))
    base = bytes(reversed(data)) if encoding.startswith("near") else None
    stored = bytearray(encoded(data, encoding, base))
    for at, value in draw.draw(st.lists(st.tuples(st.integers(0, len(stored) - 1), st.integers(0, 255)), min_size=1)):
        stored[at] = value
    del stored[draw.draw(st.integers(0, len(stored))) :]
    try:
        assert len(decoded(encoding, len(data), bytes(stored), base)) == len(data)
    except blobs.DecodeError:
        pass


def test_a_frame_that_claims_much_takes_no_memory() -> None:
    """The size in a zstd frame is compared before it is given."""
    import zstandard

    frame = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    stream = bytes([1]) + len(frame).to_bytes(4, "little") + frame
    body = stream + bytes(5)
    stored = len(body).to_bytes(4, "little") + body
    tracemalloc.start()
    with pytest.raises(blobs.DecodeError, match="does not hold"):
        decoded("planes:1", 1000, stored)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["planes:4", "near:f4:2"])
@pytest.mark.parametrize("pieces", [[], [bytes(16)], [bytes(blobs.CHUNK)]])
def test_a_base_with_fewer_bytes(encoding: str, pieces: list[bytes]) -> None:
    """It is an error, or nothing reads it."""
    data = bytes(blobs.CHUNK) + bytes(64)
    stored = memoryview(encoded(data, encoding, data if encoding.startswith("near") else None))
    chunks = blobs.decode(encoding, len(data), stored, map(memoryview, pieces))
    if encoding == "planes:4":
        assert b"".join(map(bytes, chunks)) == data
        return
    with pytest.raises(blobs.DecodeError):
        list(chunks)
