"""Where the tensors of a part of a graph come from, the keys of their blobs, and the records of the part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch.export import ExportedProgram

from blobstore.logical.records import ModelTensor, Operation, Record, Step
from blobstore.lowering.tables import NameTable

__all__ = ["TensorOrigin", "TensorOrigins", "blob_key"]


@dataclass(frozen=True)
class TensorOrigin:
    """Where a tensor of the graph comes from.

    Attributes:
        name: what to call it.
        sources: the model's tensors that it is made of.
        tensors: their values in the program before any pass: the sources, or the result of the first steps.
        steps: how it is made of the sources.
        done: the number of steps that `tensors` already include.
    """

    name: str
    sources: tuple[ModelTensor, ...]
    tensors: tuple[torch.Tensor, ...]
    steps: tuple[Step, ...] = ()
    done: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape after all steps: that of the first source, unless the last step changes it."""
        last = self.steps[-1] if self.steps else None
        return last.ints if last is not None and last.operation is Operation.RESHAPE else self.sources[0].sizes

    @classmethod
    def combined(cls, name: str, parts: Sequence[TensorOrigin | None], *steps: Step) -> TensorOrigin:
        """The origin of a tensor that is made of these parts; None stands for an optional part that is missing."""
        present = [part for part in parts if part is not None]
        return cls(name, tuple(p.sources[0] for p in present), tuple(p.tensors[0] for p in present), steps)


class TensorOrigins:
    """The tensors of a part of a graph by their names in the program, before any pass replaces them; and those that cannot
    be changed, and why."""

    def __init__(self, table: NameTable, program: ExportedProgram) -> None:
        signature = program.graph_signature
        self.table = table
        self.tensors: dict[str, torch.Tensor] = {**program.constants, **program.state_dict}
        self.refused: dict[ModelTensor, str] = {}
        self.used = (*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values())

    def origin(self, name: str) -> TensorOrigin | None:
        """The origin of a tensor of the graph; None if it is unknown."""
        if name not in self.tensors or name in self.table.refused:
            return None
        held = (self.tensors[name],)
        if fold := self.table.folds.get(name):
            return TensorOrigin(fold.name, fold.sources, held, (fold.step,), done=1)
        source = self.table.sources.get(name)
        return None if source is None else TensorOrigin(source.name, (source,), held)

    def refuse(self, sources: Iterable[ModelTensor], reason: str) -> None:
        """Note that tensors cannot be changed; the first reason stays."""
        for source in sources:
            self.refused.setdefault(source, reason)

    def records_of(self, proved: Iterable[Record], missing: str) -> list[Record]:
        """The record of each blob; of several with one key, the last stays. And a refusal for each tensor that has none,
        which `missing` may explain, or cannot be changed everywhere."""
        records = {record.key: record for record in proved}
        covered = {source.name for record in records.values() for source in record.sources}
        for name in self.used:
            source = self.table.sources.get(name)
            if source is not None and source.name not in covered:
                self.refuse((source,), missing)
        model = self.table.source_names()  # neither scales nor made-up names
        refusals = [
            Record("", 0, (source,), refusal=reason, auxiliary=source.name not in model)
            for source, reason in self.refused.items()
            if source.name
        ]
        return [*records.values(), *refusals]


def blob_key(name: str, sources: tuple[ModelTensor, ...], steps: tuple[Step, ...]) -> str:
    """The key of a blob: the name that users know, and a digest of everything that determines how it is laid out.

    It does not depend on the backend, so backends that store a tensor in the same way share a blob.
    """
    made = repr([(source.name, int(source.scalar_type), source.sizes) for source in sources]) + repr(
        [(int(step.operation), step.ints, step.floats, step.names) for step in steps]
    )
    return f"{name}@{xxhash.xxh3_64_hexdigest(made.encode())}"
