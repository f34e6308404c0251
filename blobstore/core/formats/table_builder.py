"""Writes flatbuffers with the types of tables that `flatbuffer.py` reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import flatbuffers
import numpy as np

from blobstore.core.formats.flatbuffer import Scalar, Struct, TableType

__all__ = ["TableBuilder"]

_PREPEND = {
    "?": "PrependBoolSlot",
    "b": "PrependInt8Slot",
    "B": "PrependUint8Slot",
    "i": "PrependInt32Slot",
    "I": "PrependUint32Slot",
    "q": "PrependInt64Slot",
    "d": "PrependFloat64Slot",
    "Q": "PrependUint64Slot",
}


class TableBuilder(flatbuffers.Builder):  # type: ignore[misc]
    """A flatbuffer that grows from its end: what a table refers to is written before it."""

    def table(self, kind: TableType, **fields: Any) -> int:
        """Write a table.

        Args:
            kind: its type.
            fields: numbers, the bytes of structs, and for all else where it was written; None for a field that is absent.
                They are written in the order in which they are given, which decides the bytes.

        Returns:
            Where it was written.
        """
        self.StartObject(len(kind.fields))
        for name, value in fields.items():
            if value is None:
                continue
            slot, field = kind.slots[name], kind.fields[name]
            if isinstance(field, Scalar):
                getattr(self, _PREPEND[field.code])(slot, value, 0)
            elif isinstance(field, Struct):
                self.Prep(1, field.width)
                self.raw(value)
                self.PrependStructSlot(slot, self.Offset(), 0)
            else:
                self.PrependUOffsetTRelativeSlot(slot, value, 0)
        return int(self.EndObject())

    def numbers(self, of: Scalar, values: Iterable[float]) -> int:
        """Write a vector of numbers; where it was written."""
        return int(self.CreateNumpyVector(np.asarray(values, of.format.format)))

    def references(self, targets: list[int]) -> int:
        """Write a vector of what was written before; where it was written."""
        self.StartVector(4, len(targets), 4)
        for target in reversed(targets):
            self.PrependUOffsetTRelative(target)
        return int(self.EndVector())

    def texts(self, texts: Iterable[str]) -> int:
        """Write a vector of texts; where it was written."""
        return self.references([self.CreateString(text) for text in texts])

    def structs(self, of: Struct, count: int, data: bytes) -> int:
        """Write a vector of `count` structs at once; where it was written."""
        self.StartVector(of.width, count, 1)
        self.raw(data)
        return int(self.EndVector())

    def raw(self, data: bytes | bytearray) -> None:
        """Put bytes in front of what was written, for which there must be room."""
        self.head -= len(data)
        self.Bytes[self.head : self.head + len(data)] = data

    def finish(self, root: int, identifier: bytes) -> bytes:
        """The bytes of the flatbuffer with this root table."""
        self.Finish(root, file_identifier=identifier)
        return bytes(self.Output())
