"""Data maps whose tensors are ranges of one file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.pickling import by_path
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import as_path, map_file

__all__ = ["FileMap"]


class FileMap(NamedDataMap):
    """The tensors of a file. A subclass reads the file in its constructor, and fills `_ranges`, `_layouts` and `_keys`.

    Args:
        path: the file; the class is called with it again where a pickled map arrives.
        data: the bytes, if the caller has them already. The file is not opened then, and errors name `path`.

    Attributes:
        path: the file, as given.

    Raises:
        FileAccessError: the file cannot be read.
        InvalidFileError: it is empty.
    """

    def __init__(self, path: str | os.PathLike[str], data: memoryview | None) -> None:
        self.path = as_path(path)
        self.name = str(self.path)
        self._data = map_file(path) if data is None else data
        self._ranges: dict[str, tuple[int, int]] = {}
        self._layouts: dict[str, TensorLayout | None] = {}
        self._keys: Sequence[str] = ()

    def byte_range(self, key: str) -> tuple[int, int]:
        """Where a tensor lies in the file: first byte, and first byte behind it."""
        self.get_tensor_layout(key)
        return self._ranges[key]

    @property
    def sources(self) -> tuple[Path, ...]:
        return (self.path,)

    def _key_list(self) -> Sequence[str]:
        return self._keys

    def _view(self, key: str) -> memoryview:
        start, stop = self._ranges[key]
        return self._data[start:stop]

    def _layout(self, key: str) -> TensorLayout | None:
        return self._layouts[key]

    def _nbytes(self) -> int:
        return len(self._data)

    def __reduce__(self) -> Any:
        """Pickled by path: see `blobstore.core.formats.pickling`."""
        self._check_open()
        return by_path(self, type(self), self._data)

    def close(self) -> None:
        super().close()
        self._data = memoryview(b"")
