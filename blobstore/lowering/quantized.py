"""Names for weights that PT2E quantization renamed.

`convert_pt2e` folds each weight and its quantization into a new constant, `_frozen_param0` and so on, counted anew in
each graph. The float weight stays in the module under its name, unused, and so it can be found again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from blobstore.lowering.names import QUANTIZED

__all__ = ["restore_names"]

_FROZEN = "_frozen_param"


def restore_names(module: GraphModule) -> list[str]:
    """Give the weights of a quantized module their names back; call it between `convert_pt2e` and `torch.export.export`.

    Each method of a program that is quantized on its own needs the call. A weight is recognized by its quantization
    giving the very same integers, and among several such by the layer that uses it.

    Args:
        module: what `convert_pt2e` gave; it is changed in place.

    Returns:
        The names that were restored. A weight that none fits to, because it was combined with others before it was
        quantized (batch normalization folded into a convolution, say), stays as it is and cannot be updated by name.
    """
    restored = []
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and str(node.target).startswith(_FROZEN):
            name = _original(module, node)
            if name is not None:
                _rename(module, node, name)
                restored.append(name)
    module.recompile()
    return restored


def _original(module: GraphModule, node: Node) -> str | None:
    frozen = getattr(module, str(node.target))
    users = [user for user in node.users if "dequantize_per" in str(user.target)]
    if not users:
        return None
    floats = {name: tensor for name, tensor in _tensors(module) if tensor.shape == frozen.shape}
    same = [name for name, tensor in floats.items() if torch.equal(_quantize(module, users[0], tensor), frozen)]
    layers = {path for user in users for layer in user.users for path in _layers(layer)}
    of_layer = [name for name in same if name.rpartition(".")[0] in layers]
    if len(of_layer) == 1:
        return of_layer[0]
    return same[0] if len(same) == 1 else None


def _tensors(module: GraphModule) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_floating_point():
            yield name, buffer


def _quantize(module: GraphModule, dequantize: Node, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor quantized with the arguments that a node has for the way back."""
    ops = torch.ops.quantized_decomposed
    per_channel = "per_channel" in str(dequantize.target)
    scale, zero, *rest = (_value(module, argument) for argument in dequantize.args[1:])
    with torch.no_grad():
        if per_channel:
            found: torch.Tensor = ops.quantize_per_channel(tensor.detach(), scale, zero, *rest)
        else:
            found = ops.quantize_per_tensor(tensor.detach(), scale, zero, *rest)
    return found


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
