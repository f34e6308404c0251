"""Names for weights that PT2E quantization renamed or changed.

`convert_pt2e` replaces each weight and its quantization by a new constant, `_frozen_param0` and so on, numbered anew in
each graph. The float weight stays in the module under its name, unused, so its constant can be found (`frozen`). But it
may not be the model's own weight: `prepare_pt2e` folds batch normalizations into the layers before them and stores the
result under the names of the layers' own tensors, without a trace. Which names still hold their own tensor can only be
found by comparing with the model (`batch_norm`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule

from blobstore.core.errors import UnsupportedDataError
from blobstore.lowering.marks import mark
from blobstore.lowering.names import is_frozen
from blobstore.lowering.pt2e.batch_norm import OwnTensors, explain_layers
from blobstore.lowering.pt2e.frozen import float_tensor, original_name, rename_frozen

__all__ = ["restore_names"]


def restore_names(module: GraphModule, model: nn.Module | Mapping[str, Any] | None = None) -> list[str]:
    """Restore the names of a quantized module's weights; call it between `convert_pt2e` and `torch.export.export`.

    Each method that is quantized separately needs a call. A float weight is recognized because quantizing it gives the
    stored integers; among several such weights, the one of the layer that uses the integers is taken. Then each tensor of
    the graph is compared with the model's own tensor of that name. A tensor that differs is recorded as the fold of a
    batch normalization if the fold gives it to the bit. Otherwise it cannot be updated.

    Args:
        module: what `convert_pt2e` returned; changed in place.
        model: the float model that was exported and quantized, with the same weights, or its state dict. After
            quantization-aware training, the state dict of the prepared module.

    Returns:
        The names that were restored. A weight without a match, because it was computed before it was quantized, keeps its
        name and cannot be updated.

    Raises:
        UnsupportedDataError: `module` is not a `GraphModule`, or `model` is neither a module nor a state dict.
    """
    if not isinstance(module, GraphModule):
        raise UnsupportedDataError(
            f"expected the module that convert_pt2e returned, found a {type(module).__qualname__}"
        )
    own = OwnTensors.of(model)
    restored, names = [], {}
    for node in [node for node in module.graph.nodes if node.op == "get_attr"]:
        names[node] = str(node.target)
        if is_frozen(names[node]) and (name := original_name(module, node)) is not None:
            names[node] = name
            rename_frozen(module, node, name)
            restored.append(name)
    by_node = explain_layers(module, names, own)
    for node, name in names.items():
        tensor = float_tensor(module, name)
        if tensor is not None:
            explained = by_node.get(node, own.reason(name, tensor))
            for user in node.users:
                mark(user, str(node.target), explained)
    if isinstance(model, nn.Module):
        _leave_out_of_state_dict(module, model)
    module.recompile()
    return restored


def _leave_out_of_state_dict(module: GraphModule, model: nn.Module) -> None:
    """Let the buffers that a model's state dict does not have be missing in that of the module, too: quantizing forgets
    it, and a strict update would ask for them."""
    kept = model.state_dict().keys()
    for name, _ in model.named_buffers(remove_duplicate=False):
        path, _, last = name.rpartition(".")
        with contextlib.suppress(AttributeError):  # the module need not have it
            if name not in kept and last in (owner := module.get_submodule(path))._buffers:
                owner._non_persistent_buffers_set.add(last)
