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

from flatbuffers.builder import BuilderSizeError

from blobstore.core.disk.output import write_view
from blobstore.core.errors import KeyConflictError, LayoutError, UnsupportedProgramError
from blobstore.core.formats.alignment import PAGE, SEGMENT_ALIGNMENT, TENSOR_ALIGNMENT, align_up, alignment_of
from blobstore.core.formats.flatbuffer import U64, Table
from blobstore.core.formats.keys import check_key
from blobstore.core.formats.pte.excerpt import Excerpt
from blobstore.core.formats.pte.header import HEADER_MAGIC, HEADER_OFFSET, HEADER_WITH_DATA_SIZE, IDENTIFIER
from blobstore.core.formats.pte.parts import ExternalTensor, TensorData
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.formats.pte.schema import (
    DATA_REFERENCE,
    DATA_SEGMENT,
    NAMED_DATA,
    PROGRAM,
    SUBSEGMENT_OFFSETS,
    DataLocation,
    TensorDataLocation,
)
from blobstore.core.formats.table_builder import TableBuilder
from blobstore.core.memory.digest import digest
from blobstore.core.memory.distinct import Distinct
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import check_length

__all__ = ["FusedBlob", "FusedProgram", "Fusion"]

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
        self._runs: list[tuple[int, memoryview]] = []  # behind the first segment
        try:
            flatbuffer = self._lay(excerpts)
        except BuilderSizeError:
            raise UnsupportedProgramError(
                parts[0].program.path, "the flatbuffer of all would have over 2 GiB"
            ) from None
        self._head = _with_header(flatbuffer, self._base_alignment, self._segments_size)
        self.nbytes = len(self._head) + self._segments_size
        self.shared = sum(contents.shared for contents in (self._segments, self._constants, self._states))

    def write(self, file: BinaryIO) -> None:
        """Write the program at the current position of `file`, which must be its start."""
        file.write(self._head)
        position = 0
        for start, data in self._runs:
            file.write(bytes(start - position))
            write_view(file, data)
            position = start + len(data)
        file.write(bytes(self._segments_size - position))

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
                check_key(name, f"{program.path}: ", "method")
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
            self._names.append((excerpt, slot, part.methods[name].encode()))
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

    def _lay(self, excerpts: Sequence[Excerpt]) -> bytes:
        """The flatbuffer: a new root and its lists, the parts, the names and the references to payloads.

        It grows from its end, and so all places are distances to the end.
        """
        constants, states = (self._segments.add_group(group) for group in (self._constants, self._states))
        end = 0
        for excerpt in excerpts:
            end = excerpt.place(end)
        new = TableBuilder(end + (1 << 16))
        new.ForceDefaults(True)
        ends = [(excerpt.moved(slot), new.CreateString(name)) for excerpt, slot, name in self._names]
        for excerpt, slot, segment in self._payloads:
            ends.append((excerpt.moved(slot), new.table(DATA_REFERENCE, location=DataLocation.SEGMENT, index=segment)))
        copied = bytearray()
        for excerpt in excerpts:
            excerpt.copy_to(copied)
        new.Prep(TENSOR_ALIGNMENT, end)
        start = new.Offset() + end
        for slot, target in ends:
            struct.pack_into("<I", copied, slot, start - slot - target)
        new.raw(copied)
        plans = [
            start - excerpt.moved(plan.position)
            for excerpt, part in zip(excerpts, self._parts, strict=True)
            for plan, _ in _plans(part)
        ]
        named = [
            new.table(NAMED_DATA, key=new.CreateString(key), segment_index=index)
            for key, (index, _) in self._named.items()
        ]
        groups = [_group(new, constants, self._constants), _group(new, states, self._states)]
        root = new.table(
            PROGRAM,
            version=self._parts[0].program.root.scalar("version"),
            execution_plan=new.references(plans),
            constant_buffer=new.references([]),
            backend_delegate_data=new.references([]),
            segments=new.references([new.table(DATA_SEGMENT, offset=o, size=s) for o, s in self._place_segments()]),
            constant_segment=groups[0],
            mutable_data_segments=new.references(groups[1:] if len(self._states) else []),
            named_data=new.references(named),
        )
        return new.finish(root, IDENTIFIER)

    def _place_segments(self) -> list[tuple[int, int]]:
        """Decide where every segment lies behind the first, and return that with their sizes."""
        # If one must lie on a page, all do, because only then the file shows it; see `_alignment`.
        pages = any(blob.alignment > SEGMENT_ALIGNMENT for blob in self._segments.blobs)
        needs = [max(blob.alignment, PAGE if pages else SEGMENT_ALIGNMENT) for blob in self._segments.blobs]
        self._base_alignment = max(needs, default=1)
        cursor, places = 0, []
        for blob, need in zip(self._segments.blobs, needs, strict=True):
            cursor = align_up(cursor, need)
            places.append((cursor, blob.nbytes))
            self._runs += [(cursor + offset, data) for offset, data in blob.runs]
            cursor += blob.nbytes
        self._segments_size = cursor
        return places


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


def _group(builder: TableBuilder, index: int, contents: _Contents) -> int:
    """Write a SubsegmentOffsets with the place of each blob; entry 0 stands for no data."""
    return builder.table(SUBSEGMENT_OFFSETS, segment_index=index, offsets=builder.numbers(U64, [0, *contents.places()]))


def _with_header(flatbuffer: bytes, alignment: int, segments_size: int) -> bytes:
    """The flatbuffer with the extended header, and zeros up to the segments, if there are any."""
    size = len(flatbuffer) + HEADER_WITH_DATA_SIZE
    base = align_up(size, alignment) if segments_size else 0
    header = struct.pack("<4sIQQQ", HEADER_MAGIC, HEADER_WITH_DATA_SIZE, size, base, segments_size)
    root = struct.pack("<I", struct.unpack_from("<I", flatbuffer)[0] + HEADER_WITH_DATA_SIZE)
    return b"".join([root, IDENTIFIER, header, flatbuffer[HEADER_OFFSET:]]).ljust(base, b"\0")


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
