"""Which float weight a frozen parameter was quantized from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy.typing as npt
import torch
from torch import nn
from torch.fx import GraphModule, Node

from blobstore.core.memory.arrays import plain, raw
from blobstore.logical.records import Operation, Record, Step
from blobstore.lowering.names import QUANTIZED, scalar_type
from blobstore.lowering.proof import contradiction

__all__ = ["float_tensor", "float_tensors", "gives", "original_name", "rename_frozen"]


def original_name(module: GraphModule, node: Node) -> str | None:
    """The name of the float weight that a frozen constant was quantized from; None if that is not certain."""
    frozen = getattr(module, str(node.target))
    users = [user for user in node.users if "dequantize_per" in str(user.target)]
    if not users:
        return None
    floats = {name: tensor for name, tensor in float_tensors(module) if tensor.shape == frozen.shape}
    same = [name for name, tensor in floats.items() if _gives(module, users[0], tensor, frozen)]
    layers = {path for user in users for layer in user.users for path in _layers(layer)}
    of_layer = [name for name in same if name.rpartition(".")[0] in layers]
    if len(of_layer) == 1:
        return of_layer[0]
    # any weight of zeros gives the same zeros, so without the layer they prove nothing
    return same[0] if len(same) == 1 and bool(frozen.any()) else None


def float_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating-point parameters and buffers of a module, under all their names."""
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        if tensor.is_floating_point():
            yield name, tensor


def _gives(module: GraphModule, dequantize: Node, tensor: torch.Tensor, frozen: torch.Tensor) -> bool:
    """Whether an update with this tensor would store these integers, by the arguments of the node that dequantizes them."""
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
    scales = {"scales": plain(scale)[0]} if isinstance(scale, torch.Tensor) else {}
    return gives([tensor], step, frozen, scales)


def _value(module: GraphModule, argument: Any) -> Any:
    """The value of an argument: a number, or a tensor of the module."""
    return getattr(module, str(argument.target)) if isinstance(argument, Node) else argument


def _layers(node: Node) -> Iterator[str]:
    """The paths of the modules that a node came from."""
    for path, _ in node.meta.get("nn_module_stack", {}).values():
        yield path.removeprefix("L['self'].")


def rename_frozen(module: GraphModule, node: Node, name: str) -> None:
    """Move a frozen constant beside the float weight that it was quantized from."""
    path, _, last = name.rpartition(".")
    frozen = getattr(module, str(node.target))
    module.get_submodule(path).register_buffer(last + QUANTIZED, frozen)
    delattr(module, str(node.target))
    node.target = name + QUANTIZED


def float_tensor(module: nn.Module, name: str) -> torch.Tensor | None:
    """A floating-point tensor of a module by name, or None."""
    path, _, last = name.rpartition(".")
    try:
        tensor = getattr(module.get_submodule(path), last)
    except AttributeError:
        return None
    return tensor if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else None


def gives(
    tensors: Sequence[torch.Tensor],
    step: Step,
    result: torch.Tensor,
    scales: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
) -> bool:
    """Whether a step turns these tensors into this result, to the bit."""
    expected = plain(result)[0]
    record = Record("", expected.nbytes, (), (step,))
    return not contradiction(record, record.steps, tensors, raw(expected), scales)
