"""Packages of native programs, `.ptn`: a zip with a program, its tensors as `.safetensors`, and `aliases.json`.

Members that are stored, not deflated, are ranges of the file, so their tensors are views of it. `aliases.json` is an object
in which a name stands for that of a tensor; equal tensors are in a package once. The format is that of ExecuTorch's main
branch, which may change: what is not understood of the aliases is left out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

from blobstore.core.formats.file_map import FileMap
from blobstore.core.formats.safetensors import SafetensorsDataMap, parse_json
from blobstore.core.formats.zips import Member, members_of
from blobstore.core.memory.layout import TensorLayout

__all__ = ["PtnDataMap"]

_ALIASES = "aliases.json"
_TENSORS = ".safetensors"
_LARGEST = 1 << 24  # bytes of the aliases


class PtnDataMap(FileMap):
    """The tensors of all `.safetensors` of a package, under their names and their aliases.

    If tensors of several members have one name, each is `member:name`. Nothing is decompressed: tensors of a member that is
    deflated are not here. If the caller has the bytes already (`data`), the file is not opened, and errors name `path`.
    """

    def __init__(self, path: str | os.PathLike[str], *, data: memoryview | None = None) -> None:
        super().__init__(path, data)
        self.members = members_of(self._data, self.path)
        self._places: dict[str, tuple[SafetensorsDataMap, str, int]] = {}
        maps = [
            (one, SafetensorsDataMap(f"{self.path}: {one.name}", data=self._data[one.start : one.stop]))
            for one in self.members
            if one.is_stored and one.name.endswith(_TENSORS)
        ]
        times = Counter(key for _, inside in maps for key in inside)
        for one, inside in maps:
            for key in inside:
                self._places[key if times[key] == 1 else f"{one.name}:{key}"] = (inside, key, one.start)
        for alias, key in self._aliases().items():
            if key in self._places:
                self._places.setdefault(alias, self._places[key])
        self._keys = list(self._places)

    @property
    def contents(self) -> Iterator[Member]:
        """The members that are neither tensors nor what names them."""
        return (
            one for one in self.members if one.name != _ALIASES and not (one.is_stored and one.name.endswith(_TENSORS))
        )

    def byte_range(self, key: str) -> tuple[int, int]:
        """Where a tensor lies in the file: first byte, and first byte behind it."""
        self.get_tensor_layout(key)
        inside, own, base = self._places[key]
        start, stop = inside.byte_range(own)
        return base + start, base + stop

    def dtype(self, key: str) -> str:
        """The dtype of a tensor as the file spells it."""
        self.get_tensor_layout(key)
        inside, own, _ = self._places[key]
        return inside.dtypes[own]

    def _view(self, key: str) -> memoryview:
        inside, own, _ = self._places[key]
        return inside.get_data(own)

    def _layout(self, key: str) -> TensorLayout | None:
        inside, own, _ = self._places[key]
        return inside.get_tensor_layout(own)

    def close(self) -> None:
        super().close()
        for inside, _, _ in self._places.values():
            inside.close()

    def _aliases(self) -> dict[str, str]:
        for one in self.members:
            if one.name == _ALIASES and one.is_stored and one.stop - one.start <= _LARGEST:
                content = parse_json(self._data[one.start : one.stop], self.path, _ALIASES)
                if isinstance(content, dict):
                    return {alias: key for alias, key in content.items() if isinstance(key, str)}
        return {}
