"""From the tensors of a model to the bytes of a stored blob, exactly as lowering made them.

Everything here uses numpy, so a device without torch can update its weights. Each operation of a record gives the same
result as the exporter's own code, to the bit; the tests compare the two.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blobstore.errors import LayoutError, UnsupportedDataError, UpdateError
from blobstore.logical.records import Operation, Record, Source, Step
from blobstore.memory.buffers import same_bytes
from blobstore.memory.dtypes import NUMBERS, numpy_dtype, unsigned_dtype
from blobstore.memory.layout import ScalarType, TensorLayout
from blobstore.memory.tensors import as_bytes, in_dim_order, to_numpy, to_torch

__all__ = [
    "Lookup",
    "Plain",
    "cast",
    "check_finite",
    "floats",
    "from_blob",
    "plain",
    "raw",
    "restore",
    "same_tensors",
    "store",
    "tensor_of",
]

Lookup: TypeAlias = Callable[[str], memoryview]
"""Returns the bytes of another blob by its key: the scales that weights are quantized with."""

Plain: TypeAlias = tuple[npt.NDArray[Any], ScalarType]
"""A contiguous array and its type; bfloat16, which numpy lacks, is the uint16 of its bits."""

_DTYPES: dict[ScalarType, np.dtype[Any]] = {
    kind: unsigned_dtype(kind) if kind is ScalarType.BFLOAT16 else numpy_dtype(kind) for kind in NUMBERS
}
"""The types that updates take, each with the dtype of its array in a `Plain`."""

_KINDS = {dtype: kind for kind, dtype in _DTYPES.items() if kind is not ScalarType.BFLOAT16}


def plain(data: Any) -> Plain:
    """A torch tensor or numpy array as a contiguous array; a view of its memory if it is contiguous.

    Raises:
        UnsupportedDataError: `data` is neither, or its dtype or device is not supported.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        data = data.detach().contiguous()
    elif isinstance(data, np.ndarray) and data.flags.c_contiguous and data.dtype in _KINDS:
        return data, _KINDS[data.dtype]
    elif isinstance(data, np.ndarray | np.generic):
        data = np.ascontiguousarray(data).reshape(np.shape(data))
    else:
        raise UnsupportedDataError(f"expected a torch tensor or a numpy array, found {type(data).__name__}")
    view, layout = as_bytes(data)
    if layout is None or layout.scalar_type not in _DTYPES:
        raise UnsupportedDataError(f"weights of type {layout} are not supported")
    return np.frombuffer(view, _DTYPES[layout.scalar_type]).reshape(layout.sizes), layout.scalar_type


def raw(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of an array; a view of its memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def same_tensors(one: Plain, other: Plain) -> bool:
    """Whether two tensors have the same type, the same shape and, to the bit, the same numbers."""
    (left, left_kind), (right, right_kind) = one, other
    return (left_kind, left.shape) == (right_kind, right.shape) and same_bytes(raw(left), raw(right))


def check_finite(tensor: Plain) -> bool:
    """Whether a tensor has neither infinities nor NaN."""
    array, kind = tensor
    if kind is ScalarType.BFLOAT16:
        return bool(((array & 0x7F80) != 0x7F80).all())
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def accepts(record: Record, source: Source, kind: ScalarType) -> bool:
    """Whether a source can be given in this dtype: its own, or the one that it is quantized to."""
    if kind == source.scalar_type:
        return True
    quantized = [_target(step) for step in record.steps if step.operation in _QUANTIZE]
    return len(record.sources) == 1 and kind in quantized


def store(record: Record, tensors: Sequence[Plain], lookup: Lookup) -> npt.NDArray[Any]:
    """The blob of a record.

    Args:
        record: how the blob is made.
        tensors: one for each of its sources, in the source's shape.
        lookup: returns the scales that the record names.

    Returns:
        A contiguous array whose bytes are the blob; a view of a tensor if its bytes are the blob already.

    Raises:
        LayoutError: the result does not have the size of the blob.
        UnsupportedDataError: a step cannot take this dtype.
    """
    values = list(tensors)
    for step in record.steps:
        values = [_OPERATIONS[step.operation](step, values, lookup)]
    array = np.ascontiguousarray(values[0][0])
    if array.nbytes != record.nbytes:
        raise LayoutError(f"blob '{record.key}': expected {record.nbytes} bytes, its steps give {array.nbytes}")
    return array


def restore(record: Record, data: memoryview) -> Plain:
    """The tensor that a blob was made of, in the dtype that it is stored in.

    Args:
        record: how the blob was made.
        data: its bytes; the result is a view of them.

    Raises:
        UpdateError: the blob does not contain the tensor, because it is made of several, or was quantized or packed.
    """
    source = record.sources[0]
    kind = source.scalar_type
    for step in record.steps:
        if step.operation is Operation.CAST:
            kind = _target(step)
        elif step.operation is not Operation.RESHAPE or len(record.sources) > 1:
            how = step.operation.name.lower().replace("_", " ")
            raise UpdateError(
                f"'{source.name}' cannot be read back from its blob '{record.key}', which was made by: {how}"
            )
    if kind not in _DTYPES or record.nbytes != len(data):
        raise UpdateError(f"'{source.name}' cannot be read back from its blob '{record.key}' of {len(data)} bytes")
    array = np.frombuffer(data, _DTYPES[kind])
    if array.size != math.prod(source.sizes):
        raise UpdateError(f"'{source.name}' is {list(source.sizes)}, its blob '{record.key}' has {array.size} numbers")
    return array.reshape(source.sizes), kind


def from_blob(data: memoryview, layout: TensorLayout) -> Plain:
    """The tensor in a blob that has a layout; a view of its bytes if they are in the order of the dimensions.

    Raises:
        UnsupportedDataError: the dtype is not supported.
    """
    kind = layout.scalar_type
    if kind not in _DTYPES:
        raise UnsupportedDataError(f"weights of type {layout} are not supported")
    return np.frombuffer(in_dim_order(data, layout), _DTYPES[kind]).reshape(layout.sizes), kind


def tensor_of(tensor: Plain) -> Any:
    """An array that updates take. For bfloat16, a copy: a torch tensor if torch is imported, else an `ml_dtypes` array.

    Raises:
        MissingDependencyError: the tensor is bfloat16, torch is not imported, and ml_dtypes is not installed.
    """
    array, kind = tensor
    if kind is not ScalarType.BFLOAT16:
        return array
    layout = TensorLayout(kind, array.shape)
    if "torch" in sys.modules:
        return to_torch(memoryview(bytearray(array.tobytes())), layout)
    return to_numpy(memoryview(array.tobytes()), layout)


def floats(tensor: Plain) -> npt.NDArray[np.float32]:
    """A tensor as float32; a view if it is float32 already."""
    array, kind = tensor
    if kind is ScalarType.BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _reshape(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    array, kind = values[0]
    return array.reshape(step.ints), kind


def _cast(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    return cast(values[0], _target(step))


def cast(tensor: Plain, target: ScalarType) -> Plain:
    """A tensor in another dtype, rounded as torch does; the tensor itself if it has the dtype."""
    array, kind = tensor
    if kind == target:
        return tensor
    if target is ScalarType.BFLOAT16:  # to the nearest, ties to even
        bits = np.ascontiguousarray(floats(tensor)).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40
        return np.where(np.isnan(bits.view(np.float32)), quiet, rounded).astype(np.uint16), target
    if kind is ScalarType.BFLOAT16 or target is ScalarType.HALF:  # torch casts to half by way of float32
        array = floats(tensor)
    return array.astype(_DTYPES[target]), target


def _round(array: npt.NDArray[np.float32], step: Step, zero: int = 0) -> Plain:
    """Round scaled values to integers of the step's type and range."""
    low, high = step.ints[-3:-1]
    target = _target(step)
    scaled = np.rint(array)
    if zero:
        scaled += np.float32(zero)
    if target is ScalarType.INT:  # float32 cannot represent 2**31 - 1
        return np.clip(scaled.astype(np.float64), low, high).astype(np.int32), target
    return np.clip(scaled, low, high).astype(_DTYPES[target]), target


def _quantize_tensor(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    if values[0][1] == _target(step):
        return values[0]
    inverse = np.float32(1.0 / step.floats[0])
    return _round(floats(values[0]) * inverse, step, zero=step.ints[0])


def _quantize_channel(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    if values[0][1] == _target(step):
        return values[0]
    scales = np.frombuffer(lookup(step.names[0]), np.float32)
    array = floats(values[0])
    shape = [1] * array.ndim
    shape[step.ints[0]] = -1
    return _round(array * (np.float32(1) / scales).reshape(shape), step)


def _quantize_group(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    if values[0][1] == _target(step):
        return values[0]
    array = floats(values[0])
    groups = np.frombuffer(lookup(step.names[0]), np.uint16).reshape(array.shape[0], -1)
    scales = np.repeat(floats((groups, ScalarType.BFLOAT16)), step.ints[0], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # the scale of a group of zeros is 0
        scaled = np.where(scales == 0, np.float32(0), array * (np.float32(1) / scales))
    return _round(scaled, step)


def _swap_in_out(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    """(in, out/groups, …) to (out, in/groups, …)."""
    array, kind = values[0]
    groups, rest = step.ints[0], array.shape[2:]
    grouped = array.reshape(groups, array.shape[0] // groups, *array.shape[1:]).swapaxes(1, 2)
    return grouped.reshape(array.shape[1] * groups, array.shape[0] // groups, *rest), kind


def _channels_last(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    array, kind = values[0]
    return array.transpose(0, 2, 3, 1), kind


def _pack_int4(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    """Pack two numbers of -8 … 7 into a byte, each plus 8, the first in the low half; pad rows of odd length with a zero."""
    array = values[0][0]
    array = array.reshape(array.shape[0], -1) if array.ndim == 2 else array.squeeze()
    if array.size and (array.min() < -8 or array.max() > 7):
        raise UnsupportedDataError("numbers of four bits must be in -8 … 7")
    if array.shape[1] % 2:
        array = np.pad(array, ((0, 0), (0, 1)))
    shifted = array.astype(np.uint8) + np.uint8(8)
    return shifted[:, 1::2] << 4 | shifted[:, ::2], ScalarType.BYTE


def _optional(values: list[Plain], present: Sequence[int]) -> list[npt.NDArray[np.float32] | None]:
    """The next of `values` for each part that is present, None for each that is not."""
    rest = iter(values)
    return [floats(next(rest)) if given else None for given in present]


def _deviation(variance: npt.NDArray[np.float32], epsilon: float) -> npt.NDArray[np.float32]:
    """torch.rsqrt(variance + epsilon)"""
    inverse: npt.NDArray[np.float32] = np.float32(1) / np.sqrt(variance + np.float32(epsilon))
    return inverse


def _fold_weight(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    """Sources: weight, variance, and gamma if present. ints: axis of the output channels; 1 if gamma is present."""
    _only_float32(values)
    axis, has_gamma = step.ints
    weight, variance = values[0][0], values[1][0]
    deviation = _deviation(variance, step.floats[0])
    scale = values[2][0] * deviation if has_gamma else deviation
    shape = [1] * weight.ndim
    shape[axis] = -1
    return weight * scale.reshape(shape), ScalarType.FLOAT


def _fold_conv_bias(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    """Sources: mean, variance, then bias, gamma and beta if present. ints: 1 for each that is present."""
    bias, gamma, beta, mean, deviation = _fold_inputs(step, values)
    folded = (bias - mean) * deviation * gamma + beta
    return folded, ScalarType.FLOAT


def _fold_linear_bias(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    """As for a convolution, but multiplied in another order, which rounds differently."""
    bias, gamma, beta, mean, deviation = _fold_inputs(step, values)
    folded = (bias - mean) * (gamma * deviation) + beta
    return folded, ScalarType.FLOAT


def _fold_inputs(step: Step, values: list[Plain]) -> tuple[npt.NDArray[np.float32], ...]:
    """Bias, gamma, beta, mean and deviation, with zeros and ones for what is not present."""
    _only_float32(values)
    mean, variance = values[0][0], values[1][0]
    bias, gamma, beta = _optional(values[2:], step.ints)
    return (
        np.zeros_like(mean) if bias is None else bias,
        np.ones_like(mean) if gamma is None else gamma,
        np.zeros_like(mean) if beta is None else beta,
        mean,
        _deviation(variance, step.floats[0]),
    )


def _only_float32(values: list[Plain]) -> None:
    for _, kind in values:
        if kind is not ScalarType.FLOAT:
            raise UnsupportedDataError(f"batch normalization can be folded only in float32, found {kind.name.lower()}")


def _norm(step: Step, values: list[Plain], lookup: Lookup) -> Plain:
    """A batch normalization without a layer before it, as a depthwise convolution with a kernel of one element.

    Sources: mean, variance, then gamma and beta if present. ints: 1 for each that is present.
    """
    _only_float32(values)
    mean, variance = (values[i][0].astype(np.float64) for i in (0, 1))
    gamma, beta = _optional(values[2:], step.ints)
    deviation = np.sqrt(variance + np.float64(np.float32(step.floats[0])))
    scale = np.float64(1) if gamma is None else gamma.astype(np.float64)
    if step.operation is Operation.NORM_WEIGHT:
        result = scale / deviation
    else:
        result = -mean * scale / deviation + (np.float64(0) if beta is None else beta.astype(np.float64))
    return result.astype(np.float32), ScalarType.FLOAT


def _target(step: Step) -> ScalarType:
    """The type of a step's result, which is its last integer."""
    return ScalarType(step.ints[-1])


_QUANTIZE = (Operation.QUANTIZE_TENSOR, Operation.QUANTIZE_CHANNEL, Operation.QUANTIZE_GROUP)

_OPERATIONS: dict[Operation, Callable[[Step, list[Plain], Lookup], Plain]] = {
    Operation.RESHAPE: _reshape,  # ints: sizes
    Operation.CAST: _cast,  # ints: type
    Operation.QUANTIZE_TENSOR: _quantize_tensor,  # floats: scale; ints: zero point, least, greatest, type
    Operation.QUANTIZE_CHANNEL: _quantize_channel,  # names: scales; ints: axis, least, greatest, type
    Operation.QUANTIZE_GROUP: _quantize_group,  # names: scales; ints: group size, least, greatest, type
    Operation.SWAP_IN_OUT: _swap_in_out,  # ints: groups
    Operation.CHANNELS_LAST: _channels_last,
    Operation.PACK_INT4: _pack_int4,
    Operation.FOLD_CONV_WEIGHT: _fold_weight,  # floats: epsilon; ints: see there
    Operation.FOLD_CONV_BIAS: _fold_conv_bias,
    Operation.FOLD_LINEAR_WEIGHT: _fold_weight,
    Operation.FOLD_LINEAR_BIAS: _fold_linear_bias,
    Operation.NORM_WEIGHT: _norm,
    Operation.NORM_BIAS: _norm,
}
