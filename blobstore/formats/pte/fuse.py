"""One program with the methods of several, each blob once.

The flatbuffers of the inputs are edited (`edit.py`) and laid one behind the other, as they are: references inside a
flatbuffer are relative. Before them comes a new root with the lists of the whole: methods, segments, constants, named
data. So everything that a method says stays what it was, but for numbers that count these lists:

- the index of each constant, and of each initial state, into the one segment of constants, and of initial states;
- the reference to each delegate's payload;
- the names of methods that are renamed.

Constants and payloads inside a flatbuffer, as old programs have them, move to segments. What programs take from data files
becomes part of the program. Programs with fields that are unknown to this version are refused, because these may count
something, too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from blobstore.disk.output import write_view
from blobstore.errors import InvalidKeyError, KeyConflictError, LayoutError, UnsupportedProgramError
from blobstore.formats.alignment import SEGMENT_ALIGNMENT, TENSOR_ALIGNMENT, align_up
from blobstore.formats.pte.edit import Editor
from blobstore.formats.pte.flatbuffer import Table
from blobstore.formats.pte.header import HEADER_MAGIC, HEADER_OFFSET, HEADER_WITH_DATA_SIZE, IDENTIFIER
from blobstore.formats.pte.parts import ExternalTensor
from blobstore.formats.pte.program import ProgramFile
from blobstore.formats.pte.schema import DataLocation, TensorDataLocation
from blobstore.memory.digest import digest
from blobstore.memory.distinct import Distinct
from blobstore.memory.layout import TensorLayout
from blobstore.memory.mapped_file import check_length

__all__ = ["Blob", "Fusion", "Part"]

_MAX_FLATBUFFER = 2**31 - 1
_SAMPLE = 256  # bytes


@dataclass(frozen=True, eq=False)
class Blob:
    """What becomes part of the program: its bytes, its layout if it is a tensor, and its alignment in bytes."""

    data: memoryview
    layout: TensorLayout | None
    alignment: int


@dataclass(frozen=True, eq=False)
class Part:
    """A program that becomes part of another one.

    Attributes:
        program: the program.
        methods: the methods that are taken, in the order of the program, with their names in the new one.
        tensors: the tensors that it takes from data files, by key; those that are missing stay outside.
        named_data: the blobs that its delegates take from data files, by key.
    """

    program: ProgramFile
    methods: Mapping[str, str]
    tensors: Mapping[str, Blob] = field(default_factory=dict)
    named_data: Mapping[str, Blob] = field(default_factory=dict)


class Fusion:
    """A fused program as it will be written.

    The constructor raises all errors, before a byte is written.

    Attributes:
        nbytes: the size of the file.
        shared: bytes of blobs that were met again and are stored once.

    Raises:
        UnsupportedProgramError: a program has fields of a later version, the versions differ, two methods have one name,
            or the flatbuffer would be too large.
        KeyConflictError: a key has two contents.
        LayoutError: a tensor in a data file is not what the program expects.
        InvalidKeyError: the name of a method is empty, holds a NUL or is not valid Unicode.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._segments = _Contents()
        self._constants, self._states = _Contents(), _Contents()
        self._named: dict[str, tuple[int, ProgramFile]] = {}
        self._check()
        editors = [self._edit(part) for part in parts]
        for part in parts:
            self._add_named_data(part)
        self._front = self._front_of(editors)
        self.nbytes = self._place_segments()
        self.shared = sum(contents.shared for contents in (self._segments, self._constants, self._states))

    def write(self, file: BinaryIO) -> None:
        """Write the program at the current position of `file`, which must be its start."""
        position = 0
        for start, pieces in self._flatbuffers:
            file.write(bytes(start - position))
            position = start
            for piece in pieces():
                file.write(piece)
                position += len(piece)
        for start, data in self._runs:
            file.write(bytes(start - position))
            write_view(file, data)
            position = start + len(data)
        file.write(bytes(self.nbytes - position))

    def _check(self) -> None:
        versions = {part.program.root.scalar("version") for part in self._parts}
        names: dict[str, ProgramFile] = {}
        for part in self._parts:
            program = part.program
            if program.unknown:
                unknown = ", ".join(sorted(program.unknown))
                raise UnsupportedProgramError(program.path, f"it has unknown fields of {unknown}, which may be lost")
            if len(versions) > 1:
                raise UnsupportedProgramError(program.path, f"the programs have the versions {sorted(versions)}")
            for name in part.methods.values():
                if not name or "\0" in name:
                    raise InvalidKeyError(
                        f"{program.path}: a method must have a non-empty name without NUL, got {name!r}"
                    )
                if name in names:
                    raise UnsupportedProgramError(
                        program.path, f"{names[name].path} has a method {name!r}, too; give one of them another name"
                    )
                names[name] = program

    # The parts.

    def _edit(self, part: Part) -> Editor:
        """A program with numbers for the lists of the whole, and without bytes that move to segments."""
        program = part.program
        editor = Editor(program.root)
        alignments = {group: program.alignment_of(group) for group in {item.group for item in program.tensors}}
        for item in program.tensors:
            if not any(use.method in part.methods for use in item.uses):
                continue
            contents = self._states if item.kind == "state" else self._constants
            blob = Blob(program.data[item.span.start : item.span.stop], None, alignments[item.group])
            index = 1 + contents.add(blob)  # entry 0 stands for no data
            for use in item.uses:
                editor.write(use.table.slot("data_buffer_idx"), struct.pack("<I", index))
                if item.kind == "state":
                    _use_first_group(editor, use.table)
        internal: set[int] = set()
        for external in program.externals:
            blob_of_key = part.tensors.get(external.key)
            if blob_of_key is None or external.use.method not in part.methods:
                continue
            if external.use.table.position not in internal:
                internal.add(external.use.table.position)
                self._internalize(editor, program, external, blob_of_key)
        payloads = iter(program.delegates)
        for plan in program.root.tables("execution_plan"):
            name = plan.string("name") or ""  # the reader has checked that it is there
            for delegate in plan.tables("delegates"):
                payload = next(payloads)
                if name in part.methods:
                    span = payload.span
                    blob = Blob(program.data[span.start : span.stop], None, program.segment_alignment)
                    editor.link(delegate.slot("processed"), _payload_reference(editor, self._segments.add(blob)))
            if name in part.methods and part.methods[name] != name:
                editor.link(plan.slot("name"), _text(editor, part.methods[name], program))
        inline = [*program.inline, *(table.span("data") for table in program.root.tables("backend_delegate_data"))]
        for inside in inline:
            if inside and inside.size:
                editor.write(inside.start - 4, bytes(4))
                editor.cut(inside, inside.size % TENSOR_ALIGNMENT)  # what lies behind keeps its alignment
        editor.finish()
        return editor

    def _internalize(self, editor: Editor, program: ProgramFile, external: ExternalTensor, blob: Blob) -> None:
        """Make a tensor of a data file one of the program."""
        use, tensor = external.use, external.use.table
        what = f"{program.path}: method {use.method!r}, value {use.value}, key {external.key!r}"
        if external.layout is None or use.layout is None or blob.layout != external.layout:
            raise LayoutError(f"{what}: the program expects {external.layout}, the data file has {blob.layout}")
        index = struct.pack("<I", 1 + (self._states if external.mutable else self._constants).add(blob))
        extra = tensor.table("extra_tensor_info")
        assert extra is not None  # noqa: S101 - an external tensor has one
        slot = tensor.slot("data_buffer_idx")
        if slot:
            editor.write(slot, index)
            editor.write(extra.slot("location"), bytes([TensorDataLocation.SEGMENT]))
            _use_first_group(editor, tensor)
            return
        # The tensor has no room for an index: its reference to the ExtraTensorInfo becomes one. The name is lost with it.
        if extra.scalar("device_type") or extra.scalar("device_index"):
            raise UnsupportedProgramError(
                program.path, f"{use.method!r}, value {use.value} is an external tensor of a device"
            )
        slot = tensor.slot("extra_tensor_info")
        editor.set_fields(tensor, {"extra_tensor_info": 0, "data_buffer_idx": slot - tensor.position})
        editor.write(slot, index)

    def _add_named_data(self, part: Part) -> None:
        program = part.program
        inside = {
            blob.key: Blob(program.data[blob.span.start : blob.span.stop], None, program.segment_alignment)
            for blob in program.named_data
        }
        for blobs in (inside, part.named_data):
            for key, blob in blobs.items():
                index = self._segments.add(blob)
                known, other = self._named.setdefault(key, (index, program))
                if known != index:
                    raise KeyConflictError(
                        f"{program.path}: the key {key!r} has other bytes than in {other.path}; programs with equal keys for "
                        "different weights cannot become one"
                    )

    # The whole.

    def _front_of(self, editors: Sequence[Editor]) -> _Front:
        """The new root and its lists, and the place of each part behind them."""
        constants = self._segments.add_group(self._constants)
        states = self._segments.add_group(self._states)
        plans = [
            (number, table.position)
            for number, part in enumerate(self._parts)
            for table in part.program.root.tables("execution_plan")
            if table.string("name") in part.methods
        ]
        version = self._parts[0].program.root.scalar("version")
        front = _Front()
        front.root(version)
        plan_slots = front.vector("execution_plan", len(plans))
        front.vector("constant_buffer", 0)
        front.vector("backend_delegate_data", 0)
        self._segment_numbers = []
        for slot in front.vector("segments", len(self._segments)):
            front.refer(slot)
            self._segment_numbers.append(front.segment())
        front.refer(front.slots["constant_segment"])
        front.group(constants, self._constants)
        mutable = front.vector("mutable_data_segments", 1 if len(self._states) else 0)
        for slot in mutable:
            front.refer(slot)
            front.group(states, self._states)
        named = list(self._named.items())
        for slot, (key, (index, _)) in zip(front.vector("named_data", len(named)), named, strict=True):
            front.refer(slot)
            front.named(key, index)
        self._flatbuffers: list[tuple[int, Callable[[], Iterator[bytes | memoryview]]]] = [(0, front.pieces)]
        position = len(front.data)
        bases = []
        for part, editor in zip(self._parts, editors, strict=True):
            start = part.program.root.buffer.start
            position += (start - position) % TENSOR_ALIGNMENT
            bases.append(position - start)
            self._flatbuffers.append((position, _without(start, editor)))
            position += editor.size - start
        if position > _MAX_FLATBUFFER:
            raise UnsupportedProgramError(
                self._parts[0].program.path,
                f"the flatbuffer of all would have {position} bytes, above {_MAX_FLATBUFFER}",
            )
        for slot, (number, target) in zip(plan_slots, plans, strict=True):
            front.link(slot, bases[number] + editors[number].moved(target))
        self._program_size = position
        return front

    def _place_segments(self) -> int:
        """Decide where every segment lies, write that into the front, and return the size of the file."""
        front = self._front
        base = align_up(self._program_size, max([SEGMENT_ALIGNMENT, *(one.alignment for one in self._segments.blobs)]))
        cursor = 0
        self._runs: list[tuple[int, memoryview]] = []
        for numbers, blob in zip(self._segment_numbers, self._segments.blobs, strict=True):
            cursor = align_up(cursor, max(blob.alignment, SEGMENT_ALIGNMENT))
            struct.pack_into("<QQ", front.data, numbers, cursor, blob.nbytes)
            self._runs += [(base + cursor + offset, data) for offset, data in blob.runs]
            cursor += blob.nbytes
        if not len(self._segments):
            base = 0
        struct.pack_into(
            "<4sIQQQ",
            front.data,
            HEADER_OFFSET,
            HEADER_MAGIC,
            HEADER_WITH_DATA_SIZE,
            self._program_size,
            base,
            cursor,
        )
        return base + cursor if base else self._program_size


@dataclass(frozen=True)
class _Content:
    """The contents of a segment: its size, its alignment, and runs of bytes at offsets in it."""

    nbytes: int
    alignment: int
    runs: list[tuple[int, memoryview]]


class _Contents:
    """Distinct blobs, each once, in the order in which they came."""

    def __init__(self) -> None:
        self.blobs: list[_Content] = []
        self.shared = 0
        self._alike: dict[tuple[int, bytes, bytes], int | None] = {}
        self._known = Distinct()

    def __len__(self) -> int:
        return len(self.blobs)

    def add(self, blob: Blob) -> int:
        """The index of a blob with these bytes.

        A blob is read only if another one has its size, its beginning and its end.
        """
        data = blob.data
        check_length(data)
        ends = len(data), bytes(data[:_SAMPLE]), bytes(data[-_SAMPLE:])
        index = len(self.blobs)
        if ends not in self._alike:
            self._alike[ends] = index
        else:
            first = self._alike[ends]
            if first is not None:  # the others of them came after it, and are known
                view = self.blobs[first].runs[0][1]
                self._known.add(view, digest(view), first)
                self._alike[ends] = None
            address = digest(data)
            same = self._known.find(data, address)
            if same is not None:
                known = self.blobs[same]
                if blob.alignment > known.alignment:
                    self.blobs[same] = _Content(known.nbytes, blob.alignment, known.runs)
                self.shared += len(data)
                return same
            self._known.add(data, address, index)
        self.blobs.append(_Content(len(data), blob.alignment, [(0, data)]))
        return index

    def add_group(self, group: _Contents) -> int:
        """Add a segment with all blobs of a group, and return its index; 0 if there are none."""
        if not len(group):
            return 0
        places = group.places()
        size = max(places[-1] + group.blobs[-1].nbytes, 1)  # the runtime requires a segment with bytes
        runs = [(place, blob.runs[0][1]) for place, blob in zip(places, group.blobs, strict=True)]
        self.blobs.append(_Content(size, max(blob.alignment for blob in group.blobs), runs))
        return len(self.blobs) - 1

    def places(self) -> list[int]:
        """The offset of each blob when they lie in one segment."""
        places, cursor = [], 0
        for blob in self.blobs:
            cursor = align_up(cursor, max(blob.alignment, TENSOR_ALIGNMENT))
            places.append(cursor)
            cursor += blob.nbytes
        return places


class _Front:
    """The first bytes of a program: its header, its root, and the tables of its lists, each before what it refers to."""

    _PROGRAM = (
        "execution_plan",
        "constant_buffer",
        "backend_delegate_data",
        "segments",
        "constant_segment",
        "mutable_data_segments",
        "named_data",
    )

    def __init__(self) -> None:
        self.data = bytearray(HEADER_OFFSET + HEADER_WITH_DATA_SIZE)
        self.data[4:8] = IDENTIFIER
        # Each vtable: its size, the size of the table, the place of each field; then the tables, which lie behind them.
        self._program = self._append(struct.pack("<10H", 20, 36, *range(4, 36, 4)))
        self._segment = self._append(struct.pack("<4H", 8, 24, 8, 16))
        self._pair = self._append(struct.pack("<4H", 8, 12, 4, 8))  # a number and a reference, or the other way round
        self.slots: dict[str, int] = {}

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The bytes, once they are complete."""
        yield bytes(self.data)

    def root(self, version: int) -> None:
        """The Program table; its references are linked later."""
        start = self._table(self._program, 32)
        struct.pack_into("<I", self.data, start + 4, version)
        self.slots = {name: start + 8 + 4 * index for index, name in enumerate(self._PROGRAM)}
        self.link(0, start)

    def vector(self, name: str, count: int) -> list[int]:
        """A list of tables, with the places of its references."""
        start = self._append(struct.pack("<I", count) + bytes(4 * count), 4)
        self.link(self.slots[name], start)
        return [start + 4 + 4 * index for index in range(count)]

    def refer(self, slot: int) -> None:
        """Let a reference lead to the table that comes next."""
        self._pending = slot

    def segment(self) -> int:
        """A DataSegment; the place of its two numbers."""
        start = self._table(self._segment, 20, 8)
        self.link(self._pending, start)
        return start + 8

    def group(self, index: int, contents: _Contents) -> None:
        """A SubsegmentOffsets with the place of each blob."""
        places = contents.places()
        start = self._table(self._pair, 8)
        self.link(self._pending, start)
        struct.pack_into("<I", self.data, start + 4, index)
        self.data += bytes((4 - len(self.data)) % 8)
        self.link(start + 8, len(self.data))
        self.data += struct.pack(f"<I{len(places) + 1}Q", len(places) + 1, 0, *places)

    def named(self, key: str, index: int) -> None:
        """A NamedData with its key."""
        start = self._table(self._pair, 8)
        self.link(self._pending, start)
        struct.pack_into("<I", self.data, start + 8, index)
        text = key.encode()
        self.link(start + 4, self._append(struct.pack("<I", len(text)) + text + b"\0", 4))

    def link(self, slot: int, target: int) -> None:
        """Let the reference at `slot` lead to `target`, which lies behind it."""
        struct.pack_into("<I", self.data, slot, target - slot)

    def _append(self, data: bytes, align: int = 2) -> int:
        self.data += bytes(-len(self.data) % align)
        start = len(self.data)
        self.data += data
        return start

    def _table(self, vtable: int, nbytes: int, align: int = 4) -> int:
        """A table with so many bytes of fields, all zero."""
        start = self._append(bytes(4 + nbytes), align)
        struct.pack_into("<i", self.data, start, start - vtable)
        return start


def _use_first_group(editor: Editor, tensor: Table) -> None:
    """All initial states lie in the first group."""
    extra = tensor.table("extra_tensor_info")
    slot = 0 if extra is None else extra.slot("mutable_data_segments_idx")
    if slot:
        editor.write(slot, bytes(8))


def _payload_reference(editor: Editor, segment: int) -> int:
    """A BackendDelegateDataReference to a segment."""
    vtable = editor.vtable((12, 8, 4))
    start = editor.append(b"")
    return editor.append(struct.pack("<iIb3x", start - vtable, segment, DataLocation.SEGMENT))


def _text(editor: Editor, text: str, program: ProgramFile) -> int:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise InvalidKeyError(f"{program.path}: the name {text!r} of a method is not valid Unicode") from None
    return editor.append(struct.pack("<I", len(data)) + data + b"\0")


def _without(start: int, editor: Editor) -> Callable[[], Iterator[bytes | memoryview]]:
    """The pieces of a flatbuffer behind its header."""

    def pieces() -> Iterator[bytes | memoryview]:
        skip = start
        for piece in editor.pieces():
            yield piece[skip:] if skip < len(piece) else b""
            skip = max(0, skip - len(piece))

    return pieces
