"""The file of `--names`: tensors with the names that people know them by."""

from __future__ import annotations

from pathlib import Path

from blobstore.errors import UnsupportedDataError
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.opening import Format, open_any
from blobstore.formats.pte.data_map import PteDataMap
from blobstore.formats.pte.program import read_program
from blobstore.memory.mapped_file import same_file
from blobstore.programs import DedupResult

__all__ = ["named_by", "open_names"]


def open_names(path: Path | None) -> NamedDataMap | None:
    """Open the file, if one is given.

    Raises:
        FileAccessError, InvalidFileError, UnsupportedDataError: as `open_any`; or it is a program, which has no names.
    """
    if path is None:
        return None
    found = open_any(path)
    if isinstance(found, PteDataMap):
        raise UnsupportedDataError(f"{path}: expected names from a .safetensors or a .ptd, found {Format.PTE.value}")
    return found


def named_by(names: NamedDataMap, result: DedupResult) -> int:
    """How many tensors that left the programs of a run have names of this file."""
    found: set[str] = set()
    for program in result.programs:
        found |= {one.key for one in read_program(program.path).externals}
        if not same_file(program.source, program.path):  # with --force a program can replace itself
            found -= {one.key for one in read_program(program.source).externals}
    return sum(key in names for key in found)
