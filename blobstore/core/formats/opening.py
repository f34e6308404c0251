"""Opening a file of any format with the reader that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from blobstore.core.disk.kinds import Format, by_name, detect_format
from blobstore.core.errors import UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.formats.pte.data_map import open_pte
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.core.memory.mapped_file import as_path

__all__ = ["Format", "by_name", "detect_format", "open_any"]


def open_any(path: str | os.PathLike[str]) -> NamedDataMap:
    """Open a file of any known format as a data map.

    Raises:
        FileAccessError, InvalidFileError: it cannot be read, or is malformed.
        UnsupportedDataError: its format is unknown.
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
