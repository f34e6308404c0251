"""Comparing one step of a lowered program with eager PyTorch.

For some operators ExecuTorch's kernels compute other gradients than PyTorch, and lowering does not report it. So every
program runs once before it is used for training.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import OutputKind

from blobstore.core.errors import BlobStoreError, GradientError
from blobstore.runtime import BlobCache
from blobstore.runtime.native import native
from blobstore.training.training_program import TrainingProgram

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram

__all__ = ["check", "operators"]

_TOLERANCE = 0.01
"""Relative. Kernels add in different orders, which makes less of a difference; a wrong gradient makes more."""

_SHOWN = 5
"""How many names a message lists."""


def check(
    module: nn.Module, inputs: tuple[Any, ...], joint: ExportedProgram, manager: ExecutorchProgramManager
) -> None:
    """Compare loss and gradients of a program with those of the module that it was lowered from.

    Args:
        module: the module that was exported; it is not changed.
        inputs: the example inputs.
        joint: the exported forward and backward pass, in which the operators to blame are found.
        manager: the lowered program.

    Raises:
        GradientError: they differ; or they cannot be compared, because the module computes something else each time.
    """
    name = type(module).__name__
    # Twice, because what PyTorch itself computes differently each time cannot be compared with a program.
    loss, expected = _eager(module, inputs)
    again, repeated = _eager(module, inputs)
    if not _close(again, loss, 1.0) or any(not _close(repeated[key], expected[key], 1.0) for key in expected):
        raise GradientError(
            f"{name} computes another loss or other gradients each time, as dropout does in train(), so its lowered step "
            "cannot be checked: export it in eval(), or skip the check (check_gradients=False)"
        )
    found_loss, found = _lowered(inputs, manager, name)
    scale = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in expected.values()))
    wrong = [key for key, gradient in expected.items() if not _close(found.get(key), gradient, scale)]
    if not _close(found_loss, loss, 1.0):
        raise GradientError(
            f"the loss of {name} is {float(loss):.6g} in PyTorch and {float(found_loss):.6g} after lowering; it uses "
            f"{_some(_suspects(joint, ()))}"
        )
    if wrong:
        raise GradientError(
            f"ExecuTorch computes other gradients than PyTorch for {_some(map(repr, wrong))} of {name}. Only these gradients "
            f"depend on {_some(_suspects(joint, wrong))}; replace one of these operators, most likely the first"
        )


def _eager(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients by name; the module and its state do not change."""
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
    """The loss and the gradients of one step of the program, loaded from a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="blobstore-") as folder:
        path = Path(folder) / "train.pte"
        with path.open("wb") as file:
            manager.write_to_file(file)
        manager.write_tensor_data_to_file(folder)
        native.take_failed_operator()  # of an earlier program
        try:
            program = TrainingProgram(path, BlobCache(sorted(Path(folder).glob("*.ptd"))))
            outputs = program.forward_backward(*(_copied(value) for value in inputs))
        except BlobStoreError as error:
            reason = str(error).removeprefix(f"{path}: ")
            operator = native.take_failed_operator()
            where = f"; the kernel of {operator} refuses it, so use another operator" if operator else ""
            raise GradientError(f"{name} was lowered, but its step does not run: {reason}{where}") from error
        return outputs[0].clone(), {key: value.clone() for key, value in program.named_gradients().items()}


def _close(found: Tensor | None, expected: Tensor, scale: float) -> bool:
    """Whether two tensors are equal up to rounding; differences much smaller than `scale` do not count."""
    if found is None or found.numel() != expected.numel():
        return False
    a, b = found.double().reshape(-1), expected.double().reshape(-1)
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return False
    # A gradient that is zero but for rounding has no relative error to speak of, so it is measured by all of them together.
    rounding = 4 * math.sqrt(torch.finfo(expected.dtype).eps) if expected.dtype.is_floating_point else 0
    difference, size = float((a - b)[finite].norm()), float(b[finite].norm())
    return difference <= max(_TOLERANCE, rounding) * size + 1e-5 * scale


def _suspects(joint: ExportedProgram, wrong: Container[str]) -> list[str]:
    """The operators that all wrong gradients depend on and no other output does, those of backward passes first.

    If no gradient is wrong, these are the operators that all outputs depend on.
    """
    bad, good = _split_outputs(joint, wrong)
    suspects = set.intersection(*bad) - set().union(*good) if bad else set()
    return [str(operator) for operator in operators(node for node in joint.graph.nodes if node in suspects)]


def _split_outputs(
    joint: ExportedProgram, wrong: Container[str]
) -> tuple[list[set[torch.fx.Node]], list[set[torch.fx.Node]]]:
    """The nodes that each wrong gradient depends on, and those of each other output."""
    bad: list[set[torch.fx.Node]] = []
    good: list[set[torch.fx.Node]] = []
    for spec, node in zip(joint.graph_signature.output_specs, joint.graph.output_node().args[0], strict=True):
        if isinstance(node, torch.fx.Node):
            is_wrong = spec.kind is OutputKind.GRADIENT_TO_PARAMETER and spec.target in wrong
            (bad if is_wrong else good).append(_ancestors(node))
    return (bad, good) if bad else (good, [])


def operators(nodes: Iterable[torch.fx.Node]) -> list[torch._ops.OpOverload]:
    """The operators that nodes of a graph call, each once, those of backward passes first."""
    targets = dict.fromkeys(node.target for node in nodes if node.op == "call_function")
    overloads = [target for target in targets if isinstance(target, torch._ops.OpOverload)]
    return sorted(overloads, key=lambda operator: "backward" not in str(operator))


def _ancestors(node: torch.fx.Node) -> set[torch.fx.Node]:
    """A node and all nodes that it depends on."""
    ancestors, left = {node}, [node]
    while left:
        for one in left.pop().all_input_nodes:
            if one not in ancestors:
                ancestors.add(one)
                left.append(one)
    return ancestors


def _some(texts: Iterable[str]) -> str:
    """The first few texts, and how many more there are."""
    every = list(texts)
    shown = ", ".join(every[:_SHOWN])
    return shown if len(every) <= _SHOWN else f"{shown} and {len(every) - _SHOWN} more"
