"""What one run of XNNPACK's exporter has shown so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.export import ExportedProgram

from blobstore.logical.records import Record
from blobstore.lowering.origins import TensorOrigin, TensorOrigins
from blobstore.lowering.tables import NameTable

__all__ = ["Run"]


class Run(TensorOrigins):
    """One run of XNNPACK's exporter.

    Args:
        table, program: see `TensorOrigins`.

    Attributes:
        combined: the origins of tensors that passes computed from several tensors, by their names in the program.
        records: the record of each constant, by the constant's index.
        keys: the key and the size in bytes of each constant, by its index.
        graph: the graph that XNNPACK is about to serialize.
    """

    def __init__(self, table: NameTable, program: ExportedProgram) -> None:
        super().__init__(table, program)
        self.combined: dict[str, TensorOrigin] = {}
        self.records: dict[int, Record] = {}
        self.keys: dict[int, tuple[str, int]] = {}
        self.graph: Any = None

    def origin(self, name: str) -> TensorOrigin | None:
        """The origin of a tensor of the graph; None if it is unknown."""
        return self.combined[name] if name in self.combined else super().origin(name)

    def name_constant(self, constant: Any, index: int, key: str, record: Record | None) -> None:
        """Give a constant of the graph its key, and note its record if it has one."""
        constant.named_key = key
        self.keys[index] = (key, constant.size)
        if record is not None:
            self.records[index] = replace(record, nbytes=constant.size)

    def note_products(self, products: Mapping[int, tuple[int, float]]) -> None:
        """Note which scales are products of others.

        Args:
            products: by the index of the scales of a bias, the index of the weight's scales, and the activations' scale.
        """
        for index, (of, factor) in products.items():
            if index in self.records and of in self.records:
                self.records[index] = replace(self.records[index], product_of=self.records[of].key, factor=factor)

    def all_records(self, groups: Mapping[int, int]) -> list[Record]:
        """The records of all constants, and refusals.

        Args:
            groups: the group of each constant, by its index.
        """
        return self.records_of(
            (replace(record, group=groups[index]) for index, record in self.records.items()),
            "it was combined with other tensors while lowering",
        )
