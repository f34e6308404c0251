"""What the scalar types are called elsewhere: in torch, in numpy, and in `.safetensors` files."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.core.errors import MissingDependencyError, UnsupportedDataError
from blobstore.core.memory.layout import ScalarType

if TYPE_CHECKING:
    import torch

__all__ = [
    "FLOATS",
    "NUMBERS",
    "SAFETENSORS",
    "native_dtype",
    "numpy_dtype",
    "scalar_type_named",
    "torch_dtype",
    "unsigned_dtype",
]

_SCALAR_TYPES = {scalar_type.dtype: scalar_type for scalar_type in ScalarType if scalar_type.dtype}
_ONLY_IN_TORCH = {
    ScalarType.COMPLEX32,
    ScalarType.BITS1X8,
    ScalarType.BITS2X4,
    ScalarType.BITS4X2,
    ScalarType.BITS8,
    ScalarType.BITS16,
}
_ONLY_IN_ML_DTYPES = {
    ScalarType.BFLOAT16,
    ScalarType.FLOAT8E5M2,
    ScalarType.FLOAT8E4M3FN,
    ScalarType.FLOAT8E5M2FNUZ,
    ScalarType.FLOAT8E4M3FNUZ,
}

FLOATS = frozenset({ScalarType.HALF, ScalarType.BFLOAT16, ScalarType.FLOAT, ScalarType.DOUBLE})
"""The floating-point types of weights."""

NUMBERS = FLOATS | {
    ScalarType.BYTE,
    ScalarType.CHAR,
    ScalarType.SHORT,
    ScalarType.INT,
    ScalarType.LONG,
    ScalarType.BOOL,
}
"""The types that updates and adapters compute with."""

SAFETENSORS: Mapping[str, ScalarType] = {
    "BOOL": ScalarType.BOOL,
    "U8": ScalarType.BYTE,
    "I8": ScalarType.CHAR,
    "F8_E5M2": ScalarType.FLOAT8E5M2,
    "F8_E4M3": ScalarType.FLOAT8E4M3FN,
    "F8_E5M2FNUZ": ScalarType.FLOAT8E5M2FNUZ,
    "F8_E4M3FNUZ": ScalarType.FLOAT8E4M3FNUZ,
    "I16": ScalarType.SHORT,
    "U16": ScalarType.UINT16,
    "F16": ScalarType.HALF,
    "BF16": ScalarType.BFLOAT16,
    "I32": ScalarType.INT,
    "U32": ScalarType.UINT32,
    "F32": ScalarType.FLOAT,
    "C64": ScalarType.COMPLEX64,
    "F64": ScalarType.DOUBLE,
    "I64": ScalarType.LONG,
    "U64": ScalarType.UINT64,
}
"""The dtypes of a .safetensors that a .ptd can hold too; the others are sub-byte."""


def scalar_type_named(dtype: Any) -> ScalarType | None:
    """The scalar type of a torch or numpy dtype, or of its name; None if a .ptd cannot name it."""
    return _SCALAR_TYPES.get(str(dtype).removeprefix("torch."))


@functools.cache
def native_dtype(scalar_type: ScalarType) -> np.dtype[Any] | None:
    """numpy's own dtype for a scalar type; None if numpy has none without other packages."""
    if not scalar_type.dtype or scalar_type in _ONLY_IN_TORCH | _ONLY_IN_ML_DTYPES:
        return None
    return np.dtype(scalar_type.dtype)


def unsigned_dtype(scalar_type: ScalarType) -> np.dtype[Any]:
    """The unsigned integer that is as wide as an element, or void: it moves elements of any type, with numpy alone."""
    return np.dtype(f"{'u' if scalar_type.itemsize <= 8 else 'V'}{scalar_type.itemsize}")


def numpy_dtype(scalar_type: ScalarType) -> np.dtype[Any]:
    """The dtype for a scalar type, of numpy or of the package `ml_dtypes`, which may be missing; UnsupportedDataError if
    none has it."""
    native = native_dtype(scalar_type)
    if native is not None:
        return native
    if scalar_type not in _ONLY_IN_ML_DTYPES:
        raise UnsupportedDataError(f"numpy has no dtype for {scalar_type.name}")
    name = scalar_type.dtype
    try:
        import ml_dtypes
    except ImportError:
        raise MissingDependencyError(f"numpy needs the ml_dtypes package for {name}: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def torch_dtype(scalar_type: ScalarType) -> torch.dtype:
    """torch's dtype for a scalar type.

    Raises:
        UnsupportedDataError: torch has none.
    """
    import torch

    dtype = getattr(torch, scalar_type.dtype, None) if scalar_type.dtype else None
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedDataError(f"torch has no dtype for {scalar_type.name}")
    return dtype
