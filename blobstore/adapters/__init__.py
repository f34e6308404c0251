"""LoRA adapters: small files beside a shared foundation, exchanged or merged while programs run.

    tags = AdapterTags()  # lowering: foundation.ptd and adapter.ptd
    save_adapter("b.ptd", tensors, foundation="foundation.ptd", scale=alpha / rank)

    cache = BlobCache("adapter.ptd", base=BlobCache("foundation.ptd"))
    load_adapter(cache, "b.ptd")  # the next call runs with it

    merged = merge_adapter(plain_cache, "b.ptd")  # into the weights of a program without an adapter
    merged.undo()  # the bits from before

Reading and writing adapters needs neither torch, executorch nor the native runtime.
"""

from blobstore.adapters.files import Adapter, bind_adapter, read_adapter, save_adapter
from blobstore.adapters.fit import AdapterInfo, AdaptersInfo, FoundationInfo, inspect_adapters
from blobstore.adapters.foundation import NamedTensor, foundation_fingerprint
from blobstore.adapters.live import MergedAdapter, load_adapter, merge_adapter
from blobstore.adapters.names import AdapterTags, Pair

__all__ = [
    "Adapter",
    "AdapterInfo",
    "AdapterTags",
    "AdaptersInfo",
    "FoundationInfo",
    "MergedAdapter",
    "NamedTensor",
    "Pair",
    "bind_adapter",
    "foundation_fingerprint",
    "inspect_adapters",
    "load_adapter",
    "merge_adapter",
    "read_adapter",
    "save_adapter",
]
