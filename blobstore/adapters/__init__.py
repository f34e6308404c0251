"""LoRA adapters: small files beside a shared foundation, exchanged or merged while programs run.

    tags = AdapterTags()  # at lowering: foundation.ptd and adapter.ptd
    save_adapter("b.ptd", tensors, foundation="foundation.ptd", scale=alpha / rank)

    cache = BlobCache("adapter.ptd", base=BlobCache("foundation.ptd"))
    load_adapter(cache, "b.ptd")  # the next call uses it
    set_adapter_strength(cache, 0.5)  # half of it; 0 turns it off
    load_adapters(cache, ["b.ptd", ("c.ptd", 0.5)])  # the sum of two; [] for no adapter

    merged = merge_adapter(plain_cache, "b.ptd")  # into the weights of a program without an adapter
    merged.undo()  # exactly the bytes from before

Everything here but `AdapterTags` needs the native package `executorch-blobstore-runtime`, which does the work, and
neither torch nor executorch's Python code.
"""

from blobstore.adapters.adapter_file import Adapter, bind_adapter, read_adapter, save_adapter
from blobstore.adapters.combine import combine_adapters, load_adapters, set_adapter_strengths
from blobstore.adapters.exchange import load_adapter, set_adapter_strength
from blobstore.adapters.fit import AdapterInfo, AdaptersInfo, FoundationInfo, inspect_adapters
from blobstore.adapters.foundation import NamedTensor, foundation_fingerprint
from blobstore.adapters.lora_names import AdapterTags, Pair
from blobstore.adapters.merge import MergedAdapter, merge_adapter
from blobstore.adapters.peft import import_peft
from blobstore.adapters.peft_export import export_peft
from blobstore.adapters.stock import import_for_program

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
    "combine_adapters",
    "export_peft",
    "foundation_fingerprint",
    "import_for_program",
    "import_peft",
    "inspect_adapters",
    "load_adapter",
    "load_adapters",
    "merge_adapter",
    "read_adapter",
    "save_adapter",
    "set_adapter_strength",
    "set_adapter_strengths",
]


def __dir__() -> list[str]:
    return list(__all__)
