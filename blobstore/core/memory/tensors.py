"""Tensors, arrays and buffers as bytes and a layout, and back, without a copy wherever the memory allows it."""

from __future__ import annotations

import functools
import importlib.util
import operator
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from blobstore.core.distribution import install
from blobstore.core.errors import (
    BlobStoreError,
    InvalidFileError,
    LayoutError,
    MissingDependencyError,
    UnsupportedDataError,
)
from blobstore.core.memory.dtypes import numpy_dtype, scalar_type_named, torch_dtype, unsigned_dtype
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import map_file
from blobstore.core.reprs import fields_line

if TYPE_CHECKING:
    import torch

__all__ = [
    "AnyTensor",
    "Array",
    "FileSlice",
    "as_buffer",
    "as_bytes",
    "bytes_of",
    "check_by_name",
    "default_framework",
    "dense_order",
    "in_dim_order",
    "scalar_type_of",
    "to_framework",
    "to_numpy",
    "to_torch",
]


Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[Any]]"
"""A numpy array; which dtype it has, a file says."""

AnyTensor: TypeAlias = "torch.Tensor | Array"
"""A tensor of the framework that is installed; see `default_framework`."""


@functools.cache
def default_framework() -> Literal["pt", "np"]:
    """What tensors come as where the caller does not say: torch's if torch is installed, otherwise numpy's."""
    return "np" if importlib.util.find_spec("torch") is None else "pt"


@dataclass(frozen=True)
class FileSlice:
    """The bytes `offset` to `offset + nbytes` of a file, mapped when they are needed and never copied.

    Attributes:
        path: the file; it must not be truncated while a store refers to it.
        offset: where the bytes start.
        nbytes: how many bytes; by default all up to the end of the file.
    """

    __repr__ = fields_line

    path: str | os.PathLike[str]
    offset: int = 0
    nbytes: int | None = None

    def view(self) -> memoryview:
        """The bytes, read-only; the view owns the map.

        Raises:
            FileAccessError: the file cannot be opened.
            InvalidFileError: the file is shorter than the slice.
            UnsupportedDataError: offset or nbytes is not an integer.
        """
        whole = map_file(self.path)
        try:
            offset = operator.index(self.offset)
            nbytes = len(whole) - offset if self.nbytes is None else operator.index(self.nbytes)
        except TypeError:
            raise UnsupportedDataError(f"{self} has an offset or a size that is not an integer") from None
        if offset < 0 or nbytes < 0 or offset + nbytes > len(whole):
            raise InvalidFileError(self.path, f"{nbytes} bytes at {offset} are not in a file of {len(whole)} bytes")
        return whole[offset : offset + nbytes]


def scalar_type_of(data: Any) -> ScalarType | None:
    """The element type of a torch tensor or a numpy array; None if a .ptd cannot name it."""
    return scalar_type_named(getattr(data, "dtype", "")) if hasattr(data, "shape") else None


def as_bytes(data: Any, layout: TensorLayout | None = None) -> tuple[memoryview, TensorLayout | None]:
    """The bytes of `data`, and how they form a tensor.

    Args:
        data: a torch tensor on the CPU, a numpy array, a `FileSlice`, or anything with the buffer protocol. Dense
            memory with its dimensions in any order is used as it is and described by `dim_order`. Memory with other
            strides is made contiguous; only then is tensor data copied.
        layout: for bytes, how they form a tensor (None: opaque); for a tensor or an array, the layout it must have.

    Returns:
        A one-dimensional view of format "B" that keeps the memory alive, and the layout or None.

    Raises:
        UnsupportedDataError: no bytes can be taken from this type, dtype, device or storage.
        LayoutError: `layout` is not the layout of the tensor, or its size in bytes is not that of the data.
    """
    if layout is not None and not isinstance(layout, TensorLayout):
        raise LayoutError(f"expected a TensorLayout, found {layout!r}")
    view, of_tensor = _tensor_bytes(data) or (bytes_of(data), None)
    if of_tensor is None:
        if layout is not None and layout.nbytes != len(view):
            raise LayoutError(f"{layout} takes {layout.nbytes} bytes, the data has {len(view)}")
        return view, layout
    if layout is not None and layout != of_tensor:
        raise LayoutError(f"the tensor is {of_tensor}, not {layout}")
    return view, of_tensor


def as_buffer(data: Any) -> tuple[memoryview | Array, TensorLayout | None]:
    """As `as_bytes`; a numpy array whose memory is in order already stays itself, which takes no memory for each."""
    if type(data) is np.ndarray and data.flags.c_contiguous and data.dtype.byteorder != ">":
        return data, _numpy_layout(data.dtype, data.shape, data.strides)[0]
    return as_bytes(data)


def _tensor_bytes(data: Any) -> tuple[memoryview, TensorLayout | None] | None:
    """The bytes of a tensor of torch or of an array of numpy; None for anything else."""
    if isinstance(data, (np.ndarray, np.generic)):  # a union would be made with every call
        return _from_numpy(np.asarray(data))
    # Whoever has a tensor has imported torch; others do not wait for it.
    torch_module = sys.modules.get("torch")
    if torch_module is None or not isinstance(data, torch_module.Tensor):
        return None
    try:
        return _from_torch(data)
    except BlobStoreError:
        raise
    except Exception as error:  # from code of a subclass, such as fake and nested tensors
        raise UnsupportedDataError(f"a {type(data).__name__} gives no access to its memory: {error}") from error


def bytes_of(data: Any) -> memoryview:
    """The bytes of anything with the buffer protocol.

    Raises:
        UnsupportedDataError: the object has no buffer, or one that is not contiguous, or whose numbers are big-endian.
    """
    if isinstance(data, FileSlice):
        return data.view()
    try:
        view = memoryview(data)
    except ValueError as error:  # released or closed
        raise UnsupportedDataError(f"cannot take bytes from a {type(data).__qualname__}: {error}") from None
    except TypeError:
        hint = "; numpy.asarray makes an array of it" if isinstance(data, list | tuple | int | float) else ""
        raise UnsupportedDataError(
            f"cannot take bytes from {type(data).__module__}.{type(data).__qualname__}: expected a torch tensor, a "
            f"numpy array, a FileSlice, or an object with the buffer protocol{hint}"
        ) from None
    if view.format[0] in ">!" and view.itemsize > 1:
        raise UnsupportedDataError(f"cannot take bytes from a buffer of {view.format!r}: its numbers are big-endian")
    if not view.c_contiguous:
        raise UnsupportedDataError("cannot take bytes from a buffer that is not C-contiguous")
    if view.nbytes == 0:  # cast() refuses a shape with a zero in it
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _from_numpy(array: np.ndarray) -> tuple[memoryview, TensorLayout]:
    layout, dense = _numpy_layout(array.dtype, array.shape, array.strides)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"), order="K")
    if not dense:
        array = np.ascontiguousarray(array)
    if array.size == 0:
        return memoryview(b""), layout
    outer_first = array if array.flags.c_contiguous else array.transpose(layout.dim_order)
    return outer_first.reshape(-1).view(np.uint8).data, layout  # a view: in this order the memory is contiguous


@functools.lru_cache(maxsize=4096)
def _numpy_layout(dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[TensorLayout, bool]:
    """The layout of an array, and whether its memory has it; otherwise that of a contiguous copy."""
    scalar_type = scalar_type_named(dtype.name)
    if scalar_type is None:
        raise UnsupportedDataError(f"numpy dtype {dtype} has no counterpart in a .ptd")
    order = dense_order(shape, [stride // dtype.itemsize for stride in strides])
    if any(stride % dtype.itemsize for stride in strides):
        order = None
    return TensorLayout(scalar_type, shape, order or tuple(range(len(shape)))), order is not None


def _from_torch(tensor: torch.Tensor) -> tuple[memoryview, TensorLayout]:
    import torch

    scalar_type = scalar_type_named(tensor.dtype)
    if scalar_type is None:
        reason = "; add its int_repr() and its scales as tensors of their own" if tensor.is_quantized else ""
        raise UnsupportedDataError(f"dtype {tensor.dtype} has no counterpart in a .ptd{reason}")
    if tensor.layout is not torch.strided:
        raise UnsupportedDataError(
            f"a tensor of layout {tensor.layout} is not one run of bytes; convert it with to_dense()"
        )
    if tensor.device.type != "cpu":
        raise UnsupportedDataError(f"the tensor is on device {tensor.device}; move it to the CPU first")
    tensor = tensor.detach().resolve_conj().resolve_neg()  # whose memory has the numbers themselves
    order: Sequence[int] | None
    if tensor.is_contiguous():
        order = range(tensor.dim())
    else:
        order = dense_order(tensor.shape, tensor.stride())
        if order is None:
            tensor, order = tensor.contiguous(), range(tensor.dim())
    layout = TensorLayout(scalar_type, tuple(tensor.shape), tuple(order))
    count = tensor.numel()
    if count == 0:
        return memoryview(b""), layout
    return tensor.as_strided((count,), (1,)).view(torch.uint8).numpy().data, layout


def dense_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The dim order in which strided memory is one run without gaps; None if there is no such order.

    The stride of a dimension of size 1 means nothing, so such a dimension goes where its number puts it.
    """
    if 0 in sizes:
        return tuple(range(len(sizes)))
    wide = sorted((d for d in range(len(sizes)) if sizes[d] != 1), key=lambda d: -strides[d])
    step = 1
    for dim in reversed(wide):
        if strides[dim] != step:
            return None
        step *= sizes[dim]
    if wide == sorted(wide):
        return tuple(range(len(sizes)))
    # channels-last of (N, 3, 1, W) is still (0, 2, 3, 1): equal strides keep their numbers' order, as in ExecuTorch
    return tuple(sorted(range(len(sizes)), key=lambda d: -strides[d]))


def to_framework(framework: Literal["pt", "np"], view: memoryview, layout: TensorLayout | None) -> Any:
    """A torch tensor or a numpy array over memory; opaque bytes are uint8.

    Raises:
        As `to_torch` and `to_numpy`.
    """
    return to_torch(view, layout) if framework == "pt" else to_numpy(view, layout)


def to_numpy(data: memoryview, layout: TensorLayout | None) -> Array:
    """A numpy array over the bytes, in the tensor's own shape; nothing is copied.

    An opaque blob (layout None) becomes an array of uint8. The array is read-only if `data` is. For a dtype that numpy
    lacks, the extension dtype of the `ml_dtypes` package is used.

    Raises:
        MissingDependencyError: the dtype needs ml_dtypes, which is not installed.
        UnsupportedDataError: neither package has the scalar type.
    """
    if layout is None:
        return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    return _shaped(data, layout, numpy_dtype(layout.scalar_type))


def _shaped(data: memoryview, layout: TensorLayout, dtype: np.dtype[Any]) -> Array:
    """The elements in the tensor's own shape, as a view of the bytes."""
    flat = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
    if layout.is_contiguous:
        return flat.reshape(layout.sizes)
    return flat.reshape([layout.sizes[dim] for dim in layout.dim_order]).transpose(np.argsort(layout.dim_order))


def in_dim_order(data: memoryview, layout: TensorLayout, dim_order: Sequence[int] | None = None) -> memoryview:
    """The bytes of a tensor with its dimensions in another order in memory; a copy only where the order differs.

    `dim_order` is from the outermost dimension to the innermost; left out, contiguous.
    """
    order = tuple(range(len(layout.sizes)) if dim_order is None else dim_order)
    if order == layout.dim_order:
        return data
    array = _shaped(data, layout, unsigned_dtype(layout.scalar_type))
    return np.ascontiguousarray(array.transpose(order)).reshape(-1).view(np.uint8).data


def to_torch(data: memoryview, layout: TensorLayout | None) -> torch.Tensor:
    """A torch tensor over the bytes, in the tensor's own shape and strides; nothing is copied.

    An opaque blob (layout None) becomes a tensor of uint8. The tensor keeps the memory alive. `data` must be writable,
    because torch has no read-only tensors.

    Raises:
        MissingDependencyError: torch is not installed.
        UnsupportedDataError: torch has no dtype for the scalar type, or `data` is read-only.
    """
    try:
        import torch
    except ImportError:
        raise MissingDependencyError(f"tensors need torch: {install('executorch')}") from None
    if data.readonly and len(data):
        raise UnsupportedDataError("torch has no read-only tensors; copy the data or map it writable")
    if layout is None:
        return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    dtype = torch_dtype(layout.scalar_type)
    if not len(data):
        return torch.empty(layout.sizes, dtype=dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
    return flat.as_strided(layout.sizes, layout.strides)


def check_by_name(tensors: object) -> None:
    """Raise UnsupportedDataError if an argument is not a mapping of tensors by name."""
    if not isinstance(tensors, Mapping):
        raise UnsupportedDataError(f"expected tensors by name, found a {type(tensors).__qualname__}")
