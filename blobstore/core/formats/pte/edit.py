"""Changing a flatbuffer in place, without knowing all of it.

References point forward, except those from a table to its vtable, which point anywhere. So a new object can always be
appended and referred to from an old place. Everything else stays as it is, including fields of later versions.

Removing bytes is different: every reference across the gap changes, so all of them must be known. `Editor.cut` therefore
works only on buffers without unknown fields.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterator
from itertools import pairwise

from blobstore.core.errors import UnsupportedProgramError
from blobstore.core.formats.flatbuffer import Span, Table, Walk, packed_vtable

__all__ = ["Editor"]

_MAX_SIZE = 2**31 - 1  # distances to vtables are signed
_SMALL = 1 << 16  # shorter unchanged runs are copied together with their neighbors
_GATHER = 1 << 20


class Editor:
    """Collects changes to the flatbuffer below `root` and yields the changed bytes.

    All positions are in the coordinates of the old buffer, also those of appended objects.
    """

    def __init__(self, root: Table) -> None:
        self._root = root
        self._old = root.buffer
        self._writes: dict[int, bytes] = {}
        self._links: dict[int, tuple[int, bool]] = {}
        self._cuts: list[tuple[int, int, int]] = []
        self._changes: list[tuple[int, int, bytes]] = []
        self._tail = bytearray()
        self._vtables: dict[bytes, int] = {}
        self._fields: dict[int, dict[str, int]] = {}
        self._starts: list[int] = []
        self._shifts = [0]

    def write(self, position: int, data: bytes) -> None:
        """Overwrite the bytes at `position` with `data`."""
        self._writes[position] = data

    def link(self, slot: int, target: int) -> None:
        """Make the reference at `slot` lead to `target`, which lies behind it."""
        self._links[slot] = (target, False)

    def append(self, data: bytes, align: int = 4) -> int:
        """Add an object (`align` is 16 at most) and return its position."""
        self._tail += bytes(-(len(self._old.data) + len(self._tail)) % align)
        position = len(self._old.data) + len(self._tail)
        self._tail += data
        return position

    def vtable(self, entries: tuple[int, ...]) -> int:
        """The position of a new vtable with these entries: the size of the table, then the position of each field."""
        data = packed_vtable(entries)
        if data not in self._vtables:
            self._vtables[data] = self.append(data, 2)
        return self._vtables[data]

    def set_fields(self, table: Table, places: dict[str, int]) -> None:
        """Give a table its own vtable, in which each field of `places` is at that position of the table; 0 is absent.

        Tables share vtables, so an old one is never changed.
        """
        known = self._fields.setdefault(table.position, {})
        known |= places
        self._links[table.position] = (self.vtable(table.entries(known)), True)

    def cut(self, span: Span, left: int) -> None:
        """Replace bytes that nothing refers to by `left` zeros, fewer or more.

        The caller must keep the bytes behind them aligned.
        """
        self._cuts.append((span.start, span.stop, left))

    @property
    def size(self) -> int:
        """Bytes of the new flatbuffer."""
        return len(self._old.data) - sum(stop - start - left for start, stop, left in self._cuts) + len(self._tail)

    def finish(self) -> None:
        """Compute the new buffer.

        Raises:
            UnsupportedProgramError: the new buffer is too large, two changes affect the same bytes, or bytes are cut but
                not every reference is known.
        """
        if self.size > _MAX_SIZE:
            raise self._refuse(f"its flatbuffer would have {self.size} bytes, above {_MAX_SIZE}")
        self._cuts.sort()
        for start, stop, left in self._cuts:
            self._starts.append(start)
            self._shifts.append(self._shifts[-1] + stop - start - left)
        links = {**(self._links_across_cuts() if self._cuts else {}), **self._links}
        changes = [(start, stop, bytes(left)) for start, stop, left in self._cuts]
        changes += [(position, position + len(data), data) for position, data in self._writes.items()]
        for place, (target, to_vtable) in links.items():
            distance = self.moved(target) - self.moved(place)
            changes.append((place, place + 4, struct.pack("<i", -distance if to_vtable else distance)))
        changes.sort()
        for left_change, right_change in pairwise(changes):
            if left_change[1] > right_change[0]:
                raise self._refuse(f"objects overlap at {right_change[0]} in its flatbuffer")
        self._changes = changes

    def moved(self, position: int) -> int:
        """Where an object lies in the new buffer, after `finish`."""
        return position - self._shifts[bisect.bisect_right(self._starts, position)]

    def pieces(self) -> Iterator[memoryview | bytes]:
        """The bytes of the new flatbuffer, after `finish`; long unchanged runs are views of the old one."""
        gathered = bytearray()
        position = 0
        end = len(self._old.data)
        for start, stop, data in [*self._changes, (end, end, bytes(self._tail))]:
            if start - position > _SMALL:
                yield bytes(gathered)
                gathered.clear()
                yield self._old.data[position:start]
            else:
                gathered += self._old.data[position:start]
            gathered += data
            position = stop
            if len(gathered) > _GATHER:
                yield bytes(gathered)
                gathered.clear()
        yield bytes(gathered)

    def _refuse(self, reason: str) -> UnsupportedProgramError:
        return UnsupportedProgramError(self._old.path, reason)

    def _links_across_cuts(self) -> dict[int, tuple[int, bool]]:
        """Every old reference whose distance a cut changes."""
        links: dict[int, tuple[int, bool]] = {}

        def reference(place: int, target: int, to_vtable: bool) -> None:
            cuts = [bisect.bisect_right(self._starts, position) for position in (place, target)]
            for position, cut in zip((place, target), cuts, strict=True):
                if cut and position < self._cuts[cut - 1][1]:
                    raise self._refuse(f"objects overlap at {position} in its flatbuffer")
            if cuts[0] != cuts[1]:
                links[place] = (target, to_vtable)

        unknown = Walk([self._root], reference).unknown
        if unknown:
            names = ", ".join(sorted(unknown))
            raise self._refuse(f"constants lie inside its flatbuffer beside unknown fields of {names}")
        reference(0, self._root.position, False)
        return links
