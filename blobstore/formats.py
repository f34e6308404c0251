"""Telling files apart by their first bytes, not by their names."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from typing import Any

from blobstore.data_map import NamedDataMap
from blobstore.errors import UnsupportedDataError
from blobstore.mapped_file import as_path, map_file
from blobstore.ptd.reader import open_ptd
from blobstore.pte.data_map import open_pte
from blobstore.safetensors import SafetensorsDataMap

__all__ = ["Format", "by_name", "detect_format", "open_any"]


class Format(enum.Enum):
    """What a file is; the value is how messages call it."""

    PTE = "a .pte program"
    PTD = "a .ptd data file"
    SAFETENSORS = "a .safetensors file"
    UNKNOWN = "a file of an unknown format"


def detect_format(path: str | os.PathLike[str]) -> Format:
    """What a file claims to be; whether it is well-formed is for its reader to say.

    Raises:
        FileAccessError: the file cannot be read.
        InvalidFileError: it is empty.
    """
    head = bytes(map_file(path)[:9])
    if head[4:8] == b"FT01":
        return Format.PTD
    if head[4:6] == b"ET":
        return Format.PTE
    # A .safetensors has no magic: the length of a JSON object, which starts with its brace.
    if head[8:9] == b"{" and head[6:8] == b"\0\0":
        return Format.SAFETENSORS
    return by_name(path)


def by_name(path: str | os.PathLike[str]) -> Format:
    """What a file should be by its name."""
    formats = {".pte": Format.PTE, ".ptd": Format.PTD, ".safetensors": Format.SAFETENSORS}
    return formats.get(as_path(path).suffix, Format.UNKNOWN)


def open_any(path: str | os.PathLike[str]) -> NamedDataMap:
    """Open a file of any known format as a data map.

    Raises:
        FileAccessError, InvalidFileError: it cannot be read or is malformed.
        UnsupportedDataError: its format is not known.
    """
    opener: dict[Format, Callable[[Any], NamedDataMap]] = {
        Format.PTE: open_pte,
        Format.PTD: open_ptd,
        Format.SAFETENSORS: SafetensorsDataMap,
    }
    kind = detect_format(path)
    if kind not in opener:
        raise UnsupportedDataError(f"{as_path(path)}: {kind.value}; expected a .pte, .ptd or .safetensors")
    return opener[kind](path)
