"""Chunks in C++ and with numpy: the same bytes, the same refusals (P2, S3)."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.codec import blobs, chunks
from tests.core.codec.test_blobs import NEAR, PLAIN

native = pytest.importorskip("blobstore_runtime._codec")
BOTH = pytest.mark.parametrize("module", [chunks, native], ids=["numpy", "C++"])
ENCODINGS = tuple(one for one in PLAIN + NEAR if one != "raw")


def decoded(module: ModuleType, body: bytes, encoding: str, size: int, base: bytes | None) -> bytes | None:
    """What comes back; None if the body is refused."""
    out = bytearray(size)
    try:
        module.decode_chunk(memoryview(body), encoding, None if base is None else memoryview(base), memoryview(out))
    except ValueError:
        return None
    return bytes(out)


def encoded(module: ModuleType, data: bytes, encoding: str, base: bytes | None) -> bytes:
    streams = module.split_chunk(memoryview(data), encoding, None if base is None else memoryview(base))
    stored = chunks.join_chunk(streams)
    assert int.from_bytes(stored[:4], "little") == len(stored) - 4
    return stored[4:]


def stream(data: bytes, how: int = 0) -> bytes:
    return bytes([how]) + len(data).to_bytes(4, "little") + data


GOLDEN = [
    ("planes:2", "0102030405", None, stream(b"\1\3") + stream(b"\2\4") + stream(b"\5")),
    # 0, 1, -1 and 5 more than the base: numbers 0, 2, 1 and 10, of which the last has the code 3 and 7 behind it
    (
        *("near:u2:2", "0001 0102 ff02 0504", "0001 0002 0003 0004"),
        stream(b"\xd8") + stream(b"\7") + stream(b"\0") + stream(b""),
    ),
    # from 0 to -0, one down in the order of values; from the first number below -0 to the first one above 0, three up
    ("near:f2:4", "0080 0100", "0000 0180", stream(b"\x61") + stream(b"") * 3),
    # three codes of half a byte, the last one all bits, then 2^32 - 1 less 15 in four planes, and a byte that is left
    (
        *("near:u4:4", "00000000 01000000 00000080 aa", "00000000 00000000 00000000 aa"),
        stream(b"\x20\x0f") + stream(b"\xf0") + stream(b"\xff") * 3 + stream(b"\xaa"),
    ),
]


@BOTH
@pytest.mark.parametrize(("encoding", "data", "base", "stored"), GOLDEN)
def test_golden_bytes(module: ModuleType, encoding: str, data: str, base: str | None, stored: bytes) -> None:
    """Written by hand, after the description of the format."""
    plain, other = bytes.fromhex(data), None if base is None else bytes.fromhex(base)
    assert encoded(module, plain, encoding, other) == stored
    assert decoded(module, stored, encoding, len(plain), other) == plain


@given(st.data(), st.sampled_from(ENCODINGS))
@settings(max_examples=200)
def test_both_make_the_same_bytes_and_read_them(draw: st.DataObject, encoding: str) -> None:
    base = draw.draw(st.binary(max_size=2000)) * draw.draw(st.sampled_from([1, 9, 80]))
    data = np.frombuffer(base, np.uint8).copy()
    for at, value in draw.draw(st.lists(st.tuples(st.integers(0, len(data)), st.integers(0, 255)), max_size=30)):
        data[at : at + 1] += np.uint8(value)
    other = base if encoding.startswith("near") else None
    stored = encoded(native, data.tobytes(), encoding, other)
    assert stored == encoded(chunks, data.tobytes(), encoding, other)
    for module in (chunks, native):
        assert decoded(module, stored, encoding, len(data), other) == data.tobytes()


@pytest.mark.long
@given(st.data(), st.sampled_from(ENCODINGS))
@settings(max_examples=300)
def test_the_same_damage_is_refused(draw: st.DataObject, encoding: str) -> None:
    data = draw.draw(st.binary(min_size=1, max_size=300)) * draw.draw(st.sampled_from([1, 9]))
    base = bytes(reversed(data)) if encoding.startswith("near") else None
    stored = bytearray(encoded(chunks, data, encoding, base))
    for at, value in draw.draw(st.lists(st.tuples(st.integers(0, len(stored) - 1), st.integers(0, 255)), max_size=4)):
        stored[at] = value
    del stored[draw.draw(st.integers(0, len(stored)) | st.just(len(stored))) :]
    assert decoded(native, bytes(stored), encoding, len(data), base) == decoded(
        chunks, bytes(stored), encoding, len(data), base
    )


def _frames() -> dict[str, bytes]:
    whole = zstandard.ZstdCompressor().compress(bytes(1000))
    half = zstandard.ZstdCompressor().compress(bytes(500))
    skippable = bytes.fromhex("502a4d18 04000000 00000000")
    words = zstandard.train_dictionary(1 << 10, [b"%d" % (number % 7) * 9 for number in range(2000)])
    return {
        "another size": half,
        "two frames": half + half,
        "a frame and more": whole + b"\0",
        "a skippable frame": skippable,
        "a skippable frame before one": skippable + whole,
        "a frame and a skippable one": whole + skippable,
        "no size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
        "no magic": whole[4:],
        "a dictionary": zstandard.ZstdCompressor(dict_data=words).compress(bytes(1000)),
        "half a frame": whole[:-1],
        "a wrong checksum": zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1000))[:-1] + b"\x7f",
        "nothing": b"",
    }


@BOTH
@pytest.mark.parametrize("name", _frames())
def test_frames_of_other_kinds_are_refused(module: ModuleType, name: str) -> None:
    assert decoded(module, stream(_frames()[name], 1) + stream(b""), "planes:1", 1000, None) is None


@BOTH
def test_frames_with_checksums_are_taken(module: ModuleType) -> None:
    frame = zstandard.ZstdCompressor(write_checksum=True, level=19).compress(bytes(1000))
    assert decoded(module, stream(frame, 1) + stream(b""), "planes:1", 1000, None) == bytes(1000)


@BOTH
def test_an_empty_stream_is_no_frame(module: ModuleType) -> None:
    frame = zstandard.ZstdCompressor().compress(b"")
    assert decoded(module, stream(bytes(10)) + stream(frame, 1), "planes:1", 10, None) is None


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_large_chunks(encoding: str) -> None:
    """Streams that are tried by a piece, and stored either way."""
    random = np.random.default_rng(5)
    base = (random.standard_normal(blobs.CHUNK // 4) * 0.02).astype("<f4").view(np.uint8)[:-3]
    data = base.copy()
    data[:: random.integers(3, 40)] += np.uint8(1)
    other = base.tobytes() if encoding.startswith("near") else None
    stored = encoded(native, data.tobytes(), encoding, other)
    assert stored == encoded(chunks, data.tobytes(), encoding, other)
    for module in (chunks, native):
        assert decoded(module, stored, encoding, len(data), other) == data.tobytes()


def test_many_threads_at_once() -> None:
    random = np.random.default_rng(6)
    blobs = [random.integers(0, 4, 300_000, np.uint8).tobytes() for _ in range(8)]

    def there_and_back(number: int) -> bool:
        data, base = blobs[number % 8], blobs[(number + 1) % 8]
        stored = encoded(native, data, "near:u2:2", base)
        return decoded(native, stored, "near:u2:2", len(data), base) == data

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(there_and_back, range(64)))


@pytest.mark.parametrize(
    "encoding",
    [
        *("raw", "raw:1", "", "planes", "planes:", "planes:0", "planes:3", "planes:10", "planes:2:2", "zstd"),
        *("near", "near:f2", "near:f1:0", "near:f3:2", "near:f2:3", "near:f2:", "near:u1:1", "near:2:2", "near:u1:2:"),
    ],
)
def test_other_encodings_are_errors(encoding: str) -> None:
    assert blobs.check_encoding(encoding) is (encoding == "raw")  # a blob may be raw, a chunk not
    with pytest.raises(ValueError, match="no encoding of chunks"):
        native.split_chunk(b"1234", encoding, None)


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="a base of another size"):
        native.split_chunk(b"1234", "near:u1:2", None)
    with pytest.raises(ValueError, match="a base of another size"):
        native.decode_chunk(b"1234", "near:u1:2", b"123", bytearray(4))
    with pytest.raises(ValueError, match="at most"):
        native.split_chunk(bytes(blobs.CHUNK + 1), "planes:1", None)
    with pytest.raises(BufferError):
        native.decode_chunk(b"1234", "planes:1", None, bytes(4))


CHOICE = """
import sys
from blobstore.core.codec import blobs
assert blobs._chunks.__name__ == {chosen!r}, blobs._chunks
assert not {{"torch", "executorch", "blobstore_runtime._native"}} & set(sys.modules)
stored = b"".join(blobs.encode(memoryview(bytes(range(256)) * 20), "planes:2"))
assert b"".join(map(bytes, blobs.decode("planes:2", 5120, memoryview(stored)))) == bytes(range(256)) * 20
"""


@pytest.mark.parametrize(
    ("before", "chosen"),
    [
        ("", "blobstore_runtime._codec"),
        ("import sys; sys.modules['blobstore_runtime'] = None", "blobstore.core.codec.chunks"),
        ("from blobstore_runtime import _codec; _codec.version = '0.0.1'", "blobstore.core.codec.chunks"),
    ],
    ids=["there", "not installed", "another version"],
)
def test_it_is_used_where_it_belongs_to_this_version(before: str, chosen: str) -> None:
    """And loads nothing else."""
    subprocess.run([sys.executable, "-W", "error", "-c", before + CHOICE.format(chosen=chosen)], check=True)
