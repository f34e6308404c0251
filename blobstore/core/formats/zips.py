"""The members of a zip, where their bytes lie in the file, without decompressing anything.

Members that are stored, not deflated, are ranges of the file, so what is in them is a view of it.
"""

from __future__ import annotations

import io
import itertools
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.core.errors import InvalidFileError

__all__ = ["Member", "members_of"]

_LOCAL = struct.Struct("<4s2xHH16xHH")  # magic, flags, method, lengths of the name and of what follows it
_ENCRYPTED = 1
_MOST = 1 << 16  # members


@dataclass(frozen=True)
class Member:
    """A member of a zip: its path there, where its bytes lie in the file, and whether these are its content, not compressed."""

    name: str
    start: int
    stop: int
    is_stored: bool


def members_of(data: memoryview, path: Path) -> tuple[Member, ...]:
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
