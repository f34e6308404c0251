"""Reading a .pte: which weights it holds, where they lie, and what refers to them.

A .pte is a flatbuffer (`schema/program.fbs`) that starts at the first byte, and behind it segments of raw bytes. The
extended header (`header.py`) lies inside the flatbuffer. All trust in the file is decided here, when it is opened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from blobstore.core.errors import InvalidFileError, LayoutError
from blobstore.core.formats.alignment import SEGMENT_ALIGNMENT, TENSOR_ALIGNMENT, alignment_of
from blobstore.core.formats.flatbuffer import Buffer, Span, Table, Walk
from blobstore.core.formats.pte.header import HEADER_OFFSET, ExtendedHeader
from blobstore.core.formats.pte.parts import (
    DelegatePayload,
    ExternalTensor,
    NamedBlob,
    Offsets,
    Segment,
    TensorData,
    TensorUse,
)
from blobstore.core.formats.pte.schema import PROGRAM, DataLocation, TensorDataLocation
from blobstore.core.memory.digest import Digest, digest
from blobstore.core.memory.layout import MAX_RANK, ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import as_path, check_length, map_file
from blobstore.core.reprs import count, line, listed

__all__ = ["Movable", "ProgramFile", "content_key", "read_program"]

_Place = tuple[int | None, int]
"""A group (index into `ProgramFile.offsets`; None: inside the flatbuffer) and a data_buffer_idx in it."""

_SCALAR_TYPES = frozenset(ScalarType)

_OVERLAP = 8
"""The tensors together may be this many times as long as the file; those of ordinary programs hardly overlap."""


@dataclass(frozen=True, eq=False)
class Movable:
    """Something that can move from a program to a data file. Compared and hashed by identity.

    Attributes:
        kind: a constant, the initial state of a mutable tensor, or a named blob of a delegate.
        program: the program that holds it.
        data: its bytes, a view of the mapped file.
        layout: the tensor's layout; None for named data, which is opaque.
        name: the only key under which it may move: the key of named data, or the name that the program records for the
            tensor, because applications look tensors up by it. None: any key will do.
        alignment: in bytes, a power of two. The file does not record one; this is the alignment of its own offsets.
        parts: the tensors, or the one named blob, that will be looked up in the data file.
    """

    kind: Literal["constant", "state", "named_data"]
    program: ProgramFile
    data: memoryview
    layout: TensorLayout | None
    name: str | None
    alignment: int
    parts: tuple[TensorUse, ...] | tuple[NamedBlob]

    @cached_property
    def digest(self) -> Digest:
        """The content address; the bytes are read the first time."""
        check_length(self.data)
        return digest(self.data)

    @property
    def key(self) -> str:
        """The key by default: the recorded name, or else one made of content and layout."""
        if self.name is not None:
            return self.name
        assert self.layout is not None  # noqa: S101 - only named data has no layout, and that has a name
        return content_key(self.digest, self.layout)


def content_key(address: Digest, layout: TensorLayout) -> str:
    """The key of a tensor that has no name: `tensor.<xxh3-128>.<scalar type>.<sizes>[.<dim order>]`.

    The layout is part of the key because the runtime compares the scalar type, sizes and dim order of the entry with
    those of the tensor. Equal bytes in two layouts have two keys (and one blob).
    """
    sizes = "x".join(map(str, layout.sizes)) or "scalar"
    order = "" if layout.is_contiguous else "." + "-".join(map(str, layout.dim_order))
    return f"tensor.{address.xxh3_128.hex()}.{layout.scalar_type.name.lower()}.{sizes}{order}"


def read_program(path: str | os.PathLike[str]) -> ProgramFile:
    """Map a .pte and verify its structure. It stays mapped while the program, or any view of it, is referenced."""
    return ProgramFile(path, map_file(path))


class ProgramFile:
    """A mapped and verified .pte.

    Attributes:
        path: the file, as given.
        data: its bytes, read-only.
        header_size: bytes of the extended header behind the file identifier; 0 without one.
        program_size: bytes of the flatbuffer, counted from the start of the file.
        segment_base: where segment offsets count from; 0 without segments.
        unknown: names of types with fields, and of unions with members, that are unknown to this version.
        methods: their names.
        segments, offsets, tensors, named_data, delegates, externals: what the file holds, in its order.
        inline: of an old program with constants inside the flatbuffer, the span of each; None for an empty one.
    """

    def __init__(self, path: str | os.PathLike[str], data: memoryview) -> None:
        self.path = as_path(path)
        self.data = data
        header = ExtendedHeader.parse(data, self.path)
        self.header_size, self.program_size = header.length, header.program_size
        self.segment_base = header.segment_base
        buffer = Buffer(data[: self.program_size], self.path, HEADER_OFFSET + self.header_size)
        self.root = buffer.root(PROGRAM)
        self.unknown = Walk([self.root]).unknown
        self.segments = self._read_segments(header.segments_stop)
        self.offsets: list[Offsets] = []
        self.inline: list[Span | None] = []
        self._states: list[int] = []  # index into offsets of each mutable_data_segments entry
        self._read_offsets()
        self.methods: list[str] = []
        self._layouts: dict[tuple[int, bytes, bytes], TensorLayout] = {}  # the same few occur again and again
        self.externals: list[ExternalTensor] = []
        self.delegates: list[DelegatePayload] = []
        self.tensors: list[TensorData] = []
        self._taken: set[tuple[int | None, int, TensorLayout | None, str | None]] = set()  # tensors counted so far
        self._left = _OVERLAP * len(data) + (1 << 16)  # bytes that other tensors may still take
        self._read_methods()
        self.named_data = self._read_named_data()

    def __repr__(self) -> str:
        return line("ProgramFile", self.path, f"{count(len(self.methods), 'method')} ({listed(self.methods)})")

    def movable(self, keep_small: int = 0) -> Iterator[Movable]:
        """Everything that the stock runtime can also find in a data file, in the order of the program.

        Tensors without bytes are left out, and so are those that ExecuTorch 1.5 does not look up in a data file: with a
        layout that is unknown to this version, or with an initial state outside the first segment of such states.

        Args:
            keep_small: leave out everything with fewer bytes than this.
        """
        least = max(keep_small, 1)
        alignments = {group: self.alignment_of(group) for group in {item.group for item in self.tensors}}
        for item in self.tensors:
            if item.kind == "constant" or item.group == self._states[0]:
                for (layout, name), uses in item.by_layout(least).items():
                    data = self.data[item.span.start : item.span.start + layout.nbytes]
                    yield Movable(item.kind, self, data, layout, name, alignments[item.group], tuple(uses))
        for blob in self.named_data:
            if blob.span.size >= least:
                data = self.data[blob.span.start : blob.span.stop]
                yield Movable("named_data", self, data, None, blob.key, self.segment_alignment, (blob,))

    def fail(self, reason: str) -> InvalidFileError:
        """An error about this file, to be raised."""
        return InvalidFileError(self.path, reason)

    def _read_segments(self, end: int) -> list[Segment]:
        segments = []
        for index, table in enumerate(self.root.tables("segments")):
            start, size = self.segment_base + table.scalar("offset"), table.scalar("size")
            if size and not self.segment_base:
                raise self.fail(f"segment {index} has {size} bytes, but the file has no segments")
            if size and size > end - start:
                raise self.fail(f"segment {index}: {size} bytes at {start} reach beyond the end, {end}")
            segments.append(Segment(index, Span(start, start + size), table))
        filled = sorted((s for s in segments if s.span.size), key=lambda s: s.span)
        for left, right in pairwise(filled):
            if left.span.stop > right.span.start:
                raise self.fail(f"segments {left.index} and {right.index} overlap")
        return segments

    def _segment(self, index: int, user: str) -> Segment:
        if index >= len(self.segments):
            raise self.fail(f"{user}: segment {index} is out of range, there are {len(self.segments)}")
        self.segments[index].users.append(user)
        return self.segments[index]

    def _read_offsets(self) -> None:
        root = self.root
        for table in root.tables("constant_buffer"):
            span = table.span("storage")
            self.inline.append(span if span and span.size else None)
        constants = root.table("constant_segment")
        if constants is not None:
            self.offsets.append(self._offsets_of("constant", constants, "constants"))
            if self.inline and self.offsets[0].segment >= 0:
                raise self.fail("constants both inside the flatbuffer and in a segment")
        for number, table in enumerate(root.tables("mutable_data_segments")):
            self._states.append(len(self.offsets))
            self.offsets.append(self._offsets_of("state", table, f"initial state {number}"))

    def _offsets_of(self, kind: Literal["constant", "state"], table: Table, name: str) -> Offsets:
        values = table.numbers("offsets")
        index = table.scalar("segment_index")
        if len(values) <= 1:  # entry 0 stands for no data, so there are no tensors, and the index may be out of range
            return Offsets(kind, -1, values, table)
        segment = self._segment(index, name)
        if max(values) > segment.span.size:
            raise self.fail(f"{name}: offset {max(values)} is beyond segment {index} of {segment.span.size} bytes")
        return Offsets(kind, index, values, table)

    def _plans(self) -> Iterator[tuple[str, Table]]:
        """The methods, with their names."""
        named: set[str] = set()
        for plan in self.root.tables("execution_plan"):
            method = plan.string("name")
            if not method:
                raise self.fail(f"method {len(named)} has no name")
            if method in named:
                raise self.fail(f"two methods have the name {method!r}")
            named.add(method)
            self.methods.append(method)
            yield method, plan

    def _read_methods(self) -> None:
        uses: dict[_Place, list[TensorUse]] = {}
        spans: dict[_Place, Span] = {}
        payloads = self._inline_payloads()
        for method, plan in self._plans():
            for index, value in enumerate(plan.tables("values")):
                tensor = value.union("val")
                if tensor is not None and tensor.kind.name == "Tensor":
                    self._read_tensor(method, index, tensor, uses, spans)
            for index, delegate in enumerate(plan.tables("delegates")):
                self.delegates.append(self._read_delegate(method, index, delegate, payloads))
        for (group, index), span in sorted(spans.items(), key=lambda item: (item[0][0] or 0, item[0][1])):
            kind = "constant" if group is None else self.offsets[group].kind
            self.tensors.append(TensorData(kind, group, index, span, tuple(uses[group, index])))

    def _inline_payloads(self) -> list[Span | None]:
        """The payloads inside the flatbuffer, which overlap neither each other nor the constants there."""
        payloads = [table.span("data") for table in self.root.tables("backend_delegate_data")]
        inside = sorted(span for span in (*self.inline, *payloads) if span and span.size)
        if any(left.stop > right.start for left, right in pairwise(inside)):
            raise self.fail("constants or payloads inside the flatbuffer overlap")
        return payloads

    def _read_tensor(
        self, method: str, value: int, tensor: Table, uses: dict[_Place, list[TensorUse]], spans: dict[_Place, Span]
    ) -> None:
        """Add a tensor value to the external tensors, or to the uses of the stored bytes that it refers to."""
        extra = tensor.table("extra_tensor_info")
        external = extra is not None and extra.scalar("location") == TensorDataLocation.EXTERNAL
        index = tensor.scalar("data_buffer_idx")
        if not external and index == 0:
            return
        what = f"method {method!r}, value {value}"
        name = extra.string("fully_qualified_name") if extra is not None else None
        layout = self.layout_of(tensor, what)
        use = TensorUse(method, value, layout if tensor.scalar("storage_offset") == 0 else None, name, tensor)
        if external:
            if name is None:
                raise self.fail(f"{what}: an external tensor has no name")
            self.externals.append(ExternalTensor(name, layout, tensor.slot("allocation_info") != 0, use))
            return
        place, room = self._find_room(tensor, extra, index, what)
        span = self._take(use, place, room, what)
        before = spans.get(place, span)
        spans[place] = Span(span.start, max(before.stop, span.stop))
        uses.setdefault(place, []).append(use)

    def _find_room(self, tensor: Table, extra: Table | None, index: int, what: str) -> tuple[_Place, Span]:
        """Where the bytes of a tensor begin, and the end of the segment or of the constant that they lie in."""
        group: int | None = None
        if tensor.slot("allocation_info"):  # mutable
            number = extra.scalar("mutable_data_segments_idx") if extra is not None else 0
            if number >= len(self._states):
                raise self.fail(f"{what}: initial state {number} is out of range, there are {len(self._states)}")
            group = self._states[number]
        elif self.offsets and self.offsets[0].kind == "constant" and self.offsets[0].segment >= 0:
            group = 0
        if group is None:
            if index >= len(self.inline):
                raise self.fail(f"{what}: constant {index} is out of range, there are {len(self.inline)}")
            return (None, index), self.inline[index] or Span(0, 0)
        offsets = self.offsets[group]
        if index >= len(offsets.values) or offsets.segment < 0:
            raise self.fail(f"{what}: {offsets.kind} {index} is out of range, there are {len(offsets.values)}")
        segment = self.segments[offsets.segment].span
        return (group, index), Span(segment.start + offsets.values[index], segment.stop)

    def _take(self, use: TensorUse, place: _Place, room: Span, what: str) -> Span:
        """The bytes of a tensor, which must fit the room and the limit on how much tensors overlap."""
        group, index = place
        if use.layout is not None:
            nbytes = use.layout.nbytes
            if nbytes > room.size:
                raise self.fail(f"{what}: {use.layout} takes {nbytes} bytes, but there are only {room.size}")
        elif group is None:
            nbytes = room.size
        else:  # everything that may belong to the tensor
            offsets = self.offsets[group]
            nbytes = offsets.extent(index, self.segments[offsets.segment].span.size)
        identity = (group, index, use.layout, use.name)
        if identity not in self._taken:
            self._taken.add(identity)
            self._left -= nbytes
            if self._left < 0:
                raise self.fail(f"its tensors overlap so much that together they take over {_OVERLAP} times its bytes")
        return Span(room.start, room.start + nbytes)

    def layout_of(self, tensor: Table, what: str) -> TensorLayout | None:
        """The layout of a tensor value, which errors call `what`; None for a scalar type of a later ExecuTorch."""
        number = tensor.scalar("scalar_type")
        if number not in _SCALAR_TYPES:
            return None  # from a later ExecuTorch
        written = []
        for name, width in (("sizes", 4), ("dim_order", 1)):
            span = tensor.span(name)
            if span is None:
                raise self.fail(f"{what}: the tensor has no {name}")
            if span.size // width > MAX_RANK:
                raise self.fail(f"{what}: {span.size // width} {name}, at most {MAX_RANK} are possible")
            written.append(bytes(self.data[span.start : span.stop]))
        sizes, order = written
        layout = self._layouts.get((number, sizes, order))
        if layout is None:
            try:
                layout = TensorLayout(ScalarType(number), tensor.numbers("sizes"), tuple(order))
            except LayoutError as error:
                raise self.fail(f"{what}: {error}") from None
            self._layouts[number, sizes, order] = layout
        return layout

    def _read_delegate(self, method: str, index: int, delegate: Table, payloads: list[Span | None]) -> DelegatePayload:
        what = f"method {method!r}, delegate {index}"
        backend = delegate.string("id")
        processed = delegate.table("processed")
        if backend is None or processed is None:
            raise self.fail(f"{what} has no backend id or no payload")
        number = processed.scalar("index")
        if processed.scalar("location") == DataLocation.SEGMENT:
            return DelegatePayload(method, index, backend, number, self._segment(number, what).span)
        if number >= len(payloads):
            raise self.fail(f"{what}: inline payload {number} is out of range, there are {len(payloads)}")
        return DelegatePayload(method, index, backend, None, payloads[number] or Span(0, 0))

    def _read_named_data(self) -> list[NamedBlob]:
        blobs: dict[str, NamedBlob] = {}
        for index, table in enumerate(self.root.tables("named_data")):
            key = table.string("key")
            if not key:
                raise self.fail(f"named data {index} has no key")
            if key in blobs:
                raise self.fail(f"the key {key!r} occurs twice")
            segment = self._segment(table.scalar("segment_index"), f"named data {key!r}")
            blobs[key] = NamedBlob(key, index, segment.index, segment.span, table)
        return list(blobs.values())

    def alignment_of(self, group: int | None) -> int:
        """The alignment that all tensors of a group have, in bytes."""
        inline = [span.start for span in self.inline if span]
        starts = inline if group is None else self.offsets[group].values
        return min(max(alignment_of(math.gcd(*starts)), TENSOR_ALIGNMENT), SEGMENT_ALIGNMENT)

    @cached_property
    def segment_alignment(self) -> int:
        """The alignment that all segments have, in bytes."""
        return max(alignment_of(math.gcd(*(s.span.start for s in self.segments if s.span.size))), TENSOR_ALIGNMENT)
