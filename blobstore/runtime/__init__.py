"""Programs that run on a writable cache of weights.

    with BlobCache("weights.ptd") as cache:
        forward = Program("model.pte", cache).method("forward")
        before = forward(x)
        cache.update({"layers.0.weight": new_weight})
        after = forward(x)

ExecuTorch runs the programs; this package decides where their weights are stored. `docs/runtime.md` describes what
memory costs, which generation of the weights a call sees, and what threads, processes and forks may do.
"""

from typing import TYPE_CHECKING

from blobstore.core.lazy import lazily, usable

if TYPE_CHECKING:
    from blobstore.runtime.cache import BlobCache, CacheStats, Transaction, make_working_copy
    from blobstore.runtime.delegates import DelegateStats, delegate_failure, delegate_stats, serving
    from blobstore.runtime.packed import PackedFile, PackedStats, PackedStore
    from blobstore.runtime.program import Method, Program, ValueInfo
    from blobstore.runtime.tensors import Quantized, Updated

__all__ = [
    "BlobCache",
    "CacheStats",
    "DelegateStats",
    "Method",
    "PackedFile",
    "PackedStats",
    "PackedStore",
    "Program",
    "Quantized",
    "Transaction",
    "Updated",
    "ValueInfo",
    "delegate_failure",
    "delegate_stats",
    "make_working_copy",
    "serving",
]

# Everything is imported when it is first used: `executorch.py`, which lowering needs, works without the native package.
_HOME = {
    "cache": ("BlobCache", "CacheStats", "Transaction", "make_working_copy"),
    "delegates": ("DelegateStats", "delegate_failure", "delegate_stats", "serving"),
    "packed": ("PackedFile", "PackedStats", "PackedStore"),
    "program": ("Method", "Program", "ValueInfo"),
    "tensors": ("Quantized", "Updated"),
}


if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error

    def __getattr__(name: str) -> object:
        return lazily(__name__, _HOME, name)


def __dir__() -> list[str]:
    return usable(__name__, __all__)
