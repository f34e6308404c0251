"""Reading a .ptd: map it, decide once whether it can be trusted, then look up."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blobstore.disk.staging import Progress, check_progress
from blobstore.errors import IntegrityError, InvalidFileError, LayoutError
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.pickling import by_path
from blobstore.formats.ptd.columns import Columns, ColumnsError, Positions
from blobstore.formats.ptd.header import Header, HeaderError
from blobstore.formats.ptd.manifest import (
    KEY_PREFIX,
    OLD_MAGIC,
    Manifest,
    ManifestError,
    find_manifest,
    is_keyed_manifest,
)
from blobstore.memory.digest import Digest, digest
from blobstore.memory.layout import MAX_RANK, ScalarType, TensorLayout
from blobstore.memory.mapped_file import as_path, check_length, map_file
from blobstore.memory.tensors import bytes_of

__all__ = ["PtdDataMap", "open_ptd"]


class _Table(NamedTuple):
    """A checked table of contents: all that is trusted of a file."""

    keys: list[str]
    segment_index: list[int]
    layouts: list[TensorLayout | None]
    starts: list[int]  # of each segment, from the start of the file
    ends: list[int]
    manifest: Manifest | None
    manifest_start: int
    header: Header


class PtdDataMap(NamedDataMap):
    """The blobs of one .ptd file, mapped and read without a copy.

    Keys are in the order of the file. See `open_ptd` for what is checked when.

    Args:
        path: the file.
        data: the bytes, when something else has them; then the file is not opened, and `path` is what errors name.

    Attributes:
        path: the file, as given.
        metadata: the text that the file was written with.
        has_digests: whether the file carries a manifest, so that `verify` can tell damage.
    """

    def __init__(self, path: str | os.PathLike[str], *, data: memoryview | None = None) -> None:
        self.path = as_path(path)
        self.name = str(self.path)
        self._data = map_file(path) if data is None else bytes_of(data)
        try:
            table = _read(self._data)
        except (HeaderError, ColumnsError, LayoutError) as error:
            raise InvalidFileError(self.path, str(error)) from None
        except ManifestError as error:
            raise IntegrityError(self.path, str(error)) from None
        self._table = table
        self._digests: dict[int, Digest] = {}
        self._index = dict(zip(table.keys, itertools.count()))
        self.metadata: Mapping[str, str] = table.manifest.metadata if table.manifest else {}
        self.has_digests = table.manifest is not None

    def _key_list(self) -> Sequence[str]:
        return self._table.keys

    def _view(self, key: str) -> memoryview:
        segment = self._table.segment_index[self._index[key]]
        return self._data[self._table.starts[segment] : self._table.ends[segment]]

    def _layout(self, key: str) -> TensorLayout | None:
        return self._table.layouts[self._index[key]]

    def get_tensor_layout(self, key: str) -> TensorLayout | None:
        # the same as in the base class with fewer calls: listing a large file is mostly this
        try:
            return self._table.layouts[self._index[key]]
        except (KeyError, TypeError, ValueError):  # not hashable, or memory that was released
            return super().get_tensor_layout(key)

    def alignment(self, key: str) -> int:
        self.get_tensor_layout(key)
        return int(self._table.manifest.alignments[self._index[key]]) if self._table.manifest else 1

    def digest(self, key: str) -> Digest:
        data = self.get_data(key)
        segment = self._table.segment_index[self._index[key]]
        if self._table.manifest is None:
            if segment not in self._digests:  # keys may share it
                self._digests[segment] = digest(data)
            return self._digests[segment]
        return Digest(len(data), self._table.manifest.segments[segment].tobytes())

    @property
    def sources(self) -> tuple[Path, ...]:
        return (self.path,)

    def segment_of(self, key: str) -> int:
        """Index of the segment that holds a blob: keys with the same index share their bytes."""
        self.get_tensor_layout(key)
        return self._table.segment_index[self._index[key]]

    def byte_range(self, key: str) -> tuple[int, int]:
        """Where a blob lies in the file: first byte, and first byte behind it."""
        segment = self.segment_of(key)
        return self._table.starts[segment], self._table.ends[segment]

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Where each segment lies in the file, whether a key leads to it or not: first byte, first byte behind."""
        return list(zip(self._table.starts, self._table.ends, strict=True))

    @property
    def manifest_extent(self) -> tuple[int, int] | None:
        """Where the digests lie in the file: first byte, and first byte behind; None without them."""
        return (self._table.manifest_start, len(self._data)) if self._table.manifest else None

    @property
    def head_size(self) -> int:
        """Bytes of the header and the table of contents, from the start of the file."""
        return self._table.header.flatbuffer_end

    def verify(self, *, progress: Progress | None = None) -> bool:
        """Hash all blobs and compare them with the digests that the file carries.

        Args:
            progress: told of every blob.

        Returns:
            True if everything was compared; False if the file carries no digests, so nothing could be.

        Raises:
            IntegrityError: a blob or the padding between blobs was damaged; the keys are named.
            FileAccessError: the file was truncated since it was opened.
        """
        self._check_open()
        check_progress(progress)
        check_length(self._data)
        table = self._table
        if table.manifest is None:
            return False
        position = table.header.segment_base
        for segment in np.argsort(np.array(table.starts, np.int64), kind="stable").tolist():
            start, end = table.starts[segment], table.ends[segment]
            self._check_padding(position, start)
            position = max(position, end)
            expected = table.manifest.segments[segment].tobytes()
            if (found := digest(self._data[start:end]).xxh3_128) != expected:
                keys = [key for key in table.keys if table.segment_index[self._index[key]] == segment]
                raise IntegrityError(
                    self.path,
                    f"the bytes of {', '.join(map(repr, keys)) or f'segment {segment}'} are damaged: expected xxh3-128 "
                    f"{expected.hex()}, found {found.hex()}",
                )
            if progress:
                progress(f"verifying {self.path.name}", end, len(self._data))
        self._check_padding(position, table.manifest_start)
        return True

    def _check_padding(self, start: int, end: int) -> None:
        if np.frombuffer(self._data[start:end], np.uint8).any():
            raise IntegrityError(self.path, f"the padding before byte {end} is not zero")

    def _nbytes(self) -> int:
        return len(self._data)

    def __reduce__(self) -> Any:
        """Pickled by path: see `blobstore.formats.pickling`."""
        self._check_open()
        recorded = self._data[self._table.manifest_start :] if self._table.manifest else None
        return by_path(self, self._data, recorded)

    def close(self) -> None:
        super().close()
        self._data = memoryview(b"")
        self._index = {}


def open_ptd(path: str | os.PathLike[str], *, verify: bool = False) -> PtdDataMap:
    """Open a .ptd, whoever wrote it, and map it.

    Opening decides whether the structure can be trusted: every offset, size, index, key and layout is checked, and
    for a file with a manifest the digest of everything in front of the blobs. The blobs themselves are not read;
    that is what `verify` is for.

    Args:
        path: the file.
        verify: also compare all blobs with their digests.

    Returns:
        The data map, which is a context manager. Its views stay valid after it is closed.

    Raises:
        FileAccessError: the file cannot be read.
        InvalidFileError: the file is malformed.
        IntegrityError: the file is damaged.
    """
    data_map = PtdDataMap(path)
    if verify:
        data_map.verify()
    return data_map


def _read(data: memoryview) -> _Table:
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
    layouts = _layouts(columns, keys, layout_at, (ends - starts)[index] if len(index) else index)

    manifest, manifest_start = None, header.segment_end
    if (place := find_manifest(data, header)) is not None:
        manifest = Manifest.parse(place, len(starts), len(keys))
    elif (at := _keyed_manifest(data, keys, index, starts, ends)) is not None:
        manifest_start = int(starts[-1])
        manifest = Manifest.parse(data[manifest_start : -len(OLD_MAGIC)], len(starts), len(keys)).without_last(at)
        del keys[at], layouts[at]
        index, starts, ends = np.delete(index, at), starts[:-1], ends[:-1]
    if manifest is not None:
        if digest(data[: header.segment_base]).xxh3_128 != manifest.head:
            raise ManifestError(f"the first {header.segment_base} bytes are damaged: their digest differs")
        _check_alignment(keys, starts[index], manifest)
    return _Table(keys, index.tolist(), layouts, starts.tolist(), ends.tolist(), manifest, manifest_start, header)


def _keyed_manifest(
    data: memoryview, keys: Sequence[str], index: Positions, starts: Positions, ends: Positions
) -> int | None:
    """The index of the key of the manifest in an earlier file, which had one; None if no key leads to a manifest."""
    records = [i for i, key in enumerate(keys) if key.startswith(KEY_PREFIX)]
    found = [i for i in records if is_keyed_manifest(keys[i], data[starts[index[i]] : ends[index[i]]])]
    if not found:
        if data[-len(OLD_MAGIC) :] == OLD_MAGIC:
            raise ManifestError("the file ends like one with a manifest, but its key is damaged")
        return None
    last = len(starts) - 1
    if len(found) > 1 or np.flatnonzero(index == last).tolist() != found:
        raise ManifestError("a manifest that has a key must be alone in the last segment")
    if ends[last] != len(data) or data[-len(OLD_MAGIC) :] != OLD_MAGIC:
        raise ManifestError(f"the manifest ends at byte {ends[last]} of {len(data)}, or its magic is missing")
    return found[0]


def _segments(
    offsets: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64], header: Header
) -> tuple[Positions, Positions]:
    """Where segments start and end in the file; they lie within it and do not overlap."""
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
        raise ColumnsError(f"key {twice!r} is there twice")
    return keys


def _layouts(
    columns: Columns, keys: Sequence[str], layout_at: Positions, sizes: Positions
) -> list[TensorLayout | None]:
    """The layout of each entry, None for opaque blobs; each agrees with the `sizes` of the entries' segments.

    Equal layouts become one object, so that a file of many equal layers does not pay for each.
    """
    found: list[TensorLayout | None] = [None] * len(keys)
    present = np.flatnonzero(layout_at)
    tables, inverse = np.unique(columns.follow(layout_at[present]), return_inverse=True)
    type_at, sizes_at, order_at = columns.fields(tables, {0: 1, 1: 4, 2: 4})
    types = columns.u8(type_at).view(np.int8)
    size_start, rank = columns.vectors(sizes_at, 4)
    order_start, order_rank = columns.vectors(order_at, 1)
    if (rank != order_rank).any() or (rank > MAX_RANK).any():
        i = int(np.argmax((rank != order_rank) | (rank > MAX_RANK)))
        key = keys[present[int(np.argmax(inverse == i))]]
        raise LayoutError(
            f"key {key!r} has {rank[i]} sizes and a dim_order of {order_rank[i]}, at most {MAX_RANK} are possible"
        )
    if (4 * rank + order_rank).sum() > columns.size:  # many may refer to the same sizes
        raise LayoutError("the layouts together are longer than the flatbuffer")
    by_table: list[TensorLayout | None] = [None] * len(tables)
    nbytes = np.zeros(len(tables), np.int64)
    known: dict[tuple[int, bytes], TensorLayout] = {}
    for r in np.unique(rank).tolist():
        rows = np.flatnonzero(rank == r)
        matrix = np.empty((len(rows), 1 + 2 * r), "<i4")
        matrix[:, 0] = types[rows]
        matrix[:, 1 : 1 + r] = columns.gather(size_start[rows], r, 4)
        matrix[:, 1 + r :] = columns.gather(order_start[rows], r, 1)
        raw, width = matrix.tobytes(), matrix.shape[1] * 4
        for i, row in enumerate(rows.tolist()):
            identity = (r, raw[i * width : (i + 1) * width])
            layout = known.get(identity)
            if layout is None:
                values = matrix[i].tolist()
                try:
                    layout = TensorLayout(_scalar_type(values[0]), values[1 : 1 + r], values[1 + r :])
                except LayoutError as error:
                    key = keys[present[int(np.argmax(inverse == row))]]
                    raise LayoutError(f"key {key!r}: {error}") from None
                known[identity] = layout
            by_table[row] = layout
            nbytes[row] = layout.nbytes
    wrong = nbytes[inverse] != sizes[present]
    if wrong.any():
        i = int(np.argmax(wrong))
        raise LayoutError(
            f"key {keys[present[i]]!r} is {by_table[inverse[i]]} of {nbytes[inverse[i]]} bytes, but its segment has "
            f"{sizes[present[i]]}"
        )
    for entry, table in zip(present.tolist(), inverse.tolist(), strict=True):
        found[entry] = by_table[table]
    return found


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
        raise ColumnsError(f"key {keys[i]!r} asks for alignment {asked[i]} but lies at byte {starts[i]}")
