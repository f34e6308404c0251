"""Optimizers over the parameters of a training program, and their state as tensors and JSON.

A `torch.optim` optimizer numbers its parameters. In a checkpoint they have their names, so that it can be told which
tensor belongs to which parameter, and whether an optimizer that is to go on has the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blobstore.errors import CheckpointError, TrainingError, UnsupportedDataError, UnsupportedOperationError

__all__ = ["OptimizerState", "capture", "check", "restore"]

_PREFIX = "optimizer/"  # of the keys of tensors; no name of a parameter begins like this by accident


@dataclass
class OptimizerState:
    """What an optimizer remembers; tensors are in memory of its own.

    Attributes:
        kind: the name of its class.
        groups: for each parameter group its options and the names of its parameters.
        state: for each parameter what is kept for it.
    """

    kind: str
    groups: list[tuple[dict[str, Any], list[str]]]
    state: dict[str, Any]

    def encode(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON values, and the tensors that these refer to as `{"tensor": key}`, by key.

        Raises:
            UnsupportedDataError: there are things that are neither tensors nor plain values.
        """
        tensors: dict[str, Tensor] = {}
        groups = [
            {"options": _encode(options, f"{_PREFIX}{index}", tensors), "params": names}
            for index, (options, names) in enumerate(self.groups)
        ]
        state = {name: _encode(kept, f"{_PREFIX}{name}", tensors) for name, kept in self.state.items()}
        return {"kind": self.kind, "groups": groups, "state": state}, tensors

    @classmethod
    def decode(cls, values: Any, tensors: Mapping[str, Tensor]) -> OptimizerState:
        """What was encoded. The values were read from a file.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: they cannot have been made by `encode`.
        """
        groups = [(_decode(group["options"], tensors), list(map(_text, group["params"]))) for group in values["groups"]]
        state = {_text(name): _decode(kept, tensors) for name, kept in values["state"].items()}
        names = [name for _, own in groups for name in own]
        if len(set(names)) != len(names) or not set(state) <= set(names):
            raise ValueError("the optimizer's parameters are named twice, or not at all")
        if not all(isinstance(item, dict) for item in (*state.values(), *(options for options, _ in groups))):
            raise TypeError("the optimizer's state and options have no names")
        return cls(_text(values["kind"]), groups, state)


def check(optimizer: Any, parameters: Mapping[str, Tensor]) -> bool:
    """Whether it is a `torch.optim` optimizer; otherwise it is one of ExecuTorch's kind, stepped with gradients.

    Raises:
        TrainingError: it is neither, or it has parameters of somebody else.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        if callable(getattr(optimizer, "step", None)):
            return False
        raise TrainingError(f"a {type(optimizer).__name__} is no optimizer: it has no step()")
    _names(optimizer, parameters)
    return True


def _names(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> list[list[str]]:
    """For each group the names of its parameters."""
    names = {id(tensor): name for name, tensor in parameters.items()}
    groups = [[names.get(id(tensor), "") for tensor in group["params"]] for group in optimizer.param_groups]
    if not all(name for group in groups for name in group):
        raise TrainingError(
            f"the {type(optimizer).__name__} has parameters that are none of this program's: make it over "
            "named_parameters().values()"
        )
    return groups


def _torch_only(optimizer: Any) -> torch.optim.Optimizer:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedOperationError(
            f"the state of a {type(optimizer).__name__} cannot be saved or restored: only that of torch.optim's "
            "optimizers can be reached"
        )
    return optimizer


def capture(optimizer: Any, parameters: Mapping[str, Tensor]) -> OptimizerState:
    """A copy of an optimizer's state.

    Raises:
        UnsupportedOperationError: it is no `torch.optim` optimizer.
        TrainingError: it has parameters that are not among these.
        UnsupportedDataError: it keeps state for something else than its parameters.
    """
    optimizer = _torch_only(optimizer)
    names = _names(optimizer, parameters)
    packed = optimizer.state_dict()
    out = OptimizerState(type(optimizer).__name__, [], {})
    by_number: dict[Any, str] = {}
    for group, own in zip(packed["param_groups"], names, strict=True):
        by_number.update(zip(group["params"], own, strict=True))
        out.groups.append(({key: _copy(value) for key, value in group.items() if key != "params"}, own))
    for number, kept in packed["state"].items():
        if number not in by_number:
            raise UnsupportedDataError(f"the {out.kind} keeps state for {number!r}, which is no parameter")
        out.state[by_number[number]] = _copy(kept)
    return out


def restore(optimizer: Any, saved: OptimizerState, parameters: Mapping[str, Tensor]) -> None:
    """Give an optimizer the state that another one had; the tensors become the optimizer's.

    Raises:
        UnsupportedOperationError: it is no `torch.optim` optimizer.
        CheckpointError: the state is that of another class, or its groups have other parameters.
        TrainingError: it has parameters that are not among these. In each case it is as it was.
    """
    optimizer = _torch_only(optimizer)
    names = _names(optimizer, parameters)
    kind = type(optimizer).__name__
    if saved.kind != kind:
        raise CheckpointError(f"the optimizer's state is that of {saved.kind}, not of {kind}")
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
    except Exception as error:  # what a class of optimizer makes of it is its own business
        optimizer.load_state_dict(old)
        raise CheckpointError(f"the {kind} does not take the saved state: {error}") from error


def _copy(value: Any) -> Any:
    """The same value with tensors of its own, so that the next step does not change it."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return tuple(_copy(item) for item in value) if type(value) is tuple else value


def _encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON value; tensors are put aside, under keys that begin with `key`."""
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"tensor": key}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{key}/{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": {name: _encode(item, f"{key}/{name}", tensors) for name, item in value.items()}}
    raise UnsupportedDataError(f"{key} is a {type(value).__name__}: neither a tensor nor a plain value")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `_encode` was given."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float.fromhex(content)
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in content)
    if kind == "dict":
        return {name: _decode(item, tensors) for name, item in content.items()}
    raise ValueError(f"an unknown kind of value, {kind!r}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
