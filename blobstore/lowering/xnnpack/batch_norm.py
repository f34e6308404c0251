"""Records what XNNPACK's passes make of batch normalizations.

`FuseBatchNormPass` folds a normalization into the convolution or linear layer before it: `record_fold`. What stands
alone becomes a depthwise convolution in `DecomposeBatchNorm`: `record_replacement`. Both compute new weights and biases
from several tensors of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from blobstore.logical.records import Operation, Step
from blobstore.lowering.origins import TensorOrigin
from blobstore.lowering.xnnpack.run import Run
from blobstore.runtime.executorch import get_param_tensor, get_tensor_name

__all__ = ["record_fold", "record_replacement"]


def record_fold(run: Run, original: Callable[..., None], fusion: Any, *args: Any) -> None:
    """Wraps `FuseBatchNormPass._fuse_ops`, which folds a batch normalization into the layer before it."""
    _, _, layer, norm, is_conv, _ = args
    program = fusion.exported_program
    parts = _Parts(run, program)
    weight = parts.find(layer.args[1])
    bias = parts.find(layer.args[2]) if len(layer.args) > 2 else None
    gamma, beta, mean, variance = (parts.find(argument) for argument in norm.args[1:5])
    epsilon = float(norm.args[-1])
    axis = (
        1 if is_conv and layer.args[6] else 0
    )  # of the output channels; args[6]: whether the convolution is transposed
    original(fusion, *args)
    if not parts.known or weight is None or mean is None or variance is None:
        return
    of_weight, of_bias = (
        (Operation.FOLD_CONV_WEIGHT, Operation.FOLD_CONV_BIAS)
        if is_conv
        else (Operation.FOLD_LINEAR_WEIGHT, Operation.FOLD_LINEAR_BIAS)
    )
    run.combined[get_tensor_name(program, layer.args[1])] = TensorOrigin.combined(
        weight.name,
        (weight, variance, gamma),
        Step(of_weight, ints=(axis, int(gamma is not None)), floats=(epsilon,)),
    )
    run.combined[get_tensor_name(program, layer.args[2])] = TensorOrigin.combined(
        bias.name if bias is not None else _bias_beside(weight.name),
        (mean, variance, bias, gamma, beta),
        Step(of_bias, ints=_presence(bias, gamma, beta), floats=(epsilon,)),
    )


def record_replacement(run: Run, original: Callable[..., Any], decomposition: Any, norm: Any, *args: Any) -> Any:
    """Wraps `DecomposeBatchNorm.replace_bn_node_with_conv`, which makes a convolution of a batch normalization."""
    program = decomposition.exported_program
    parts = _Parts(run, program)
    gamma, beta, mean, variance = (parts.find(argument) for argument in norm.args[1:5])
    epsilon = float(norm.args[-1])
    conv = original(decomposition, norm, *args)
    if not parts.known or mean is None or variance is None:
        return conv
    name = mean.name if gamma is None else gamma.name
    value = get_param_tensor(program, conv.args[1])
    run.combined[get_tensor_name(program, conv.args[1])] = TensorOrigin.combined(
        name,
        (mean, variance, gamma, beta),
        Step(Operation.NORM_WEIGHT, ints=_presence(gamma, beta), floats=(epsilon,)),
        Step(Operation.RESHAPE, ints=tuple(value.shape)),
    )
    run.combined[get_tensor_name(program, conv.args[2])] = TensorOrigin.combined(
        beta.name if beta is not None else _bias_beside(name),
        (mean, variance, gamma, beta),
        Step(Operation.NORM_BIAS, ints=_presence(gamma, beta), floats=(epsilon,)),
    )
    return conv


class _Parts:
    """Finds the tensors that a pass combines; `known` becomes false if one has no name or is itself the result of steps."""

    def __init__(self, run: Run, program: ExportedProgram) -> None:
        self._run, self._program, self.known = run, program, True

    def find(self, node: Any) -> TensorOrigin | None:
        if not isinstance(node, torch.fx.Node):
            return None
        origin = self._run.origin(get_tensor_name(self._program, node))
        if origin is None or origin.steps:
            self.known = False
            return None
        return origin


def _presence(*parts: TensorOrigin | None) -> tuple[int, ...]:
    """Which optional parts there are: 1 or 0 for each."""
    return tuple(int(part is not None) for part in parts)


def _bias_beside(name: str) -> str:
    """What a bias of the module that has this tensor is called."""
    return ".".join([*name.split(".")[:-1], "bias"])
