"""Names for weights that PT2E quantization renamed or changed.

`convert_pt2e` folds each weight and its quantization into a new constant, `_frozen_param0` and so on, counted anew in
each graph. The float weight stays in the module under its name, unused, and so it can be found again. But it need not
be the model's own: `prepare_pt2e` folds batch normalizations into the layers before them, puts the result under the
names of the layers' own tensors, and leaves no trace of it. Only the model itself tells which names still hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from blobstore.errors import BlobStoreError, UnsupportedDataError
from blobstore.logical import steps
from blobstore.logical.records import Operation, Record, Source, Step
from blobstore.lowering.names import QUANTIZED, Fold, mark, scalar_type

__all__ = ["restore_names"]

_FROZEN = "_frozen_param"
_EPSILONS = (1e-5, 1e-3)
"""Tried for a normalization of which only the tensors are known."""


def restore_names(module: GraphModule, model: nn.Module | Mapping[str, Any] | None = None) -> list[str]:
    """Give the weights of a quantized module their names back; call it between `convert_pt2e` and `torch.export.export`.

    Each method of a program that is quantized on its own needs the call. A weight is recognized by its quantization
    giving the very same integers, and among several such by the layer that uses it. Then each tensor of the graph is
    compared with the model's own of that name. One that differs is recorded as the fold of a batch normalization if
    that gives it to the bit, and cannot be updated otherwise.

    Args:
        module: what `convert_pt2e` gave; it is changed in place.
        model: the float model that was exported and quantized, with the same weights, or its state dict. After
            training with quantization, the state dict of the prepared module.

    Returns:
        The names that were restored. A weight that none fits to, because it was computed before it was quantized, stays
        as it is and cannot be updated by name.

    Raises:
        UnsupportedDataError: `module` is no graph, or `model` is neither a module nor a state dict.
    """
    if not isinstance(module, GraphModule):
        raise UnsupportedDataError(f"expected the module that convert_pt2e gave, found a {type(module).__qualname__}")
    own = _Model.of(model)
    restored, names = [], {}
    attributes = [node for node in module.graph.nodes if node.op == "get_attr"]
    for node in attributes:
        names[node] = str(node.target)
        if str(node.target).startswith(_FROZEN) and (name := _original(module, node)) is not None:
            names[node] = name
            _rename(module, node, name)
            restored.append(name)
    found = _layers_of(module, names, own)
    for node, name in names.items():
        tensor = _float(module, name)
        if tensor is not None:
            explained = found.get(node, own.reason(name, tensor))
            for user in node.users:
                mark(user, str(node.target), explained)
    module.recompile()
    return restored


# ------------------------------------------------------------------------------------------------- frozen parameters


def _original(module: GraphModule, node: Node) -> str | None:
    frozen = getattr(module, str(node.target))
    users = [user for user in node.users if "dequantize_per" in str(user.target)]
    if not users:
        return None
    floats = {name: tensor for name, tensor in _tensors(module) if tensor.shape == frozen.shape}
    same = [name for name, tensor in floats.items() if _gives(module, users[0], tensor, frozen)]
    layers = {path for user in users for layer in user.users for path in _layers(layer)}
    of_layer = [name for name in same if name.rpartition(".")[0] in layers]
    if len(of_layer) == 1:
        return of_layer[0]
    # zeros are the quantization of any zeros, so elsewhere they prove nothing
    return same[0] if len(same) == 1 and bool(frozen.any()) else None


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        if tensor.is_floating_point():
            yield name, tensor


def _gives(module: GraphModule, dequantize: Node, tensor: torch.Tensor, frozen: torch.Tensor) -> bool:
    """Whether an update with this tensor would store these integers; a node has the arguments for the way back."""
    scale, zero, *rest = (_value(module, argument) for argument in dequantize.args[1:])
    kind = scalar_type(frozen.dtype)
    if kind is None or ("per_channel" in str(dequantize.target) and bool((zero != 0).any())):
        return False
    if "per_channel" in str(dequantize.target):
        axis, low, high = rest[:3]
        step = Step(Operation.QUANTIZE_CHANNEL, (int(axis), int(low), int(high), int(kind)), names=("scales",))
    else:
        low, high = rest[:2]
        step = Step(Operation.QUANTIZE_TENSOR, (int(zero), int(low), int(high), int(kind)), (float(scale),))
    return _same([tensor], step, frozen, scales=scale if isinstance(scale, torch.Tensor) else None)


def _value(module: GraphModule, argument: Any) -> Any:
    return getattr(module, str(argument.target)) if isinstance(argument, Node) else argument


def _layers(node: Node) -> Iterator[str]:
    """The modules that a node came from, as paths."""
    for path, _ in node.meta.get("nn_module_stack", {}).values():
        yield path.removeprefix("L['self'].")


def _rename(module: GraphModule, node: Node, name: str) -> None:
    path, _, last = name.rpartition(".")
    frozen = getattr(module, str(node.target))
    module.get_submodule(path).register_buffer(last + QUANTIZED, frozen)
    delattr(module, str(node.target))
    node.target = name + QUANTIZED


def _float(module: nn.Module, name: str) -> torch.Tensor | None:
    """A float tensor of a module that is more than a part of a quantization."""
    path, _, last = name.rpartition(".")
    try:
        tensor = getattr(module.get_submodule(path), last)
    except AttributeError:
        return None
    return tensor if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else None


def _same(
    tensors: Sequence[torch.Tensor], step: Step, result: torch.Tensor, scales: torch.Tensor | None = None
) -> bool:
    """Whether a step gives this tensor, to the bit."""
    expected = steps.plain(result)[0]
    record = Record("", expected.nbytes, (), (step,))
    try:
        made = steps.store(
            record, [steps.plain(tensor) for tensor in tensors], lambda _: steps.raw(steps.plain(scales)[0])
        )
    except (BlobStoreError, ValueError):
        return False
    return made.tobytes() == expected.tobytes()


# ------------------------------------------------------------------------------------------------ folded normalizations


@dataclass(frozen=True)
class _Norm:
    """A batch normalization of the model, by the name of its module."""

    name: str
    tensors: dict[str, torch.Tensor]
    epsilons: tuple[float, ...]


@dataclass(frozen=True)
class _Model:
    """The model's own tensors and batch normalizations."""

    tensors: dict[str, torch.Tensor]
    norms: list[_Norm]

    @classmethod
    def of(cls, model: nn.Module | Mapping[str, Any] | None) -> _Model:
        if isinstance(model, nn.Module):
            tensors = dict(_tensors(model))
        elif isinstance(model, Mapping):
            tensors = {
                str(name): tensor
                for name, tensor in model.items()
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            }
        else:
            raise UnsupportedDataError(
                "restore_names needs the float model that was quantized, or its state dict, because quantizing folds "
                f"batch normalizations into other layers' weights under their old names; found {model!r}"
            )
        norms = []
        for name in tensors:
            path, _, last = name.rpartition(".")
            if last == "running_var" and (mean := f"{path}.running_mean") in tensors:
                parts = {part: tensors[f"{path}.{part}"] for part in ("weight", "bias") if f"{path}.{part}" in tensors}
                epsilon = getattr(model.get_submodule(path), "eps", None) if isinstance(model, nn.Module) else None
                norms.append(
                    _Norm(
                        path,
                        {"running_mean": tensors[mean], "running_var": tensors[name], **parts},
                        _EPSILONS if epsilon is None else (float(epsilon),),
                    )
                )
        return cls(tensors, norms)

    def reason(self, name: str, tensor: torch.Tensor) -> str | None:
        """Why a tensor is not the model's own of that name; None if it is."""
        if name not in self.tensors:
            return "it is no tensor of the model"
        own, found = steps.plain(self.tensors[name]), steps.plain(tensor)
        if own[1] == found[1] and own[0].shape == found[0].shape and own[0].tobytes() == found[0].tobytes():
            return None
        return "it is not the model's own: it was changed, or combined with other tensors, before it was exported"


_LAYERS = {"conv1d": 0, "conv2d": 0, "conv3d": 0, "conv_transpose1d": 1, "conv_transpose2d": 1, "conv_transpose3d": 1}
"""The axis of the output channels in the weights of operators that normalizations are folded into."""


def _layers_of(module: GraphModule, names: Mapping[Node, str], own: _Model) -> dict[Node, Fold | str | None]:
    """What the weights and biases of layers are, of all that they could be."""
    kept = {str(node.target).rpartition(".")[0] for node in names if str(node.target).endswith(".running_var")}
    vanished = [norm for norm in own.norms if norm.name not in kept]
    found: dict[Node, Fold | str | None] = {}
    for layer in module.graph.nodes:
        operator = str(layer.target).removeprefix("aten.").partition(".")[0]
        if layer.op != "call_function" or operator not in {*_LAYERS, "linear"}:
            continue
        weight, bias = (_attribute(layer.args[i]) if len(layer.args) > i else None for i in (1, 2))
        if weight is None:
            continue
        parts = _Layer(module, names, weight, bias, own)
        choices: list[tuple[Fold | None, Fold | None]] = [] if parts.changed() else [(None, None)]
        for norm in vanished:
            for epsilon in norm.epsilons:
                choices += parts.folded(norm, epsilon, _LAYERS.get(operator))
        for node, part in ((weight, 0), (bias, 1)):
            if node is None:
                continue
            if len(choices) == 1:
                found[node] = choices[0][part]
            elif choices:
                found[node] = "whether a normalization was folded into it, and which, cannot be told from its numbers"
            else:
                found[node] = parts.reason(node) or (
                    "its layer was changed, or combined with other tensors, before it was exported"
                )
    return found


def _attribute(argument: Any) -> Node | None:
    """The tensor of the module behind an argument, through its quantization."""
    while isinstance(argument, Node) and argument.op == "call_function" and "quantize_per" in str(argument.target):
        argument = argument.args[0]
    return argument if isinstance(argument, Node) and argument.op == "get_attr" else None


class _Layer:
    """The weight and the bias of a layer, as the quantized module has them in float."""

    def __init__(
        self, module: GraphModule, names: Mapping[Node, str], weight: Node, bias: Node | None, own: _Model
    ) -> None:
        self._names, self._weight, self._bias, self._own = names, weight, bias, own
        self._tensors = {node: _float(module, names[node]) for node in (weight, bias) if node is not None}

    def reason(self, node: Node) -> str | None:
        """Why one of them is not the model's own; None if it is."""
        tensor = self._tensors[node]
        return None if tensor is None else self._own.reason(self._names[node], tensor)

    def changed(self) -> bool:
        """Whether one of them is not the model's own."""
        return any(self.reason(node) is not None for node in self._tensors)

    def folded(self, norm: _Norm, epsilon: float, axis: int | None) -> Iterator[tuple[Fold, Fold]]:
        """What they are folded of, if that is this normalization; the axis is None for a linear layer."""
        name = self._names[self._weight]
        weight, bias = self._tensors[self._weight], self._tensors.get(self._bias) if self._bias else None
        if weight is None or bias is None or name not in self._own.tensors:
            return
        kinds = (
            (Operation.FOLD_LINEAR_WEIGHT, Operation.FOLD_LINEAR_BIAS)
            if axis is None
            else (Operation.FOLD_CONV_WEIGHT, Operation.FOLD_CONV_BIAS)
        )
        before = f"{name.rpartition('.')[0]}.bias".removeprefix(".")
        if self._bias is not None and self._names[self._bias] in self._own.tensors:
            before = self._names[self._bias]
        given = {part: f"{norm.name}.{part}" for part in norm.tensors}
        of_weight = [name, given["running_var"], *([given["weight"]] if "weight" in given else [])]
        of_bias = [given["running_mean"], given["running_var"], *([before] if before in self._own.tensors else [])]
        of_bias += [given[part] for part in ("weight", "bias") if part in given]
        flags = (int(before in self._own.tensors), int("weight" in given), int("bias" in given))
        steps = (
            Step(kinds[0], (axis or 0, int("weight" in given)), (epsilon,)),
            Step(kinds[1], flags, (epsilon,)),
        )
        if self._gives(of_weight, steps[0], weight) and self._gives(of_bias, steps[1], bias):
            yield Fold(name, self._sources(of_weight), steps[0]), Fold(before, self._sources(of_bias), steps[1])

    def _gives(self, names: list[str], step: Step, tensor: torch.Tensor) -> bool:
        return _same([self._own.tensors[name] for name in names], step, tensor)

    def _sources(self, names: list[str]) -> tuple[Source, ...]:
        found = []
        for name in names:
            array, kind = steps.plain(self._own.tensors[name])
            found.append(Source(name, kind, tuple(array.shape)))
        return tuple(found)
