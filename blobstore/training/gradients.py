"""Comparing one step of a lowered program with eager PyTorch.

ExecuTorch lowers the backward pass of operators for which its kernels compute something else, without a word. So a
program is tried once before anybody trains with it.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import OutputKind

from blobstore.errors import BlobStoreError, GradientError
from blobstore.runtime import BlobCache
from blobstore.training.program import TrainingProgram

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram

__all__ = ["check"]

_TOLERANCE = 0.01
"""Kernels add in different orders; what is wrong is wrong by more than a hundredth."""

_SHOWN = 5


def check(
    module: nn.Module, inputs: tuple[Any, ...], joint: ExportedProgram, manager: ExecutorchProgramManager
) -> None:
    """Compare loss and gradients of a program with those of the module that it was lowered from.

    Args:
        module: as it was exported; not changed.
        inputs: the example inputs.
        joint: the exported forward and backward pass, to look for the operator that is wrong.
        manager: the lowered program.

    Raises:
        GradientError: they differ, or the module computes something else each time, so that they cannot be compared.
    """
    name = type(module).__name__
    loss, expected = _eager(module, inputs)
    again, repeated = _eager(module, inputs)
    if not _close(again, loss, 1.0) or any(not _close(repeated[key], expected[key], 1.0) for key in expected):
        raise GradientError(
            f"{name} computes another loss or other gradients each time, as dropout does in train(), so its lowered step "
            "cannot be checked: export it in eval(), or leave the check out (check_gradients=False)"
        )
    found_loss, found = _lowered(inputs, manager, name)
    scale = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    wrong = [key for key, gradient in expected.items() if not _close(found.get(key), gradient, scale)]
    if not _close(found_loss, loss, 1.0):
        raise GradientError(
            f"the loss of {name} is {float(loss):.6g}, but {float(found_loss):.6g} when it is lowered; it uses "
            f"{_listed(_operators(joint, ()))}"
        )
    if wrong:
        raise GradientError(
            f"ExecuTorch computes other gradients than PyTorch for {_listed(map(repr, wrong))} of {name}. Only these gradients "
            f"depend on {_listed(_operators(joint, wrong))}; use other operators, most likely instead of the first"
        )


def _eager(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients by name; the module and its state stay as they are."""
    twin = copy.deepcopy(module)
    twin.zero_grad(set_to_none=True)
    with torch.enable_grad():
        outputs = twin(*(_copied(value) for value in inputs))
        loss = outputs if isinstance(outputs, Tensor) else next(iter(outputs))
        loss.sum().backward()
    return loss.detach(), {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _lowered(
    inputs: tuple[Any, ...], manager: ExecutorchProgramManager, name: str
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The loss and the gradients of one step of the program, which is loaded from a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="blobstore-") as folder:
        path = Path(folder) / "train.pte"
        with path.open("wb") as file:
            manager.write_to_file(file)
        manager.write_tensor_data_to_file(folder)
        try:
            program = TrainingProgram(path, BlobCache(sorted(Path(folder).glob("*.ptd"))))
            outputs = program.forward_backward(*(_copied(value) for value in inputs))
        except BlobStoreError as error:
            reason = str(error).removeprefix(f"{path}: ")
            raise GradientError(f"{name} was lowered, but its step does not run: {reason}") from error
        return outputs[0].clone(), {key: value.clone() for key, value in program.named_gradients().items()}


def _close(found: Tensor | None, expected: Tensor, scale: float) -> bool:
    """Whether two tensors are equal up to rounding; `scale` is the size of numbers beside which others do not count."""
    if found is None or found.numel() != expected.numel():
        return False
    a, b = found.double().reshape(-1), expected.double().reshape(-1)
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return False
    rounding = 4 * math.sqrt(torch.finfo(expected.dtype).eps) if expected.dtype.is_floating_point else 0
    difference, size = float((a - b)[finite].norm()), float(b[finite].norm())
    return difference <= max(_TOLERANCE, rounding) * size + 1e-6 * scale


def _operators(joint: ExportedProgram, wrong: Iterable[str]) -> list[str]:
    """The operators on which all wrong gradients depend and nothing else does, those of backward passes first.

    Without a wrong gradient, all on which any output depends.
    """
    outputs = dict(
        zip(
            (spec.arg.name for spec in joint.graph_signature.output_specs),
            joint.graph.output_node().args[0],
            strict=True,
        )
    )
    bad, good = [], set()
    names = set(wrong)
    for spec in joint.graph_signature.output_specs:
        node = outputs[spec.arg.name]
        if isinstance(node, torch.fx.Node):
            above = _ancestors(node)
            if spec.kind is OutputKind.GRADIENT_TO_PARAMETER and spec.target in names:
                bad.append(above)
            elif names:
                good |= above
            else:
                bad.append(above)
    suspects = set.intersection(*bad) - good if bad else set()
    calls = [node for node in joint.graph.nodes if node in suspects and node.op == "call_function"]
    found = dict.fromkeys(str(node.target) for node in calls if isinstance(node.target, torch._ops.OpOverload))
    return sorted(found, key=lambda operator: "backward" not in operator)  # those that only a backward pass has


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    found, left = {node}, [node]
    while left:
        for one in left.pop().all_input_nodes:
            if one not in found:
                found.add(one)
                left.append(one)
    return found


def _listed(texts: Iterable[str]) -> str:
    all_of_them = list(texts)
    shown = ", ".join(all_of_them[:_SHOWN])
    return shown if len(all_of_them) <= _SHOWN else f"{shown} and {len(all_of_them) - _SHOWN} more"
