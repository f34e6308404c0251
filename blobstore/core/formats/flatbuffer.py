"""Checked, lazy access to an unverified flatbuffer.

Every read is bounds-checked before anything is allocated, so a hostile file leads to an error and not to a crash. Work is
bounded too: everything with a length is charged to a budget in proportion to the size of the buffer, so many references
to one huge vector end in an error and not in hours of work.

The wire format is https://flatbuffers.dev/internals: all numbers are little-endian; a table starts with the signed
distance back to its vtable; a vtable holds its own size, the size of the table, and for every field its position in the
table (0 if the field is absent); every other reference is an unsigned distance forward.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, NoReturn, TypeVar

from blobstore.core.errors import InvalidFileError

__all__ = [
    "BOOL",
    "F64",
    "I8",
    "I32",
    "I64",
    "STRING",
    "U8",
    "U32",
    "U64",
    "Buffer",
    "Kind",
    "Scalar",
    "Span",
    "Struct",
]
__all__ += ["Table", "TableType", "Union", "Vector", "Walk", "packed_vtable"]

_U16, _U32, _I32 = (struct.Struct(f) for f in ("<H", "<I", "<i"))

_BUDGET_FACTOR = 8
_BUDGET_BASE = 1 << 16
_TABLE_COST = 16  # bytes; looking at a table costs more than reading its few bytes


class Span(NamedTuple):
    """A run of bytes in a file, `start` to `stop` exclusive."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.stop - self.start


class Kind:
    """The type of a field; `width` is its size inside the table, in bytes."""

    width = 4


class Scalar(Kind):
    """A number, `format` as in the struct module. All defaults in ET12 are 0."""

    def __init__(self, format_: str) -> None:
        self.code = format_
        self.format = struct.Struct("<" + format_)
        self.width = self.format.size


class String(Kind):
    """UTF-8 text."""


class Struct(Kind):
    """Bytes inside the table itself, such as a digest."""

    def __init__(self, nbytes: int) -> None:
        self.width = nbytes


class Vector(Kind):
    """A list of numbers, of structs, of texts or of tables."""

    def __init__(self, of: Scalar | Struct | String | TableType) -> None:
        self.of = of


class Union(Kind):
    """One of several tables; the field before it has the number of the table, counted from 1."""

    def __init__(self, tag: str, members: list[TableType]) -> None:
        self.tag = tag
        self.members = members


class TableType(Kind):
    """A type of table, with its fields in the order of their slots."""

    def __init__(self, name: str, /, **fields: Kind) -> None:
        self.name = name
        self.slots = {field: slot for slot, field in enumerate(fields)}
        self.fields = fields
        self.names = {field: f"{name}.{field}" for field in fields}  # as messages call them


K = TypeVar("K", bound=Kind)

U8, I8, BOOL = Scalar("B"), Scalar("b"), Scalar("?")
U32, I32, U64, I64, F64 = Scalar("I"), Scalar("i"), Scalar("Q"), Scalar("q"), Scalar("d")
STRING = String()


class Buffer:
    """A flatbuffer at the start of a file. Its objects begin at `start`; everything before that belongs to headers."""

    def __init__(self, data: memoryview, path: str | os.PathLike[str], start: int) -> None:
        self.data = data
        self.path = path
        self.start = start
        self._end = len(data)
        self.renew()
        self._vtables: dict[int, tuple[int, ...]] = {}
        self._shapes: dict[tuple[int, TableType], Shape] = {}
        self._strings: dict[int, str] = {}

    def fail(self, reason: str) -> NoReturn:
        """Raise InvalidFileError."""
        raise InvalidFileError(self.path, f"damaged flatbuffer: {reason}")

    def renew(self) -> None:
        """Begin another pass over the objects, with a new budget."""
        self._budget = _BUDGET_FACTOR * len(self.data) + _BUDGET_BASE

    def spend(self, nbytes: int) -> None:
        """Charge the reading of `nbytes` to the budget."""
        self._budget -= nbytes
        if self._budget < 0:
            self.fail("its tables refer to the same bytes again and again")

    def check(self, start: int, nbytes: int, what: str) -> None:
        """Fail unless `nbytes` bytes at `start` lie among the objects."""
        if start < self.start or nbytes > self._end - start:
            self.fail(f"{what} at {start} with {nbytes} bytes is outside {self.start}..{self._end}")

    def target(self, slot: int, what: str) -> int:
        """The target of the reference at `slot` (checked by the caller); its first 4 bytes are checked."""
        position: int = slot + _U32.unpack_from(self.data, slot)[0]
        if not self.start <= position <= self._end - 4:
            self.check(position, 4, what)
        return position

    def vtable(self, position: int) -> tuple[int, ...]:
        """The size of the table, then the position of each field in it."""
        known = self._vtables.get(position)
        if known is not None:
            return known
        self.check(position, 4, "a vtable")
        nbytes = int(_U16.unpack_from(self.data, position)[0])
        if nbytes < 4 or nbytes % 2:
            self.fail(f"the vtable at {position} has the impossible size {nbytes}")
        self.check(position, nbytes, "a vtable")
        self.spend(nbytes)
        entries: tuple[int, ...] = struct.unpack_from(f"<{nbytes // 2 - 1}H", self.data, position + 2)
        self._vtables[position] = entries
        return entries

    def shape(self, position: int, kind: TableType) -> Shape:
        """The tables of a type that have the vtable at `position`."""
        known = self._shapes.get((position, kind))
        if known is None:
            known = self._shapes[position, kind] = Shape(self.vtable(position), kind)
        return known

    def vector(self, position: int, width: int, what: str) -> Span:
        """The elements of the vector at `position` (its length field is checked already), each `width` bytes."""
        start = position + 4
        stop: int = start + _U32.unpack_from(self.data, position)[0] * width
        if stop > self._end:
            self.check(start, stop - start, what)
        return Span(start, stop)

    def string(self, position: int, what: str) -> str:
        """The text at `position`."""
        known = self._strings.get(position)
        if known is not None:
            return known
        span = self.vector(position, 1, what)
        self.spend(span.size + 1)
        if span.stop >= len(self.data) or self.data[span.stop] != 0:
            self.fail(f"{what} at {position} does not end in a zero byte")
        try:
            text = str(self.data[span.start : span.stop], "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} at {position} is not UTF-8: {error}")
        self._strings[position] = text
        return text

    def root(self, kind: TableType) -> Table:
        """The table that the first four bytes lead to."""
        if len(self.data) < self.start or self.start < 4:
            self.fail(f"{len(self.data)} bytes are too few")
        return Table(self, self.target(0, f"the root {kind.name}"), kind)


def packed_vtable(entries: tuple[int, ...]) -> bytes:
    """The bytes of a vtable: its size, then the size of the table, then the position of each field in it."""
    return struct.pack(f"<{len(entries) + 1}H", 2 * len(entries) + 2, *entries)


class Shape:
    """What a vtable says of the tables of a type. Most tables share theirs, so it is worked out once.

    Attributes:
        size: bytes of a table.
        places: where each field lies in a table; 0 if it is absent, -1 if it would lie outside.
        present: the fields that are there.
        scalars: the numbers among them, with their places and how they are read.
        unknown: whether there are fields that are unknown to the type.
    """

    __slots__ = ("places", "present", "scalars", "size", "unknown")

    def __init__(self, vtable: tuple[int, ...], kind: TableType) -> None:
        self.size = vtable[0]
        self.places = dict.fromkeys(kind.fields, 0)
        for (field, its), offset in zip(kind.fields.items(), vtable[1:], strict=False):
            inside = not offset or 4 <= offset <= self.size - its.width
            self.places[field] = offset if inside else -1
        self.present = [field for field, place in self.places.items() if place]
        self.scalars = {
            field: (place, its.format.unpack_from)
            for field, its in kind.fields.items()
            if isinstance(its, Scalar) and (place := self.places[field]) > 0
        }
        self.unknown = any(vtable[1 + len(kind.fields) :])


class Table:
    """A table of a known type at a position of a buffer."""

    __slots__ = ("buffer", "kind", "position", "shape", "vtable_position")

    def __init__(self, buffer: Buffer, position: int, kind: TableType) -> None:
        buffer.check(position, 4, kind.name)
        self.buffer = buffer
        self.kind = kind
        self.position = position
        self.vtable_position: int = position - _I32.unpack_from(buffer.data, position)[0]
        self.shape = buffer.shape(self.vtable_position, kind)
        size = self.shape.size
        if size < 4:
            buffer.fail(f"{kind.name} at {position} claims a size of {size} bytes")
        buffer.check(position, size, kind.name)
        buffer.spend(_TABLE_COST + size)

    def slot(self, field: str) -> int:
        """The position of a field's bytes in the buffer; 0 if it is absent."""
        offset = self.shape.places[field]
        if offset < 0:
            self.buffer.fail(f"{self.kind.names[field]} at {self.position} lies outside its table")
        return self.position + offset if offset else 0

    @property
    def vtable(self) -> tuple[int, ...]:
        """The size of the table, then the position of each field in it."""
        return self.buffer.vtable(self.vtable_position)

    def entries(self, places: dict[str, int]) -> tuple[int, ...]:
        """The entries of its vtable with each field of `places` at that position of the table; 0 is absent."""
        entries = list(self.vtable)
        for field, place in places.items():
            index = self.kind.slots[field] + 1
            entries += [0] * (index + 1 - len(entries))
            entries[index] = place
        return tuple(entries)

    def has_unknown_fields(self) -> bool:
        """Whether the table has fields that are unknown to its type."""
        return self.shape.unknown

    def scalar(self, field: str) -> int:
        """A whole number; 0 if it is absent."""
        read = self.shape.scalars.get(field)
        if read is not None:
            offset, unpack = read
            return int(unpack(self.buffer.data, self.position + offset)[0])
        self._kind(field, Scalar)
        return self.slot(field)  # absent, or an error

    def target(self, field: str) -> int:
        """The position that a reference leads to; 0 if it is absent."""
        slot = self.slot(field)
        return self.buffer.target(slot, self.kind.names[field]) if slot else 0

    def string(self, field: str) -> str | None:
        """Text; None if it is absent."""
        position = self.target(field)
        return self.buffer.string(position, self.kind.names[field]) if position else None

    def table(self, field: str) -> Table | None:
        """A table; None if it is absent."""
        position = self.target(field)
        return Table(self.buffer, position, self._kind(field, TableType)) if position else None

    def union(self, field: str) -> Table | None:
        """The table of a union; None if it is absent or of an unknown type."""
        kind = self._kind(field, Union)
        tag = self.scalar(kind.tag)
        if not 1 <= tag <= len(kind.members):
            return None
        position = self.target(field)
        member = kind.members[tag - 1]
        if position == 0:
            self.buffer.fail(f"{self.kind.names[field]} at {self.position} must be a {member.name}, but is absent")
        return Table(self.buffer, position, member)

    def span(self, field: str) -> Span | None:
        """The bytes of a vector's elements; None if it is absent."""
        position = self.target(field)
        if not position:
            return None
        return self.buffer.vector(position, self._kind(field, Vector).of.width, self.kind.names[field])

    def numbers(self, field: str) -> tuple[int, ...]:
        """A vector of numbers; empty if it is absent."""
        span = self.span(field)
        if span is None:
            return ()
        self.buffer.spend(span.size)
        item = self._kind(field, Vector).of
        if not isinstance(item, Scalar):
            raise TypeError(f"{self.kind.names[field]} does not hold numbers")
        count = span.size // item.width
        return struct.unpack_from(f"<{count}{item.format.format[1:]}", self.buffer.data, span.start)

    def tables(self, field: str) -> list[Table]:
        """A vector of tables; empty if it is absent."""
        span = self.span(field)
        if span is None:
            return []
        self.buffer.spend(span.size)
        item = self._kind(field, Vector).of
        if not isinstance(item, TableType):
            raise TypeError(f"{self.kind.names[field]} does not hold tables")
        name = self.kind.names[field]
        slots = range(span.start, span.stop, 4)
        return [Table(self.buffer, self.buffer.target(slot, name), item) for slot in slots]

    def _kind(self, field: str, kind: type[K]) -> K:
        of_field = self.kind.fields[field]
        if not isinstance(of_field, kind):
            raise TypeError(f"{self.kind.names[field]} is not a {kind.__name__}")
        return of_field


class Walk:
    """Everything that some tables of one buffer refer to, each object read once, these tables among them.

    Args:
        roots: the tables.
        reference: called as (place, target, is_vtable) for every reference, if given.
        without: the places of references that are not followed; that of a reference to a vtable is the place of its table.

    Attributes:
        spans: the objects, in the order of the buffer.
        unknown: the names of types with unknown fields, and of unions with unknown members. Whatever these refer to was not
            read.

    Raises:
        InvalidFileError: an object is out of bounds, is not valid text, overlaps another one (several references to one
            object are fine), or is referred to too often.
    """

    def __init__(
        self,
        roots: Sequence[Table],
        reference: Callable[[int, int, bool], None] = lambda place, target, to_vtable: None,
        without: Collection[int] = frozenset(),
    ) -> None:
        self.unknown: set[str] = set()
        self._stack: list[Table] = []
        self._buffer = roots[0].buffer
        self._buffer.renew()
        self._reference = reference
        self._without = without
        self._objects: dict[int, tuple[int, object]] = {}
        self._distinct: set[tuple[int, TableType]] = set()
        for root in roots:
            self._visit(root)
        while self._stack:
            self._read(self._stack.pop())
        self.spans = self._without_overlaps()

    def _visit(self, table: Table) -> None:
        """Read a table later, unless it was met before."""
        if self._is_new(table.position, table.position + table.shape.size, table.kind):
            self._stack.append(table)

    def _read(self, table: Table) -> None:
        """Check a table and its vtable, and everything that its fields refer to directly."""
        if table.position not in self._without:
            self._is_new(table.vtable_position, table.vtable_position + 2 + 2 * len(table.vtable), Table)
            self._reference(table.position, table.vtable_position, True)
        self._check_fields(table)
        if table.has_unknown_fields():
            self.unknown.add(table.kind.name)
        for field in table.shape.present:
            slot, kind = table.slot(field), table.kind.fields[field]
            if field not in table.shape.scalars and slot not in self._without:
                target = self._buffer.target(slot, field)
                self._reference(slot, target, False)
                self._follow(table, field, kind, target)

    def _check_fields(self, table: Table) -> None:
        """Fail if two fields of a table share bytes: a change of one would change the other."""
        if (table.vtable_position, table.kind) in self._distinct:
            return
        self._distinct.add((table.vtable_position, table.kind))
        end = 0
        for slot, width in sorted((table.slot(field), kind.width) for field, kind in table.kind.fields.items()):
            if slot and slot < end:
                self._buffer.fail(f"two fields of the {table.kind.name} at {table.position} share bytes")
            end = slot + width

    def _follow(self, table: Table, field: str, kind: Kind, target: int) -> None:
        if isinstance(kind, String):
            self._buffer.string(target, field)
            self._is_new(target, self._buffer.vector(target, 1, field).stop + 1, kind)
        elif isinstance(kind, TableType):
            self._visit(Table(self._buffer, target, kind))
        elif isinstance(kind, Union):
            member = table.union(field)
            if member is not None:
                self._visit(member)
            elif table.scalar(kind.tag):
                self.unknown.add(f"{table.kind.name}.{field}")
        elif isinstance(kind, Vector):
            span = self._buffer.vector(target, kind.of.width, field)
            if self._is_new(target, span.stop, (Vector, kind.of)) and isinstance(kind.of, TableType):
                self._buffer.spend(span.size)
                for element in range(span.start, span.stop, 4):
                    position = self._buffer.target(element, field)
                    self._reference(element, position, False)
                    self._visit(Table(self._buffer, position, kind.of))

    def _is_new(self, start: int, stop: int, kind: object) -> bool:
        known = self._objects.get(start)
        if known is None:
            self._objects[start] = (stop, kind)
        elif known[1] != kind:
            self._buffer.fail(f"the object at {start} is used as two different things")
        return known is None

    def _without_overlaps(self) -> list[Span]:
        """All objects in order; fail if two share bytes."""
        end = 0
        spans = [Span(start, self._objects[start][0]) for start in sorted(self._objects)]
        for start, stop in spans:
            if start < end:
                self._buffer.fail(f"the object at {start} overlaps the one before, which ends at {end}")
            end = stop
        return spans
