"""Reading a .pte: what weights it holds, where, and who refers to them.

A .pte is a flatbuffer (`schema/program.fbs`) that starts at the first byte, and behind it segments of raw
bytes. The extended header sits inside the flatbuffer, between its file identifier and its first object:

    offset  bytes  what
    0       4      distance to the root table
    4       4      "ET12"
    8       4      "eh00"; anything else: there is no extended header, and the flatbuffer is the whole file
    12      4      length of the extended header, at least 24
    16      8      size of the flatbuffer, counted from the start of the file
    24      8      where segment offsets count from; 0 without segments
    32      8      bytes from there to the end of the last segment (only if the length is at least 32)

(`schema/extended_header.cpp` of ExecuTorch.) All trust in the file is decided here, when it is opened.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

from blobstore.errors import InvalidFileError, LayoutError
from blobstore.formats.pte.flatbuffer import Buffer, Span, Table, walk
from blobstore.formats.pte.schema import PROGRAM, DataLocation, TensorDataLocation
from blobstore.memory.digest import Digest, digest
from blobstore.memory.layout import MAX_RANK, ScalarType, TensorLayout
from blobstore.memory.mapped_file import as_path, check_length, map_file

__all__ = ["DelegatePayload", "ExternalTensor", "Movable", "NamedBlob", "Offsets", "ProgramFile", "Segment"]
__all__ += ["TensorData", "TensorUse", "content_key", "read_program"]

IDENTIFIER = b"ET12"
HEADER_OFFSET = 8
HEADER_MAGIC = b"eh00"
HEADER_MIN = 24
HEADER_WITH_DATA_SIZE = 32

_OVERLAP = 8
"""How many times as long as the file its tensors together may be; those of sane programs hardly overlap."""

MAX_ALIGNMENT = 4096
"""An offset that is a multiple of more than a page is so by accident."""

TENSOR_ALIGNMENT = 16
"""What ExecuTorch gives every constant."""


@dataclass(frozen=True, eq=False)
class TensorUse:
    """A tensor value of a method that refers to stored bytes.

    Attributes:
        method: name of the method.
        value: index into the method's values.
        layout: scalar type, sizes and dim order; None when a later ExecuTorch is needed to tell, or when the
            tensor starts inside its bytes.
        name: the name that the program records for the tensor, if any.
        table: the Tensor table.
    """

    method: str
    value: int
    layout: TensorLayout | None
    name: str | None
    table: Table


@dataclass(frozen=True, eq=False)
class TensorData:
    """The bytes of a constant, or of the initial state of a mutable tensor.

    Attributes:
        kind: which of the two.
        group: index into `ProgramFile.offsets`; None when the bytes lie inside the flatbuffer.
        index: the tensor's data_buffer_idx.
        span: where the bytes are in the file; as long as the largest tensor that refers to them.
        uses: all tensors that refer to them, in the order of the program.
    """

    kind: Literal["constant", "state"]
    group: int | None
    index: int
    span: Span
    uses: tuple[TensorUse, ...]


@dataclass(frozen=True, eq=False)
class Offsets:
    """A segment that holds many tensors: the one of the constants, or one of initial states.

    Attributes:
        kind: what it holds.
        segment: index into `ProgramFile.segments`; -1 when there is none and nothing refers to it.
        values: offset of each tensor inside the segment.
        table: the SubsegmentOffsets table.
    """

    kind: Literal["constant", "state"]
    segment: int
    values: tuple[int, ...]
    table: Table

    def extent(self, index: int, segment_size: int) -> int:
        """Bytes from one entry to the next: what an entry may take that no known tensor refers to."""
        if index == 0:  # stands for "no data"
            return 0
        stop = self.values[index + 1] if index + 1 < len(self.values) else segment_size
        if stop < self.values[index]:
            stop = segment_size
        return stop - self.values[index]


@dataclass(frozen=True, eq=False)
class NamedBlob:
    """Opaque bytes that a delegate asks for by key; `index` is the one in Program.named_data."""

    key: str
    index: int
    segment: int
    span: Span
    table: Table


@dataclass(frozen=True, eq=False)
class DelegatePayload:
    """What a backend's preprocess returned; `segment` is None when it lies inside the flatbuffer."""

    method: str
    index: int
    backend: str
    segment: int | None
    span: Span


@dataclass(frozen=True, eq=False)
class ExternalTensor:
    """A tensor whose bytes are in a data file already."""

    key: str
    layout: TensorLayout | None
    mutable: bool
    use: TensorUse


@dataclass(frozen=True, eq=False)
class Segment:
    """A run of bytes behind the flatbuffer; `users` says who refers to it (nobody known: an empty list)."""

    index: int
    span: Span
    table: Table
    users: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Movable:
    """Something that can leave a program and be found in a data file instead. Compared and hashed by identity.

    Attributes:
        kind: a constant, the initial state of a mutable tensor, or a named blob of a delegate.
        program: where it is now.
        data: its bytes, a view of the mapped file.
        layout: the tensor's layout; None for named data, which is opaque.
        name: the only key under which it may leave, if there is one: the key of named data, or the name that the
            program records for the tensor, because applications look tensors up by it. None: any key will do.
        alignment: in bytes, a power of two; the file records none, this is what its own offsets keep to.
        parts: the tensors, or the one named blob, that will look for it in the data file.
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
        """The key if there is no better one: the recorded name, else one made of content and layout."""
        if self.name is not None:
            return self.name
        assert self.layout is not None  # noqa: S101 - only named data has no layout, and that has a name
        return content_key(self.digest, self.layout)


def content_key(address: Digest, layout: TensorLayout) -> str:
    """The key of a tensor that has no name: `tensor.<xxh3-128>.<scalar type>.<sizes>[.<dim order>]`.

    The layout is part of it because the runtime compares scalar type, sizes and dim order of what it finds
    under a key with those of the tensor; equal bytes in two layouts are two keys (and one blob).
    """
    sizes = "x".join(map(str, layout.sizes)) or "scalar"
    order = "" if layout.is_contiguous else "." + "-".join(map(str, layout.dim_order))
    return f"tensor.{address.xxh3_128.hex()}.{layout.scalar_type.name.lower()}.{sizes}{order}"


def read_program(path: str | os.PathLike[str]) -> ProgramFile:
    """Map a .pte and verify its structure.

    Returns:
        The program. It keeps the file mapped for as long as it, or any view that it gave out, is referenced.

    Raises:
        FileAccessError: it cannot be opened.
        InvalidFileError: it is not a well-formed program.
    """
    return ProgramFile(path, map_file(path))


class ProgramFile:
    """A .pte that is mapped and verified.

    Attributes:
        path: the file, as given.
        data: its bytes, read-only.
        header_size: bytes of the extended header behind the file identifier; 0 without.
        program_size: bytes of the flatbuffer, counted from the start of the file.
        segment_base: where segment offsets count from; 0 without segments.
        unknown: names of types with fields, and of unions with members, that this version does not know.
        methods: their names.
        segments, offsets, tensors, named_data, delegates, externals: what the file holds, in its order.
        inline: the constants of an old program, inside the flatbuffer: the span of each, None when it has none.
    """

    def __init__(self, path: str | os.PathLike[str], data: memoryview) -> None:
        self.path = as_path(path)
        self.data = data
        self.header_size = self.segment_base = 0
        self.program_size = len(data)
        segments_stop = self._read_header()
        buffer = Buffer(data[: self.program_size], self.path, HEADER_OFFSET + self.header_size)
        self.root = buffer.root(PROGRAM)
        self.unknown = walk(self.root)
        self.segments = self._read_segments(segments_stop)
        self.offsets: list[Offsets] = []
        self.inline: list[Span | None] = []
        self._states: list[int] = []  # index into offsets of each mutable_data_segments entry
        self._read_offsets()
        self.methods: list[str] = []
        self._layouts: dict[int, TensorLayout | None] = {}
        self.externals: list[ExternalTensor] = []
        self.delegates: list[DelegatePayload] = []
        self.tensors: list[TensorData] = []
        self._left = _OVERLAP * len(data) + (1 << 16)  # bytes that tensors may still take,
        self._taken: set[tuple[int | None, int, TensorLayout | None, str | None]] = set()  # beside these
        self._read_methods()
        self.named_data = self._read_named_data()

    def __repr__(self) -> str:
        return f"<ProgramFile {self.path}: {', '.join(self.methods)}>"

    def movable(self, keep_small: int = 0) -> Iterator[Movable]:
        """Everything that the stock runtime can find in a data file instead, in the order of the program.

        Tensors without bytes stay; so do those that ExecuTorch 1.5 would not look up outside: with a layout
        that this version does not know, or with initial state elsewhere than in the first such segment.

        Args:
            keep_small: leave out what has fewer bytes than this.
        """
        alignments = {group: self._alignment(group) for group in {item.group for item in self.tensors}}
        for item in self.tensors:
            if item.kind == "state" and item.group != self._states[0]:
                continue
            groups: dict[tuple[TensorLayout, str | None], list[TensorUse]] = {}
            for use in item.uses:
                if use.layout is not None and use.layout.nbytes >= max(keep_small, 1):
                    groups.setdefault((use.layout, use.name), []).append(use)
            for (layout, name), uses in groups.items():
                data = self.data[item.span.start : item.span.start + layout.nbytes]
                yield Movable(item.kind, self, data, layout, name, alignments[item.group], tuple(uses))
        for blob in self.named_data:
            if blob.span.size >= max(keep_small, 1):
                data = self.data[blob.span.start : blob.span.stop]
                yield Movable("named_data", self, data, None, blob.key, self._segment_alignment, (blob,))

    def fail(self, reason: str) -> InvalidFileError:
        """An error about this file, to be raised."""
        return InvalidFileError(self.path, reason)

    def _read_header(self) -> int | None:
        """Take the header's numbers over; where the segments end, if it says so."""
        data = self.data
        if len(data) < HEADER_OFFSET + 4:
            raise self.fail(f"{len(data)} bytes are too few for a program")
        if data[4:8] != IDENTIFIER:
            raise self.fail(f"not a program: expected {IDENTIFIER!r} at byte 4, found {bytes(data[4:8])!r}")
        if data[HEADER_OFFSET : HEADER_OFFSET + 4] != HEADER_MAGIC:
            return None
        if len(data) < HEADER_OFFSET + HEADER_WITH_DATA_SIZE:
            raise self.fail("it ends inside the extended header")
        length, program_size, base, data_size = struct.unpack_from("<IQQQ", data, HEADER_OFFSET + 4)
        if length < HEADER_MIN:
            raise self.fail(f"the extended header has {length} bytes, at least {HEADER_MIN} are needed")
        if program_size > len(data):
            raise self.fail(f"truncated: the program takes {program_size} bytes, the file has {len(data)}")
        if HEADER_OFFSET + length > program_size:
            raise self.fail(f"the extended header of {length} bytes does not fit a program of {program_size}")
        if base and not program_size <= base <= len(data):
            raise self.fail(f"segments begin at {base}, outside {program_size}..{len(data)}")
        self.header_size, self.program_size, self.segment_base = length, program_size, base
        if length < HEADER_WITH_DATA_SIZE or data_size == 0:
            return None
        if data_size > len(data) - base:
            raise self.fail(f"truncated: segments take {data_size} bytes from {base}, the file has {len(data)}")
        return int(base + data_size)

    def _read_segments(self, stop: int | None) -> list[Segment]:
        end = len(self.data) if stop is None else stop
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
        groups: list[tuple[Literal["constant", "state"], Table]] = (
            [] if constants is None else [("constant", constants)]
        )
        groups += [("state", table) for table in root.tables("mutable_data_segments")]
        for kind, table in groups:
            values = table.numbers("offsets")
            index = table.scalar("segment_index")
            name = "constants" if kind == "constant" else f"initial state {len(self._states)}"
            # Without tensors the index may lead nowhere.
            segment = self._segment(index, name) if len(values) > 1 else None
            if segment is not None and max(values) > segment.span.size:
                raise self.fail(f"{name}: offset {max(values)} is beyond segment {index} of {segment.span.size} bytes")
            if kind == "state":
                self._states.append(len(self.offsets))
            self.offsets.append(Offsets(kind, index if segment else -1, values, table))
        if self.inline and constants is not None and self.offsets[0].segment >= 0:
            raise self.fail("constants both inside the flatbuffer and in a segment")

    def _read_methods(self) -> None:
        uses: dict[tuple[int | None, int], list[TensorUse]] = {}
        spans: dict[tuple[int | None, int], Span] = {}
        payloads = [table.span("data") for table in self.root.tables("backend_delegate_data")]
        named: set[str] = set()
        for plan in self.root.tables("execution_plan"):
            method = plan.string("name")
            if not method:
                raise self.fail(f"method {len(self.methods)} has no name")
            if method in named:
                raise self.fail(f"two methods have the name {method!r}")
            named.add(method)
            self.methods.append(method)
            for index, value in enumerate(plan.tables("values")):
                tensor = value.union("val")
                if tensor is not None and tensor.kind.name == "Tensor":
                    self._read_tensor(method, index, tensor, uses, spans)
            for index, delegate in enumerate(plan.tables("delegates")):
                self.delegates.append(self._read_delegate(method, index, delegate, payloads))
        for (group, index), span in sorted(spans.items(), key=lambda item: (item[0][0] or 0, item[0][1])):
            kind = "constant" if group is None else self.offsets[group].kind
            self.tensors.append(TensorData(kind, group, index, span, tuple(uses[group, index])))
        inside = sorted(span for span in (*self.inline, *payloads) if span and span.size)
        for left, right in pairwise(inside):
            if left.stop > right.start:
                raise self.fail("constants or payloads inside the flatbuffer overlap")

    def _read_tensor(
        self,
        method: str,
        value: int,
        tensor: Table,
        uses: dict[tuple[int | None, int], list[TensorUse]],
        spans: dict[tuple[int | None, int], Span],
    ) -> None:
        extra = tensor.table("extra_tensor_info")
        external = extra is not None and extra.scalar("location") == TensorDataLocation.EXTERNAL
        index = tensor.scalar("data_buffer_idx")
        if not external and index == 0:
            return
        what = f"method {method!r}, value {value}"
        name = extra.string("fully_qualified_name") if extra is not None else None
        mutable = tensor.slot("allocation_info") != 0
        layout = self._layouts.get(tensor.position)  # many values may refer to one tensor
        if layout is None:
            layout = self._layouts[tensor.position] = self._read_layout(tensor, what)
        use = TensorUse(method, value, layout if tensor.scalar("storage_offset") == 0 else None, name, tensor)
        if external:
            if name is None:
                raise self.fail(f"{what}: an external tensor has no name")
            self.externals.append(ExternalTensor(name, layout, mutable, use))
            return
        group: int | None = None
        if mutable:
            number = extra.scalar("mutable_data_segments_idx") if extra is not None else 0
            if number >= len(self._states):
                raise self.fail(f"{what}: initial state {number} is out of range, there are {len(self._states)}")
            group = self._states[number]
        elif self.offsets and self.offsets[0].kind == "constant" and self.offsets[0].segment >= 0:
            group = 0
        if group is None:
            if index >= len(self.inline):
                raise self.fail(f"{what}: constant {index} is out of range, there are {len(self.inline)}")
            room = self.inline[index] or Span(0, 0)
        else:
            offsets = self.offsets[group]
            if index >= len(offsets.values) or offsets.segment < 0:
                raise self.fail(f"{what}: {offsets.kind} {index} is out of range, there are {len(offsets.values)}")
            segment = self.segments[offsets.segment].span
            room = Span(segment.start + offsets.values[index], segment.stop)
        nbytes = layout.nbytes if use.layout is not None and layout is not None else 0
        if nbytes > room.size:
            raise self.fail(f"{what}: {layout} takes {nbytes} bytes, {room.size} are there")
        if use.layout is None:  # all that might be the tensor's
            nbytes = room.size if group is None else self.offsets[group].extent(index, segment.size)
        if (identity := (group, index, use.layout, name)) not in self._taken:
            self._taken.add(identity)
            self._left -= nbytes
            if self._left < 0:
                raise self.fail(f"its tensors overlap so much that they have more than {_OVERLAP} times its bytes")
        before = spans.get((group, index), Span(room.start, room.start))
        spans[group, index] = Span(room.start, max(before.stop, room.start + nbytes))
        uses.setdefault((group, index), []).append(use)

    def _read_layout(self, tensor: Table, what: str) -> TensorLayout | None:
        try:
            scalar_type = ScalarType(tensor.scalar("scalar_type"))
        except ValueError:
            return None  # added by a later ExecuTorch
        for name, width in (("sizes", 4), ("dim_order", 1)):
            span = tensor.span(name)
            if span is None:
                raise self.fail(f"{what}: a tensor without {name}")
            if span.size // width > MAX_RANK:
                raise self.fail(f"{what}: {span.size // width} {name}, at most {MAX_RANK} are possible")
        try:
            return TensorLayout(scalar_type, tensor.numbers("sizes"), tensor.numbers("dim_order"))
        except LayoutError as error:
            raise self.fail(f"{what}: {error}") from None

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
                raise self.fail(f"the key {key!r} is there twice")
            segment = self._segment(table.scalar("segment_index"), f"named data {key!r}")
            blobs[key] = NamedBlob(key, index, segment.index, segment.span, table)
        return list(blobs.values())

    def _alignment(self, group: int | None) -> int:
        """What all tensors of a group keep to."""
        inline = [span.start for span in self.inline if span]
        starts = inline if group is None else self.offsets[group].values
        return min(max(alignment(math.gcd(*starts)), TENSOR_ALIGNMENT), 128)

    @cached_property
    def _segment_alignment(self) -> int:
        """What all segments keep to."""
        return max(alignment(math.gcd(*(s.span.start for s in self.segments if s.span.size))), TENSOR_ALIGNMENT)


def alignment(position: int) -> int:
    """The largest power of two that divides `position`, at most MAX_ALIGNMENT."""
    return min(position & -position, MAX_ALIGNMENT) if position else MAX_ALIGNMENT
