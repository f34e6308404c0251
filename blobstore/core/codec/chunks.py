"""Chunks of encoded blobs. `blobs` has the format, and takes `split_chunk` and `decode_chunk` of the native module if it is
there; these are the same with numpy."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from blobstore.core.requirements import needed

with needed("encoding blobs needs zstandard", "pool"):
    import zstandard

__all__ = ["decode_chunk", "join_chunk", "split_chunk"]

_LEVEL = 1  # a higher one is slower and hardly smaller
_WORTH = 0.95  # a stream that zstd does not make smaller than this is stored as it is: reading it is a copy
_PROBE = 1 << 14
_LENGTH = struct.Struct("<I")
_STREAM = struct.Struct("<BI")
_PLAIN, _ZSTD = 0, 1
_KINDS = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "u8": "<u8", "f2": "<u2", "f4": "<u4", "f8": "<u8"}

_Array = npt.NDArray[Any]


def split_chunk(chunk: memoryview, encoding: str, base: memoryview | None) -> Iterable[bytes]:
    """The streams that an encoding makes of a chunk, each as it is."""
    other = None if base is None else np.frombuffer(base, np.uint8)
    return (stream.tobytes() for stream in _split(np.frombuffer(chunk, np.uint8), encoding, other))


def join_chunk(streams: Iterable[bytes]) -> bytes:
    """A chunk of these streams, compressed where that pays, with its length in front."""
    body = bytearray(_LENGTH.size)
    for stream in streams:
        frame = _compressed(stream)
        stored = stream if frame is None else frame
        body += _STREAM.pack(_PLAIN if frame is None else _ZSTD, len(stored))
        body += stored
    _LENGTH.pack_into(body, 0, len(body) - _LENGTH.size)
    return bytes(body)


def decode_chunk(body: memoryview, encoding: str, base: memoryview | None, out: memoryview) -> None:
    """Write a chunk.

    Args:
        body: what `join_chunk` made of it, without the length.
        encoding: any but raw.
        base: for `near`, as many bytes of the base as the chunk has.
        out: where its bytes go.

    Raises:
        ValueError: the body is not a chunk of this size in this encoding.
    """
    other = None if base is None else np.frombuffer(base, np.uint8)
    _decoded(body, encoding, other, np.frombuffer(out, np.uint8))


def _split(chunk: _Array, encoding: str, base: _Array | None) -> Iterator[_Array]:
    kind, _, rest = encoding.partition(":")
    if kind == "planes":
        whole = len(chunk) // int(rest) * int(rest)
        yield from _planes(chunk[:whole], int(rest))
        yield chunk[whole:]
        return
    assert base is not None  # noqa: S101 - near has one
    order, _, bits = rest.partition(":")
    dtype = np.dtype(_KINDS[order])
    whole = len(chunk) // dtype.itemsize * dtype.itemsize
    numbers = _differences(chunk[:whole].view(dtype), base[:whole].view(dtype), floating=order[0] == "f")
    if bits != "0":
        most = dtype.type((1 << int(bits)) - 1)
        yield _packed(np.minimum(numbers, most).astype(np.uint8), int(bits))
        numbers = numbers[numbers >= most] - most
    yield from _planes(numbers.view(np.uint8), dtype.itemsize)
    yield chunk[whole:]


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
    codes = _UNPACKING[bits][streams.take(-(-count * bits // 8))].view(np.uint8)[:count]
    numbers = codes.astype(dtype)
    escaped = np.flatnonzero(codes == most)
    large = np.empty(len(escaped), dtype)
    _join([streams.take(len(escaped)) for _ in range(dtype.itemsize)], dtype.itemsize, large.view(np.uint8))
    numbers[escaped] = large + dtype.type(most)
    return numbers


def _planes(data: _Array, width: int) -> Sequence[_Array]:
    return [data[plane::width] for plane in range(width)]


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
            raise ValueError("a chunk with too few streams")
        how, length = _STREAM.unpack(head)
        self._at += _STREAM.size
        stored = self._body[self._at : self._at + length]
        self._at += length
        if len(stored) != length or how not in {_PLAIN, _ZSTD}:
            raise ValueError(f"a stream of {length} bytes, of which {len(stored)} are there, stored as {how}")
        if how == _ZSTD:
            try:
                # before memory is taken; an empty stream is never stored as a frame
                if not expected or zstandard.frame_content_size(stored) != expected:
                    raise ValueError(f"a stream that does not hold {expected} bytes")
                stored = memoryview(_engines.decompressor.decompress(stored, allow_extra_data=False))
            except zstandard.ZstdError as error:
                raise ValueError(f"a stream: {error}") from None
        if len(stored) != expected:
            raise ValueError(f"a stream of {len(stored)} bytes, expected {expected}")
        return np.frombuffer(stored, np.uint8)

    def finish(self) -> None:
        """Raise ValueError unless all streams were taken."""
        if self._at != len(self._body):
            raise ValueError(f"{len(self._body) - self._at} bytes behind the last stream of a chunk")
