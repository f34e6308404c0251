"""From the origin of a constant to the steps that are recorded, and the proof that they give the constant's bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from blobstore.core.memory.arrays import plain
from blobstore.core.memory.layout import ScalarType
from blobstore.logical.records import ModelTensor, Operation, Record, Step
from blobstore.logical.steps import cast
from blobstore.lowering.names import Refusal, is_frozen, scalar_type
from blobstore.lowering.origins import TensorOrigin, blob_key
from blobstore.lowering.proof import contradiction
from blobstore.lowering.xnnpack.run import Run

__all__ = ["ConstantLayout", "prove_constant", "prove_scales"]


@dataclass(frozen=True)
class ConstantLayout:
    """How XNNPACK's exporter was asked to store a constant.

    Attributes:
        quant: the `QuantParams` of the constant; None if it is not quantized.
        force_fp32: whether float16 and bfloat16 become float32.
        swap_groups: the groups of a transposed convolution, whose first two dimensions are exchanged; otherwise 0.
        nhwc: whether channels come last.
    """

    quant: Any
    force_fp32: bool
    swap_groups: int
    nhwc: bool


def prove_constant(run: Run, name: str, value: torch.Tensor, data: bytes, layout: ConstantLayout) -> Record | Refusal:
    """The record of a constant, if its steps give these very bytes; otherwise why it cannot be updated.

    `value` is the tensor as the passes left it, and `layout` how XNNPACK was asked to store it.
    """
    if name in run.table.refused:
        return run.table.refused[name]
    origin = run.origin(name)
    if origin is None:
        return Refusal((ModelTensor(name, ScalarType.FLOAT, ()),), _why_unnamed(name))
    steps = _steps(origin, value, layout)
    if isinstance(steps, str):
        return Refusal(origin.sources, steps)
    record = Record(blob_key(origin.name, origin.sources, steps), len(data), origin.sources, steps)
    scales = {}
    if layout.quant is not None and layout.quant.per_channel:
        kind = ScalarType.BFLOAT16 if layout.quant.per_channel_group else ScalarType.FLOAT
        scales[_scale_record(origin.name, layout.quant).key] = cast(plain(layout.quant.scale), kind)[0]
    reason = contradiction(record, steps[origin.done :], origin.tensors, memoryview(data), scales)
    return Refusal(origin.sources, reason) if reason else record


def prove_scales(origin: TensorOrigin, quant: Any, data: bytes) -> Record | Refusal:
    """As `prove_constant`, for the scales that a tensor is quantized with."""
    record = replace(_scale_record(origin.name, quant), nbytes=len(data))
    reason = contradiction(record, record.steps, [quant.scale], memoryview(data))
    return Refusal(record.sources, reason) if reason else record


def _why_unnamed(name: str) -> str:
    if is_frozen(name):
        return (
            "its name was lost when it was quantized; call blobstore.lowering.restore_names(converted, model) before "
            "exporting"
        )
    return "it was made up or computed from other tensors while lowering"


def _steps(origin: TensorOrigin, value: torch.Tensor, layout: ConstantLayout) -> tuple[Step, ...] | str:
    """The steps that XNNPACK's exporter takes, in its order; or why they cannot be repeated."""
    steps = list(origin.steps)
    shape, before, quant = tuple(value.shape), origin.sizes, layout.quant
    if shape != before:
        if value.numel() != math.prod(before):
            return f"it was stretched from {before} to {shape} while lowering"
        steps.append(Step(Operation.RESHAPE, ints=shape))
    kind = scalar_type(value.dtype)
    if kind is None:
        return f"dtype {value.dtype} is not supported"
    if quant is not None and not quant.is_dynamic:
        step = _quantization(origin.name, quant)
        if isinstance(step, str):
            return step
        steps.append(step)
    elif (layout.force_fp32 or kind not in {ScalarType.HALF, ScalarType.BFLOAT16}) and kind is not ScalarType.FLOAT:
        steps.append(Step(Operation.CAST, ints=(int(ScalarType.FLOAT),)))
    if layout.swap_groups:
        steps.append(Step(Operation.SWAP_IN_OUT, ints=(layout.swap_groups,)))
    if layout.nhwc:
        steps.append(Step(Operation.CHANNELS_LAST))
    if quant is not None and quant.is_qc4w:
        steps.append(Step(Operation.PACK_INT4))
    return tuple(steps)


def _quantization(name: str, quant: Any) -> Step | str:
    """The step that quantizes a tensor; or why it cannot be repeated."""
    kind = scalar_type(quant.dtype)
    if kind is None:
        return f"quantization to {quant.dtype} is not supported"
    limits = (int(quant.qmin), int(quant.qmax), int(kind))
    if not quant.per_channel:
        return Step(Operation.QUANTIZE_TENSOR, (int(quant.zp), *limits), (float(quant.scale),))
    if bool((torch.as_tensor(quant.zp) != 0).any()):
        return "its channels have zero points other than 0"
    scales = (_scale_record(name, quant).key,)
    if quant.per_channel_group:
        return Step(Operation.QUANTIZE_GROUP, (int(quant.group_size), *limits), names=scales)
    if torch.as_tensor(quant.scale).dtype is not torch.float32:
        return f"its scales are {quant.scale.dtype}, not float32"
    return Step(Operation.QUANTIZE_CHANNEL, (int(quant.axis), *limits), names=scales)


def _scale_record(name: str, quant: Any) -> Record:
    """The record of the scales of a tensor's channels or groups; the weight's own record has the axis."""
    kind = scalar_type(quant.scale.dtype) or ScalarType.FLOAT
    source = ModelTensor(f"{name}.scale", kind, tuple(quant.scale.shape))
    steps = (Step(Operation.CAST, ints=(int(ScalarType.BFLOAT16),)),) if quant.per_channel_group else ()
    return Record(blob_key(source.name, (source,), steps), 0, (source,), steps, auxiliary=True)
