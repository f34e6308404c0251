"""Content-addressed weights for ExecuTorch: each blob once, in `.ptd` files that the stock runtime reads."""

from __future__ import annotations

from blobstore.version import __version__ as __version__

TYPE_CHECKING = False  # type checkers take it for true; importing `typing` would take longer than all the rest
if TYPE_CHECKING:
    from typing import Any

    from blobstore.data_map import MergedDataMap, NamedDataMap
    from blobstore.digest import Digest
    from blobstore.errors import BlobStoreError
    from blobstore.files import load_file, save_file
    from blobstore.layout import ScalarType, TensorLayout
    from blobstore.programs import dedup_programs, save_programs
    from blobstore.ptd.reader import PtdDataMap, open_ptd
    from blobstore.pte import PteDataMap, open_pte
    from blobstore.reporting import report
    from blobstore.store import BlobStore, StoreStats
    from blobstore.tensors import FileSlice

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

# Everything is imported when it is first used. So the command line is ready for Ctrl-C before numpy is imported, and
# nobody waits for what they do not use.
_HOME = {
    "BlobStore": "store",
    "BlobStoreError": "errors",
    "Digest": "digest",
    "FileSlice": "tensors",
    "MergedDataMap": "data_map",
    "NamedDataMap": "data_map",
    "PtdDataMap": "ptd.reader",
    "PteDataMap": "pte",
    "ScalarType": "layout",
    "StoreStats": "store",
    "TensorLayout": "layout",
    "dedup_programs": "programs",
    "load_file": "files",
    "open_ptd": "ptd.reader",
    "open_pte": "pte",
    "report": "reporting",
    "save_file": "files",
    "save_programs": "programs",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name == "errors":  # what `except blobstore.errors.KeyNotFoundError` needs
        return import_module(f"{__name__}.errors")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
