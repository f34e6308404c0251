"""Optimizers over the parameters of a training program, and their state by the names of the parameters.

A `torch.optim` optimizer numbers its parameters. A checkpoint refers to them by name instead, so that each tensor can
be matched with its parameter, and an optimizer over other parameters is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from blobstore.core.errors import CheckpointError, TrainingError, UnsupportedDataError, UnsupportedOperationError
from blobstore.training.json_values import decode, encode, text

__all__ = ["OptimizerState", "capture", "check", "restore"]

_PREFIX = "optimizer/"  # of the keys of its tensors; names of parameters do not begin like this


@dataclass
class OptimizerState:
    """The state of an optimizer, with tensors that own their memory.

    Attributes:
        kind: the name of its class.
        groups: the options and the names of the parameters of each group.
        state: maps the name of each parameter to the state that is kept for it.
    """

    kind: str
    groups: list[tuple[dict[str, Any], list[str]]]
    state: dict[str, Any]

    def encode(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The state as JSON values, and by key the tensors that these refer to.

        Raises:
            UnsupportedDataError: the state has something that is neither a tensor nor a plain value.
        """
        tensors: dict[str, Tensor] = {}
        groups = [
            {"options": encode(options, f"{_PREFIX}{index}", tensors), "params": names}
            for index, (options, names) in enumerate(self.groups)
        ]
        state = {name: encode(kept, f"{_PREFIX}{name}", tensors) for name, kept in self.state.items()}
        return {"kind": self.kind, "groups": groups, "state": state}, tensors

    @classmethod
    def decode(cls, values: Any, tensors: Mapping[str, Tensor]) -> OptimizerState:
        """The state that `encode` was called on. The values were read from a file and are checked.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: `encode` cannot have returned these values.
        """
        groups = [(decode(group["options"], tensors), list(map(text, group["params"]))) for group in values["groups"]]
        state = {text(name): decode(kept, tensors) for name, kept in values["state"].items()}
        names = [name for _, own in groups for name in own]
        if len(set(names)) != len(names) or not set(state) <= set(names):
            raise ValueError("a parameter of the optimizer is named twice, or is in no group")
        if not all(isinstance(item, dict) for item in (*state.values(), *(options for options, _ in groups))):
            raise TypeError("the state and the options of the optimizer must be dictionaries")
        return cls(text(values["kind"]), groups, state)


def check(optimizer: Any, parameters: Mapping[str, Tensor]) -> bool:
    """Check that an optimizer can step these parameters.

    Returns:
        True for an optimizer of `torch.optim`; False for one like ExecuTorch's, whose `step` takes the gradients.

    Raises:
        TrainingError: it is neither, it has other parameters, or it must run the program itself.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        if callable(getattr(optimizer, "step", None)) and not isinstance(optimizer, type | LRScheduler):
            return False
        raise TrainingError(f"expected an optimizer, found a {type(optimizer).__name__}")
    _names(optimizer, parameters)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TrainingError("LBFGS runs the program itself: in locked(), call its step() with a closure")
    return True


def _names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of the parameters of each group."""
    names = {id(tensor): name for name, tensor in parameters.items()}
    groups = [[names.get(id(tensor), "") for tensor in group["params"]] for group in optimizer.param_groups]
    if not all(name for group in groups for name in group):
        raise TrainingError(
            f"the {type(optimizer).__name__} has parameters that do not belong to this program: make it over "
            "named_parameters().values()"
        )
    return groups


def _torch_only(optimizer: Any) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedOperationError(
            f"the state of a {type(optimizer).__name__} cannot be saved or restored: only optimizers of torch.optim give "
            "access to theirs"
        )
    return optimizer


def capture(optimizer: Any, parameters: Mapping[str, Tensor]) -> OptimizerState:
    """A copy of an optimizer's state.

    Raises:
        UnsupportedOperationError: it is not an optimizer of `torch.optim`.
        TrainingError: it has parameters that are not among these.
        UnsupportedDataError: it keeps state for something other than its parameters.
    """
    optimizer = _torch_only(optimizer)
    names = _names(optimizer, parameters)
    packed = optimizer.state_dict()
    out = OptimizerState(type(optimizer).__name__, [], {})
    by_number: dict[Any, str] = {}
    for group, own in zip(packed["param_groups"], names, strict=True):
        by_number.update(zip(group["params"], own, strict=True))
        options = {key: _copy(value) for key, value in group.items() if key not in ("params", "param_names")}
        out.groups.append((options, own))
    for number, kept in packed["state"].items():
        if number not in by_number:
            raise UnsupportedDataError(f"the {out.kind} keeps state for {number!r}, which is not a parameter")
        out.state[by_number[number]] = _copy(kept)
    return out


def restore(optimizer: Any, saved: OptimizerState, parameters: Mapping[str, Tensor]) -> None:
    """Give an optimizer a saved state, whose tensors become the optimizer's.

    Raises:
        UnsupportedOperationError: it is not an optimizer of `torch.optim`.
        CheckpointError: the state is that of another class, or its groups have other parameters.
        TrainingError: it has parameters that are not among these. After any of these errors it is unchanged.
    """
    optimizer = _torch_only(optimizer)
    names = _names(optimizer, parameters)
    kind = type(optimizer).__name__
    if saved.kind != kind:
        raise CheckpointError(f"the saved state is that of optimizer {saved.kind}, not of {kind}")
    if [sorted(own) for _, own in saved.groups] != [sorted(own) for own in names]:
        raise CheckpointError(
            f"the parameter groups of the {kind} are {names}, those of the saved one {[own for _, own in saved.groups]}"
        )
    old = optimizer.state_dict()
    numbers = {
        name: number
        for group, own in zip(old["param_groups"], names, strict=True)
        for number, name in zip(group["params"], own, strict=True)
    }
    new = {
        "param_groups": [
            {**options, "params": now["params"]}
            for (options, _), now in zip(saved.groups, old["param_groups"], strict=True)
        ],
        "state": {numbers[name]: kept for name, kept in saved.state.items()},
    }
    try:
        optimizer.load_state_dict(new)
    except Exception as error:  # each class of optimizer has its own reasons to refuse a state
        optimizer.load_state_dict(old)
        raise CheckpointError(f"the {kind} refuses the saved state: {error}") from error


def _copy(value: Any) -> Any:
    """The same value with copies of its tensors, so that the next step does not change it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return tuple(_copy(item) for item in value) if type(value) is tuple else value
