"""Opening a file of any format with the reader that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from blobstore.core.disk.kinds import Format, by_name, detect_format
from blobstore.core.errors import UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.formats.pte.data_map import PteDataMap, open_pte
from blobstore.core.formats.ptn import PtnDataMap
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.core.formats.sharded import ShardedDataMap
from blobstore.core.formats.torch_saved import TorchDataMap
from blobstore.core.memory.mapped_file import as_path

__all__ = ["Format", "Names", "by_name", "detect_format", "open_any", "open_names"]

Names: TypeAlias = NamedDataMap | str | os.PathLike[str] | Sequence[NamedDataMap | str | os.PathLike[str]]
"""A checkpoint that gives names to tensors, opened or its path, or several in a list."""


def open_any(path: str | os.PathLike[str]) -> NamedDataMap:
    """Open a file of any known format as a data map: a .pte, .ptd, .safetensors or .ptn, the index of a sharded
    checkpoint (`model.safetensors.index.json`), or what `torch.save` wrote, without unpickling it.

    Raises:
        FileAccessError, InvalidFileError: it cannot be read, or is malformed.
        UnsupportedDataError: its format is unknown.
    """
    opener: dict[Format, Callable[[Any], NamedDataMap]] = {
        Format.PTE: open_pte,
        Format.PTD: open_ptd,
        Format.SAFETENSORS: SafetensorsDataMap,
        Format.SHARDS: ShardedDataMap,
        Format.PTN: PtnDataMap,
        Format.TORCH: TorchDataMap,
    }
    kind = detect_format(path)
    if kind not in opener:
        raise UnsupportedDataError(f"{as_path(path)}: {kind.value}; expected a .pte, .ptd or .safetensors")
    return opener[kind](path)


def open_names(names: Names | None) -> tuple[NamedDataMap, ...]:
    """What an argument `names` stands for.

    Raises:
        FileAccessError, InvalidFileError, UnsupportedDataError: as `open_any`; or one of them is neither a data map nor a
            path, or the path of a program, which has no names.
    """
    if names is None:
        return ()
    if isinstance(names, list | tuple):
        return tuple(map(_open_names, names))
    return (_open_names(names),)


def _open_names(names: Any) -> NamedDataMap:
    if isinstance(names, NamedDataMap):
        return names
    if not isinstance(names, str | os.PathLike):
        raise UnsupportedDataError(f"names: expected a checkpoint or its path, found a {type(names).__qualname__}")
    data_map = open_any(names)
    if isinstance(data_map, PteDataMap):
        raise UnsupportedDataError(
            f"{as_path(names)}: expected names from a .safetensors or a .ptd, found {Format.PTE.value}"
        )
    return data_map
