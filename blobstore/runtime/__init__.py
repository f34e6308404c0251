"""Programs that run on a writable cache of weights.

    with BlobCache("weights.ptd") as cache:
        forward = Program("model.pte", cache).method("forward")
        before = forward(x)
        cache.update({"layers.0.weight": new_weight})
        after = forward(x)

ExecuTorch runs the programs; this package decides where their weights are stored. `docs/runtime.md` describes what
memory costs, which generation of the weights a call sees, and what threads, processes and forks may do.
"""

from blobstore.runtime.cache import BlobCache, CacheStats, Transaction, make_working_copy
from blobstore.runtime.delegates import DelegateStats, delegate_failure, delegate_stats, serving
from blobstore.runtime.packed import PackedFile, PackedStats, PackedStore
from blobstore.runtime.program import Method, Program, ValueInfo

__all__ = [
    "BlobCache",
    "CacheStats",
    "DelegateStats",
    "Method",
    "PackedFile",
    "PackedStats",
    "PackedStore",
    "Program",
    "Transaction",
    "ValueInfo",
    "delegate_failure",
    "delegate_stats",
    "make_working_copy",
    "serving",
]
