"""One architecture: exported by transformers, deduplicated, exported by us, updated by name; each compared with its peer."""

import copy
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from executorch.runtime import Runtime
from torch.utils import _pytree as trees
from transformers.exporters.base import ExportedModel
from transformers.exporters.configs import ExecutorchConfig
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.exporter_executorch import ExecutorchExporter
from transformers.exporters.runners.runner_executorch import ExecutorchModelRunner

from blobstore import dedup_programs
from blobstore.errors import BlobStoreError
from blobstore.runtime import BlobCache
from blobstore.transformers import BlobStoreExporter
from campaigns.architectures.table import TOLERANCE
from campaigns.architectures.tiny import PartError, tiny

__all__ = ["exported_both_ways", "trial"]

_MASKED, _MOST_ROUNDING = 1e30, 100 * TOLERANCE
"""What fills what is masked; of eager mode, against float64, where small changes move outputs by more than is usual."""


def trial(kind: str) -> dict[str, Any]:
    """What became of an architecture, for `table.py`.

    `result` is `part` (transformers has no model of this type), `untried` (there are no tiny model and inputs that eager mode
    takes), `theirs` (transformers' exporter or ExecuTorch refuses it), `ours`, or `works`; all but the last have a `message`. Then there are the class of the model, its
    number of `parameters`, whether `dedup` kept all `bits`, how many parameters `follow` an update by name with the outputs of
    eager mode, which are `refused`, and which followed in no way and without an error (`silent`). `stock` is how far outputs
    of transformers' own program are from eager mode's; ours may be twice as far, if that is more than the usual tolerance.
    """
    found: dict[str, Any] = {"kind": kind}
    try:
        model, inputs = tiny(kind)
        expected = _eager(model, inputs)
    except Exception as error:
        known = {PartError: "part", NotImplementedError: "theirs"}  # there is no model, or it has no `forward`
        return {**found, "result": known.get(type(error), "untried"), "message": _first_line(error)}
    found |= {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    with tempfile.TemporaryDirectory() as place:
        try:
            with _traced_once():
                for whose, exporter in (("theirs", ExecutorchExporter), ("ours", BlobStoreExporter)):
                    found["result"] = whose
                    _exported(exporter, model, inputs).save_pretrained(Path(place, whose))
            found["result"] = "theirs"
            theirs = ExportedModel.from_pretrained(Path(place, "theirs"))
            outputs = _tensors(theirs(**inputs))
            found["stock"] = _distance(outputs, expected)
            if found["stock"] > _MOST_ROUNDING and _distance(outputs, _exact(model, inputs)) > _MOST_ROUNDING:
                raise ValueError(f"its outputs differ from eager mode's by {found['stock']:.1g}")
            found["result"] = "ours"
            found["bits"] = _keeps_bits(Path(place), inputs, theirs, outputs)
            found |= _Updates(model, inputs, Path(place, "ours"), max(TOLERANCE, 2 * found["stock"])).tried()
        except Exception as error:
            return {**found, "message": _first_line(error)}
    return {**found, "result": "works"}


def exported_both_ways(kind: str) -> None:
    """Let both exporters lower an architecture, which runs nothing."""
    with _traced_once():
        for exporter in (ExecutorchExporter, BlobStoreExporter):
            _exported(exporter, *tiny(kind))


def _exported(exporter: type[ExecutorchExporter], model: torch.nn.Module, inputs: Mapping[str, Any]) -> ExportedModel:
    return exporter().export(copy.deepcopy(model), copy.deepcopy(inputs), ExecutorchConfig())


@contextmanager
def _traced_once() -> Iterator[None]:
    """Both exporters begin with the same tracing, which takes a third of the time: the second gets the first one's result,
    unless there are sizes in it that only data gives, which can be lowered once."""
    real = DynamoExporter.export_program
    traced: list[Any] = []

    def export_program(*arguments: Any, **options: Any) -> Any:
        if traced:
            return traced[0]
        made = real(*arguments, **options)
        if made[0].range_constraints or any("unbacked_bindings" in node.meta for node in made[0].graph.nodes):
            return made
        traced.append(made)
        return copy.deepcopy(made)

    with patch.object(DynamoExporter, "export_program", export_program):
        yield


def _keeps_bits(place: Path, inputs: Mapping[str, Any], theirs: ExportedModel, outputs: list[torch.Tensor]) -> bool:
    """Whether the slim program on the stock runtime returns the same bits."""
    dedup_programs([place / "theirs/model.pte"], place / "slim")
    data = place / "slim/shared.ptd"
    options = {"data_path": str(data)} if data.exists() else {}
    program = Runtime.get().load_program(place / "slim/model.pte", **options)
    runner = ExecutorchModelRunner(program, theirs.components["model"].metadata)
    taken = {name: value for name, value in inputs.items() if name in runner.metadata.kwargs}
    slim = _tensors(runner(**taken))
    return len(slim) == len(outputs) and all(torch.equal(*pair) for pair in zip(slim, outputs, strict=True))


class _Updates:
    """Updates of a program, each compared with eager mode on the same weights."""

    def __init__(self, model: torch.nn.Module, inputs: Mapping[str, Any], folder: Path, tolerance: float) -> None:
        self.model = model
        self.tolerance = tolerance
        self.inputs = inputs
        self.cache = BlobCache(folder / "model.ptd")
        self.exported = ExportedModel.from_pretrained(folder, cache=self.cache)
        torch.manual_seed(1)
        tuned = copy.deepcopy(model)
        for tensor in (*tuned.parameters(), *tuned.buffers()):  # each once, however many names it has
            if tensor.is_floating_point():
                tensor.data.mul_(1 + 0.3 * torch.rand_like(tensor))
        self.tuned = tuned.state_dict()

    def tried(self) -> dict[str, Any]:
        """What followed: first each parameter alone, because in all together one that stays may hide, then all together."""
        parameters = dict(self.model.named_parameters())
        kept = {name: value.clone() for name, value in self.model.state_dict().items()}
        before = _eager(self.model, self.inputs)
        ours_before = self._ours()
        if (far := self._far(ours_before, before)) > self.tolerance:
            raise ValueError(f"before any update, outputs differ by {far:.1g}")
        refused: list[str] = []
        silent: list[str] = []
        follow = 0
        for name, parameter in parameters.items():
            parameter.data.copy_(self.tuned[name])
            wanted = _eager(self.model, self.inputs)
            is_accepted = self._update(name)
            ours = self._ours()
            matters = _distance(before, wanted) > self.tolerance
            moved = not matters or _distance(ours_before, ours) > 0
            if moved and self._far(ours, wanted) <= self.tolerance:
                follow += parameter.numel()
            else:
                (silent if is_accepted else refused).append(name)
            parameter.data.copy_(kept[name])
            self.cache.revert()
        self._all(kept, refused)
        return {"follow": follow, "refused": refused, "silent": silent}

    def _update(self, name: str) -> bool:
        """Update one parameter; with all others, if it was folded with some of them."""
        try:
            self.cache.update({name: self.tuned[name]})
        except BlobStoreError:
            try:
                self.cache.update_state_dict(self.model.state_dict())
            except BlobStoreError:
                return False
        return True

    def _all(self, kept: dict[str, torch.Tensor], refused: list[str]) -> None:
        """One update of everything, strict unless parameters are refused by name."""
        tuned = {name: kept[name] if name in refused else value for name, value in self.tuned.items()}
        self.model.load_state_dict(tuned)
        self.cache.update_state_dict(tuned, strict=not refused)
        far = self._far(self._ours(), _eager(self.model, self.inputs))
        self.model.load_state_dict(kept)
        if far > self.tolerance:
            raise ValueError(f"after an update of everything, outputs differ by {far:.1g}")

    def _far(self, ours: list[torch.Tensor], eager: list[torch.Tensor]) -> float:
        """How far our outputs are from the truth: from eager mode's, or where these are rounded too much to tell, in float64.

        Among boxes that are nearly as good as each other, eager mode itself may choose another one than in float64. What
        transformers' exporter makes of the same weights is the last judge: near it, or at most twice as far off, is right.
        """
        if (far := _distance(ours, eager)) <= self.tolerance:
            return far
        exact = _exact(self.model, self.inputs)
        nearest = min(_distance(ours, exact), far - _allowed(_distance(eager, exact)))
        if nearest <= self.tolerance:
            return nearest
        stock = _tensors(_exported(ExecutorchExporter, self.model, self.inputs)(**self.inputs))
        return min(nearest, _distance(ours, stock), far - _allowed(_distance(eager, stock)))

    def _ours(self) -> list[torch.Tensor]:
        return _tensors(self.exported(**self.inputs))


def _allowed(rounding: float) -> float:
    return 2 * rounding if rounding <= _MOST_ROUNDING else 0.0


def _eager(model: torch.nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What a copy of the model returns: some models keep what they once computed of their weights."""
    with torch.no_grad():
        return _tensors(copy.deepcopy(model)(**inputs))


def _exact(model: torch.nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the model returns in float64; nothing, which is infinitely far from everything, if it has operators without that."""

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    try:
        return _eager(copy.deepcopy(model).double(), trees.tree_map(double, inputs))
    except RuntimeError:
        return []


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """In the order of their names, because an exported program may have another one."""
    named = {trees.keystr(path): leaf for path, leaf in trees.tree_flatten_with_path(outputs)[0]}
    return [named[name] for name in sorted(named) if isinstance(named[name], torch.Tensor)]


def _distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor if that is above 1."""
    if [one.shape for one in ours] != [one.shape for one in theirs]:
        return float("inf")
    distances = (
        float(torch.where(one == other, 0, one.double() - other.double()).abs().max() / max(1.0, _largest(other)))
        for one, other in zip(ours, theirs, strict=True)
        if one.numel()
    )
    return max((float("inf") if math.isnan(distance) else distance for distance in distances), default=0.0)


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude, but for infinities and what stands for them, which fill what is masked."""
    return float(tensor.double().abs().where(tensor.abs() < _MASKED, 0).max())


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
