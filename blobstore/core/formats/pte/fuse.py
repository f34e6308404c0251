"""One program with the methods of several, each blob once.

What the methods refer to in the flatbuffers of the inputs is copied (`excerpt.py`), one part behind the other. Before
comes a new root with the lists of the whole: methods, segments, constants, named data. Behind come the names of the
methods, and the references to the payloads of delegates. So everything that a method says stays what it was, but for
numbers that count these lists: the index of each constant, and of each initial state, into the one segment of constants,
and of initial states, and the segment of each payload.

Constants and payloads inside a flatbuffer, as old programs have them, move to segments. What programs take from data files
becomes part of the program. Nothing else is in it: the same program comes out of it again. Programs with fields that are
unknown to this version are refused, because these may count something, too.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from blobstore.core.disk.output import write_view
from blobstore.core.errors import InvalidKeyError, KeyConflictError, LayoutError, UnsupportedProgramError
from blobstore.core.formats.alignment import PAGE, SEGMENT_ALIGNMENT, TENSOR_ALIGNMENT, align_up, alignment_of
from blobstore.core.formats.flatbuffer import Table
from blobstore.core.formats.pte.excerpt import Excerpt
from blobstore.core.formats.pte.header import HEADER_MAGIC, HEADER_OFFSET, HEADER_WITH_DATA_SIZE, IDENTIFIER
from blobstore.core.formats.pte.parts import ExternalTensor, TensorData
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.formats.pte.schema import DataLocation, TensorDataLocation
from blobstore.core.memory.digest import digest
from blobstore.core.memory.distinct import Distinct
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import check_length

__all__ = ["FusedBlob", "FusedProgram", "Fusion"]

_MAX_FLATBUFFER = 2**31 - 1
_SAMPLE = 256  # bytes


@dataclass(frozen=True, eq=False)
class FusedBlob:
    """What becomes part of the program: its bytes, its layout if it is a tensor, and its alignment in bytes."""

    data: memoryview
    layout: TensorLayout | None
    alignment: int


@dataclass(frozen=True, eq=False)
class FusedProgram:
    """A program that becomes part of another one.

    Attributes:
        program: the program.
        methods: the methods that are taken, in the order of the program, with their names in the new one.
        tensors: the tensors that it takes from data files, by key; those that are missing stay outside.
        named_data: the blobs that its delegates take from data files, by key.
        unneeded: keys of its own named data that are not taken.
        application: keys of its own named data that no delegate looks up, each with its key in the new program, or "" to
            leave it out.
    """

    program: ProgramFile
    methods: Mapping[str, str]
    tensors: Mapping[str, FusedBlob] = field(default_factory=dict)
    named_data: Mapping[str, FusedBlob] = field(default_factory=dict)
    unneeded: Collection[str] = frozenset()
    application: Mapping[str, str] = field(default_factory=dict)


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

    def __init__(self, parts: Sequence[FusedProgram]) -> None:
        self._parts = parts
        self._segments = _Contents()
        self._constants, self._states = _Contents(), _Contents()
        self._named: dict[str, tuple[int, FusedProgram]] = {}
        self._payloads: list[tuple[Excerpt, int, int]] = []  # slots of their references, and their segments
        self._names: list[tuple[Excerpt, int, bytes]] = []  # slots of their references
        self._check()
        excerpts = [self._excerpt(part) for part in parts]
        for part in parts:
            self._add_named_data(part)
        self._flatbuffer = self._lay(excerpts)
        self.nbytes = self._place_segments()
        self.shared = sum(contents.shared for contents in (self._segments, self._constants, self._states))

    def write(self, file: BinaryIO) -> None:
        """Write the program at the current position of `file`, which must be its start."""
        file.write(self._flatbuffer.data)
        position = len(self._flatbuffer.data)
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
                        program.path,
                        f"{names[name].path} has a method {name!r}, too; give one of them another name with methods= "
                        f"(--method {program.path.stem}:{name}=NAME)",
                    )
                names[name] = program

    # The parts.

    def _excerpt(self, part: FusedProgram) -> Excerpt:
        """The methods of a program with numbers for the lists of the whole."""
        program = part.program
        plans = _plans(part)
        excerpt = Excerpt([plan for plan, _ in plans])
        self._number_tensors(part, excerpt)
        internal: set[int] = set()
        for external in program.externals:
            blob_of_key = part.tensors.get(external.key)
            position = external.use.table.position
            if blob_of_key is not None and external.use.method in part.methods and position not in internal:
                internal.add(position)  # values may share one table
                self._internalize(excerpt, program, external, blob_of_key)
        alignment = _alignment(program)
        spans = {(one.method, one.index): one.span for one in program.delegates}
        for plan, name in plans:
            for number, delegate in enumerate(plan.tables("delegates")):
                span = spans[name, number]
                blob = FusedBlob(program.data[span.start : span.stop], None, alignment)
                slot = delegate.slot("processed")
                excerpt.open(slot)
                self._payloads.append((excerpt, slot, self._segments.add(blob)))
            slot = plan.slot("name")
            excerpt.open(slot)
            self._names.append((excerpt, slot, _text(part.methods[name], program)))
        return excerpt

    def _number_tensors(self, part: FusedProgram, excerpt: Excerpt) -> None:
        """Give each constant and each initial state its number in the one segment of its kind."""
        for item in part.program.tensors:
            uses = [use for use in item.uses if use.method in part.methods]
            if not uses:
                continue
            contents = self._states if item.kind == "state" else self._constants
            index = 1 + contents.add(_taken(part.program, item, item.nbytes_of(uses)))  # entry 0 stands for no data
            for use in uses:
                excerpt.write(use.table.slot("data_buffer_idx"), struct.pack("<I", index))
                if item.kind == "state":
                    _use_first_group(excerpt, use.table)

    def _internalize(self, excerpt: Excerpt, program: ProgramFile, external: ExternalTensor, blob: FusedBlob) -> None:
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
            excerpt.write(slot, index)
            excerpt.write(extra.slot("location"), bytes([TensorDataLocation.SEGMENT]))
            _use_first_group(excerpt, tensor)
            return
        # The tensor has no room for an index: its reference to the ExtraTensorInfo becomes one. The name is lost with it.
        if extra.scalar("device_type") or extra.scalar("device_index"):
            raise UnsupportedProgramError(
                program.path, f"{use.method!r}, value {use.value} is an external tensor of a device"
            )
        excerpt.turn_reference(tensor, "extra_tensor_info", "data_buffer_idx", index)

    def _add_named_data(self, part: FusedProgram) -> None:
        program = part.program
        alignment = _alignment(program)
        named = [
            (
                part.application.get(blob.key, blob.key),
                FusedBlob(program.data[blob.span.start : blob.span.stop], None, alignment),
            )
            for blob in program.named_data
            if blob.key not in part.unneeded
        ]
        for key, blob in (*named, *part.named_data.items()):
            if key:
                index = self._segments.add(blob)
                first, other = self._named.setdefault(key, (index, part))
                if first != index:
                    raise _conflict(key, part, other)

    # The whole.

    def _lay(self, excerpts: Sequence[Excerpt]) -> _Flatbuffer:
        """The flatbuffer: a new root and its lists, the parts, the names and the references to payloads."""
        constants = self._segments.add_group(self._constants)
        states = self._segments.add_group(self._states)
        plans = [
            (excerpt, plan.position)
            for excerpt, part in zip(excerpts, self._parts, strict=True)
            for plan, _ in _plans(part)
        ]
        new = _Flatbuffer()
        new.root(self._parts[0].program.root.scalar("version"))
        plan_slots = new.vector("execution_plan", len(plans))
        new.vector("constant_buffer", 0)
        new.vector("backend_delegate_data", 0)
        self._segment_numbers = [new.segment(slot) for slot in new.vector("segments", len(self._segments))]
        new.group(new.slots["constant_segment"], constants, self._constants)
        for slot in new.vector("mutable_data_segments", 1 if len(self._states) else 0):
            new.group(slot, states, self._states)
        named = list(self._named.items())
        for slot, (key, (index, _)) in zip(new.vector("named_data", len(named)), named, strict=True):
            new.named(slot, key, index)
        end = len(new.data)
        for excerpt in excerpts:
            end = excerpt.place(end)
        end += sum(len(name) + 8 for _, _, name in self._names) + 12 * len(self._payloads)  # and padding
        if end > _MAX_FLATBUFFER:
            raise UnsupportedProgramError(
                self._parts[0].program.path, f"the flatbuffer of all would have {end} bytes, above {_MAX_FLATBUFFER}"
            )
        for excerpt in excerpts:
            excerpt.copy_to(new.data)
        for slot, (excerpt, position) in zip(plan_slots, plans, strict=True):
            new.link(slot, excerpt.moved(position))
        for excerpt, slot, name in self._names:
            new.text(excerpt.moved(slot), name)
        for excerpt, slot, segment in self._payloads:
            new.payload(excerpt.moved(slot), segment)
        return new

    def _place_segments(self) -> int:
        """Decide where every segment lies, write that into the front, and return the size of the file."""
        new = self._flatbuffer
        # If one must lie on a page, all do, because only then the file shows it; see `_alignment`.
        pages = any(blob.alignment > SEGMENT_ALIGNMENT for blob in self._segments.blobs)
        needs = [max(blob.alignment, PAGE if pages else SEGMENT_ALIGNMENT) for blob in self._segments.blobs]
        base = align_up(len(new.data), needs[0]) if needs else 0
        cursor = base
        self._runs: list[tuple[int, memoryview]] = []
        for numbers, blob, need in zip(self._segment_numbers, self._segments.blobs, needs, strict=True):
            cursor = align_up(cursor, need)
            struct.pack_into("<QQ", new.data, numbers, cursor - base, blob.nbytes)
            self._runs += [(cursor + offset, data) for offset, data in blob.runs]
            cursor += blob.nbytes
        header = (HEADER_MAGIC, HEADER_WITH_DATA_SIZE, len(new.data), base, cursor - base)
        struct.pack_into("<4sIQQQ", new.data, HEADER_OFFSET, *header)
        return cursor or len(new.data)


@dataclass(frozen=True)
class _FusedSegment:
    """The contents of a segment: its size, its alignment, and runs of bytes at offsets in it."""

    nbytes: int
    alignment: int
    runs: list[tuple[int, memoryview]]


class _Contents:
    """Distinct blobs, each once, in the order in which they came."""

    def __init__(self) -> None:
        self.blobs: list[_FusedSegment] = []
        self.shared = 0
        self._alike: dict[tuple[int, bytes, bytes], int | None] = {}
        self._known = Distinct()

    def __len__(self) -> int:
        return len(self.blobs)

    def add(self, blob: FusedBlob) -> int:
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
                stored = self.blobs[same]
                if blob.alignment > stored.alignment:
                    self.blobs[same] = _FusedSegment(stored.nbytes, blob.alignment, stored.runs)
                self.shared += len(data)
                return same
            self._known.add(data, address, index)
        self.blobs.append(_FusedSegment(len(data), blob.alignment, [(0, data)]))
        return index

    def add_group(self, group: _Contents) -> int:
        """Add a segment with all blobs of a group, and return its index; 0 for an empty group."""
        if not len(group):
            return 0
        places = group.places()
        size = max(places[-1] + group.blobs[-1].nbytes, 1)  # the runtime requires a segment with bytes
        runs = [(place, blob.runs[0][1]) for place, blob in zip(places, group.blobs, strict=True)]
        self.blobs.append(_FusedSegment(size, SEGMENT_ALIGNMENT, runs))
        return len(self.blobs) - 1

    def places(self) -> list[int]:
        """The offset of each blob when they lie in one segment."""
        places, cursor = [], 0
        for blob in self.blobs:
            cursor = align_up(cursor, min(max(blob.alignment, TENSOR_ALIGNMENT), SEGMENT_ALIGNMENT))
            places.append(cursor)
            cursor += blob.nbytes
        return places


class _Flatbuffer:
    """The flatbuffer of a program: its header, its root, and the tables of its lists, each before what it refers to."""

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
        self._place = self._append(struct.pack("<4H", 8, 12, 8, 4))  # where a payload lies, and in which segment
        self.slots: dict[str, int] = {}

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

    def segment(self, slot: int) -> int:
        """A DataSegment; the place of its two numbers."""
        start = self._table(self._segment, 20, 8)
        self.link(slot, start)
        return start + 8

    def group(self, slot: int, index: int, contents: _Contents) -> None:
        """A SubsegmentOffsets with the place of each blob."""
        places = contents.places()
        start = self._table(self._pair, 8)
        self.link(slot, start)
        struct.pack_into("<I", self.data, start + 4, index)
        self.data += bytes((4 - len(self.data)) % 8)
        self.link(start + 8, len(self.data))
        self.data += struct.pack(f"<I{len(places) + 1}Q", len(places) + 1, 0, *places)

    def named(self, slot: int, key: str, index: int) -> None:
        """A NamedData with its key."""
        start = self._table(self._pair, 8)
        self.link(slot, start)
        struct.pack_into("<I", self.data, start + 8, index)
        self.text(start + 4, key.encode())

    def payload(self, slot: int, segment: int) -> None:
        """A BackendDelegateDataReference to a segment."""
        start = self._table(self._place, 8)
        self.link(slot, start)
        struct.pack_into("<Ib", self.data, start + 4, segment, DataLocation.SEGMENT)

    def text(self, slot: int, text: bytes) -> None:
        """A string."""
        self.link(slot, self._append(struct.pack("<I", len(text)) + text + b"\0", 4))

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


def _conflict(key: str, part: FusedProgram, other: FusedProgram) -> KeyConflictError:
    """The error for a key with two contents."""
    what = f"{part.program.path}: the key {key!r} has other bytes than in {other.program.path}; "
    for one in (part, other):
        for old, new in one.application.items():
            if new == key:
                return KeyConflictError(
                    f"{what}a program has each key once. No delegate of {one.program.path} looks for it, so give it another key "
                    f"there, or leave it out, with named_data= (--named-data {one.program.path.stem}:{old}=NAME)"
                )
    return KeyConflictError(f"{what}programs with equal keys for different weights cannot become one")


def _plans(part: FusedProgram) -> list[tuple[Table, str]]:
    """The methods that are taken of a program, with their names there."""
    plans = [(plan, plan.string("name") or "") for plan in part.program.root.tables("execution_plan")]
    return [(plan, name) for plan, name in plans if name in part.methods]


def _alignment(program: ProgramFile) -> int:
    """The alignment of segments that a program was written with: one of them alone may be aligned to more by accident."""
    filled = any(segment.span.size for segment in program.segments)
    return PAGE if filled and program.segment_alignment >= PAGE else SEGMENT_ALIGNMENT


def _taken(program: ProgramFile, item: TensorData, nbytes: int) -> FusedBlob:
    """The first bytes of a constant or of an initial state. Their alignment is that of their place in the segment."""
    start = item.span.start
    place = start if item.group is None else program.offsets[item.group].values[item.index]
    return FusedBlob(program.data[start : start + nbytes], None, alignment_of(place))


def _use_first_group(excerpt: Excerpt, tensor: Table) -> None:
    """All initial states lie in the first group."""
    extra = tensor.table("extra_tensor_info")
    slot = 0 if extra is None else extra.slot("mutable_data_segments_idx")
    if slot:
        excerpt.write(slot, bytes(8))


def _text(text: str, program: ProgramFile) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidKeyError(f"{program.path}: the name {text!r} of a method is not valid Unicode") from None
