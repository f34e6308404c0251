"""How the bytes of a part travel: under zstd, as byte planes, or as a patch against a blob that is there already.

A part is encoded in chunks of `CHUNK` bytes, so that neither side needs more memory than a few chunks. Each chunk is four
bytes, the length of what follows in little-endian order, and one zstd frame with its content size:

    zstd        the chunk
    planes:W    its byte planes: all first bytes of elements of W bytes, then all second ones, and so on; what remains
                behind the last whole element follows as it is
    patch:W     the same of the exclusive-or of the chunk with the bytes at the same place in another blob
    copy        nothing: the part has the bytes of another blob

In trained weights the bytes with signs and exponents repeat, and those of mantissas do not; planes separate them. Most
elements of a fine-tune in bfloat16 are as they were, and their exclusive-or is zero.

What is decoded is compared with its digest by the caller. Here only sizes are checked, before memory is taken.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from blobstore.core.distribution import install
from blobstore.core.errors import MissingDependencyError

try:
    import zstandard
except ImportError as error:
    raise MissingDependencyError(f"encoding blobs needs zstandard: {install('releases')}") from error

__all__ = ["CHUNK", "DecodeError", "best_width", "decode", "encode"]

CHUNK = 1 << 20
"""Bytes of a part that are encoded together; a processor's cache holds the planes of one chunk."""

_LEVEL = 1  # a higher one is slower and hardly smaller in planes
_PATCH_LEVEL = 3
_LARGEST = CHUNK + CHUNK // 64 + 1024  # of a frame: what zstd cannot compress grows a little
_LENGTH = struct.Struct("<I")


class DecodeError(ValueError):
    """Why bytes are not an encoded part."""


def _planes(chunk: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint8]:
    if width == 1:
        return chunk
    whole = len(chunk) // width
    out = np.empty(len(chunk), np.uint8)
    out[: whole * width].reshape(width, whole)[:] = chunk[: whole * width].reshape(whole, width).T
    out[whole * width :] = chunk[whole * width :]
    return out


def _elements(planes: npt.NDArray[np.uint8], width: int, out: npt.NDArray[np.uint8]) -> None:
    """Write the chunk whose byte planes are given."""
    whole = len(planes) // width
    if width == 2:  # twice as fast as bytes one by one
        pairs = out[: 2 * whole].view("<u2")
        np.multiply(planes[whole : 2 * whole], np.uint16(256), out=pairs, dtype="<u2")
        np.add(pairs, planes[:whole], out=pairs)
    else:
        for plane in range(width):
            out[plane : whole * width : width] = planes[plane * whole : (plane + 1) * whole]
    out[whole * width :] = planes[whole * width :]


def encode(data: memoryview, width: int, base: memoryview | None = None) -> Iterator[bytes]:
    """The chunks of a part, encoded.

    Args:
        data: its bytes.
        width: bytes of an element: 1, 2, 4 or 8; 1 leaves the bytes in their order.
        base: for a patch, the bytes of the other blob, as many.
    """
    compressor = zstandard.ZstdCompressor(level=_LEVEL if base is None else _PATCH_LEVEL)
    for start in range(0, len(data), CHUNK):
        chunk = np.frombuffer(data[start : start + CHUNK], np.uint8)
        if base is not None:
            chunk = chunk ^ np.frombuffer(base[start : start + CHUNK], np.uint8)
        frame = compressor.compress(memoryview(_planes(chunk, width)))  # type: ignore[arg-type]
        yield _LENGTH.pack(len(frame))
        yield frame


def decode(
    encoding: str, size: int, read: Callable[[int], bytes], base: Callable[[int, int], bytes] | None = None
) -> Iterator[memoryview]:
    """The bytes of a part, chunk by chunk; a chunk is valid until the next one.

    Args:
        encoding: any but "copy".
        size: bytes of the part.
        read: gives the next n bytes of what was stored, or fewer at its end.
        base: for a patch, gives bytes of the other blob: first byte, and number.

    Raises:
        DecodeError: the stored bytes are not `size` bytes in this encoding.
    """
    kind, _, digits = encoding.partition(":")
    width = int(digits or 1)
    decompressor = zstandard.ZstdDecompressor()
    room = np.empty(min(size, CHUNK), np.uint8)
    for start in range(0, size, CHUNK):
        expected = min(CHUNK, size - start)
        head = read(_LENGTH.size)
        length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
        if not 0 < length <= _LARGEST:
            raise DecodeError(f"a chunk of {length} bytes at byte {start}")
        frame = read(length)
        try:
            # the frame says how much memory it wants; so ask before giving it
            if len(frame) != length or zstandard.frame_content_size(frame) != expected:
                raise DecodeError(f"a chunk at byte {start} that does not hold {expected} bytes")
            raw = np.frombuffer(decompressor.decompress(frame), np.uint8)
        except zstandard.ZstdError as error:
            raise DecodeError(f"a chunk at byte {start}: {error}") from None
        if len(raw) != expected:
            raise DecodeError(f"{len(raw)} bytes at byte {start}, expected {expected}")
        if width == 1 and kind != "patch":
            yield memoryview(raw)  # type: ignore[arg-type]
            continue
        out = room[:expected]
        _elements(raw, width, out)
        if kind == "patch":
            assert base is not None  # noqa: S101 - the caller has the other blob
            out ^= np.frombuffer(base(start, expected), np.uint8)
        yield memoryview(out)  # type: ignore[arg-type]


_SAMPLES = 4


def best_width(data: memoryview, widths: Iterable[int], base: memoryview | None = None) -> tuple[int, float]:
    """Which width makes a part smallest, and the share of its bytes that remain; judged by a few chunks.

    Args:
        data: its bytes.
        widths: those to try.
        base: as in `encode`.
    """
    chunks = -(-len(data) // CHUNK)
    starts = sorted({chunks * i // _SAMPLES * CHUNK for i in range(_SAMPLES)})
    sampled = sum(len(data[start : start + CHUNK]) for start in starts)
    best = (1, 1.0)
    for width in widths:
        stored = sum(
            len(piece)
            for start in starts
            for piece in encode(
                data[start : start + CHUNK], width, None if base is None else base[start : start + CHUNK]
            )
        )
        if stored / max(sampled, 1) < best[1]:
            best = (width, stored / sampled)
    return best
