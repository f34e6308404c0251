"""Tensor layouts: scalar type, sizes, dim order, and the bytes they take.

The numbers of the scalar types are those of ExecuTorch (`schema/scalar_type.fbs`). `dim_order` is ExecuTorch's: the
dimensions from the outermost to the innermost in memory, so (0, 1, 2, 3) is contiguous and (0, 2, 3, 1) is
channels-last.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from blobstore.core.errors import LayoutError
from blobstore.core.reprs import LIMIT, shorten

__all__ = ["MAX_NBYTES", "MAX_RANK", "ScalarType", "TensorLayout"]

MAX_RANK = 64
"""The most dimensions that torch and numpy give a tensor (ExecuTorch itself runs up to 16)."""

MAX_SIZE = 2**31 - 1
"""A .ptd stores sizes as int32."""

MAX_NBYTES = 2**63 - 1
"""The largest file, and so the largest blob."""


class ScalarType(enum.IntEnum):
    """The element types that ExecuTorch knows, and so a .ptd can name: each with its number, its size and its name elsewhere.

    Attributes:
        itemsize: bytes of one element, as ExecuTorch counts them (the types that pack several numbers take one byte).
        dtype: what torch, numpy and the ml_dtypes package call it; empty if none of them has it.
    """

    itemsize: int
    dtype: str

    # a call finds a member by its number alone
    def __new__(cls, number: int, itemsize: int = 0, dtype: str = "") -> ScalarType:
        kind = int.__new__(cls, number)
        kind._value_ = number
        kind.itemsize, kind.dtype = itemsize, dtype
        return kind

    BYTE = 0, 1, "uint8"
    CHAR = 1, 1, "int8"
    SHORT = 2, 2, "int16"
    INT = 3, 4, "int32"
    LONG = 4, 8, "int64"
    HALF = 5, 2, "float16"
    FLOAT = 6, 4, "float32"
    DOUBLE = 7, 8, "float64"
    COMPLEX32 = 8, 4, "complex32"
    COMPLEX64 = 9, 8, "complex64"
    COMPLEX128 = 10, 16, "complex128"
    BOOL = 11, 1, "bool"
    QINT8 = 12, 1
    QUINT8 = 13, 1
    QINT32 = 14, 4
    BFLOAT16 = 15, 2, "bfloat16"
    QUINT4X2 = 16, 1
    QUINT2X4 = 17, 1
    BITS1X8 = 18, 1, "bits1x8"
    BITS2X4 = 19, 1, "bits2x4"
    BITS4X2 = 20, 1, "bits4x2"
    BITS8 = 21, 1, "bits8"
    BITS16 = 22, 2, "bits16"
    FLOAT8E5M2 = 23, 1, "float8_e5m2"
    FLOAT8E4M3FN = 24, 1, "float8_e4m3fn"
    FLOAT8E5M2FNUZ = 25, 1, "float8_e5m2fnuz"
    FLOAT8E4M3FNUZ = 26, 1, "float8_e4m3fnuz"
    UINT16 = 27, 2, "uint16"
    UINT32 = 28, 4, "uint32"
    UINT64 = 29, 8, "uint64"


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How the bytes of a blob form a tensor.

    Attributes:
        scalar_type: the element type.
        sizes: extent of each dimension; empty for a scalar.
        dim_order: the dimensions from outermost to innermost in memory; left out, it is contiguous.

    Raises:
        LayoutError: a size is not an integer, is negative or above 2**31-1, dim_order is not a permutation, or the tensor
            would take more than 2**63-1 bytes.
    """

    scalar_type: ScalarType
    sizes: tuple[int, ...]
    dim_order: tuple[int, ...] = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "sizes", tuple(map(operator.index, self.sizes)))
            order = range(len(self.sizes)) if self.dim_order is None else self.dim_order
            object.__setattr__(self, "dim_order", tuple(map(operator.index, order)))
        except (TypeError, ValueError) as error:  # ValueError: memory that was released
            raise LayoutError(f"sizes {self.sizes!r} and dim_order {self.dim_order!r} must be integers") from error
        try:
            object.__setattr__(self, "scalar_type", ScalarType(self.scalar_type))
        except ValueError:
            raise LayoutError(f"scalar type {self.scalar_type!r} is not one that a .ptd can name") from None
        if problem := layout_problem(self.scalar_type, self.sizes, self.dim_order):
            raise LayoutError(f"impossible tensor layout {self}: {problem}")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, without padding."""
        return layout_nbytes(self.scalar_type, self.sizes)

    @property
    def is_contiguous(self) -> bool:
        """Whether the dimensions lie in memory in their own order."""
        return self.dim_order == tuple(range(len(self.sizes)))

    @property
    def strides(self) -> tuple[int, ...]:
        """Stride of each dimension, in elements."""
        strides = [0] * len(self.sizes)
        step = 1
        for dim in reversed(self.dim_order):
            strides[dim] = step
            step *= max(self.sizes[dim], 1)
        return tuple(strides)

    def __repr__(self) -> str:
        name = getattr(self.scalar_type, "name", self.scalar_type)
        order = "" if self.is_contiguous else f", {self.dim_order}"
        return shorten(f"TensorLayout({name}, {self.sizes}{order})", LIMIT)

    def __str__(self) -> str:
        name = getattr(self.scalar_type, "name", self.scalar_type)
        order = "" if self.dim_order == tuple(range(len(self.sizes))) else f" dim_order={list(self.dim_order)}"
        return f"{str(name).lower()}{list(self.sizes)}{order}"


def in_words(layout: TensorLayout) -> tuple[str, str]:
    """The element type, such as "float", and the sizes, such as "384 x 1536", with the dim order if it is permuted."""
    sizes = " x ".join(map(str, layout.sizes)) or "scalar"
    order = "" if layout.is_contiguous else f", dim order {' '.join(map(str, layout.dim_order))}"
    return layout.scalar_type.name.lower(), f"{sizes}{order}"


def layout_nbytes(scalar_type: ScalarType, sizes: Sequence[int]) -> int:
    """Bytes that a tensor of these sizes takes, computed without overflow."""
    nbytes = scalar_type.itemsize
    for size in sizes:
        nbytes *= size
    return nbytes


def layout_problem(scalar_type: ScalarType, sizes: Sequence[int], dim_order: Sequence[int]) -> str | None:
    """Why a layout is impossible, or None."""
    if len(sizes) > MAX_RANK:
        return f"{len(sizes)} dimensions, at most {MAX_RANK} are possible"
    for size in sizes:
        if not 0 <= size <= MAX_SIZE:
            return f"size {size} is outside 0..{MAX_SIZE}"
    if len(dim_order) != len(sizes):
        return f"dim_order has {len(dim_order)} entries for {len(sizes)} sizes"
    if sorted(dim_order) != list(range(len(sizes))):
        return f"dim_order {list(dim_order)} is not a permutation of 0..{len(sizes) - 1}"
    if layout_nbytes(scalar_type, sizes) > MAX_NBYTES:
        return "its size in bytes overflows"
    return None
