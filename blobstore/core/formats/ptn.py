"""Packages of native programs, `.ptn`: a zip with a program, its tensors as `.safetensors`, and `aliases.json`.

Members that are stored, not deflated, are ranges of the file, so their tensors are views of it. `aliases.json` is an object
in which a name stands for that of a tensor; equal tensors are in a package once. The format is that of ExecuTorch's main
branch, which may change: what is not understood of the aliases is left out.
"""

from __future__ import annotations

import io
import itertools
import os
import struct
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.core.errors import InvalidFileError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.pickling import by_path
from blobstore.core.formats.safetensors import SafetensorsDataMap, parse_json
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import as_path, map_file

__all__ = ["ALIASES", "Member", "PtnDataMap"]

ALIASES = "aliases.json"
_LOCAL = struct.Struct("<4s2xHH16xHH")  # magic, flags, method, lengths of the name and of what follows it
_ENCRYPTED = 1
_MOST = 1 << 16  # members
_LARGEST = 1 << 24  # bytes of the aliases


@dataclass(frozen=True)
class Member:
    """A member of a package: its path there, where its bytes lie in the file, and whether these are its content, not
    compressed."""

    name: str
    start: int
    stop: int
    is_stored: bool


class PtnDataMap(NamedDataMap):
    """The tensors of all `.safetensors` of a package, under their names and their aliases.

    If tensors of several members have one name, each is `member:name`. Nothing is decompressed: tensors of a member that is
    deflated are not here. If the caller has the bytes already (`data`), the file is not opened, and errors name `path`.
    """

    def __init__(self, path: str | os.PathLike[str], *, data: memoryview | None = None) -> None:
        self.path = as_path(path)
        self.name = str(self.path)
        self._data = map_file(path) if data is None else data
        self.members = _members(self._data, self.path)
        self._places: dict[str, tuple[SafetensorsDataMap, str, int]] = {}
        maps = [
            (one, SafetensorsDataMap(f"{self.path}: {one.name}", data=self._data[one.start : one.stop]))
            for one in self.members
            if one.is_stored and one.name.endswith(".safetensors")
        ]
        times = Counter(key for _, inside in maps for key in inside)
        for one, inside in maps:
            for key in inside:
                self._places[key if times[key] == 1 else f"{one.name}:{key}"] = (inside, key, one.start)
        for alias, key in self._aliases().items():
            if key in self._places:
                self._places.setdefault(alias, self._places[key])
        self._keys = list(self._places)

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

    @property
    def sources(self) -> tuple[Path, ...]:
        return (self.path,)

    def _key_list(self) -> Sequence[str]:
        return self._keys

    def _view(self, key: str) -> memoryview:
        inside, own, _ = self._places[key]
        return inside.get_data(own)

    def _layout(self, key: str) -> TensorLayout | None:
        inside, own, _ = self._places[key]
        return inside.get_tensor_layout(own)

    def _nbytes(self) -> int:
        return len(self._data)

    def __reduce__(self) -> Any:
        """Pickled by path: see `blobstore.core.formats.pickling`."""
        self._check_open()
        return by_path(self, PtnDataMap, self._data)

    def close(self) -> None:
        super().close()
        for inside, _, _ in self._places.values():
            inside.close()
        self._data = memoryview(b"")

    def _aliases(self) -> dict[str, str]:
        for one in self.members:
            if one.name == ALIASES and one.is_stored and one.stop - one.start <= _LARGEST:
                content = parse_json(self._data[one.start : one.stop], self.path, ALIASES)
                if isinstance(content, dict):
                    return {alias: key for alias, key in content.items() if isinstance(key, str)}
        return {}


def _members(data: memoryview, path: Path) -> tuple[Member, ...]:
    """The members of a zip, in the order of their bytes.

    Raises:
        InvalidFileError: it is none, or its members are not what its directory says.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_File(data))) as package:  # reads the directory only
            listed = package.infolist()
    except (zipfile.BadZipFile, ValueError, OverflowError, OSError, NotImplementedError, struct.error) as error:
        raise InvalidFileError(path, f"not a well-formed zip: {error}") from None
    if len(listed) > _MOST:
        raise InvalidFileError(path, f"{len(listed)} members, at most {_MOST} are read")
    members = [(info.header_offset, _member(info, data, path)) for info in listed]
    members.sort(key=lambda placed: (placed[0], placed[1].stop))
    for (_, before), (at, after) in itertools.pairwise(members):
        if at < before.stop:
            raise InvalidFileError(path, f"the members {before.name!r} and {after.name!r} overlap")
    return tuple(member for _, member in members)


def _member(info: zipfile.ZipInfo, data: memoryview, path: Path) -> Member:
    """A member as the directory lists it. What stands before its bytes must say the same, as other readers go by that."""
    at = info.header_offset
    if not 0 <= at <= len(data) - _LOCAL.size - 4:
        raise InvalidFileError(path, f"the member {info.filename!r} at {at} is not within the file")
    magic, flags, method, name, extra = _LOCAL.unpack_from(data, at)
    start = at + 30 + name + extra
    stop = start + info.compress_size
    if magic != b"PK\3\4" or method != info.compress_type or stop > len(data):
        raise InvalidFileError(path, f"the member {info.filename!r} at {at} is not what the directory says")
    is_stored = method == zipfile.ZIP_STORED and not flags & _ENCRYPTED
    if is_stored and info.file_size != info.compress_size:
        raise InvalidFileError(
            path, f"the member {info.filename!r} is stored in {info.compress_size} bytes, and has {info.file_size}"
        )
    return Member(info.filename, start, stop, is_stored)


class _File(io.RawIOBase):
    """Memory as a file, without a copy of it."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, len(self._data))[whence]
        if at < 0:
            raise OSError("a place before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
