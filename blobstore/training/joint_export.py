"""Lowering a module that computes its own loss to a program that trains.

These are ExecuTorch's own steps with three additions. Each weight goes to the data file that is chosen by its name, so
frozen weights can be stored where other programs share them, and trained ones in a separate file; with
`external_mutable_weights` alone there is only one file, and frozen weights stay in the program. Buffers that a step
changes, such as running statistics, keep their names and initial values, so that checkpoints contain them. And operators
that ExecuTorch cannot run well become others, as `decompositions` says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blobstore.core.errors import UnsupportedDataError
from blobstore.core.requirements import needed
from blobstore.lowering import names
from blobstore.lowering.export import first_line, last_line, refusing
from blobstore.training import decompositions, gradients

if TYPE_CHECKING:
    from executorch.exir import EdgeProgramManager
    from torch.export import ExportedProgram

    from blobstore.lowering.lowered import LoweredProgram

__all__ = ["lower_training"]

_CUT = (
    ". Parameters that reach the loss through detach() alone must not have requires_grad, and outputs behind the loss must be "
    "detached"
)


def lower_training(
    module: nn.Module,
    inputs: tuple[Any, ...],
    *,
    tag: names.Tag = "model",
    check_gradients: bool = True,
    **config: Any,
) -> LoweredProgram:
    """Lower a module to a program whose method `forward` computes the outputs and the gradients.

    Args:
        module: its first output is the loss, a single float. Parameters with `requires_grad` are trained; everything
            else is frozen. The module is exported in its current mode, `train()` or `eval()`, and not changed.
        inputs: example inputs. The program takes inputs of these shapes and dtypes.
        tag: the data file for the weights, without a folder: a name, or a function that returns one for the name of a
            parameter or buffer. If the tag of a weight is None, the weight stays in the program, as do buffers that are
            not persistent and of which the program takes views, such as tables of positions. `BlobStorePartitioner` has
            the same argument: with the same function, both programs share what is frozen.
        check_gradients: run one step of the program on the example inputs, in the native runtime, and compare loss and
            gradients with those of eager PyTorch. This takes the time of a step of each, and a temporary copy of the
            program.
        config: further arguments of ExecuTorch's `ExecutorchBackendConfig`. If the module views a weight
            (`weight.view(...)`) that goes to a data file, pass `remove_view_copy=False`, because ExecuTorch fails
            otherwise.

    Returns:
        The result of `to_executorch()`, for `save_programs` or for its own `write_to_file`.

    Raises:
        InvalidTagError: `tag`, or what it returns for a weight, is not a plain file name.
        UnsupportedDataError: the first output is not a single float; no parameter has `requires_grad`; two of the
            inputs are the same tensor; `module` is not a module or `inputs` is not a tuple; torch cannot export the
            module with the inputs; or ExecuTorch cannot lower the step.
        GradientError: the program's loss or gradients differ from those of eager PyTorch. The message names the
            parameters, and the operators that only their gradients depend on.
        MissingDependencyError: torch or executorch is not installed, or has another version than the supported one.
    """
    _check_arguments(module, inputs, tag)
    with needed("lowering needs all of executorch", "executorch"):
        from executorch.exir import EdgeCompileConfig, to_edge
        from torch.export.experimental import _export_forward_backward

    name = type(module).__name__
    # attention as products and a softmax: the fused operators have gradients for which ExecuTorch has no kernel
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with refusing(f"{name} cannot be exported with these inputs", first_line):
            exported = torch.export.export(module, inputs, strict=True)
        _check_loss(exported, name)
        with refusing(f"torch cannot export the backward pass of {name}", first_line, _CUT):
            joint = _export_forward_backward(exported).run_decompositions(decompositions.TABLE)
    # joint graphs contain scalar_tensor, which is not in the edge dialect; it becomes a constant later
    with refusing(f"ExecuTorch cannot lower a step of {name}", last_line):
        edge = to_edge(joint, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    manager = _emit(edge, joint, name, tag, config)
    if check_gradients:
        gradients.check(module, inputs, joint, manager)
    return manager


def _check_arguments(module: Any, inputs: Any, tag: names.Tag) -> None:
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
        raise UnsupportedDataError(
            "two of the inputs are the same tensor, so the program would read one input for both: clone it"
        )


def _check_loss(exported: ExportedProgram, name: str) -> None:
    (outputs,) = exported.graph.output_node().args
    loss = outputs[0].meta.get("val") if outputs and isinstance(outputs[0], torch.fx.Node) else None
    if not isinstance(loss, Tensor) or math.prod(loss.shape) != 1 or not loss.dtype.is_floating_point:
        value = (
            "none" if loss is None else f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        )
        raise UnsupportedDataError(f"the first output of {name} must be its loss, a single float; found {value}")


def _emit(
    edge: EdgeProgramManager, joint: ExportedProgram, name: str, tag: names.Tag, config: dict[str, Any]
) -> LoweredProgram:
    """Turn the edge program into an ExecuTorch program, with each weight in the data file of its tag."""
    from executorch.exir import ExecutorchBackendConfig

    from blobstore.runtime.executorch import InitializedMutableBufferPass

    signature = edge.exported_program().graph_signature
    weights = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}

    def choose(node: torch.fx.Node) -> str | None:
        weight = weights.get(str(node.target))
        if weight is None or (weight in signature.non_persistent_buffers and _is_viewed(node)):
            return None
        return names.check(tag(weight) if callable(tag) else tag)

    changed = [
        node for node, buffer in signature.inputs_to_buffers.items() if buffer in signature.buffers_to_mutate.values()
    ]
    options = {"emit_mutable_buffer_names": True, **config}
    if changed:
        options["passes"] = [*config.get("passes", ()), InitializedMutableBufferPass(changed)]
    views = config.get("remove_view_copy", True)
    hint = "; if it views a weight, as PReLU does, give remove_view_copy=False" if views else ""
    more = f"{hint}. Operators in it beyond PyTorch's core set: {', '.join(_beyond_core(joint)) or 'none'}"
    # usually because of operators that only a backward pass has
    with refusing(f"ExecuTorch cannot lower a step of {name}", last_line, more):
        program: LoweredProgram = edge.to_executorch(ExecutorchBackendConfig(external_constants=choose, **options))
    return program


def _beyond_core(joint: ExportedProgram) -> list[str]:
    """The operators that a backend may lack, those of backward passes first."""
    called = gradients.operators(joint.graph.nodes)
    return [str(operator) for operator in called if torch.Tag.core not in operator.tags]


def _is_viewed(node: torch.fx.Node) -> bool:
    """Whether a view of a constant is taken, which ExecuTorch can emit only if the constant is in the program."""
    return any("view" in str(user.target) for user in node.users)
