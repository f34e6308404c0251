"""The names of a language model's tensors: those that its checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.export import ExportedProgram

from blobstore.lowering.methods import rename
from blobstore.lowering.names import identity, logical_name

__all__ = ["checkpoint_names", "restore_checkpoint_names"]


def checkpoint_names(model: nn.Module, wrapper: type[nn.Module]) -> dict[str, tuple[str, ...]]:
    """All names of each parameter and buffer of a model, by each name that it has in the model.

    Args:
        model: the model as it is exported, also after quantizing.
        wrapper: a class of modules that keep the layer that they adapt as `linear`, although checkpoints have its
            tensors at the module itself, such as ExecuTorch's `LoRALinear`.

    Returns:
        The names, the preferred one first. It is the checkpoint's: `layers.0.attention.wq.weight`, not
        `layers.0.attention.wq.linear.weight`. A tensor that several modules share has the names of all of them.
    """
    wrapped = [f"{path}.linear." for path, module in model.named_modules() if isinstance(module, wrapper)]
    called: dict[str, str] = {}
    groups: dict[object, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        prefix = next((prefix for prefix in wrapped if name.startswith(prefix)), None)
        called[name] = name if prefix is None else prefix.removesuffix("linear.") + name.removeprefix(prefix)
        groups.setdefault(_memory(tensor), []).extend([called[name], name])
    return {
        name: tuple(dict.fromkeys((called[name], *names)))
        for names in groups.values()
        for name in names
        if name in called
    }


def _memory(tensor: torch.Tensor) -> object:
    """Equal for names of one tensor; a quantized tensor has no memory of its own, only its parts have."""
    plain = type(tensor) in {torch.Tensor, nn.Parameter, nn.Buffer}
    return identity(tensor) if plain and tensor.numel() else id(tensor)


def restore_checkpoint_names(program: ExportedProgram, names: Mapping[str, tuple[str, ...]]) -> None:
    """Give the tensors of a program the names that `checkpoint_names` returned for its model, in place. Tensors that
    exporting unwrapped from a quantized parameter keep their endings."""
    renamed: dict[str, tuple[str, ...]] = {}
    for tensor in (*program.state_dict, *program.constants):
        own = logical_name(tensor)
        first, *others = names.get(own, (own,))
        if own == tensor:
            renamed[tensor] = (first, *others)
        else:  # a part of a quantized parameter, which keeps its place below the module
            path, old = first.rpartition(".")[0], own.rpartition(".")[0]
            renamed[tensor] = (path + tensor.removeprefix(old), *(other for other in others if other != first))
    rename(program, renamed)
