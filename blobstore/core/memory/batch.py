"""Many tensors at once, as columns: what costs microseconds for each key is done for all of them in passes over arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from blobstore.core.errors import LayoutError, UnsupportedDataError
from blobstore.core.memory.buffers import LARGE, address_of
from blobstore.core.memory.digest import Digest
from blobstore.core.memory.distinct import Distinct
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import check_length
from blobstore.core.memory.tensors import Array, as_buffer, as_bytes

__all__ = ["Batch"]


@dataclass(frozen=True)
class Batch:
    """The columns of a table of keys; each has one item for each key, in the same order.

    Attributes:
        keys: unique texts.
        data: the bytes, as any contiguous buffer; `nbytes` is their number.
        layouts: how the bytes form a tensor; None for opaque bytes.
        digests: their xxh3-128, uint8 of shape (keys, 16).
        first: the index of the first key with the same bytes, int64 of shape (keys,).
        alignments: the alignment requested, in bytes, uint32 of shape (keys,).
    """

    keys: Sequence[str]
    data: Sequence[memoryview | Array]
    layouts: Sequence[TensorLayout | None]
    digests: npt.NDArray[np.uint8]
    first: npt.NDArray[np.int64]
    alignments: npt.NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct contents."""
        return sum(self.data[at].nbytes for at in np.flatnonzero(self.first == np.arange(len(self.keys))).tolist())

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> Batch:
        """The columns of tensors by name, whose memory they keep; nothing asks for an alignment.

        Args:
            tensors: torch tensors on the CPU, numpy arrays, `FileSlice`s, and other buffers, which are opaque. The
                caller has checked the keys.

        Raises:
            UnsupportedDataError, LayoutError: one of them gives no access to its bytes; the message names its key.
            FileAccessError, InvalidFileError: the file of a `FileSlice` cannot be read, or is shorter.
        """
        data: list[memoryview | Array] = []
        layouts: list[TensorLayout | None] = []
        for key, tensor in tensors.items():
            try:
                buffer, layout = as_buffer(tensor)
            except (UnsupportedDataError, LayoutError) as error:
                raise type(error)(f"key {key!r}: {error}") from error
            data.append(buffer)
            layouts.append(layout)
        digests = _digests(data)
        return cls(list(tensors), data, layouts, digests, _first(data, digests), np.ones(len(data), np.uint32))


def _digests(data: Sequence[Any]) -> npt.NDArray[np.uint8]:
    """The xxh3-128 of each. Large memory that was hashed for another key already is not read again."""
    known: dict[tuple[int, int], bytes] = {}
    found = []
    for buffer in data:
        check_length(buffer)
        if buffer.nbytes < LARGE:
            found.append(xxhash.xxh3_128_digest(buffer))
            continue
        memory = address_of(as_bytes(buffer)[0])
        if memory not in known:
            known[memory] = xxhash.xxh3_128_digest(buffer)
        found.append(known[memory])
    return np.frombuffer(b"".join(found), np.uint8).reshape(-1, 16)


def _first(data: Sequence[memoryview | Array], digests: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """For each the first one with the same bytes, which are compared where digests are equal."""
    halves = digests.view(np.uint64)
    order = np.lexsort((halves[:, 0], halves[:, 1]))  # equal digests stay in the order of the keys
    halves = halves[order]
    new = np.ones(len(order), bool)
    new[1:] = (halves[1:] != halves[:-1]).any(1)
    first = np.empty(len(order), np.int64)
    first[order] = order[new][np.cumsum(new) - 1]
    known = Distinct()
    for at in np.flatnonzero(first != np.arange(len(first))).tolist():
        for number in (int(first[at]), at):
            content, _ = as_bytes(data[number])
            address = Digest(len(content), digests[number].tobytes())
            found = known.find(content, address)
            if found is None:
                known.add(content, address, found := number)
            first[number] = found
    return first
