"""Lower a module that computes its own loss to a program that trains.

These are ExecuTorch's own steps, with three things added. Each weight goes to the data file that its name decides, so the
frozen ones can lie where other programs share them, and the trained ones in a file of their own;
`external_mutable_weights` alone has one file, and leaves what is frozen in the program. Buffers that a step changes, such
as running statistics, keep their names and first values, so that checkpoints have them. And linear layers with a bias
become a product and a sum: ExecuTorch has fast kernels for these, and a slow one for both at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blobstore.errors import BlobStoreError, MissingDependencyError, UnsupportedDataError
from blobstore.lowering import names
from blobstore.training import gradients

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from torch.export import ExportedProgram

__all__ = ["lower_training"]


def lower_training(
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    tag: names.Tag = "model",
    check_gradients: bool = True,
    **config: Any,
) -> ExecutorchProgramManager:
    """Lower a module to a program whose method `forward` gives the outputs and the gradients.

    Args:
        module: its first output is the loss, one float. What has `requires_grad` is trained; everything else is frozen.
            It is exported in the mode that it is in, `train()` or `eval()`, and not changed.
        inputs: example inputs. The program takes these shapes and dtypes.
        tag: the data file that the weights go to, without a folder: a name, or a function from the name of a parameter
            or buffer to one. None, or a function that returns it, leaves the weight in the program. As for
            `BlobStorePartitioner`: with the same function there, both programs share what is frozen.
        check_gradients: run one step of the program on the example inputs, by the native runtime, and compare loss and
            gradients with those of eager PyTorch. That takes a step of each, and a temporary copy of the program.
        config: what else ExecuTorch's `ExecutorchBackendConfig` takes. Give `remove_view_copy=False` if the module views
            a weight (`weight.view(...)`) that goes to a data file: ExecuTorch fails on that otherwise.

    Returns:
        What `to_executorch()` gives: `save_programs` takes it, or its own `write_to_file`.

    Raises:
        InvalidTagError: `tag`, or what it gives for a weight, is not a plain file name.
        UnsupportedDataError: the first output is not one float, or no parameter has `requires_grad`, or two of the
            inputs are one tensor; or `module` is no module, `inputs` no tuple, or torch cannot export the one with the
            other; or ExecuTorch cannot lower the step, as with batch normalization in train().
        GradientError: the program's loss or gradients are not those of eager PyTorch. The message names the parameters,
            and the operators that only their gradients depend on.
        MissingDependencyError: executorch is missing.
    """
    if not callable(tag):
        names.check(tag)
    if not isinstance(module, nn.Module):
        raise UnsupportedDataError(f"expected a torch module to train, found a {type(module).__qualname__}")
    if not isinstance(inputs, tuple):
        raise UnsupportedDataError(f"expected a tuple of example inputs, found a {type(inputs).__qualname__}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UnsupportedDataError(f"{type(module).__name__} has no parameter with requires_grad: nothing to train")
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if len({id(tensor) for tensor in tensors}) != len(tensors):
        raise UnsupportedDataError("two of the inputs are one tensor, so the program would read one for both: clone it")

    try:
        from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
        from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
        from torch.export import export
        from torch.export.experimental import _export_forward_backward
    except ImportError as error:
        raise MissingDependencyError("lowering needs executorch: pip install 'blobstore[executorch]'") from error

    try:
        exported = export(module, inputs, strict=True)
    except Exception as error:  # whatever the code of the module, or torch, makes of these inputs
        raise UnsupportedDataError(f"{type(module).__name__} cannot be exported with these inputs: {error}") from error
    _check_loss(exported, type(module).__name__)
    joint = _export_forward_backward(exported).run_decompositions({torch.ops.aten.addmm.default: _product_and_sum})
    _check_normalization(joint, type(module).__name__)
    # joint graphs hold an operator, scalar_tensor, that is none of the edge dialect's and becomes a constant later
    edge = to_edge(joint, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    signature = edge.exported_program().graph_signature
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}

    def choose(node: torch.fx.Node) -> str | None:
        name = weights.get(str(node.target))
        return None if name is None else names.check(tag(name) if callable(tag) else tag)

    changed = [
        node for node, name in signature.inputs_to_buffers.items() if name in signature.buffers_to_mutate.values()
    ]
    options = {"emit_mutable_buffer_names": True, **config}
    if changed:
        options["passes"] = [*config.get("passes", ()), InitializedMutableBufferPass(changed)]
    try:
        manager = edge.to_executorch(ExecutorchBackendConfig(external_constants=choose, **options))
    except (BlobStoreError, MemoryError):
        raise
    except Exception as error:  # mostly of operators that a forward pass does not have
        views = config.get("remove_view_copy", True)
        hint = "; if it views a weight, as PReLU does, give remove_view_copy=False" if views else ""
        raise UnsupportedDataError(
            f"ExecuTorch cannot lower a step of {type(module).__name__}: {_last_line(error)}{hint}. Operators in it beyond "
            f"PyTorch's core set: {', '.join(_beyond_core(joint)) or 'none'}"
        ) from error
    if check_gradients:
        gradients.check(module, inputs, joint, manager)
    return manager


def _check_loss(exported: ExportedProgram, name: str) -> None:
    (outputs,) = exported.graph.output_node().args
    loss = outputs[0].meta.get("val") if outputs and isinstance(outputs[0], torch.fx.Node) else None
    if not isinstance(loss, Tensor) or math.prod(loss.shape) != 1 or not loss.dtype.is_floating_point:
        found = (
            "none" if loss is None else f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        )
        raise UnsupportedDataError(f"the first output of {name} has to be its loss, one float; found {found}")


def _operators(program: ExportedProgram) -> list[torch._ops.OpOverload]:
    targets = dict.fromkeys(node.target for node in program.graph.nodes if node.op == "call_function")
    return [target for target in targets if isinstance(target, torch._ops.OpOverload)]


def _check_normalization(joint: ExportedProgram, name: str) -> None:
    if any(
        "_batch_norm_legit" in str(operator) and "no_training" not in str(operator) for operator in _operators(joint)
    ):
        raise UnsupportedDataError(
            f"{name} normalizes batches in train(), for which ExecuTorch has no kernel: call eval() on its BatchNorm "
            "layers (their running statistics stay, their weights train), or normalize groups or layers instead"
        )


def _beyond_core(joint: ExportedProgram) -> list[str]:
    """The operators that a backend need not have, those of backward passes first."""
    found = [str(operator) for operator in _operators(joint) if torch.Tag.core not in operator.tags]
    return sorted(found, key=lambda operator: "backward" not in operator)


def _last_line(error: BaseException) -> str:
    """What was wrong first, in a line: ExecuTorch appends whole graphs."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _product_and_sum(bias: Tensor, one: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.mm(one, other)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)
