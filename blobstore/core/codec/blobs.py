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
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from blobstore.core.codec import chunks
from blobstore.core.version import __version__

try:
    from blobstore_runtime import _codec
except ImportError:
    _codec = None

__all__ = [
    "CHUNK",
    "ENOUGH",
    "LARGEST_CHUNK",
    "DecodeError",
    "StoredChunk",
    "check_encoding",
    "cut",
    "decode",
    "encode",
    "near_encodings",
    "plane_encodings",
    "sample",
    "stored_chunks",
]

CHUNK = 1 << 20
"""Bytes of a blob that are encoded together; a processor's cache holds what becomes of one chunk."""

LARGEST_CHUNK = CHUNK + CHUNK // 2 + 64
"""Bytes of an encoded chunk at the most: codes of half a byte, beside them all elements, and the heads of streams."""

ENOUGH = 1 / 8
"""Of a blob: where an encoding leaves no more, others are not tried."""

_LENGTH = struct.Struct("<I")
_NOTHING = memoryview(b"")
_BITS = (2, 4, 0)
_KINDS = ("u1", "u2", "u4", "u8", "f2", "f4", "f8")

_chunks = chunks if _codec is None or _codec.version != __version__ else _codec  # the same functions, in C++


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
        yield from map(bytes, cut(data))
        return
    for start in range(0, len(data), CHUNK):
        other = None if base is None else base[start : start + CHUNK]
        yield chunks.join_chunk(_chunks.split_chunk(data[start : start + CHUNK], encoding, other))


def cut(data: memoryview) -> Iterator[memoryview]:
    """Bytes as chunks."""
    return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def decode(
    encoding: str,
    size: int,
    stored: memoryview,
    base: memoryview | Iterator[memoryview] | None = None,
    room: memoryview | None = None,
    within: range | None = None,
) -> Iterator[memoryview]:
    """The bytes of a blob, chunk by chunk.

    Args:
        encoding: any that `check_encoding` accepts.
        size: bytes of the blob.
        stored: what `encode` made of it.
        base: for `near`, the bytes of the base, `size` of them; whole or as chunks.
        room: where chunks are put, unless they are stored as they are. If it has `size` bytes, they lie there one behind the
            other; if it has those of a chunk, or is missing, each is valid until the next one.
        within: only chunks with some of these bytes are decoded; by default all. Not for `near` with a base in chunks.

    Raises:
        DecodeError: the stored bytes are not `size` bytes in this encoding.
    """
    room = memoryview(bytearray(min(size, CHUNK))) if room is None else room
    others = (cut(base) if isinstance(base, memoryview) else base) if encoding.startswith("near") else None
    for number, chunk in stored_chunks(encoding, size, stored, within):
        start = number * CHUNK if len(room) >= size else 0
        other = None if others is None else next(others, _NOTHING)
        yield chunk.decoded(other, room[start : start + CHUNK])


class StoredChunk(NamedTuple):
    """A chunk as it is stored.

    Attributes:
        encoding: of the blob.
        size: bytes of what is decoded.
        body: what is stored, without the length.
    """

    encoding: str
    size: int
    body: memoryview

    def decoded(self, base: memoryview | None, room: memoryview) -> memoryview:
        """Its bytes, at the beginning of `room`, unless they are stored as they are.

        Raises:
            DecodeError: the stored bytes are not as many bytes in this encoding.
        """
        if self.encoding == "raw":
            return self.body
        try:
            _chunks.decode_chunk(self.body, self.encoding, base, room[: self.size])
        except ValueError as error:
            raise DecodeError(str(error)) from None
        return room[: self.size]


def stored_chunks(
    encoding: str, size: int, stored: memoryview, within: range | None = None
) -> Iterator[tuple[int, StoredChunk]]:
    """The chunks of a blob with their numbers, to be decoded in any order; arguments and errors as for `decode`."""
    if encoding == "raw":
        if len(stored) != size:
            raise DecodeError(f"{len(stored)} bytes, expected {size}")
        bodies = iter([(start, stored[start : start + CHUNK]) for start in range(0, size, CHUNK)])
    else:
        bodies = _bodies(stored, size, within or range(size))
    for start, body in bodies:
        yield start // CHUNK, StoredChunk(encoding, min(CHUNK, size - start), body)


def _bodies(stored: memoryview, size: int, within: range) -> Iterator[tuple[int, memoryview]]:
    """Where each chunk with some of the bytes `within` begins, and what is stored for it, without its length."""
    at = 0
    for start in range(0, size, CHUNK):
        head = stored[at : at + _LENGTH.size]
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        body = stored[at + _LENGTH.size : at + _LENGTH.size + length]
        if not 0 < length == len(body) or length > LARGEST_CHUNK:
            raise DecodeError(f"a chunk of {length} bytes at byte {start}, of which {len(body)} are there")
        at += _LENGTH.size + length
        if start < within.stop and start + CHUNK > within.start:
            yield start, body
    if at != len(stored):
        raise DecodeError(f"{len(stored) - at} bytes behind the last chunk")


_SAMPLES = 4
_SAMPLED = 1 << 14
_LEAST = 1 << 12
_SHARE = 64  # of a blob, in each sample: looking at a small one would take longer than encoding it


def sample(data: memoryview, encodings: Sequence[str], base: memoryview | None = None) -> tuple[str, float]:
    """Which encoding makes a blob smallest, and the share of its bytes that remain, judged by a few of them,
    which are encoded together.

    Args:
        data: its bytes.
        encodings: those to try; "raw" is always possible.
        base: as in `encode`.
    """
    length = min(max(len(data) // _SHARE // 8 * 8, _LEAST), _SAMPLED)
    step = max(len(data) // _SAMPLES, length) // 8 * 8
    spans = [slice(start, start + length) for start in range(0, len(data), step)]
    part = memoryview(b"".join(map(data.__getitem__, spans)))
    base_part = None if base is None else memoryview(b"".join(map(base.__getitem__, spans)))
    best = ("raw", 1.0)
    for encoding in encodings if part else ():
        share = sum(len(piece) for piece in encode(part, encoding, base_part)) / len(part)
        if share < best[1]:
            best = (encoding, share)
        if best[1] < ENOUGH:
            break
    return best
