"""Many programs that share their weights: `dedup_programs`, `fuse_programs`, `save_programs` and what they return."""

from blobstore.core.programs import (
    DATA_NAME,
    DataResult,
    DedupResult,
    KeyResult,
    ProgramResult,
    data_files,
    dedup_programs,
)
from blobstore.core.programs.fuse import FusedMethod, FuseResult, fuse_programs
from blobstore.lowering.save import save_program, save_programs

__all__ = [
    "DATA_NAME",
    "DataResult",
    "DedupResult",
    "FuseResult",
    "FusedMethod",
    "KeyResult",
    "ProgramResult",
    "data_files",
    "dedup_programs",
    "fuse_programs",
    "save_program",
    "save_programs",
]


def __dir__() -> list[str]:
    return list(__all__)
