"""Encoding the table of contents of a .ptd, all tables of one type in one step.

The result is an ordinary FT01 flatbuffer (`schema/flat_tensor.fbs`). A general builder makes it object by object, back
to front, which for 50,000 keys takes longer than writing the blobs. Every table here has one of five shapes, so their
positions can be computed and the tables filled as arrays. Format: https://flatbuffers.dev/internals/
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blobstore.core.formats.alignment import align_up
from blobstore.core.formats.ptd.header import FILE_IDENTIFIER, FLATBUFFER_OFFSET, START
from blobstore.core.memory.layout import TensorLayout

__all__ = ["encode_table"]

_VERSION = 0

# A vtable: its own size, the size of the table, and the position of each field in the table, 0 if it is absent.
_VTABLES: dict[str, tuple[int, ...]] = {
    "flat_tensor": (10, 16, 4, 8, 12),  # version, segments, named_data
    "segment": (8, 24, 8, 16),  # offset, size
    "tensor": (10, 16, 4, 8, 12),  # key, segment_index, tensor_layout
    "opaque": (10, 12, 4, 8, 0),
    "layout": (10, 16, 12, 4, 8),  # scalar_type, sizes, dim_order
}
_VTABLE_ROOM = 12

_STRINGS = 1 << 14
"""How many strings are encoded at a time; fewer than all of them take less memory."""

_NULS = [b"\0" * (4 - rest) for rest in range(4)]
"""What ends a string, by the rest of its length."""

_SEGMENT = np.dtype({"names": ["vtable", "offset", "size"], "formats": ["<i4", "<u8", "<u8"], "offsets": [0, 8, 16]})
_NAMED_DATA = np.dtype([("vtable", "<i4"), ("key", "<u4"), ("segment_index", "<u4"), ("layout", "<u4")])


def encode_table(
    keys: Sequence[str],
    segment_index: Sequence[int] | npt.NDArray[np.int64],
    layouts: Sequence[TensorLayout | None],
    offsets: Sequence[int],
    sizes: Sequence[int],
) -> bytearray:
    """The flatbuffer with `FLATBUFFER_OFFSET` zero bytes at offset 8, where the header goes.

    Each key is in the segment of its index. Offsets count from the segment base, and ascend.
    """
    vtable = {name: START + FLATBUFFER_OFFSET + _VTABLE_ROOM * i for i, name in enumerate(_VTABLES)}
    root = align_up(START + FLATBUFFER_OFFSET + _VTABLE_ROOM * len(_VTABLES), 8)
    segment_vector = root + 16
    segments = align_up(segment_vector + 4 + 4 * len(sizes), 8)
    named_vector = segments + _SEGMENT.itemsize * len(sizes)
    named = named_vector + 4 + 4 * len(keys)
    layout_base = named + _NAMED_DATA.itemsize * len(keys)
    layout_at, layout_bytes = _layouts(layouts, layout_base, vtable["layout"])
    strings_base = layout_base + len(layout_bytes)
    string_at, out = _strings(keys, strings_base)

    segment_at = segments + _SEGMENT.itemsize * np.arange(len(sizes))
    segment_tables = np.zeros(len(sizes), _SEGMENT)
    segment_tables["vtable"] = segment_at - vtable["segment"]
    segment_tables["offset"] = offsets
    segment_tables["size"] = sizes

    named_at = named + _NAMED_DATA.itemsize * np.arange(len(keys))
    named_tables = np.zeros(len(keys), _NAMED_DATA)
    named_tables["vtable"] = named_at - np.where(layout_at != 0, vtable["tensor"], vtable["opaque"])
    named_tables["key"] = string_at - (named_at + 4)
    named_tables["segment_index"] = segment_index
    named_tables["layout"] = np.where(layout_at != 0, layout_at - (named_at + 12), 0)

    table = (root - vtable["flat_tensor"], _VERSION, segment_vector - (root + 8), named_vector - (root + 12))
    parts = [
        (0, struct.pack("<I4s", root, FILE_IDENTIFIER)),
        *((vtable[name], struct.pack(f"<{len(v)}H", *v)) for name, v in _VTABLES.items()),
        (root, struct.pack("<iIII", *table)),
        (segment_vector, _offset_vector(segment_vector, segment_at)),
        (segments, segment_tables.tobytes()),
        (named_vector, _offset_vector(named_vector, named_at)),
        (named, named_tables.tobytes()),
        (layout_base, layout_bytes),
    ]
    for place, part in parts:
        out[place : place + len(part)] = part
    return out


def _offset_vector(at: int, targets: npt.NDArray[np.int64]) -> bytes:
    """A vector at `at` whose elements lead to `targets`."""
    return struct.pack("<I", len(targets)) + (targets - (at + 4 + 4 * np.arange(len(targets)))).astype("<u4").tobytes()


def _layouts(layouts: Sequence[TensorLayout | None], base: int, vtable: int) -> tuple[npt.NDArray[np.int64], bytes]:
    """The position of each layout's table, 0 for None, and the tables; equal layouts share one."""
    positions: dict[TensorLayout | None, int] = {None: 0}
    parts: list[bytes] = []
    position = base
    for layout in layouts:
        if layout is None or layout in positions:
            continue
        positions[layout] = position
        rank = len(layout.sizes)
        order = position + 16 + 4 + 4 * rank
        part = struct.pack(
            f"<iIIb3xI{rank}iI{rank}B",
            position - vtable,
            16 - 4,
            order - (position + 8),
            layout.scalar_type,
            rank,
            *layout.sizes,
            rank,
            *layout.dim_order,
        )
        parts.append(part.ljust(align_up(len(part), 4), b"\0"))
        position += len(parts[-1])
    return np.array([positions[layout] for layout in layouts], np.int64), b"".join(parts)


def _strings(texts: Sequence[str], base: int) -> tuple[npt.NDArray[np.int64], bytearray]:
    """The position of each string, and the strings, behind `base` zero bytes: length, UTF-8, and at least one NUL up to a
    multiple of four."""
    out = bytearray(base)
    lengths: list[int] = []
    for start in range(0, len(texts), _STRINGS):
        encoded = [text.encode() for text in texts[start : start + _STRINGS]]
        out += b"".join([b"%b%b%b" % (len(raw).to_bytes(4, "little"), raw, _NULS[len(raw) % 4]) for raw in encoded])
        lengths += map(len, encoded)
    sizes = 8 + np.array(lengths, np.int64) // 4 * 4
    return base + np.cumsum(sizes) - sizes, out
