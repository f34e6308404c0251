"""Content-addressed weights for ExecuTorch: each blob once, in `.ptd` files that the stock runtime reads."""

from __future__ import annotations

from blobstore.lazy import lazily
from blobstore.version import __version__ as __version__

TYPE_CHECKING = False  # type checkers treat it as true; importing `typing` would take longer than everything else here
if TYPE_CHECKING:
    from typing import Any

    from blobstore.errors import BlobStoreError
    from blobstore.files import load_file, save_file
    from blobstore.formats.data_map import MergedDataMap, NamedDataMap
    from blobstore.formats.opening import open_any
    from blobstore.formats.ptd.reader import PtdDataMap, open_ptd
    from blobstore.formats.pte import PteDataMap, open_pte
    from blobstore.memory.digest import Digest
    from blobstore.memory.layout import ScalarType, TensorLayout
    from blobstore.memory.tensors import FileSlice
    from blobstore.programs import dedup_programs, save_programs
    from blobstore.programs.fuse import fuse_programs
    from blobstore.reporting import report
    from blobstore.store import BlobStore, StoreStats
    from blobstore.tensor_file import safe_open

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
    "fuse_programs",
    "load_file",
    "open_any",
    "open_ptd",
    "open_pte",
    "report",
    "safe_open",
    "save_file",
    "save_programs",
]

# Everything is imported when it is first used. So the command line can handle Ctrl-C before numpy is imported, and an
# application does not wait for parts that it does not use.
_HOME = {
    "BlobStore": "store",
    "BlobStoreError": "errors",
    "Digest": "memory.digest",
    "FileSlice": "memory.tensors",
    "MergedDataMap": "formats.data_map",
    "NamedDataMap": "formats.data_map",
    "PtdDataMap": "formats.ptd.reader",
    "PteDataMap": "formats.pte",
    "ScalarType": "memory.layout",
    "StoreStats": "store",
    "TensorLayout": "memory.layout",
    "dedup_programs": "programs",
    "fuse_programs": "programs.fuse",
    "load_file": "files",
    "open_any": "formats.opening",
    "open_ptd": "formats.ptd.reader",
    "open_pte": "formats.pte",
    "report": "reporting",
    "safe_open": "tensor_file",
    "save_file": "files",
    "save_programs": "programs",
}


def __getattr__(name: str) -> Any:
    if name == "errors":  # for `except blobstore.errors.KeyNotFoundError`
        from importlib import import_module

        return import_module(f"{__name__}.errors")
    return lazily(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
