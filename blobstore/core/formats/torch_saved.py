"""Files of `torch.save`, `.pt`, `.pth` and `.bin`: a zip with a pickle and the storages of its tensors.

Nothing is unpickled: the names and the layouts of tensors come from the pickle's operations (`pickled_tensors`), and each is
checked against its storage. What cannot be read so, of a pickle or of a tensor, has no names: its storages are opaque.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from blobstore.core.errors import InvalidFileError, LayoutError
from blobstore.core.formats.file_map import FileMap
from blobstore.core.formats.pickled_tensors import PickledTensor, tensors_of
from blobstore.core.formats.zips import Member, members_of
from blobstore.core.memory.dtypes import scalar_type_named
from blobstore.core.memory.layout import MAX_RANK, TensorLayout
from blobstore.core.memory.tensors import dense_order

__all__ = ["TorchDataMap"]

_LARGEST = 1 << 26  # bytes of a pickle
_STORAGE = re.compile(r"(data|constants)/[^/]+")  # constants are those of TorchScript, which another pickle names


class TorchDataMap(FileMap):
    """The tensors of a file of `torch.save`, under the names of its state dict; those in deeper dicts are joined by dots.

    Tensors whose elements do not fill a range of the file, such as every second column of another one, are not here. If the
    caller has the bytes already (`data`), the file is not opened, and errors name `path`.

    Raises:
        FileAccessError: the file cannot be read.
        InvalidFileError: it is no zip of `torch.save`, as torch wrote before 1.6, or is malformed.
    """

    def __init__(self, path: str | os.PathLike[str], *, data: memoryview | None = None) -> None:
        super().__init__(path, data)
        if bytes(self._data[:4]) != b"PK\3\4":
            raise InvalidFileError(self.path, "not a zip, which torch.save writes since torch 1.6")
        self.members = members_of(self._data, self.path)
        inside = {one.name.partition("/")[2]: one for one in self.members}
        if (pickle := inside.get("data.pkl")) is None:
            raise InvalidFileError(self.path, "a zip without data.pkl, so torch.save did not write it")
        self._known: set[str] = set()
        self._storages = {name: one for name, one in inside.items() if one.is_stored and _STORAGE.fullmatch(name)}
        order = inside.get("byteorder")
        if order is None or bytes(self._data[order.start : order.stop]) == b"little":
            self._read(pickle)
        self._keys = list(self._ranges)

    @property
    def contents(self) -> Iterator[Member]:
        """The storages of which nothing is known."""
        return (one for one in self._storages.values() if one.name not in self._known)

    def _read(self, pickle: Member) -> None:
        if not pickle.is_stored or pickle.stop - pickle.start > _LARGEST:
            return
        try:
            tensors = tensors_of(bytes(self._data[pickle.start : pickle.stop]))
        except ValueError:
            return
        for name, tensor in tensors.items():
            storage = self._storages.get(f"data/{tensor.storage}")
            layout = _layout_of(tensor)
            if storage is not None and layout is not None:
                start = storage.start + tensor.offset * layout.scalar_type.itemsize
                if start + layout.nbytes <= storage.stop:
                    self._known.add(storage.name)
                    self._ranges[name] = start, start + layout.nbytes
                    self._layouts[name] = layout


def _layout_of(tensor: PickledTensor) -> TensorLayout | None:
    """How the bytes of a tensor form it; None if they are not one range, or a .ptd cannot describe them."""
    sizes, strides, scalar_type = tensor.sizes, tensor.strides, scalar_type_named(tensor.dtype)
    if scalar_type is None or not _are_counts([tensor.offset]) or not (_are_counts(sizes) and _are_counts(strides)):
        return None
    if len(sizes) != len(strides):
        return None
    order = dense_order(sizes, strides)
    if order is None:
        return None
    try:
        return TensorLayout(scalar_type, tuple(sizes), order)
    except LayoutError:
        return None


def _are_counts(values: Any) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) <= MAX_RANK
        and all(type(value) is int and 0 <= value < 1 << 62 for value in values)
    )
