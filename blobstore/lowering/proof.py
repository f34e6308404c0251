"""The proof of a record: its steps turn the model's own tensors into exactly the bytes that are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy.typing as npt
import torch

from blobstore.core.errors import BlobStoreError
from blobstore.core.memory.arrays import plain
from blobstore.core.memory.buffers import same_bytes
from blobstore.logical.records import Record, Step
from blobstore.logical.steps import store

__all__ = ["contradiction"]


def contradiction(
    record: Record,
    steps: tuple[Step, ...],
    tensors: Sequence[torch.Tensor],
    data: memoryview,
    scales: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
) -> str:
    """Why steps do not turn tensors into the bytes of a blob; empty if they do.

    `steps` are those of the record that are not yet done in `tensors`; `scales` are those that the steps name, by key.
    """
    try:
        made = store(replace(record, steps=steps), [plain(tensor) for tensor in tensors], scales)
    except BlobStoreError as error:
        return f"how it was stored cannot be repeated: {error}"
    if not same_bytes(made, data):
        return "the stored bytes do not follow from it: it was changed, or combined with other tensors, while lowering"
    return ""
