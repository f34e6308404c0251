"""Content-addressed weights for ExecuTorch: each blob once, in `.ptd` files that the stock runtime reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.data_map import MergedDataMap, NamedDataMap
from blobstore.digest import Digest
from blobstore.errors import BlobStoreError
from blobstore.files import load_file, save_file
from blobstore.layout import ScalarType, TensorLayout
from blobstore.programs import dedup_programs, save_programs
from blobstore.ptd.reader import PtdDataMap, open_ptd
from blobstore.pte import PteDataMap, open_pte
from blobstore.store import BlobStore, StoreStats
from blobstore.tensors import FileSlice

if TYPE_CHECKING:
    from blobstore.reporting import report

__version__ = "0.1.0"

__all__ = [
    "BlobStore",
    "BlobStoreError",
    "Digest",
    "FileSlice",
    "MergedDataMap",
    "NamedDataMap",
    "PtdDataMap",
    "PteDataMap",
    "ScalarType",
    "StoreStats",
    "TensorLayout",
    "dedup_programs",
    "load_file",
    "open_ptd",
    "open_pte",
    "report",
    "save_file",
    "save_programs",
]


def __getattr__(name: str) -> Any:
    if name == "report":  # imported when it is first used
        from blobstore.reporting import report

        return report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
