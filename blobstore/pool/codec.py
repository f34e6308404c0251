"""How the bytes of a blob are stored: as byte planes, or as differences to the bytes of another blob.

A blob is encoded in chunks of `CHUNK` bytes, so neither side needs more memory than a few chunks. A chunk is its length
(four bytes, little-endian) and what the encoding makes of it, in *streams*. A stream is one byte that says how it is
stored (0: as it is, 1: a zstd frame), its stored length (four bytes), and these bytes.

    raw            the blob is stored as it is, without chunks
    planes:W       W streams: the first bytes of all elements of W bytes, then all second ones, and so on
    near:T:B       the differences to the elements of a base of the same size. T is how elements are ordered and how wide
                   they are: u1, u2, u4, u8 (integers), f2, f4, f8 (floats, by value). A difference is mapped to a number
                   without a sign: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4. With B = 0 these are stored as planes. With B = 2
                   or 4, a stream has B bits of each, several in a byte; where all B bits are set, the number less 2^B - 1
                   is in the planes that follow.

What remains behind the last whole element is one more stream. In trained weights, the bytes with signs and exponents
repeat, and those of mantissas do not; planes separate them. Between two fine-tunes in bfloat16, most differences are
0, 1 or -1. Two bits of each, four in a byte, are what an entropy coder of bytes needs to see several of them together:
on fine-tunes of a sentence encoder, that takes two thirds of what planes of the same differences take.

What is decoded is compared with its digest by the caller. Here only sizes are checked, before memory is taken.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blobstore.core.distribution import install
from blobstore.core.errors import MissingDependencyError

try:
    import zstandard
except ImportError as error:
    raise MissingDependencyError(f"encoding blobs needs zstandard: {install('pool')}") from error

__all__ = ["CHUNK", "DecodeError", "check_encoding", "decode", "encode", "near_encodings", "plane_encodings", "sample"]

CHUNK = 1 << 20
"""Bytes of a blob that are encoded together; a processor's cache holds what becomes of one chunk."""

_LEVEL = 1  # a higher one is slower and hardly smaller
_WORTH = 0.95  # a stream that zstd does not make smaller than this is stored as it is: reading it is a copy
_PROBE = 1 << 14
_LENGTH = struct.Struct("<I")
_STREAM = struct.Struct("<BI")
_PLAIN, _ZSTD = 0, 1
_BITS = (0, 2, 4)
_KINDS = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "u8": "<u8", "f2": "<u2", "f4": "<u4", "f8": "<u8"}

_Array = npt.NDArray[Any]


class DecodeError(ValueError):
    """Why bytes are not an encoded blob."""


def plane_encodings(width: int) -> tuple[str, ...]:
    """The encodings without a base that can pay for elements of this width in bytes."""
    return ("planes:1",) if width not in {2, 4, 8} else ("planes:1", f"planes:{width}")


def near_encodings(width: int, *, floating: bool) -> tuple[str, ...]:
    """The encodings against a base that can pay for elements of this width in bytes."""
    kind = f"{'f' if floating and width > 1 else 'u'}{width if width in {2, 4, 8} else 1}"
    return tuple(f"near:{kind}:{bits}" for bits in _BITS)


def check_encoding(encoding: str) -> bool:
    """Whether this is an encoding that `decode` knows."""
    kind, *rest = encoding.split(":")
    if kind == "raw":
        return not rest
    if kind == "planes":
        return rest in (["1"], ["2"], ["4"], ["8"])
    return kind == "near" and len(rest) == 2 and rest[0] in _KINDS and rest[1] in {"0", "2", "4"}


def encode(data: memoryview, encoding: str, base: memoryview | None = None) -> Iterator[bytes]:
    """The bytes to store for a blob.

    Args:
        data: its bytes.
        encoding: any.
        base: for `near`, the bytes of the base, as many.
    """
    if encoding == "raw":
        for start in range(0, len(data), CHUNK):
            yield bytes(data[start : start + CHUNK])
        return
    for start in range(0, len(data), CHUNK):
        chunk = np.frombuffer(data[start : start + CHUNK], np.uint8)
        other = None if base is None else np.frombuffer(base[start : start + CHUNK], np.uint8)
        body = b"".join(_encoded(chunk, encoding, other))
        yield _LENGTH.pack(len(body))
        yield body


def decode(encoding: str, size: int, stored: memoryview, base: memoryview | None = None) -> Iterator[memoryview]:
    """The bytes of a blob, chunk by chunk; a chunk is valid until the next one.

    Args:
        encoding: any that `check_encoding` accepts.
        size: bytes of the blob.
        stored: what `encode` made of it.
        base: for `near`, the bytes of the base, `size` of them.

    Raises:
        DecodeError: the stored bytes are not `size` bytes in this encoding.
    """
    if encoding == "raw":
        if len(stored) != size:
            raise DecodeError(f"{len(stored)} bytes, expected {size}")
        yield stored
        return
    at = 0
    room = np.empty(min(size, CHUNK), np.uint8)
    for start in range(0, size, CHUNK):
        expected = min(CHUNK, size - start)
        head = stored[at : at + _LENGTH.size]
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        body = stored[at + _LENGTH.size : at + _LENGTH.size + length]
        if not 0 < length == len(body):
            raise DecodeError(f"a chunk of {length} bytes at byte {start}, of which {len(body)} are there")
        at += _LENGTH.size + length
        other = None if base is None else np.frombuffer(base[start : start + expected], np.uint8)
        _decoded(body, encoding, other, room[:expected])
        yield memoryview(room[:expected])  # type: ignore[arg-type]
    if at != len(stored):
        raise DecodeError(f"{len(stored) - at} bytes behind the last chunk")


# ------------------------------------------------------------------------------------------------------- chunks


def _encoded(chunk: _Array, encoding: str, base: _Array | None) -> Iterator[bytes]:
    kind, _, rest = encoding.partition(":")
    if kind == "planes":
        whole = len(chunk) // int(rest) * int(rest)
        for plane in _planes(chunk[:whole], int(rest)):
            yield from _stream(plane)
        yield from _stream(chunk[whole:])
        return
    assert base is not None  # noqa: S101 - near has one
    order, _, bits = rest.partition(":")
    dtype = np.dtype(_KINDS[order])
    whole = len(chunk) // dtype.itemsize * dtype.itemsize
    numbers = _differences(chunk[:whole].view(dtype), base[:whole].view(dtype), floating=order[0] == "f")
    if bits != "0":
        most = dtype.type((1 << int(bits)) - 1)
        yield from _stream(_packed(np.minimum(numbers, most).astype(np.uint8), int(bits)))
        numbers = numbers[numbers >= most] - most
    for plane in _planes(numbers.view(np.uint8), dtype.itemsize):
        yield from _stream(plane)
    yield from _stream(chunk[whole:])


def _decoded(body: memoryview, encoding: str, base: _Array | None, out: _Array) -> None:
    """Write the chunk that `body` encodes to `out`, which has its size."""
    kind, _, rest = encoding.partition(":")
    streams = _Streams(body)
    if kind == "planes":
        width = int(rest)
        count = len(out) // width
        _join([streams.take(count) for _ in range(width)], width, out[: count * width])
        out[count * width :] = streams.take(len(out) - count * width)
    else:
        order, _, bits = rest.partition(":")
        dtype = np.dtype(_KINDS[order])
        count = len(out) // dtype.itemsize
        whole = count * dtype.itemsize
        assert base is not None  # noqa: S101 - near has one
        numbers = _read_numbers(streams, dtype, count, int(bits))
        _apply(numbers, base[:whole].view(dtype), out[:whole].view(dtype), floating=order[0] == "f")
        out[whole:] = streams.take(len(out) - whole)
    streams.finish()


def _read_numbers(streams: _Streams, dtype: np.dtype[Any], count: int, bits: int) -> _Array:
    if not bits:
        numbers = np.empty(count, dtype)
        _join([streams.take(count) for _ in range(dtype.itemsize)], dtype.itemsize, numbers.view(np.uint8))
        return numbers
    most = (1 << bits) - 1
    codes = _unpacked(streams.take(-(-count * bits // 8)), bits)[:count]
    numbers = codes.astype(dtype)
    escaped = np.flatnonzero(codes == most)
    large = np.empty(len(escaped), dtype)
    _join([streams.take(len(escaped)) for _ in range(dtype.itemsize)], dtype.itemsize, large.view(np.uint8))
    numbers[escaped] = large + dtype.type(most)
    return numbers


def _planes(data: _Array, width: int) -> Sequence[_Array]:
    return [np.ascontiguousarray(data[plane::width]) for plane in range(width)]


def _join(planes: Sequence[_Array], width: int, out: _Array) -> None:
    """The inverse of `_planes`."""
    if width == 2:  # twice as fast as bytes one by one
        pairs = out.view("<u2")
        np.multiply(planes[1], np.uint16(256), out=pairs, dtype="<u2")
        np.add(pairs, planes[0], out=pairs)
        return
    for plane in range(width):
        out[plane::width] = planes[plane]


def _ordered(elements: _Array) -> _Array:
    """Floats as integers without a sign that are ordered as the values are: a sign and a magnitude become one number."""
    bits = 8 * elements.dtype.itemsize
    signs = elements.view(elements.dtype.str.replace("u", "i")) >> (bits - 1)
    mask = signs.view(elements.dtype)
    mask |= elements.dtype.type(1 << (bits - 1))
    mask ^= elements
    return mask


def _values(ordered: _Array, out: _Array) -> None:
    """The inverse of `_ordered`."""
    bits = 8 * ordered.dtype.itemsize
    signs = ordered.view(ordered.dtype.str.replace("u", "i")) >> (bits - 1)
    np.invert(signs, out=signs)
    mask = signs.view(ordered.dtype)
    mask |= ordered.dtype.type(1 << (bits - 1))
    np.bitwise_xor(mask, ordered, out=out)


def _differences(elements: _Array, base: _Array, *, floating: bool) -> _Array:
    """Differences to the base as numbers without a sign, the small ones first."""
    difference = _ordered(elements) - _ordered(base) if floating else elements - base
    signed = difference.view(difference.dtype.str.replace("u", "i"))
    signs = signed >> (8 * signed.itemsize - 1)
    np.left_shift(signed, 1, out=signed)
    np.bitwise_xor(signed, signs, out=signed)
    return difference


def _apply(numbers: _Array, base: _Array, out: _Array, *, floating: bool) -> None:
    """The inverse of `_differences`; changes `numbers`."""
    one = numbers.dtype.type(1)
    signs = numbers & one
    np.negative(signs, out=signs)
    np.right_shift(numbers, one, out=numbers)
    np.bitwise_xor(numbers, signs, out=numbers)
    if floating:
        np.add(numbers, _ordered(base), out=numbers)
        _values(numbers, out)
    else:
        np.add(numbers, base, out=out)


def _packed(codes: _Array, bits: int) -> _Array:
    """Codes of `bits` bits, the first in the lowest bits of a byte."""
    each = 8 // bits
    padded = np.zeros(-(-len(codes) // each) * each, np.uint8)
    padded[: len(codes)] = codes
    if bits == 2:
        words = padded.view("<u4")
        words |= words >> np.uint32(6)
        words |= words >> np.uint32(12)
    else:
        words = padded.view("<u2")
        words |= words >> np.uint16(4)
    return words.astype(np.uint8)


def _table(bits: int) -> _Array:
    each = 8 // bits
    codes = np.arange(256)[:, None] >> (bits * np.arange(each)) & ((1 << bits) - 1)
    return codes.astype(np.uint8).view(f"<u{each}").reshape(256)


_UNPACKING = {bits: _table(bits) for bits in (2, 4)}


def _unpacked(packed: _Array, bits: int) -> _Array:
    return _UNPACKING[bits][packed].view(np.uint8)


# ------------------------------------------------------------------------------------------------------ streams


def _stream(data: _Array) -> Iterator[bytes]:
    plain = data.tobytes()
    frame = _compressed(plain)
    stored = plain if frame is None else frame
    yield _STREAM.pack(_PLAIN if frame is None else _ZSTD, len(stored))
    yield stored


class _Engines(threading.local):
    """Making one takes longer than a short stream, and no two threads may use one."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_engines = _Engines()


def _compressed(plain: bytes) -> bytes | None:
    """A zstd frame, or None if it does not pay. Of long streams, a piece is tried first."""
    compressor = _engines.compressor
    if len(plain) > 4 * _PROBE:
        middle = len(plain) // 2
        if len(compressor.compress(plain[middle : middle + _PROBE])) >= _WORTH * _PROBE:
            return None
    frame = compressor.compress(plain)
    return frame if len(frame) < _WORTH * len(plain) else None


class _Streams:
    """The streams of a chunk, one behind the other."""

    def __init__(self, body: memoryview) -> None:
        self._body, self._at = body, 0

    def take(self, expected: int) -> _Array:
        """The next stream, which must have this many bytes."""
        head = self._body[self._at : self._at + _STREAM.size]
        if len(head) != _STREAM.size:
            raise DecodeError("a chunk with too few streams")
        how, length = _STREAM.unpack(head)
        self._at += _STREAM.size
        stored = self._body[self._at : self._at + length]
        self._at += length
        if len(stored) != length or how not in {_PLAIN, _ZSTD}:
            raise DecodeError(f"a stream of {length} bytes, of which {len(stored)} are there, stored as {how}")
        if how == _ZSTD:
            try:
                # the frame says how much memory it wants; so ask before giving it
                if zstandard.frame_content_size(stored) != expected:
                    raise DecodeError(f"a stream that does not hold {expected} bytes")
                stored = memoryview(_engines.decompressor.decompress(stored))
            except zstandard.ZstdError as error:
                raise DecodeError(f"a stream: {error}") from None
        if len(stored) != expected:
            raise DecodeError(f"a stream of {len(stored)} bytes, expected {expected}")
        return np.frombuffer(stored, np.uint8)

    def finish(self) -> None:
        """Raise DecodeError unless all streams were taken."""
        if self._at != len(self._body):
            raise DecodeError(f"{len(self._body) - self._at} bytes behind the last stream of a chunk")


# ------------------------------------------------------------------------------------------------------ choosing

_SAMPLES = 4
_SAMPLED = 1 << 14


def sample(data: memoryview, encodings: Sequence[str], base: memoryview | None = None) -> tuple[str, float]:
    """Which encoding makes a blob smallest, and the share of its bytes that remain, judged by a few of them.

    Args:
        data: its bytes.
        encodings: those to try; "raw" is always possible.
        base: as in `encode`.
    """
    step = max(len(data) // _SAMPLES, _SAMPLED) // 8 * 8
    starts = range(0, len(data), step)
    sampled = sum(len(data[start : start + _SAMPLED]) for start in starts)
    best = ("raw", 1.0)
    for encoding in encodings:
        stored = sum(
            len(piece)
            for start in starts
            for piece in encode(
                data[start : start + _SAMPLED], encoding, None if base is None else base[start : start + _SAMPLED]
            )
        )
        if stored / max(sampled, 1) < best[1]:
            best = (encoding, stored / sampled)
    return best
