"""Where a .ptd is bounded: everything that is trusted of a file is checked here, once, when it is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blobstore.core.errors import LayoutError
from blobstore.core.formats.ptd.columns import Columns, ColumnsError, Positions
from blobstore.core.formats.ptd.header import Header
from blobstore.core.formats.ptd.manifest import Manifest, ManifestError, find_manifest
from blobstore.core.formats.ptd.opaque import hide_stand_ins
from blobstore.core.memory.digest import digest
from blobstore.core.memory.layout import MAX_RANK, ScalarType, TensorLayout

__all__ = ["Contents", "read_contents"]


class Contents(NamedTuple):
    """What a checked file says.

    Attributes:
        keys: in the order of the file, unique.
        segment_index: for each key, the index of its segment.
        layouts: for each key, its layout; None for an opaque blob.
        starts, ends: of each segment, in bytes from the start of the file.
        manifest: the digests and the metadata; None if the file has no manifest.
        header: the header.
    """

    keys: list[str]
    segment_index: list[int]
    layouts: list[TensorLayout | None]
    starts: list[int]
    ends: list[int]
    manifest: Manifest | None
    header: Header


def read_contents(data: memoryview) -> Contents:
    """Check a whole file, except for its blobs.

    Raises:
        PtdHeaderError, ColumnsError, LayoutError: the structure is malformed.
        ManifestError: the manifest, or what it covers with its digest, is damaged.
    """
    header = Header.parse(data)
    columns = Columns(data[: header.flatbuffer_end])
    version, segments, named_data = columns.fields(columns.root(), {0: 4, 1: 4, 2: 4})
    if version[0] and (found := int(columns.u32(version)[0])) != 0:
        raise ColumnsError(f"expected schema version 0, found {found}")
    if not segments[0] or not named_data[0]:
        raise ColumnsError("the list of segments or of keys is missing")

    offset_at, size_at = columns.fields(columns.tables(segments), {0: 8, 1: 8})
    starts, ends = _segments(columns.u64(offset_at), columns.u64(size_at), header)

    key_at, index_at, layout_at = columns.fields(columns.tables(named_data), {0: 4, 1: 4, 2: 4})
    keys = _keys(columns, key_at)
    index = np.where(index_at != 0, columns.u32(index_at), 0).astype(np.int64)
    if (index >= len(starts)).any():
        bad = int(np.argmax(index >= len(starts)))
        raise ColumnsError(f"key {keys[bad]!r} is in segment {index[bad]}, there are {len(starts)}")
    sizes = (ends - starts)[index] if len(index) else index
    layouts = _layouts(columns, keys, layout_at, sizes)

    manifest = None
    if (place := find_manifest(data, header)) is not None:
        manifest = Manifest.parse(place, len(starts), len(keys))
        hide_stand_ins(manifest.opaque, keys, layouts, sizes)
        if digest(data[: header.segment_base]).xxh3_128 != manifest.head:
            raise ManifestError(f"the first {header.segment_base} bytes are damaged: their digest differs")
        _check_alignment(keys, starts[index], manifest)
    return Contents(keys, index.tolist(), layouts, starts.tolist(), ends.tolist(), manifest, header)


def _segments(
    offsets: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], header: Header
) -> tuple[Positions, Positions]:
    """The start and the end of each segment in the file, checked: all lie within it, and none overlap."""
    limit = np.uint64(header.segment_data_size)
    bad = (offsets > limit) | (sizes > limit - np.minimum(offsets, limit))
    if bad.any():
        i = int(np.argmax(bad))
        raise ColumnsError(
            f"segment {i} of {sizes[i]} bytes at {offsets[i]} is not within the {limit} bytes of segments"
        )
    starts = offsets.astype(np.int64) + header.segment_base
    ends = starts + sizes.astype(np.int64)
    order = np.argsort(starts, kind="stable")
    order = order[sizes[order] != 0]
    overlap = ends[order[:-1]] > starts[order[1:]]
    if overlap.any():
        i = int(np.argmax(overlap))
        raise ColumnsError(f"segments {order[i]} and {order[i + 1]} overlap")
    return starts, ends


def _keys(columns: Columns, key_at: Positions) -> list[str]:
    if (key_at == 0).any():
        raise ColumnsError(f"entry {int(np.argmax(key_at == 0))} has no key")
    starts, counts = columns.vectors(key_at, 1)
    if counts.sum() > columns.size:
        raise ColumnsError("the keys together are longer than the flatbuffer")
    keys = []
    head = columns.raw(0, columns.size)
    for start, end in zip(starts.tolist(), (starts + counts).tolist(), strict=True):
        try:
            keys.append(head[start:end].decode())
        except UnicodeDecodeError as error:
            raise ColumnsError(f"key {head[start:end]!r} is not valid UTF-8: {error.reason}") from None
    if len(set(keys)) != len(keys):
        seen: set[str] = set()
        twice = next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ColumnsError(f"key {twice!r} occurs twice")
    return keys


def _layouts(
    columns: Columns, keys: Sequence[str], layout_at: Positions, sizes: Positions
) -> list[TensorLayout | None]:
    """The layout of each entry, None for opaque blobs; each agrees with the `sizes` of the entries' segments."""
    of_entries: list[TensorLayout | None] = [None] * len(keys)
    present = np.flatnonzero(layout_at)
    tables, table_of = np.unique(columns.follow(layout_at[present]), return_inverse=True)

    def key_of(table: int) -> str:
        """A key that has this layout, for messages."""
        at: int = present[int(np.argmax(table_of == table))]
        return keys[at]

    layouts = _read_layouts(columns, tables, key_of)
    nbytes = np.array([layout.nbytes for layout in layouts], np.int64)
    wrong = nbytes[table_of] != sizes[present]
    if wrong.any():
        i = int(np.argmax(wrong))
        table = table_of[i]
        raise LayoutError(
            f"key {keys[present[i]]!r} is {layouts[table]} of {nbytes[table]} bytes, but its segment has "
            f"{sizes[present[i]]}"
        )
    for entry, table in zip(present.tolist(), table_of.tolist(), strict=True):
        of_entries[entry] = layouts[table]
    return of_entries


def _read_layouts(columns: Columns, tables: Positions, key_of: Callable[[int], str]) -> list[TensorLayout]:
    """The layout in each of the tables. Equal layouts become one object, so that many equal layers cost little."""
    type_at, sizes_at, order_at = columns.fields(tables, {0: 1, 1: 4, 2: 4})
    types = columns.u8(type_at).view(np.int8)
    size_start, rank = columns.vectors(sizes_at, 4)
    order_start, order_rank = columns.vectors(order_at, 1)
    wrong = (rank != order_rank) | (rank > MAX_RANK)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise LayoutError(
            f"key {key_of(i)!r} has {rank[i]} sizes and a dim_order of {order_rank[i]}, at most {MAX_RANK} are possible"
        )
    if (4 * rank + order_rank).sum() > columns.size:  # many tables may refer to the same sizes
        raise LayoutError("the layouts together are longer than the flatbuffer")
    layouts: dict[int, TensorLayout] = {}
    by_identity: dict[tuple[int, bytes], TensorLayout] = {}
    for r in np.unique(rank).tolist():
        rows = np.flatnonzero(rank == r)
        matrix = np.empty((len(rows), 1 + 2 * r), "<i4")  # type, sizes, dim order
        matrix[:, 0] = types[rows]
        matrix[:, 1 : 1 + r] = columns.gather(size_start[rows], r, 4)
        matrix[:, 1 + r :] = columns.gather(order_start[rows], r, 1)
        raw, width = matrix.tobytes(), matrix.shape[1] * 4
        for i, row in enumerate(rows.tolist()):
            identity = (r, raw[i * width : (i + 1) * width])
            if identity not in by_identity:
                kind, *numbers = matrix[i].tolist()
                try:
                    by_identity[identity] = TensorLayout(_scalar_type(kind), tuple(numbers[:r]), tuple(numbers[r:]))
                except LayoutError as error:
                    raise LayoutError(f"key {key_of(row)!r}: {error}") from None
            layouts[row] = by_identity[identity]
    return [layouts[row] for row in range(len(tables))]


def _scalar_type(number: int) -> ScalarType:
    try:
        return ScalarType(number)
    except ValueError:
        raise LayoutError(f"unknown scalar type {number}") from None


def _check_alignment(keys: Sequence[str], starts: Positions, manifest: Manifest) -> None:
    asked = manifest.alignments.astype(np.int64)
    wrong = (asked == 0) | (starts % np.maximum(asked, 1) != 0)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ColumnsError(f"key {keys[i]!r} has alignment {asked[i]} but lies at byte {starts[i]}")
