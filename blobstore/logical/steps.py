"""From the tensors of a model to the bytes of a stored blob, exactly as lowering made them.

The native library does the work. Each operation of a record gives the same result as the exporter's own code, to the bit;
the tests compare the two. A device without torch can use it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from blobstore.core.errors import UnsupportedDataError
from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.dtypes import NUMBERS, numpy_dtype, unsigned_dtype
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.tensors import as_bytes, to_numpy, to_torch
from blobstore.logical.records import Record
from blobstore.runtime.native import NativeLayout, native

__all__ = [
    "DTYPES",
    "KINDS",
    "Plain",
    "cast",
    "check_finite",
    "plain",
    "raw",
    "same_tensors",
    "store",
    "tensor_of",
]

Plain: TypeAlias = tuple[npt.NDArray[Any], ScalarType]
"""A contiguous array and its type; bfloat16, which numpy lacks, is the uint16 of its bits."""

DTYPES: dict[ScalarType, np.dtype[Any]] = {
    kind: unsigned_dtype(kind) if kind is ScalarType.BFLOAT16 else numpy_dtype(kind) for kind in NUMBERS
}
"""The types that updates take, each with the dtype of its array in a `Plain`."""

KINDS = {dtype: kind for kind, dtype in DTYPES.items() if kind is not ScalarType.BFLOAT16}
"""The type of an array that is a tensor as it is."""


def plain(data: Any) -> Plain:
    """A torch tensor or numpy array as a contiguous array; a view of its memory if it is contiguous.

    Raises:
        UnsupportedDataError: `data` is neither, or its dtype or device is not supported.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        data = data.detach().contiguous()
    elif isinstance(data, np.ndarray) and data.flags.c_contiguous and data.dtype in KINDS:
        return data, KINDS[data.dtype]
    elif isinstance(data, np.ndarray | np.generic):
        data = np.ascontiguousarray(data).reshape(np.shape(data))
    else:
        raise UnsupportedDataError(f"expected a torch tensor or a numpy array, found {type(data).__name__}")
    view, layout = as_bytes(data)
    if layout is None or layout.scalar_type not in DTYPES:
        raise UnsupportedDataError(f"weights of type {layout} are not supported")
    return np.frombuffer(view, DTYPES[layout.scalar_type]).reshape(layout.sizes), layout.scalar_type


def raw(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of an array; a view of its memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def same_tensors(one: Plain, other: Plain) -> bool:
    """Whether two tensors have the same type, the same shape and, to the bit, the same numbers."""
    (left, left_kind), (right, right_kind) = one, other
    return (left_kind, left.shape) == (right_kind, right.shape) and same_bytes(raw(left), raw(right))


def check_finite(tensor: Plain) -> bool:
    """Whether a tensor has neither infinities nor NaN."""
    return bool(native.is_finite(raw(tensor[0]), _layout(tensor)))


def store(
    record: Record, tensors: Sequence[Plain], scales: Mapping[str, npt.NDArray[Any]] = MappingProxyType({})
) -> memoryview:
    """The blob of a record.

    Args:
        record: how the blob is made.
        tensors: one for each of its sources, in the source's shape.
        scales: by key, the scales that the record names.

    Returns:
        The bytes of the blob; a view of a tensor if its bytes are the blob already.

    Raises:
        LayoutError: the result does not have the size of the blob, or a shape does not fit a step.
        UnsupportedDataError: a step cannot take this dtype.
    """
    steps = tuple((int(step.operation), step.ints, step.floats, step.names) for step in record.steps)
    given = [(tensor[0], _layout(tensor)) for tensor in tensors]
    known = {key: np.ascontiguousarray(array) for key, array in scales.items()}
    return memoryview(native.lay_out((record.key, record.nbytes, steps), given, known))


def cast(tensor: Plain, target: ScalarType) -> Plain:
    """A tensor in another dtype, rounded as torch does; the tensor itself if it has the dtype."""
    array, kind = tensor
    if kind == target:
        return tensor
    made = native.cast(raw(array), _layout(tensor), int(target))
    return np.frombuffer(made, DTYPES[target]).reshape(array.shape), target


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


def _layout(tensor: Plain) -> NativeLayout:
    array, kind = tensor
    return int(kind), array.shape, tuple(range(array.ndim))
