"""The forms in which a backend may store a tensor in its payload, as the steps of a record."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from blobstore.core.memory.arrays import plain
from blobstore.core.memory.layout import ScalarType
from blobstore.logical.records import Operation, Record, Step
from blobstore.logical.steps import store
from blobstore.lowering.names import scalar_type

__all__ = ["encodings", "stored"]

_SIZES = {ScalarType.FLOAT: 4, ScalarType.DOUBLE: 8, ScalarType.HALF: 2, ScalarType.BFLOAT16: 2}


def encodings(tensor: torch.Tensor) -> Iterator[tuple[Step, ...]]:
    """The steps to each form, the most likely first: as it is, in another dtype, each also in another order."""
    own = scalar_type(tensor.dtype)
    kinds = [own, *(kind for kind in (ScalarType.FLOAT, ScalarType.HALF, ScalarType.BFLOAT16) if kind != own)]
    for kind in kinds:
        cast = () if kind == own or kind is None else (Step(Operation.CAST, ints=(int(kind),)),)
        yield cast
        if sum(size > 1 for size in tensor.shape[:2]) == 2:
            yield (*cast, Step(Operation.SWAP_IN_OUT, ints=(1,)))
        if tensor.dim() == 4 and tensor.shape[1] > 1 and tensor.shape[2:].numel() > 1:
            yield (*cast, Step(Operation.CHANNELS_LAST))


def stored(tensor: torch.Tensor, steps: tuple[Step, ...]) -> bytes:
    """The bytes of a tensor in one of its forms."""
    kind = next((ScalarType(step.ints[0]) for step in steps if step.operation is Operation.CAST), None)
    kind = kind or scalar_type(tensor.dtype)
    size = _SIZES[kind] if kind is not None else 0
    return bytes(store(Record("", tensor.numel() * size, (), steps), [plain(tensor)]))
