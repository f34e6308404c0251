"""Writing a program without the weights that moved to a data file.

The flatbuffer is edited (`edit.py`), not rebuilt, and segments are copied:

- A tensor that leaves is marked EXTERNAL, by an ExtraTensorInfo with its key. Every stored tensor has a data_buffer_idx,
  which the runtime ignores for an external one; by a new vtable, those four bytes become the reference to the new
  ExtraTensorInfo.
- The segment of the constants (or of initial states) is packed again with the ones that stay; they keep their index.
- Named data that leaves is removed from the list.
- A segment that nothing refers to any more becomes empty; segments keep their index.
- Constants inside the flatbuffer, as old programs have them, are cut out of it.

A table that must be changed is refused if it has fields that a later ExecuTorch added; any other table keeps them.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping
from typing import BinaryIO, NamedTuple

import numpy as np

from blobstore.core.errors import KeyConflictError, UnsupportedProgramError
from blobstore.core.formats.alignment import SEGMENT_ALIGNMENT, TENSOR_ALIGNMENT, align_up, alignment_of
from blobstore.core.formats.flatbuffer import Span, Table
from blobstore.core.formats.keys import check_key
from blobstore.core.formats.pte.edit import Editor
from blobstore.core.formats.pte.header import HEADER_OFFSET, HEADER_WITH_DATA_SIZE
from blobstore.core.formats.pte.parts import NamedBlob, Offsets, Segment, TensorData, TensorUse
from blobstore.core.formats.pte.program import Movable, ProgramFile
from blobstore.core.formats.pte.schema import TensorDataLocation
from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.mapped_file import read_pieces

__all__ = ["Rewrite"]


class Rewrite:
    """A program as it will be written, without the weights in `moves`.

    Args:
        program: the program.
        moves: the weights that leave (from `program.movable()`), each with its key in the data file.

    Attributes:
        nbytes: the size of the file.

    Raises:
        UnsupportedProgramError: something in the program would be lost.
        InvalidKeyError: a key is empty, holds a NUL or is not valid Unicode.
        KeyConflictError: two different contents, or layouts, were given one key.
    """

    def __init__(self, program: ProgramFile, moves: Mapping[Movable, str]) -> None:
        self._program = program
        self._editor = Editor(program.root)
        self._extra_infos: dict[tuple[str, int, int], int] = {}
        self._check_padding()
        moved: set[TensorUse | NamedBlob] = set()
        by_key: dict[str, Movable] = {}
        for item, key in moves.items():
            self._check_move(item, key)
            # Tied tensors share a key on purpose; two contents under one would give a method the weights of another.
            other = by_key.setdefault(key, item)
            if other.layout != item.layout or not same_bytes(other.data, item.data):
                raise KeyConflictError(f"{program.path}: the key {key!r} is given to two different contents")
            moved.update(item.parts)
            for part in item.parts:
                if isinstance(part, TensorUse):
                    self._externalize(part, key)
        contents = {s.index: _NewSegment(s.span.size, [(0, s.span)]) for s in program.segments if s.span.size}
        for number in range(len(program.offsets)):
            self._pack_offsets(number, moved, contents)
        self._drop_named_data(moved, contents)
        self._cut_inline(moved)
        self._place_segments(contents)
        self._editor.finish()

    def write(self, file: BinaryIO) -> None:
        """Write the program at the current position of `file`, which must be its start."""
        position = 0
        for piece in self._editor.pieces():
            file.write(piece)
            position += len(piece)
        for start, run in self._runs:
            file.write(bytes(start - position))
            for piece in read_pieces(self._program.data[run.start : run.stop]):
                file.write(piece)
            position = start + run.size
        file.write(bytes(self.nbytes - position))

    def _refuse(self, reason: str) -> UnsupportedProgramError:
        return UnsupportedProgramError(self._program.path, reason)

    def _refuse_unknown(self, table: Table, what: str) -> None:
        if table.has_unknown_fields():
            raise self._refuse(f"{what} must be changed, but its {table.kind.name} has unknown fields")

    def _check_padding(self) -> None:
        """Refuse bytes between or behind the segments, because they would not be copied."""
        program = self._program
        spans = sorted(s.span for s in program.segments if s.span.size)
        position = program.program_size
        for span in [*spans, Span(len(program.data), len(program.data))]:
            gap = np.frombuffer(program.data[position : span.start], np.uint8)
            if gap.any():
                raise self._refuse(f"the bytes at {position}..{span.start} belong to no segment")
            position = span.stop

    def _check_move(self, item: Movable, key: str) -> None:
        if item.program is not self._program:
            raise self._refuse(f"{key!r} belongs to another program")
        if item.name is not None and key != item.name:
            raise self._refuse(f"{item.name!r} has a recorded name and cannot be moved to the key {key!r}")
        check_key(key, f"{self._program.path}: ")
        # An unknown value could refer to the same constant, which would then be gone.
        if item.kind != "named_data" and "EValue.val" in self._program.unknown:
            raise self._refuse("the program has values of unknown types, which may refer to constants")

    # Tensors.

    def _externalize(self, use: TensorUse, key: str) -> None:
        tensor = use.table
        number = tensor.slot("data_buffer_idx")
        old = tensor.table("extra_tensor_info")
        device_type = device_index = 0
        if old is None:
            place = number - tensor.position
            self._editor.set_fields(tensor, {"data_buffer_idx": 0, "extra_tensor_info": place})
        else:
            self._refuse_unknown(old, f"method {use.method!r}, value {use.value}")
            device_type, device_index = old.scalar("device_type"), old.scalar("device_index")
            # 0 says that the program itself has no constant for the tensor.
            self._editor.write(number, bytes(4))
            number = tensor.slot("extra_tensor_info")
        self._editor.link(number, self._extra_info(key, device_type, device_index))

    def _extra_info(self, key: str, device_type: int, device_index: int) -> int:
        """The position of an ExtraTensorInfo; tensors with one key share it."""
        known = self._extra_infos.get((key, device_type, device_index))
        if known is None:
            text = key.encode()
            # 12 bytes: distance to the vtable, distance to the name behind it, three numbers, a byte of padding.
            vtable = self._editor.vtable((12, 0, 4, 8, 9, 10))
            known = self._editor.append(b"")
            numbers = (TensorDataLocation.EXTERNAL, device_type, device_index)
            self._editor.append(struct.pack("<iI3bx", known - vtable, 8, *numbers))
            self._editor.append(struct.pack("<I", len(text)) + text + b"\0")
            self._extra_infos[key, device_type, device_index] = known
        return known

    # Segments of tensors.

    def _pack_offsets(self, number: int, moved: set[TensorUse | NamedBlob], contents: dict[int, _NewSegment]) -> None:
        program = self._program
        group = program.offsets[number]
        items = {item.index: item for item in program.tensors if item.group == number}
        if not any(use in moved for item in items.values() for use in item.uses):
            return
        segment = program.segments[group.segment]
        if len(segment.users) > 1:
            return  # something else uses its bytes, too
        self._refuse_unknown(group.table, segment.users[0])
        self._refuse_unknown(segment.table, segment.users[0])
        kept, stays = self._kept_entries(group, segment, items, moved)
        content, places = _pack(kept.values())
        if stays and not content.size:
            # Only tensors without bytes stay, but the runtime requires a segment with bytes.
            content = _NewSegment(1, [])
        runs = [(at, Span(segment.span.start + r.start, segment.span.start + r.stop)) for at, r in content.runs]
        contents[segment.index] = _NewSegment(content.size, runs)
        # Entries ascend, because for ExecuTorch's own reader an entry ends where the next one begins.
        values = [content.size] * len(group.values) if kept or stays else [0]
        for index in range(len(values) - 1, 0, -1):
            following = values[min(index + 1, len(values) - 1)]
            values[index] = places[kept[index].start] if index in kept else following
        values[0] = 0
        span = group.table.span("offsets")
        assert span is not None  # noqa: S101 - there are tensors in it
        self._editor.write(span.start - 4, struct.pack(f"<I{len(values)}Q", len(values), *values))

    @staticmethod
    def _kept_entries(
        group: Offsets, segment: Segment, items: Mapping[int, TensorData], moved: set[TensorUse | NamedBlob]
    ) -> tuple[dict[int, Span], bool]:
        """The bytes in the segment of each entry that stays, and whether any tensor stays, even one without bytes."""
        kept: dict[int, Span] = {}
        stays = False
        for index, start in enumerate(group.values):
            nbytes = group.extent(index, segment.span.size)
            if index in items:
                uses = [use for use in items[index].uses if use not in moved]
                stays |= bool(uses)
                nbytes = min(nbytes, items[index].nbytes_of(uses))
            if nbytes:
                kept[index] = Span(start, start + nbytes)
        return kept, stays

    # Named data.

    def _drop_named_data(self, moved: set[TensorUse | NamedBlob], contents: dict[int, _NewSegment]) -> None:
        program = self._program
        gone = [blob for blob in program.named_data if blob in moved]
        if not gone:
            return
        for blob in gone:
            self._refuse_unknown(blob.table, f"named data {blob.key!r}")
        kept = [blob for blob in program.named_data if blob not in moved]
        if kept:
            span = program.root.span("named_data")
            assert span is not None  # noqa: S101 - there are blobs in it
            self._editor.write(span.start - 4, struct.pack("<I", len(kept)))
            for slot, blob in zip(range(span.start, span.stop, 4), kept, strict=False):
                self._editor.link(slot, blob.table.position)
        else:
            # Without a list, the runtime makes no data map of the program that it would have to merge.
            self._editor.set_fields(program.root, {"named_data": 0})
        leaving = {f"named data {blob.key!r}" for blob in gone}
        for index in {blob.segment for blob in gone}:
            segment = program.segments[index]
            if leaving.issuperset(segment.users):
                self._refuse_unknown(segment.table, segment.users[0])
                contents.pop(index, None)

    # Constants inside the flatbuffer.

    def _cut_inline(self, moved: set[TensorUse | NamedBlob]) -> None:
        program = self._program
        items = [item for item in program.tensors if item.group is None]
        gone = {item.index for item in items if moved.issuperset(item.uses)}
        if not gone:
            return
        inline = {index: span for index, span in enumerate(program.inline) if span}
        payloads = [table.span("data") for table in program.root.tables("backend_delegate_data")]
        leave = [inline[index] for index in gone & inline.keys()]
        stay = [inline[index] for index in inline.keys() - gone] + [span for span in payloads if span and span.size]
        shift = 0
        for span, need in _needs(leave, stay):
            left = (shift + span.size) % need
            self._editor.write(span.start - 4, bytes(4))
            self._editor.cut(span, left)
            shift += span.size - left
        if len(gone) == len(items) and len(leave) == len(inline):
            self._use_empty_constant_segment()

    def _use_empty_constant_segment(self) -> None:
        """Record "no constants" in today's form, because ExecuTorch 1.5 cannot load a program with a constant_buffer."""
        editor, root = self._editor, self._program.root
        slot = root.slot("constant_segment")
        if slot:
            editor.write(root.target("constant_buffer"), bytes(4))  # an empty list
        else:
            slot = root.slot("constant_buffer")
            editor.set_fields(root, {"constant_buffer": 0, "constant_segment": slot - root.position})
        vtable = editor.vtable((12, 4, 8))
        # SubsegmentOffsets: distance to the vtable, segment 0, distance to the offsets; those: one, which is 0.
        table = editor.append(b"", 8)
        editor.append(struct.pack("<iIIIQ", table - vtable, 0, 4, 1, 0), 8)
        editor.link(slot, table)

    # The file.

    def _place_segments(self, contents: dict[int, _NewSegment]) -> None:
        """Decide where every segment will lie, and write that into the flatbuffer and its header."""
        program, editor = self._program, self._editor
        order = sorted(program.segments, key=lambda segment: segment.span)
        filled = [s for s in order if contents.get(s.index, _EMPTY).size]
        needs = {s.index: max(SEGMENT_ALIGNMENT, alignment_of(s.span.start)) for s in filled}
        base = 0
        if program.segment_base:
            # The first segment stays at offset 0, because its table may have no field for another offset.
            # Tensors are read where they lie in the file, so a segment keeps the alignment that its bytes had.
            base = align_up(editor.size, needs[filled[0].index] if filled else SEGMENT_ALIGNMENT)
        cursor = 0
        self._runs: list[tuple[int, Span]] = []
        for segment in order:
            content = contents.get(segment.index, _EMPTY)
            cursor += -(base + cursor) % needs.get(segment.index, 1)
            self._set(segment.table, "offset", cursor)
            self._set(segment.table, "size", content.size)
            self._runs += [(base + cursor + offset, span) for offset, span in content.runs]
            cursor += content.size
        self.nbytes = base + cursor if base else editor.size
        if program.header_size:
            numbers = [editor.size, base]
            if program.header_size >= HEADER_WITH_DATA_SIZE:
                numbers.append(cursor)
            editor.write(HEADER_OFFSET + 8, struct.pack(f"<{len(numbers)}Q", *numbers))

    def _set(self, table: Table, field: str, value: int) -> None:
        slot = table.slot(field)
        if slot:
            self._editor.write(slot, struct.pack("<Q", value))
        elif value:  # nothing to do for the first segment, at 0, and for an empty one
            raise self._refuse(f"{table.kind.name}.{field} must become {value}, but the table has no such field")


class _NewSegment(NamedTuple):
    """The new contents of a segment: its size, and runs of the old file at offsets in it."""

    size: int
    runs: list[tuple[int, Span]]


_EMPTY = _NewSegment(0, [])


def _needs(leave: Iterable[Span], stay: Iterable[Span]) -> list[tuple[Span, int]]:
    """The spans that leave, in order, each with the alignment that the bytes between it and the next one have."""
    needs: list[tuple[Span, int]] = []
    need = TENSOR_ALIGNMENT
    for span, leaves in sorted([(span, True) for span in leave] + [(span, False) for span in stay], reverse=True):
        if leaves:
            needs.append((span, need))
            need = TENSOR_ALIGNMENT
        else:
            need = max(need, alignment_of(span.start))
    return needs[::-1]


def _pack(spans: Iterable[Span]) -> tuple[_NewSegment, dict[int, int]]:
    """Pack spans of a segment densely, overlapping ones as one; also the new place of each start of a span.

    Every start keeps its alignment.
    """
    runs: list[Span] = []
    starts = sorted({span.start for span in spans})
    for span in sorted(spans):
        if runs and span.start < runs[-1].stop:
            runs[-1] = Span(runs[-1].start, max(runs[-1].stop, span.stop))
        else:
            runs.append(span)
    places: dict[int, int] = {}
    placed: list[tuple[int, Span]] = []
    cursor = 0
    remaining = deque(starts)
    for run in runs:
        members = []
        while remaining and remaining[0] < run.stop:
            members.append(remaining.popleft())
        need = max(TENSOR_ALIGNMENT, *(alignment_of(start) for start in members))
        cursor += (run.start - cursor) % need
        places.update((start, cursor + start - run.start) for start in members)
        placed.append((cursor, run))
        cursor += run.size
    return _NewSegment(cursor, placed), places
