"""Batch normalizations that `prepare_pt2e` folded into the layers before them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from blobstore.core.errors import UnsupportedDataError
from blobstore.core.memory.arrays import plain, same_tensors
from blobstore.logical.records import ModelTensor, Operation, Step
from blobstore.lowering.names import Fold
from blobstore.lowering.pt2e.frozen import float_tensor, float_tensors, gives

__all__ = ["OwnTensors", "explain_layers"]

_EPSILONS = (1e-5, 1e-3)
"""The epsilons to try for a normalization of which only the tensors are known: the defaults of PyTorch and of Keras."""


@dataclass(frozen=True)
class _Norm:
    """A batch normalization of the model, by the name of its module."""

    name: str
    tensors: dict[str, torch.Tensor]
    epsilons: tuple[float, ...]


@dataclass(frozen=True)
class OwnTensors:
    """The model's own tensors and batch normalizations."""

    tensors: dict[str, torch.Tensor]
    norms: list[_Norm]

    @classmethod
    def of(cls, model: nn.Module | Mapping[str, Any] | None) -> OwnTensors:
        if isinstance(model, nn.Module):
            tensors = dict(float_tensors(model))
        elif isinstance(model, Mapping):
            tensors = {
                str(name): tensor
                for name, tensor in model.items()
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
            }
        else:
            raise UnsupportedDataError(
                "restore_names needs the float model that was quantized, or its state dict, because quantizing folds "
                f"batch normalizations into other layers' weights and keeps the names; found {model!r}"
            )
        norms = (_norm_of(name, tensors, model) for name in tensors)
        return cls(tensors, [norm for norm in norms if norm is not None])

    def reason(self, name: str, tensor: torch.Tensor) -> str | None:
        """Why a tensor is not the model's own of that name; None if it is."""
        if name not in self.tensors:
            return "the model has no tensor of this name"
        if same_tensors(plain(self.tensors[name]), plain(tensor)):
            return None
        return "it is not the model's own: it was changed, or combined with other tensors, before it was exported"


def _norm_of(name: str, tensors: Mapping[str, torch.Tensor], model: nn.Module | Mapping[str, Any]) -> _Norm | None:
    """The batch normalization whose `running_var` has this name; None for any other tensor."""
    path, _, last = name.rpartition(".")
    if last != "running_var" or f"{path}.running_mean" not in tensors:
        return None
    parts = ("running_mean", "running_var", "weight", "bias")
    epsilon = getattr(model.get_submodule(path), "eps", None) if isinstance(model, nn.Module) else None
    return _Norm(
        path,
        {part: tensors[f"{path}.{part}"] for part in parts if f"{path}.{part}" in tensors},
        _EPSILONS if epsilon is None else (float(epsilon),),
    )


_LAYERS = {"conv1d": 0, "conv2d": 0, "conv3d": 0, "conv_transpose1d": 1, "conv_transpose2d": 1, "conv_transpose3d": 1}
"""The axis of the output channels in the weights of operators that normalizations are folded into."""


def explain_layers(module: GraphModule, names: Mapping[Node, str], own: OwnTensors) -> dict[Node, Fold | str | None]:
    """What the weights and biases of layers are: None for the model's own, a fold, or why that cannot be known."""
    kept = {str(node.target).rpartition(".")[0] for node in names if str(node.target).endswith(".running_var")}
    vanished = [norm for norm in own.norms if norm.name not in kept]
    by_node: dict[Node, Fold | str | None] = {}
    for layer in module.graph.nodes:
        operator = str(layer.target).removeprefix("aten.").partition(".")[0]
        if layer.op != "call_function" or operator not in {*_LAYERS, "linear"}:
            continue
        weight, bias = (_attribute(layer.args[i]) if len(layer.args) > i else None for i in (1, 2))
        if weight is not None:
            by_node |= _Layer(module, names, weight, bias, own).explained(vanished, _LAYERS.get(operator))
    return by_node


def _attribute(argument: Any) -> Node | None:
    """The node of the module's tensor that an argument takes, quantized or not."""
    while isinstance(argument, Node) and argument.op == "call_function" and "quantize_per" in str(argument.target):
        argument = argument.args[0]
    return argument if isinstance(argument, Node) and argument.op == "get_attr" else None


class _Layer:
    """The weight and the bias of a layer, as the floats that the quantized module has."""

    def __init__(
        self, module: GraphModule, names: Mapping[Node, str], weight: Node, bias: Node | None, own: OwnTensors
    ) -> None:
        self._names, self._weight, self._bias, self._own = names, weight, bias, own
        self._tensors = {node: float_tensor(module, names[node]) for node in (weight, bias) if node is not None}

    def reason(self, node: Node) -> str | None:
        """Why one of them is not the model's own; None if it is."""
        tensor = self._tensors[node]
        return None if tensor is None else self._own.reason(self._names[node], tensor)

    def changed(self) -> bool:
        """Whether one of them is not the model's own."""
        return any(self.reason(node) is not None for node in self._tensors)

    def explained(self, norms: Sequence[_Norm], axis: int | None) -> dict[Node, Fold | str | None]:
        """What the weight and the bias are, each: None, the model's own; a fold of one of the normalizations; or why it
        cannot be changed. `axis` is that of the output channels in the weight; None for a linear layer."""
        choices: list[tuple[Fold | None, Fold | None]] = [] if self.changed() else [(None, None)]
        for norm in norms:
            for epsilon in norm.epsilons:
                choices += self.folded(norm, epsilon, axis)
        by_node: dict[Node, Fold | str | None] = {}
        for part, node in enumerate((self._weight, self._bias)):
            if node is None:
                continue
            if len(choices) == 1:
                by_node[node] = choices[0][part]
            elif choices:
                by_node[node] = "its numbers do not show which normalization was folded into it, if any"
            else:
                by_node[node] = self.reason(node) or (
                    "its layer was changed, or combined with other tensors, before it was exported"
                )
        return by_node

    def folded(self, norm: _Norm, epsilon: float, axis: int | None) -> Iterator[tuple[Fold, Fold]]:
        """The folds that give the weight and the bias, if folding this normalization does."""
        name = self._names[self._weight]
        weight, bias = self._tensors[self._weight], self._tensors.get(self._bias) if self._bias else None
        if weight is None or bias is None or name not in self._own.tensors:
            return
        before = self._bias_before(name)
        has_bias = before in self._own.tensors
        norm_names = {part: f"{norm.name}.{part}" for part in norm.tensors}
        gamma = [norm_names["weight"]] if "weight" in norm_names else []
        beta = [norm_names["bias"]] if "bias" in norm_names else []
        of_weight = [name, norm_names["running_var"], *gamma]
        of_bias = [norm_names["running_mean"], norm_names["running_var"]]
        of_bias += [*([before] if has_bias else []), *gamma, *beta]
        to_weight, to_bias = (
            (Operation.FOLD_LINEAR_WEIGHT, Operation.FOLD_LINEAR_BIAS)
            if axis is None
            else (Operation.FOLD_CONV_WEIGHT, Operation.FOLD_CONV_BIAS)
        )
        weight_step = Step(to_weight, (axis or 0, len(gamma)), (epsilon,))
        bias_step = Step(to_bias, (int(has_bias), len(gamma), len(beta)), (epsilon,))
        if self._gives(of_weight, weight_step, weight) and self._gives(of_bias, bias_step, bias):
            yield Fold(name, self._sources(of_weight), weight_step), Fold(before, self._sources(of_bias), bias_step)

    def _bias_before(self, weight: str) -> str:
        """The name that the layer's bias has in the model, or would have: folding gives every layer a bias."""
        if self._bias is not None and self._names[self._bias] in self._own.tensors:
            return self._names[self._bias]
        return f"{weight.rpartition('.')[0]}.bias".removeprefix(".")

    def _gives(self, names: list[str], step: Step, tensor: torch.Tensor) -> bool:
        return gives([self._own.tensors[name] for name in names], step, tensor)

    def _sources(self, names: list[str]) -> tuple[ModelTensor, ...]:
        sources = []
        for name in names:
            array, kind = plain(self._own.tensors[name])
            sources.append(ModelTensor(name, kind, tuple(array.shape)))
        return tuple(sources)
