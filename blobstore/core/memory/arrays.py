"""Weights as contiguous numpy arrays with a scalar type, of bfloat16 too, which numpy lacks."""

from __future__ import annotations

import sys
from typing import Any, TypeAlias

import numpy as np

from blobstore.core.errors import UnsupportedDataError
from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.dtypes import NUMBERS, numpy_dtype, unsigned_dtype
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.tensors import AnyTensor, Array, as_bytes, to_numpy, to_torch

__all__ = ["DTYPES", "KINDS", "Plain", "plain", "raw", "same_tensors", "tensor_of"]

Plain: TypeAlias = tuple[Array, ScalarType]
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


def raw(array: Array) -> memoryview:
    """The bytes of an array; a view of its memory if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def same_tensors(one: Plain, other: Plain) -> bool:
    """Whether two tensors have the same type, the same shape and, to the bit, the same numbers."""
    (left, left_kind), (right, right_kind) = one, other
    return (left_kind, left.shape) == (right_kind, right.shape) and same_bytes(raw(left), raw(right))


def tensor_of(tensor: Plain) -> AnyTensor:
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
