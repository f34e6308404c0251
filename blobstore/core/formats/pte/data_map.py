"""The weights of a program as a data map."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from blobstore.core.errors import KeyConflictError, UnsupportedDataError
from blobstore.core.formats.data_map import NUMBER_COLUMNS, TENSOR_COLUMNS, NamedDataMap, tensor_cells
from blobstore.core.formats.pickling import by_path
from blobstore.core.formats.pte.program import Movable, ProgramFile, read_program
from blobstore.core.formats.pte.signature import methods_table, signatures
from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.notebook import table
from blobstore.core.reprs import Fact, count, listed
from blobstore.core.text import size

__all__ = ["PteDataMap", "open_pte"]


def open_pte(path: str | os.PathLike[str]) -> PteDataMap:
    """Open the weights of a program; a context manager.

    Raises:
        FileAccessError: it cannot be opened.
        InvalidFileError: it is not a well-formed program.
    """
    return PteDataMap(read_program(path))


class PteDataMap(NamedDataMap):
    """Named data under its keys; constants and initial states under their names, or else content keys (`content_key`).

    Data is returned as views of the mapped file. The first look-up reads all constants once to compute their keys. It
    raises KeyConflictError if the program gives one name to two contents.

    Raises:
        UnsupportedDataError: `program` is not a ProgramFile; `open_pte` takes a path.
    """

    def __init__(self, program: ProgramFile) -> None:
        if not isinstance(program, ProgramFile):
            raise UnsupportedDataError(f"expected a ProgramFile (read_program), found a {type(program).__qualname__}")
        self.name = str(program.path)
        self.program = program

    @cached_property
    def _items(self) -> dict[str, Movable]:
        items: dict[str, Movable] = {}
        for item in self.program.movable():
            key = item.key
            first = items.setdefault(key, item)
            if first is not item and (first.layout != item.layout or not same_bytes(first.data, item.data)):
                raise KeyConflictError(f"{self.name}: the key {key!r} occurs twice with different contents")
        return items

    @cached_property
    def _keys(self) -> list[str]:
        return list(self._items)

    def _key_list(self) -> Sequence[str]:
        return self._keys

    def _view(self, key: str) -> memoryview:
        return self._items[key].data

    def _layout(self, key: str) -> TensorLayout | None:
        return self._items[key].layout

    def _facts(self) -> tuple[Fact, ...]:
        methods = f"{count(len(self.program.methods), 'method')} ({listed(self.program.methods)})"
        if self._closed or "_items" in self.__dict__:
            return *super()._facts(), methods
        return size(self._nbytes()), methods  # without the number of keys, which takes reading all constants

    def _tables(self) -> list[str]:
        """The methods, and the weights that can move; their content keys would take reading all of them."""
        self._check_open()
        items = list(self.program.movable())
        rows = (
            (item.name or "(no name)", item.kind.replace("_", " "), *tensor_cells(item.layout, len(item.data)))
            for item in items
        )
        columns = ("weight", "kind", *TENSOR_COLUMNS)
        return [methods_table(signatures(self.program)), table(columns, rows, len(items), numbers=NUMBER_COLUMNS)]

    def _nbytes(self) -> int:
        return len(self.program.data)

    def __reduce__(self) -> Any:
        """Pickled by path: see `blobstore.core.formats.pickling`."""
        self._check_open()
        return by_path(self, open_pte, self.program.data)

    @property
    def sources(self) -> tuple[Path, ...]:
        return (self.program.path,)

    def alignment(self, key: str) -> int:
        """The alignment that the offsets in the program have, in bytes."""
        self.get_tensor_layout(key)  # raises if there is no such key
        return self._items[key].alignment
