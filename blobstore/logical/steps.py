"""From the tensors of a model to the bytes of a stored blob, exactly as lowering made them.

The native library does the work. Each operation of a record gives the same result as the exporter's own code, to the bit;
the tests compare the two. A device without torch can use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from blobstore.core.memory.arrays import DTYPES, Plain, raw
from blobstore.core.memory.layout import ScalarType
from blobstore.logical.records import Record
from blobstore.runtime.native import NativeLayout, native

__all__ = ["cast", "check_finite", "store"]


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
    arrays = {key: np.ascontiguousarray(array) for key, array in scales.items()}
    return memoryview(native.lay_out((record.key, record.nbytes, steps), given, arrays))


def cast(tensor: Plain, target: ScalarType) -> Plain:
    """A tensor in another dtype, rounded as torch does; the tensor itself if it has the dtype."""
    array, kind = tensor
    if kind == target:
        return tensor
    made = native.cast(raw(array), _layout(tensor), int(target))
    return np.frombuffer(made, DTYPES[target]).reshape(array.shape), target


def _layout(tensor: Plain) -> NativeLayout:
    array, kind = tensor
    return int(kind), array.shape, tuple(range(array.ndim))
