"""Where the tensors of a graph come from, and what one run of XNNPACK's exporter has shown so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from blobstore.logical.records import Operation, Record, Source, Step
from blobstore.lowering.tables import NameTable

__all__ = ["Origin", "Run"]


@dataclass(frozen=True)
class Origin:
    """Where a tensor of the graph comes from.

    Attributes:
        name: what to call it.
        sources: the model's tensors that it is made of.
        tensors: their values in the program before any pass: the sources, or the result of the first steps.
        steps: how it is made of the sources.
        done: the number of steps that `tensors` already include.
    """

    name: str
    sources: tuple[Source, ...]
    tensors: tuple[torch.Tensor, ...]
    steps: tuple[Step, ...] = ()
    done: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape after all steps: that of the first source, unless the last step changes it."""
        last = self.steps[-1] if self.steps else None
        return last.ints if last is not None and last.operation is Operation.RESHAPE else self.sources[0].sizes

    @classmethod
    def combined(cls, name: str, parts: Sequence[Origin | None], *steps: Step) -> Origin:
        """The origin of a tensor that is made of these parts; None stands for an optional part that is missing."""
        present = [part for part in parts if part is not None]
        return cls(name, tuple(p.sources[0] for p in present), tuple(p.tensors[0] for p in present), steps)


@dataclass
class Run:
    """One run of XNNPACK's exporter.

    Attributes:
        table: the names of the program's tensors.
        tensors: the program's tensors by their names there, before any pass replaces them.
        combined: the origins of tensors that passes computed from several tensors, by their names in the program.
        records: the record of each constant, by the constant's index.
        keys: the key and the size in bytes of each constant, by its index.
        refused: tensors that cannot be changed, and why.
        graph: the graph that XNNPACK is about to serialize.
    """

    table: NameTable
    tensors: dict[str, torch.Tensor]
    combined: dict[str, Origin] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    keys: dict[int, tuple[str, int]] = field(default_factory=dict)
    refused: dict[Source, str] = field(default_factory=dict)
    graph: Any = None

    def origin(self, name: str) -> Origin | None:
        """The origin of a tensor of the graph; None if it is unknown."""
        if name in self.combined:
            return self.combined[name]
        if name not in self.tensors or name in self.table.refused:
            return None
        held = (self.tensors[name],)
        if fold := self.table.folds.get(name):
            return Origin(fold.name, fold.sources, held, (fold.step,), done=1)
        source = self.table.sources.get(name)
        return None if source is None else Origin(source.name, (source,), held)

    def refuse(self, sources: Iterable[Source], reason: str) -> None:
        """Note that tensors cannot be changed; the first reason stays."""
        for source in sources:
            self.refused.setdefault(source, reason)

    def name_constant(self, constant: Any, index: int, key: str, record: Record | None) -> None:
        """Give a constant of the graph its key, and note its record if it has one."""
        constant.named_key = key
        self.keys[index] = (key, constant.size)
        if record is not None:
            self.records[index] = replace(record, nbytes=constant.size)

    def all_records(self, groups: Mapping[int, int], used: Iterable[str]) -> list[Record]:
        """The records of all constants, and a refusal for each tensor that has none or cannot be changed everywhere.

        Args:
            groups: the group of each constant, by its index.
            used: names of the tensors that the graph was given.
        """
        records = {record.key: replace(record, group=groups[index]) for index, record in self.records.items()}
        covered = {source.name for record in records.values() for source in record.sources}
        for name in used:
            source = self.table.sources.get(name)
            if source is not None and source.name not in covered:
                self.refuse((source,), "it was combined with other tensors while lowering")
        model = self.table.source_names()  # neither scales nor made-up names
        refusals = [
            Record("", 0, (source,), refusal=reason, auxiliary=source.name not in model)
            for source, reason in self.refused.items()
            if source.name
        ]
        return [*records.values(), *refusals]
