"""Content-addressed weights for ExecuTorch: each blob once, in `.ptd` files that the stock runtime reads.

Files, with the calls of safetensors:

    save_file, load_file    tensors by name, in a .ptd
    safe_open               one tensor, or a part of it, of a .ptd, .safetensors or .pte
    open_ptd, open_any      a file as a data map: `data["encoder.weight"]` is a tensor, `data.get_data(...)` its bytes
    BlobStore               what writes a .ptd: keys, tags, alignments, layouts

Programs and reports:

    dedup_programs          slim programs and one shared data file, from .pte files
    save_programs           the same, from programs that were just lowered
    fuse_programs           one program of several programs and their data
    report                  where a set of files wastes bytes

Modules, imported when they are first used:

    blobstore.lowering      lower a model so that its weights change by name
    blobstore.runtime       programs on a writable cache of weights
    blobstore.adapters      LoRA adapters beside a foundation
    blobstore.training      training on the device
    blobstore.pool          every version of every model, each content once
    blobstore.releases      publish once, fetch what a device lacks
    blobstore.llm           ExecuTorch's exporter for language models
    blobstore.torch, blobstore.numpy    the calls of safetensors for one framework
    blobstore.errors        every error, in one tree
    blobstore.testing       the contract of data maps

Documentation: https://blobstore-project.github.io/blobstore/
"""

from __future__ import annotations

from blobstore.core.lazy import lazily, usable
from blobstore.core.version import __version__ as __version__

TYPE_CHECKING = False  # type checkers treat it as true; importing `typing` would take longer than everything else here
if TYPE_CHECKING:
    # One statement, which sorting would make thirteen of.
    # isort: off
    from blobstore import (
        adapters as adapters,
        errors as errors,
        llm as llm,
        lowering as lowering,
        numpy as numpy,
        pool as pool,
        programs as programs,
        releases as releases,
        reporting as reporting,
        runtime as runtime,
        store as store,
        testing as testing,
        torch as torch,
        training as training,
    )

    # isort: on
    from blobstore.core.errors import BlobStoreError
    from blobstore.core.files import load_file, save_file
    from blobstore.core.formats.data_map import MergedDataMap, NamedDataMap
    from blobstore.core.formats.opening import open_any
    from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
    from blobstore.core.formats.pte.data_map import PteDataMap, open_pte
    from blobstore.core.memory.digest import Digest
    from blobstore.core.memory.layout import ScalarType, TensorLayout
    from blobstore.core.memory.tensors import FileSlice
    from blobstore.core.programs import dedup_programs
    from blobstore.core.programs.fuse import fuse_programs
    from blobstore.core.store import BlobStore, StoreStats
    from blobstore.core.tensor_file import safe_open
    from blobstore.lowering.save import save_programs
    from blobstore.reporting import report

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
    "core.errors": ("BlobStoreError",),
    "core.files": ("load_file", "save_file"),
    "core.formats.data_map": ("MergedDataMap", "NamedDataMap"),
    "core.formats.opening": ("open_any",),
    "core.formats.ptd.reader": ("PtdDataMap", "open_ptd"),
    "core.formats.pte.data_map": ("PteDataMap", "open_pte"),
    "core.memory.digest": ("Digest",),
    "core.memory.layout": ("ScalarType", "TensorLayout"),
    "core.memory.tensors": ("FileSlice",),
    "core.programs": ("dedup_programs",),
    "core.programs.fuse": ("fuse_programs",),
    "core.store": ("BlobStore", "StoreStats"),
    "core.tensor_file": ("safe_open",),
    "lowering.save": ("save_programs",),
    "reporting": ("report",),
}


_MODULES = (
    "adapters",
    "errors",
    "llm",
    "lowering",
    "numpy",
    "pool",
    "programs",
    "releases",
    "reporting",
    "runtime",
    "store",
    "testing",
    "torch",
    "training",
)


if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            from importlib import import_module

            return import_module(f"{__name__}.{name}")
        return lazily(__name__, _HOME, name)


def __dir__() -> list[str]:
    return usable(__name__, [*__all__, *_MODULES, "__version__"])
