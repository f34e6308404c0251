"""Reading many flatbuffer tables at once, as columns.

A .ptd may hold 100,000 entries, each a few nested tables; to follow them one by one in Python would take longer than to
map the file. Here one numpy operation takes a step for all of them. Each step is checked: an offset that leads out of
the buffer raises `ColumnsError`, and nothing outside is ever read. Format: https://flatbuffers.dev/internals/
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Columns", "ColumnsError", "Positions"]

Positions = npt.NDArray[np.int64]
"""Byte positions in the buffer, one for each object; 0 stands for an absent object (no object can lie at 0)."""


class ColumnsError(ValueError):
    """Why the buffer is not a well-formed flatbuffer."""


class Columns:
    """A flatbuffer of `size` bytes, from the root offset on. Arrays that are read from it are copies."""

    def __init__(self, data: memoryview) -> None:
        if len(data) < 8:
            raise ColumnsError(f"{len(data)} bytes are too few for a flatbuffer")
        self.size = len(data)
        self._bytes = np.frombuffer(data, np.uint8)
        self._u16 = np.frombuffer(data[: self.size & ~1], "<u2")
        self._u32 = np.frombuffer(data[: self.size & ~3], "<u4")

    def root(self) -> Positions:
        """The root table."""
        return self.follow(np.zeros(1, np.int64))

    def fields(self, tables: Positions, slots: dict[int, int]) -> list[Positions]:
        """Positions of fields in each of `tables`.

        Args:
            tables: tables of one type, all present.
            slots: for each slot number, the size of the field in the table in bytes.

        Returns:
            For each slot, the position of the field in each table; 0 where the table does not have it.
        """
        if tables.size == 0:
            return [np.zeros(0, np.int64) for _ in slots]
        vtables = tables - self.u32(tables).view(np.int32)
        sizes = self._u16_at(vtables[:, None] + np.array([0, 2]))
        vtable_sizes, table_sizes = sizes[:, :1], sizes[:, 1:]
        entries = 4 + 2 * np.array(list(slots))
        has = entries + 2 <= vtable_sizes
        offsets = np.where(has, self._u16_at(vtables[:, None] + entries * has), 0)
        outside = (offsets != 0) & ((offsets < 4) | (offsets + np.array(list(slots.values())) > table_sizes))
        ends = np.maximum(vtables[:, None] + vtable_sizes, tables[:, None] + table_sizes)
        if np.count_nonzero(outside) or np.count_nonzero((ends > self.size) | (vtable_sizes < 4) | (vtable_sizes & 1)):
            raise ColumnsError("a table, its vtable or a field does not fit in the flatbuffer")
        return list(np.where(offsets != 0, tables[:, None] + offsets, 0).T)

    def follow(self, fields: Positions) -> Positions:
        """The targets of the offsets stored in `fields`, all present; the offset at position 0 is that of the root."""
        return fields + self.u32(fields)

    def vectors(self, fields: Positions, item_size: int) -> tuple[Positions, Positions]:
        """The vectors that `fields` lead to: the positions of their first items and their lengths, 0 where absent."""
        present = fields != 0
        starts, counts = np.zeros(fields.size, np.int64), np.zeros(fields.size, np.int64)
        at = self.follow(fields[present])
        length = self.u32(at).astype(np.int64)
        if np.count_nonzero(at + 4 + length * item_size > self.size):
            raise ColumnsError("a vector is longer than the flatbuffer")
        starts[present], counts[present] = at + 4, length
        return starts, counts

    def tables(self, fields: Positions) -> Positions:
        """The tables that the elements of the one vector in `fields` lead to; empty if it is absent."""
        starts, counts = self.vectors(fields, 4)
        return self.follow(starts[0] + 4 * np.arange(counts[0]))

    def u8(self, fields: Positions) -> npt.NDArray[np.uint8]:
        """Bytes at `fields`, 0 where absent."""
        return np.where(fields != 0, self._bytes[fields], np.uint8(0))

    def u32(self, positions: Positions) -> npt.NDArray[np.uint32]:
        """Unsigned 32-bit integers at `positions`, all present."""
        return _take(self._u32, positions, 2)

    def u64(self, fields: Positions) -> npt.NDArray[np.uint64]:
        """Unsigned 64-bit integers at `fields`, 0 where absent."""
        low = self.u32(fields).astype(np.uint64)
        high = self.u32(np.where(fields != 0, fields + 4, 0)).astype(np.uint64)
        return np.where(fields != 0, low | (high << np.uint64(32)), np.uint64(0))

    def _u16_at(self, positions: Positions) -> Positions:
        return _take(self._u16, positions, 1).astype(np.int64)

    def gather(self, starts: Positions, count: int, item_size: int) -> Positions:
        """A matrix of the `count` items at each of `starts`: bytes, or signed 32-bit integers.

        `vectors` has checked the vectors.
        """
        index = starts[:, None] + item_size * np.arange(count)
        items: Positions = (self._bytes[index] if item_size == 1 else self.u32(index).view(np.int32)).astype(np.int64)
        return items

    def raw(self, start: int, nbytes: int) -> bytes:
        """A copy of a run of bytes that `vectors` has checked."""
        return self._bytes[start : start + nbytes].tobytes()


def _take(words: npt.NDArray[Any], positions: Positions, shift: int) -> npt.NDArray[Any]:
    """The words at these byte positions, each `1 << shift` bytes wide."""
    together = int(np.bitwise_or.reduce(positions, axis=None))  # negative, or with low bits, if any position is
    if together < 0 or together & ((1 << shift) - 1):
        raise ColumnsError("an offset is negative or not aligned")
    try:
        taken: npt.NDArray[Any] = words[positions >> shift]
        return taken
    except IndexError:
        raise ColumnsError("an offset leads out of the flatbuffer") from None
