"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blobstore.core.disk.kinds import Format
from blobstore.core.errors import UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.opening import open_any
from blobstore.core.formats.pte.data_map import PteDataMap
from blobstore.core.text import parse_size

__all__ = ["AsJson", "DryRun", "nbytes", "open_names"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be written, and change nothing; the exit code is the same.")
]


def nbytes(option: str, text: str) -> int:
    """The number of bytes that an option names; a wrong one is a wrong command line."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def open_names(path: Path | None) -> NamedDataMap | None:
    """Open the file of `--names`, if one is given.

    Raises:
        FileAccessError, InvalidFileError, UnsupportedDataError: as `open_any`; or it is a program, which has no names.
    """
    if path is None:
        return None
    data_map = open_any(path)
    if isinstance(data_map, PteDataMap):
        raise UnsupportedDataError(f"{path}: expected names from a .safetensors or a .ptd, found {Format.PTE.value}")
    return data_map
