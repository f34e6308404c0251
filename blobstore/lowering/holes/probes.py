"""Other values for the constants of a program, to see what of a payload follows them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn
from torch.export import ExportedProgram

__all__ = ["other_values", "with_values"]


def other_values(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Other values of the same kind, which a backend stores in the same form: their range and their zeros stay.

    The order is changed, and each number by at most a fifth, towards zero, so that none overflows. If all numbers are
    equal, they become different ones: a backend may drop what it adds if it is 0, and what it multiplies by if it is 1.
    Numbers that are not finite would stay what they are, so finite ones take their places.
    """
    generator = torch.Generator().manual_seed(seed)
    flat = tensor.detach().reshape(-1).to(torch.float64)
    factors = torch.rand(flat.numel(), generator=generator, dtype=torch.float64) * 0.2 + 0.8
    finite = flat.isfinite()
    largest = flat[finite].abs().max() if finite.any() else torch.zeros((), dtype=torch.float64)
    flat = torch.where(finite, flat, torch.where(flat < 0, -largest, largest))
    if not flat.any():
        flat = torch.full_like(flat, 0.1)
    made = flat[torch.randperm(flat.numel(), generator=generator)] * factors
    return made.to(tensor.dtype).reshape(tensor.shape)


def with_values(program: ExportedProgram, values: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """A copy of a program with other values, of the same shape and dtype, for some of its constants. All other tensors are
    shared."""
    memo: dict[int, object] = {}
    for name, tensor in {**program.constants, **program.state_dict}.items():
        if isinstance(tensor, torch.Tensor):
            memo[id(tensor)] = _like(tensor, values[name]) if name in values else tensor
    copied: ExportedProgram = copy.deepcopy(program, memo)
    return copied


def _like(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values
