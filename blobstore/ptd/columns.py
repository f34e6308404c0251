"""Reading many flatbuffer tables at once, as columns.

A .ptd may hold 100,000 entries, each a few nested tables; following them one by one from Python would take longer
than mapping the file. Here one numpy operation does a step for all of them, and each step is checked: an offset that
leaves the buffer raises `ColumnsError` and nothing outside is ever read. Format: https://flatbuffers.dev/internals/
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Columns", "ColumnsError", "Positions"]

Positions = npt.NDArray[np.int64]
"""Byte positions in the buffer, one an object; 0 stands for an absent object (no object can lie at 0)."""


class ColumnsError(ValueError):
    """Why the buffer is not a well-formed flatbuffer."""


class Columns:
    """A flatbuffer.

    Args:
        data: its bytes, from the root offset on. The arrays that are read from it are copies.

    Attributes:
        size: number of bytes.
    """

    def __init__(self, data: memoryview) -> None:
        if len(data) < 8:
            raise ColumnsError(f"{len(data)} bytes are too few for a flatbuffer")
        self.size = len(data)
        even = self.size & ~3
        self._bytes = np.frombuffer(data, np.uint8)
        self._u16 = np.frombuffer(data[:even], "<u2")
        self._u32 = np.frombuffer(data[:even], "<u4")

    def root(self) -> Positions:
        """The root table."""
        return self.follow(np.zeros(1, np.int64))

    def fields(self, tables: Positions, slots: dict[int, int]) -> list[Positions]:
        """Positions of fields in each of `tables`.

        Args:
            tables: tables of one type, none absent.
            slots: slot number -> size of the field in the table in bytes.

        Returns:
            For each slot, the position of the field in each table, 0 where the table does not have it.
        """
        if tables.size == 0:
            return [np.zeros(0, np.int64) for _ in slots]
        vtables = tables - self.u32(tables).view(np.int32).astype(np.int64)
        vtable_sizes = self._u16_at(vtables)
        table_sizes = self._u16_at(vtables + 2)
        if (vtable_sizes < 4).any() or (vtable_sizes & 1).any() or (vtables + vtable_sizes > self.size).any():
            raise ColumnsError("a vtable does not fit in the flatbuffer")
        if (table_sizes < 4).any() or (tables + table_sizes > self.size).any():
            raise ColumnsError("a table does not fit in the flatbuffer")
        found = []
        for slot, width in slots.items():
            entry = 4 + 2 * slot
            has = entry + 2 <= vtable_sizes
            offsets = np.where(has, self._u16_at(np.where(has, vtables + entry, vtables)), 0)
            if ((offsets != 0) & ((offsets < 4) | (offsets + width > table_sizes))).any():
                raise ColumnsError(f"field {slot} of a table lies outside of the table")
            found.append(np.where(offsets != 0, tables + offsets, 0))
        return found

    def follow(self, fields: Positions) -> Positions:
        """Where the offsets stored in `fields` lead; absent stays absent, except that position 0 is the root's."""
        return fields + self.u32(fields)

    def vectors(self, fields: Positions, item_size: int) -> tuple[Positions, Positions]:
        """The vectors that `fields` lead to: positions of their first items and numbers of items, 0 where absent."""
        present = fields != 0
        starts, counts = np.zeros(fields.size, np.int64), np.zeros(fields.size, np.int64)
        at = self.follow(fields[present])
        length = self.u32(at).astype(np.int64)
        if (at + 4 + length * item_size > self.size).any():
            raise ColumnsError("a vector is longer than the flatbuffer")
        starts[present], counts[present] = at + 4, length
        return starts, counts

    def tables(self, fields: Positions) -> Positions:
        """The tables that the elements of the one vector in `fields` lead to; none where it is absent."""
        starts, counts = self.vectors(fields, 4)
        return self.follow(starts[0] + 4 * np.arange(counts[0]))

    def u8(self, fields: Positions, default: int = 0) -> npt.NDArray[np.uint8]:
        """Bytes at `fields`, `default` where absent."""
        return np.where(fields != 0, self._bytes[fields], np.uint8(default))

    def u32(self, positions: Positions) -> npt.NDArray[np.uint32]:
        """Unsigned 32-bit integers at `positions`, none absent."""
        if positions.size and (
            positions.min() < 0 or positions.max() + 4 > self._u32.size * 4 or (positions & 3).any()
        ):
            raise ColumnsError("an offset leaves the flatbuffer or is not aligned")
        values: npt.NDArray[np.uint32] = self._u32[positions >> 2]
        return values

    def u64(self, fields: Positions) -> npt.NDArray[np.uint64]:
        """Unsigned 64-bit integers at `fields`, 0 where absent."""
        low = self.u32(fields).astype(np.uint64)
        high = self.u32(np.where(fields != 0, fields + 4, 0)).astype(np.uint64)
        return np.where(fields != 0, low | (high << np.uint64(32)), np.uint64(0))

    def _u16_at(self, positions: Positions) -> Positions:
        if positions.size and (
            positions.min() < 0 or positions.max() + 2 > self._u16.size * 2 or (positions & 1).any()
        ):
            raise ColumnsError("a vtable lies outside of the flatbuffer or is not aligned")
        return self._u16[positions >> 1].astype(np.int64)

    def gather(self, starts: Positions, counts: int, dtype: str) -> npt.NDArray[np.generic]:
        """Matrix of `counts` items behind each of `starts`; the vectors were checked by `vectors`."""
        item = np.dtype(dtype).itemsize
        index = starts[:, None] + item * np.arange(counts)[None, :]
        if item == 1:
            return self._bytes[index].view(dtype)
        return self.u32(index.reshape(-1)).view(dtype).reshape(index.shape)

    def raw(self, start: int, nbytes: int) -> bytes:
        """A copy of a run of bytes that was checked by `vectors`."""
        return self._bytes[start : start + nbytes].tobytes()
