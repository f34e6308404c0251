"""The keys of named data that delegates look up when they are loaded, as their payloads list them."""

from __future__ import annotations

import struct

from blobstore.core.constants import BACKEND_ID
from blobstore.core.formats import payload
from blobstore.core.formats.flatbuffer import STRING, U32, U64, Buffer, TableType, Vector

__all__ = ["keys_of", "xnnpack_keys"]

# The flatbuffer in a payload of XNNPACK (xnnpack/serialization/schema.fbs in ExecuTorch), as far as it is read here.
_XNNPACK_CONSTANT = TableType("ConstantDataOffset", offset=U64, size=U64, named_key=STRING)
_XNNPACK_GRAPH = TableType(
    "XNNGraph",
    version=STRING,
    xnodes=Vector(TableType("XNode")),
    xvalues=Vector(TableType("XValue")),
    num_externs=U32,
    input_ids=Vector(U32),
    output_ids=Vector(U32),
    constant_buffer=Vector(TableType("Buffer")),
    mem_buffer_sizes=Vector(U32),
    constant_data=Vector(_XNNPACK_CONSTANT),
)
_XNNPACK_HEADER = struct.Struct("<4x4s2xII")  # its magic, and where the flatbuffer begins and how long it is


def keys_of(backend: str, data: memoryview) -> dict[str, int | None] | None:
    """The keys that a delegate looks up in named data, with the sizes that its payload records; None for an unknown
    backend, and InvalidFileError if this is not a payload of the backend."""
    if backend == BACKEND_ID:
        return {constant.key: constant.nbytes for constant in payload.split(data)[2]}
    if backend != "XnnpackBackend":
        return None
    return dict.fromkeys(key for key, _ in xnnpack_keys(data) if key)


def xnnpack_keys(data: memoryview) -> list[tuple[str, int]]:
    """The key of each constant in a payload of XNNPACK, and where its text ends there; an empty one for a constant inside.

    Raises:
        InvalidFileError: it is not such a payload.
    """
    start, stop = 0, len(data)
    if len(data) >= _XNNPACK_HEADER.size:
        magic, begin, size = _XNNPACK_HEADER.unpack_from(data)
        if magic == b"XH00":  # without this header, the flatbuffer is everything
            start, stop = begin, begin + size
    keys = []
    for constant in Buffer(data[start:stop], "payload", start=8).root(_XNNPACK_GRAPH).tables("constant_data"):
        key = constant.string("named_key") or ""
        keys.append((key, start + constant.target("named_key") + 4 + len(key.encode())))
    return keys
