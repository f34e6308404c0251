"""The description behind an inner backend's payload, read by the delegate that wraps it (docs/lowering.md).

    inner payload | zeros up to a multiple of 16 | flatbuffer | its length, 8 bytes | magic, 8 bytes

`schema/payload.fbs` is the flatbuffer. The inner payload comes first, and unchanged if it has no holes, so that the inner
backend alone can run it, too. Holes are where blobs lay in it; the delegate fills them before the inner backend sees it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from blobstore.core.constants import KEY_VERSION_SIZE as VERSION_SIZE
from blobstore.core.constants import MOST_HOLES
from blobstore.core.constants import PAYLOAD_IDENTIFIER as FILE_IDENTIFIER
from blobstore.core.constants import PAYLOAD_MAGIC as MAGIC
from blobstore.core.constants import PAYLOAD_VERSION as VERSION
from blobstore.core.errors import InvalidFileError
from blobstore.core.formats.flatbuffer import BOOL, STRING, U8, U32, U64, Buffer, Table, TableType, Vector
from blobstore.core.formats.table_builder import TableBuilder

__all__ = ["MAGIC", "VERSION_SIZE", "Constant", "find_places", "split", "wrap"]


CONSTANT = TableType(
    "Constant",
    key=STRING,
    nbytes=U64,
    group=U32,
    places=Vector(U64),
    packed=BOOL,
    packing=Vector(U8),
    holes=Vector(U64),
)
PAYLOAD = TableType(
    "Payload", version=U32, inner=STRING, size=U64, constants=Vector(CONSTANT), digest=Vector(U8), filled=U64
)


@dataclass(frozen=True)
class Constant:
    """A blob that the inner backend requests. A blob that operators pack in different ways is several constants.

    Attributes:
        key: its key.
        nbytes: its size.
        group: constants with the same number are packed together.
        places: where the last bytes of the key lie in the inner payload.
        packed: whether the inner backend has its own copy once it is initialized. If this is unknown it is False, and the
            blob stays in memory as long as the inner backend's handle.
        packing: a digest of what decides, besides the bytes of its group, how the constant is packed; empty if that is
            unknown.
        holes: where the blob lies, whole, in the inner payload; it is cut out there.
    """

    key: str
    nbytes: int
    group: int
    places: tuple[int, ...]
    packed: bool = False
    packing: bytes = b""
    holes: tuple[int, ...] = ()


def wrap(payload: bytes, inner: str, constants: Sequence[Constant]) -> bytes:
    """The payload of the delegate.

    Args:
        payload: what the inner backend gets, with the blobs in the holes.
        inner: the inner backend.
        constants: the blobs that it requests, and those in the holes.

    Raises:
        ValueError: holes overlap or leave the payload, or it also has keys, or one of them twice.
    """
    holes = _holes(constants)
    filled = len(payload) if holes else 0
    _check_holes(len(payload) - sum(stop - start for start, stop in holes), filled, constants)
    between = zip([0, *(stop for _, stop in holes)], [*(start for start, _ in holes), len(payload)], strict=True)
    payload = b"".join(payload[start:stop] for start, stop in between)
    builder = TableBuilder(1024)
    tables = builder.references([_write(builder, constant) for constant in constants])
    name = builder.CreateString(inner)
    digest = builder.CreateByteVector(xxhash.xxh3_128_digest(payload))
    table = builder.table(
        PAYLOAD,
        version=VERSION,
        inner=name,
        size=len(payload),
        constants=tables,
        digest=digest,
        filled=filled or None,
    )
    body = builder.finish(table, FILE_IDENTIFIER)
    return b"".join([payload, bytes(-len(payload) % 16), body, struct.pack("<Q", len(body)), MAGIC])


def split(data: bytes | memoryview) -> tuple[bytes, str, list[Constant]]:
    """The inner payload without what was cut out, the inner backend and the constants in a result of `wrap`.

    Raises:
        InvalidFileError: the bytes are not a result of `wrap`.
    """
    data = bytes(data)
    try:
        if data[-8:] != MAGIC:
            raise ValueError("its magic is missing")
        (length,) = struct.unpack("<Q", data[-16:-8])
        body = data[len(data) - 16 - length : -16]
        if len(body) != length or body[4:8] != FILE_IDENTIFIER:
            raise ValueError("its description is missing")
        table = Buffer(memoryview(body), "payload", start=8).root(PAYLOAD)
        version, size = table.scalar("version"), table.scalar("size")
        if version != VERSION:
            raise ValueError(f"its version is {version}, not {VERSION}")
        constants = [_read(constant) for constant in table.tables("constants")]
        _check_holes(size, table.scalar("filled"), constants)
        if (inner := table.string("inner")) is None:
            raise ValueError("it does not name the inner backend")
        if size > len(data) - 16 - length:
            raise ValueError("the inner payload does not fit")
        payload = data[:size]
        if bytes(table.numbers("digest")) != xxhash.xxh3_128_digest(payload):
            raise ValueError("the inner payload has another digest than was recorded")
        return payload, inner, constants
    except (InvalidFileError, ValueError, struct.error) as error:
        reason = error.reason if isinstance(error, InvalidFileError) else error
        raise InvalidFileError("payload", f"not the payload of a BlobStoreBackend: {reason}") from None


def _write(builder: TableBuilder, constant: Constant) -> int:
    key = builder.CreateString(constant.key)
    places = builder.numbers(U64, constant.places)
    holes = builder.numbers(U64, constant.holes) if constant.holes else None
    packing = builder.CreateByteVector(constant.packing) if constant.packing else None
    return builder.table(
        CONSTANT,
        key=key,
        nbytes=constant.nbytes,
        group=constant.group,
        places=places,
        packed=constant.packed,
        packing=packing,
        holes=holes,
    )


def _read(table: Table) -> Constant:
    return Constant(
        table.string("key") or "",
        table.scalar("nbytes"),
        table.scalar("group"),
        table.numbers("places"),
        bool(table.scalar("packed")),
        bytes(table.numbers("packing")),
        table.numbers("holes"),
    )


def _holes(constants: Sequence[Constant]) -> list[tuple[int, int]]:
    """Where each hole begins and ends, in order."""
    return sorted((hole, hole + constant.nbytes) for constant in constants for hole in constant.holes)


def _check_holes(size: int, filled: int, constants: Sequence[Constant]) -> None:
    holes = _holes(constants)
    if not holes and not filled:
        return
    at = 0
    for start, stop in holes:
        if start < at or stop == start or stop > filled:
            raise ValueError("holes are empty, overlap or leave the payload")
        at = stop
    if size + sum(stop - start for start, stop in holes) != filled:
        raise ValueError("the inner payload and its holes do not have the size that was recorded")
    if len({constant.key for constant in constants}) < len(constants):
        raise ValueError("a key occurs twice")
    if any(constant.places for constant in constants):
        raise ValueError("a payload with holes has keys in it, which would move when the holes are filled")
    if any(len(constant.holes) > MOST_HOLES for constant in constants):
        raise ValueError(f"a constant has more than {MOST_HOLES} holes")


def find_places(payload: bytes, key: str) -> tuple[int, ...]:
    """Where the version at the end of a key lies, for every flatbuffer string of a payload that is this key."""
    raw = key.encode()
    text = struct.pack("<I", len(raw)) + raw + b"\0"
    return tuple(match.start() + 4 + len(raw) - VERSION_SIZE for match in re.finditer(re.escape(text), payload))
