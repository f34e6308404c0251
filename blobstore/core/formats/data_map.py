"""Look-up of blobs by key, in files and at run time.

`NamedDataMap` is the interface of ExecuTorch's NamedDataMap RFC, with the names of the RFC, and a Python `Mapping` too.
Every implementation passes the contract in `blobstore.testing.NamedDataMapContract`.
"""

from __future__ import annotations

import builtins
import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from blobstore.core.errors import ClosedError, KeyConflictError, KeyNotFoundError, LayoutError, UnsupportedDataError
from blobstore.core.formats.keys import suggest
from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.digest import Digest, digest
from blobstore.core.memory.layout import TensorLayout, in_words
from blobstore.core.memory.mapped_file import check_length
from blobstore.core.memory.tensors import AnyTensor, Array, default_framework, to_numpy, to_torch
from blobstore.core.notebook import block, heading, shown, table
from blobstore.core.reprs import Fact, and_others, count, joined, line
from blobstore.core.text import size

if TYPE_CHECKING:
    import torch

__all__ = ["NUMBER_COLUMNS", "TENSOR_COLUMNS", "JoinedDataMap", "MergedDataMap", "NamedDataMap", "tensor_cells"]

_Default = TypeVar("_Default")
_Map = TypeVar("_Map", bound="NamedDataMap")


class NamedDataMap(Mapping[str, AnyTensor]):
    """Blobs by key: `data_map[key]` is a tensor, `get_data(key)` the view of its bytes.

    A blob is a tensor (it has a layout) or opaque bytes (its layout is None). Data is returned as views of memory that
    the map shares; a view stays valid after `close()` for as long as it is referenced.

    A subclass defines `name`, `_key_list`, `_view` and `_layout`.
    """

    name: str
    """The name of this map in messages: the path of its file."""

    _closed = False

    @abstractmethod
    def _key_list(self) -> Sequence[str]:
        """All keys, in the order of `get_key`."""

    @abstractmethod
    def _view(self, key: str) -> memoryview:
        """The bytes of `key`; KeyError if there is no such key."""

    @abstractmethod
    def _layout(self, key: str) -> TensorLayout | None:
        """The layout of `key`; KeyError if there is no such key."""

    # The RFC's five calls.

    def get_tensor_layout(self, key: str) -> TensorLayout | None:
        """The layout of a tensor, or None for an opaque blob.

        Raises:
            KeyNotFoundError: there is no such key.
            ClosedError: the map is closed.
        """
        self._check_key(key)
        try:
            return self._layout(key)
        except KeyError:
            raise self._not_found(key) from None

    def get_data(self, key: str) -> memoryview:
        """The bytes of a blob: a view of format "B", not a copy; read-only unless the map says otherwise.

        Raises:
            KeyNotFoundError: there is no such key.
            ClosedError: the map is closed.
            FileAccessError: the file was truncated after it was mapped.
        """
        self._check_key(key)
        try:
            data = self._view(key)
        except KeyError:
            raise self._not_found(key) from None
        check_length(data)
        return data

    def numpy(self, key: str) -> Array:
        """A tensor as an array over the map's own memory, in the tensor's shape; opaque bytes are uint8.

        The array is read-only if the memory is, keeps it alive, and stays valid after `close()`.

        Raises:
            As `get_data`.
            MissingDependencyError: numpy needs ml_dtypes for bfloat16 or float8.
            UnsupportedDataError: numpy has no such dtype.
        """
        return to_numpy(self.get_data(key), self.get_tensor_layout(key))

    def torch(self, key: str) -> torch.Tensor:
        """A blob as a torch tensor, in the tensor's shape and strides; opaque bytes are uint8.

        Torch has no read-only tensors, so of a map whose memory is read-only the tensor is a copy, which belongs to the
        caller. Memory that can be written to is the caller's already, and is shared, as by `numpy`.

        Raises:
            As `get_data`.
            MissingDependencyError: torch is not installed.
            UnsupportedDataError: torch has no such dtype.
        """
        data, layout = self.get_data(key), self.get_tensor_layout(key)
        return to_torch(memoryview(bytearray(data)) if data.readonly else data, layout)

    def views(self) -> Iterator[tuple[str, memoryview]]:
        """The keys, each with its bytes as `get_data` returns them."""
        for key in self:
            yield key, self.get_data(key)

    def bytes(self, key: str) -> builtins.bytes:
        """A copy of the bytes of a blob; `get_data` gives a view.

        Raises:
            As `get_data`.
        """
        return builtins.bytes(self.get_data(key))

    def load_data_into(self, key: str, buffer: object, size: int | None = None) -> None:
        """Copy a blob to the start of `buffer`. Exactly its bytes are written; the rest of the buffer stays as it is.

        Args:
            key: the blob.
            buffer: anything writable with the buffer protocol, C-contiguous.
            size: the number of bytes that the caller expects; by default that of the blob.

        Raises:
            KeyNotFoundError: there is no such key.
            LayoutError: `size` is not that of the blob, or `buffer` is smaller, read-only or not contiguous. Nothing was
                written.
            ClosedError: the map is closed.
        """
        data = self.get_data(key)
        if size is not None and (not isinstance(size, int) or size != len(data)):
            raise LayoutError(f"{self.name}: {key!r} has {len(data)} bytes, but size is {size}")
        try:
            whole = memoryview(buffer)  # type: ignore[arg-type]
            if "O" in whole.format:
                raise TypeError("it holds Python objects")
            target = whole.cast("B")
        except (TypeError, ValueError) as error:  # ValueError: released memory
            raise LayoutError(f"{self.name}: {key!r} cannot be loaded into this buffer: {error}") from None
        if target.readonly:
            raise LayoutError(f"{self.name}: {key!r} cannot be loaded into a read-only buffer")
        if len(target) < len(data):
            raise LayoutError(f"{self.name}: {key!r} has {len(data)} bytes, the buffer only {len(target)}")
        target[: len(data)] = data

    def get_num_keys(self) -> int:
        """The number of keys."""
        self._check_open()
        return len(self._key_list())

    def get_key(self, index: int) -> str:
        """The key at `index`, 0 to `get_num_keys() - 1`.

        Raises:
            KeyNotFoundError: the index is out of range.
            ClosedError: the map is closed.
        """
        self._check_open()
        keys = self._key_list()
        if not isinstance(index, int) or not 0 <= index < len(keys):
            raise KeyNotFoundError(f"{self.name}: key index {index} is out of range, there are {len(keys)} keys")
        return keys[index]

    # What a file may record beyond the RFC.

    @property
    def sources(self) -> tuple[Path, ...]:
        """The files that the blobs lie in."""
        return ()

    def alignment(self, key: str) -> int:
        """The alignment that `key` was added with, in bytes; 1 if the file does not record it."""
        self.get_tensor_layout(key)
        return 1

    def digest(self, key: str) -> Digest:
        """The content address of a blob: as recorded in the file, or else computed from its bytes."""
        return digest(self.get_data(key))

    # Mapping.

    def __getitem__(self, key: str) -> AnyTensor:
        """As `torch(key)` if torch is installed, otherwise as `numpy(key)`."""
        return self.torch(key) if default_framework() == "pt" else self.numpy(key)

    def __iter__(self) -> Iterator[str]:
        self._check_open()
        return iter(self._key_list())

    def __len__(self) -> int:
        return self.get_num_keys()

    @overload
    def get(self, key: str, default: None = None) -> AnyTensor | None: ...
    @overload
    def get(self, key: str, default: _Default) -> AnyTensor | _Default: ...
    def get(self, key: str, default: Any = None) -> Any:
        if key in self:  # Mapping's own makes an error, with its search for near keys, and drops it
            return self[key]
        return default

    def __contains__(self, key: object) -> bool:
        self._check_open()
        if not isinstance(key, str):
            return False
        try:
            self._layout(key)
        except KeyError:
            return False
        return True

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Identity; `blobstore diff` compares bytes."""
        return self is other

    def __repr__(self) -> str:
        return line(type(self).__name__, self._title(), *self._facts())

    def _repr_html_(self) -> str:
        return shown(self, lambda: block(heading(self._title(), joined(self._facts())), *self._tables()))

    def _tables(self) -> list[str]:
        """What a notebook shows of the map below its title."""
        self._check_open()
        keys = self._key_list()
        rows = ((key, *tensor_cells(self._layout(key), self._size(key))) for key in keys)
        return [table(("key", *TENSOR_COLUMNS), rows, len(keys), numbers=NUMBER_COLUMNS)]

    def _title(self) -> str:
        """What `repr` calls the map."""
        return self.name

    def _facts(self) -> tuple[Fact, ...]:
        """What `repr` says of the map."""
        if self._closed:
            return ("closed",)
        return lambda: count(len(self._key_list()), "key"), lambda: size(self._nbytes())

    def _nbytes(self) -> int:
        """What `repr` says of the map's size: the bytes of all keys."""
        return sum(self._size(key) for key in self._key_list())

    def _size(self, key: str) -> int:
        """Bytes of a blob; a map that has to fetch blobs knows this without."""
        return len(self._view(key))

    # Lifetime.

    def close(self) -> None:
        """Release the memory. Views of it stay valid; any other use of the map raises ClosedError."""
        self._closed = True

    def __enter__(self: _Map) -> _Map:
        self._check_open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name}: the data map is closed")

    def _check_key(self, key: object) -> None:
        self._check_open()
        if not isinstance(key, str):
            raise self._not_found(key)

    def _not_found(self, key: object) -> KeyNotFoundError:
        keys = self._key_list()
        return KeyNotFoundError(f"{self.name}: no key {key!r} among {len(keys)} keys{suggest(key, keys)}")


class JoinedDataMap(NamedDataMap):
    """Keys that are looked up in other maps. A subclass sets `_home`: for each key its map, in the order of the keys."""

    _home: dict[str, NamedDataMap]

    @functools.cached_property
    def _keys(self) -> Sequence[str]:
        return list(self._home)

    def _key_list(self) -> Sequence[str]:
        return self._keys

    def _view(self, key: str) -> memoryview:
        return self._home[key].get_data(key)

    def _layout(self, key: str) -> TensorLayout | None:
        return self._home[key].get_tensor_layout(key)

    def alignment(self, key: str) -> int:
        self.get_tensor_layout(key)  # raises if there is no such key
        return self._home[key].alignment(key)

    def digest(self, key: str) -> Digest:
        self.get_tensor_layout(key)  # raises if there is no such key
        return self._home[key].digest(key)


class MergedDataMap(JoinedDataMap):
    """Several maps looked up as one.

    A key may be in several of them if its bytes and layout are equal there. Closing the merged map leaves the others
    open; they belong to the caller.

    Args:
        maps: any number of maps; their order is that of the keys.

    Raises:
        KeyConflictError: two maps have different bytes or layouts for one key; the message names both.
        UnsupportedDataError: one of `maps` is not a data map.
    """

    def __init__(self, maps: Sequence[NamedDataMap]) -> None:
        try:
            maps = tuple(maps)
        except (TypeError, ValueError):  # ValueError: released memory
            raise UnsupportedDataError(f"expected data maps, found a {type(maps).__qualname__}") from None
        for one in maps:
            if not isinstance(one, NamedDataMap):
                raise UnsupportedDataError(f"expected a data map, found a {type(one).__qualname__}")
        self.name = " + ".join(m.name for m in maps) or "(no files)"
        self._maps = maps
        self._home = {}
        for current in maps:
            for key in current:
                other = self._home.setdefault(key, current)
                if other is not current:
                    _check_same(key, other, current)

    @property
    def sources(self) -> tuple[Path, ...]:
        return tuple(path for one in self._maps for path in one.sources)

    def _title(self) -> str:
        return and_others([one.name for one in self._maps]) or self.name

    def __reduce__(self) -> Any:
        self._check_open()
        return type(self), (self._maps,)


TENSOR_COLUMNS = ("dtype", "shape", "size")
NUMBER_COLUMNS = ("shape", "size")


def tensor_cells(layout: TensorLayout | None, nbytes: int) -> tuple[str, str, str]:
    """The cells of a blob under `TENSOR_COLUMNS`."""
    return ("opaque", "", size(nbytes)) if layout is None else (*in_words(layout), size(nbytes))


def _check_same(key: str, a: NamedDataMap, b: NamedDataMap) -> None:
    if a.get_tensor_layout(key) != b.get_tensor_layout(key):
        raise KeyConflictError(
            f"key {key!r} is {a.get_tensor_layout(key)} in {a.name} but {b.get_tensor_layout(key)} in {b.name}"
        )
    if not same_bytes(a.get_data(key), b.get_data(key)):
        raise KeyConflictError(f"key {key!r} has different bytes in {a.name} and in {b.name}")
