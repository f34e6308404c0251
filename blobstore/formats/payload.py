"""The description behind an inner backend's payload, read by the delegate that wraps it (docs/lowering.md).

    inner payload | zeros up to a multiple of 16 | flatbuffer | its length, 8 bytes | magic, 8 bytes

`schema/payload.fbs` is the flatbuffer. The inner payload comes first and unchanged, so that the inner backend alone can
run it, too.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import flatbuffers
import xxhash

from blobstore._generated.payload import Constant as FbConstant
from blobstore._generated.payload import Payload as FbPayload
from blobstore.errors import InvalidFileError

__all__ = ["MAGIC", "VERSION_SIZE", "Constant", "find_places", "split", "wrap"]

MAGIC = b"BSDELEG1"
FILE_IDENTIFIER = b"BD01"
VERSION = 1

VERSION_SIZE = 16
"""The number of bytes at the end of a key that the delegate replaces."""


@dataclass(frozen=True)
class Constant:
    """A blob that the inner backend requests.

    Attributes:
        key: its key.
        nbytes: its size.
        group: constants with the same number are packed together.
        places: where the last bytes of the key lie in the inner payload.
        packed: whether the inner backend has its own copy once it is initialized. If this is unknown it is False, and the
            blob stays in memory as long as the inner backend's handle.
        packing: a digest of what decides, besides their bytes, how the constants of the group are packed; empty if that is
            unknown.
    """

    key: str
    nbytes: int
    group: int
    places: tuple[int, ...]
    packed: bool = False
    packing: bytes = b""


def wrap(payload: bytes, inner: str, constants: Sequence[Constant]) -> bytes:
    """The payload of the delegate."""
    builder = flatbuffers.Builder(1024)
    tables = []
    for constant in constants:
        key = builder.CreateString(constant.key)
        FbConstant.StartPlacesVector(builder, len(constant.places))
        for place in reversed(constant.places):
            builder.PrependUint64(place)
        places = builder.EndVector()
        packing = builder.CreateByteVector(constant.packing) if constant.packing else None
        FbConstant.Start(builder)
        FbConstant.AddKey(builder, key)
        FbConstant.AddNbytes(builder, constant.nbytes)
        FbConstant.AddGroup(builder, constant.group)
        FbConstant.AddPlaces(builder, places)
        FbConstant.AddPacked(builder, constant.packed)
        if packing is not None:
            FbConstant.AddPacking(builder, packing)
        tables.append(FbConstant.End(builder))
    FbPayload.StartConstantsVector(builder, len(tables))
    for table in reversed(tables):
        builder.PrependUOffsetTRelative(table)
    vector = builder.EndVector()
    name = builder.CreateString(inner)
    digest = builder.CreateByteVector(xxhash.xxh3_128_digest(payload))
    FbPayload.Start(builder)
    FbPayload.AddVersion(builder, VERSION)
    FbPayload.AddInner(builder, name)
    FbPayload.AddSize(builder, len(payload))
    FbPayload.AddConstants(builder, vector)
    FbPayload.AddDigest(builder, digest)
    builder.Finish(FbPayload.End(builder), file_identifier=FILE_IDENTIFIER)
    body = bytes(builder.Output())
    return b"".join([payload, bytes(-len(payload) % 16), body, struct.pack("<Q", len(body)), MAGIC])


def split(data: bytes | memoryview) -> tuple[bytes, str, list[Constant]]:
    """The inner payload, the inner backend and the constants in a result of `wrap`.

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
        table = FbPayload.Payload.GetRootAs(body, 0)
        if table.Version() != VERSION:
            raise ValueError(f"its version is {table.Version()}, not {VERSION}")
        constants, left = [], length
        for i in range(table.ConstantsLength()):
            one = table.Constants(i)
            key, count = one.Key() or b"", one.PlacesLength()
            left -= 24 + len(key) + 8 * count + one.PackingLength()  # the least that it takes
            if left < 0:
                raise ValueError("its tables refer to the same bytes again and again")
            places = tuple(one.Places(j) for j in range(count))
            packing = bytes(one.Packing(j) for j in range(one.PackingLength()))
            constants.append(Constant(key.decode(), one.Nbytes(), one.Group(), places, one.Packed(), packing))
        if (inner := table.Inner()) is None:
            raise ValueError("it does not name the inner backend")
        return data[: table.Size()], inner.decode(), constants
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise InvalidFileError("payload", f"not the payload of a BlobStoreBackend: {error}") from None


def find_places(payload: bytes, key: str) -> tuple[int, ...]:
    """Where the version at the end of a key lies, for every flatbuffer string of a payload that is this key."""
    raw = key.encode()
    text = struct.pack("<I", len(raw)) + raw + b"\0"
    return tuple(match.start() + 4 + len(raw) - VERSION_SIZE for match in re.finditer(re.escape(text), payload))
