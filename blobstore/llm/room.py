"""Room for adapters in a program that is exported without one: branches of LoRA whose weights are zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from blobstore.adapters.params_json import read_json
from blobstore.adapters.peft_names import fused_parts
from blobstore.core.errors import InvalidFileError, UnsupportedDataError, UnsupportedOperationError
from blobstore.runtime.executorch import LlmConfig, LoraConfig, LoRALinear, ModelArgs, construct_transformer

__all__ = ["ROOM", "add_room", "zeros_for"]

ROOM = "room.safetensors"
"""What the configuration names in place of an adapter's file."""

_MOST_SIZE = 1 << 31
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Where the models of ExecuTorch's exporter can have a branch."""


def add_room(config: LlmConfig, room: Mapping[str, Any]) -> None:
    """Let a configuration ask for branches, in place.

    Args:
        config: has no adapter.
        room: `r`, the largest rank that adapters may have; `modules`, the names of layers as PEFT has them; and, if the
            program shall multiply with another number than 1, `alpha`, which is that number times `r`.

    Raises:
        UnsupportedDataError: `room` is something else.
        UnsupportedOperationError: there is an adapter already, or a module can have no branch.
    """
    rank, alpha, modules = _checked(room)
    if config.base.lora_config is not None or config.multimethod.methods:
        given = "base.lora_config" if config.base.lora_config is not None else "multimethod.methods"
        raise UnsupportedOperationError(
            f"room and {given} are both given; an adapter makes room for itself, so leave out one"
        )
    parts = [part for module in modules for part in _parts(module)]
    for part in parts:
        if part not in _MODULES:
            raise UnsupportedOperationError(
                f"room.modules: {part!r} can have no adapter in the models of ExecuTorch's exporter, which have them at "
                f"{', '.join(_MODULES)}; merge what was trained there into the checkpoint"
            )
    config.base.lora_config = LoraConfig(
        adapter_checkpoint=ROOM, lora_rank=rank, lora_alpha=alpha, target_modules=list(dict.fromkeys(parts))
    )


def _checked(room: Mapping[str, Any]) -> tuple[int, float, Sequence[Any]]:
    """The rank, the alpha and the modules."""
    if not isinstance(room, Mapping):
        raise UnsupportedDataError(f"room must be a mapping with r and modules, not a {type(room).__qualname__}")
    if unknown := room.keys() - {"r", "modules", "alpha"}:
        raise UnsupportedDataError(f"room has {min(map(str, unknown))!r}; it takes r, modules and alpha")
    rank, modules = room.get("r"), room.get("modules")
    if type(rank) is not int or rank <= 0:
        raise UnsupportedDataError(f"room.r must be a positive integer, found {rank!r}")
    if rank >= _MOST_SIZE:
        raise UnsupportedDataError(
            f"room.r must be less than {_MOST_SIZE}, as all sizes of tensors in ExecuTorch, found {rank}"
        )
    alpha = room.get("alpha", rank)
    if type(alpha) not in (int, float) or not 0 < alpha < float("inf"):
        raise UnsupportedDataError(f"room.alpha must be a positive number, found {alpha!r}")
    if isinstance(modules, str) or not isinstance(modules, list | tuple) or not modules:
        raise UnsupportedDataError(f"room.modules must be a list of names such as 'q_proj', found {modules!r}")
    return rank, alpha, modules


def _parts(module: Any) -> tuple[Any, ...]:
    return (fused_parts(module) if isinstance(module, str) else ()) or (module,)


def zeros_for(config: LlmConfig) -> dict[str, torch.Tensor]:
    """The tensors of the branches that `add_room` asked for, under the names of the checkpoint, all zero.

    Raises:
        FileAccessError, InvalidFileError: the `params` cannot be read.
        UnsupportedDataError: there is no memory for branches of this rank.
        UnsupportedOperationError: the model has none of the modules.
    """
    lora, params = config.base.lora_config, {}
    if config.base.params:
        params = read_json(config.base.params)
        if not isinstance(params, dict):
            raise InvalidFileError(config.base.params, "expected a JSON object")
    arguments = ModelArgs(**params, r=lora.lora_rank, lora_alpha=lora.lora_alpha, target_modules=lora.target_modules)
    with torch.device("meta"):
        model = construct_transformer(arguments)
    zeros = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            for half in ("lora_a", "lora_b"):
                shape = getattr(module, half).weight.shape
                try:
                    zeros[f"{name}.{half}.weight"] = torch.zeros(shape)
                except RuntimeError as error:  # of torch's allocator
                    raise UnsupportedDataError(
                        f"room.r is {lora.lora_rank}: there is no memory for {list(shape)} at '{name}'"
                    ) from error
    if not zeros:
        listed = ", ".join(lora.target_modules)
        raise UnsupportedOperationError(f"room.modules: this model has no {listed} that could have an adapter")
    return zeros
