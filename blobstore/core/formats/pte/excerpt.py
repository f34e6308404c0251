"""Some tables of a flatbuffer with everything that they refer to, and nothing else, laid into another flatbuffer.

References point forward, except those from a table to its vtable, which point anywhere. So the objects can be copied in
their order, and every reference across something that is left out gets a new distance. All references must be known: a
program with unknown fields has no excerpt.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Sequence

import numpy as np

from blobstore.core.formats.alignment import TENSOR_ALIGNMENT
from blobstore.core.formats.flatbuffer import Span, Table, Walk, packed_vtable

__all__ = ["Excerpt"]


class Excerpt:
    """Collects changes to what lies below `roots`, which are tables of one buffer, and copies it.

    All positions are those in the old buffer, unless stated otherwise.
    """

    def __init__(self, roots: Sequence[Table]) -> None:
        self._roots = roots
        self._old = roots[0].buffer
        self._writes: dict[int, bytes] = {}
        self._open: set[int] = set()
        self._entries: dict[int, tuple[int, ...]] = {}
        self._references: list[tuple[int, int, bool]] = []
        self._spans: list[Span] = []
        self._starts: list[int] = []  # of the spans
        self._places: list[int] = []  # in the new buffer, of each span
        self._vtables: dict[tuple[int, ...], int] = {}  # in the new buffer

    def write(self, position: int, data: bytes) -> None:
        """Overwrite the bytes at `position` with `data`."""
        self._writes[position] = data

    def open(self, slot: int) -> None:
        """Leave out what the reference at `slot` leads to; the caller gives it another target in the new buffer."""
        self._open.add(slot)

    def turn_reference(self, table: Table, reference: str, number: str, value: bytes) -> None:
        """Let the bytes of a table's reference be those of a number that it has not; the reference is absent then."""
        slot = table.slot(reference)
        self._entries[table.position] = table.entries({number: slot - table.position, reference: 0})
        self.open(slot)
        self.write(slot, value)

    def place(self, end: int) -> int:
        """Decide where each object goes in a buffer that has `end` bytes so far, and return how many it will have.

        Positions stay the same modulo the alignment of tensors, and so everything stays aligned.
        """
        without = self._open.union(self._entries)
        self._spans = Walk(self._roots, lambda *reference: self._references.append(reference), without).spans
        self._starts = [span.start for span in self._spans]
        for start, stop in self._spans:
            end += (start - end) % TENSOR_ALIGNMENT
            self._places.append(end)
            end += stop - start
        for entries in self._entries.values():
            if entries not in self._vtables:
                end += end % 2
                self._vtables[entries] = end
                end += 2 + 2 * len(entries)
        return end

    def moved(self, position: int) -> int:
        """Where a byte of an object lies in the new buffer, after `place`."""
        index = bisect.bisect_right(self._starts, position) - 1
        return self._places[index] + position - self._spans[index].start

    def copy_to(self, new: bytearray) -> None:
        """Add the objects to a buffer, where `place` put them."""
        for span, place in zip(self._spans, self._places, strict=True):
            new += bytes(place - len(new))
            new += self._old.data[span.start : span.stop]
        for entries, place in self._vtables.items():
            new += bytes(place - len(new))
            new += packed_vtable(entries)
        self._link(new)
        for position, entries in self._entries.items():
            place = self.moved(position)
            struct.pack_into("<i", new, place, place - self._vtables[entries])
        for position, data in self._writes.items():
            place = self.moved(position)
            new[place : place + len(data)] = data

    def _link(self, new: bytearray) -> None:
        """Give all references their new distances; there may be a million."""
        if not self._references:
            return
        starts, shifts = np.array(self._starts), np.array(self._places) - self._starts
        references = np.array(self._references)
        ends = references[:, :2]
        place, target = (ends + shifts[np.searchsorted(starts, ends, "right") - 1]).T
        distances = np.where(references[:, 2], place - target, target - place).astype("<i4")
        np.frombuffer(new, np.uint8)[place[:, None] + np.arange(4)] = distances.view(np.uint8).reshape(-1, 4)
