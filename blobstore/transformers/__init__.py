"""Models of Hugging Face's transformers, through its own ExecuTorch exporter: all stages share one `model.ptd`, and weights
can be changed by the names that the checkpoint has; see docs/transformers.md.

    exported = BlobStoreExporter().export_for_generation(model, inputs, ExecutorchConfig(), generation_config=generation)
    exported.save_pretrained("exported")  # prefill.pte, decode.pte, model.ptd, export.json, config.json ...

    model = load("exported")
    tokens = model.generate(input_ids)
    model.cache.update_state_dict(fine_tuned.state_dict())  # the next call computes with it

Importing this package needs none of torch, executorch and transformers. All are imported when one of its names is first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core.lazy import lazily, usable

if TYPE_CHECKING:
    from blobstore.transformers.exporter import BlobStoreExporter
    from blobstore.transformers.loading import StoredModel, load
    from blobstore.transformers.runner import BlobStoreRunner

__all__ = ["BlobStoreExporter", "BlobStoreRunner", "StoredModel", "load"]

_HOME = {"exporter": ("BlobStoreExporter",), "loading": ("StoredModel", "load"), "runner": ("BlobStoreRunner",)}


if not TYPE_CHECKING:  # to a type checker, a name that is not there is an error

    def __getattr__(name: str) -> object:
        why = "this needs the exporters of transformers 5.24"
        return lazily(__name__, _HOME, name, needs="transformers", extra="transformers", why=why)


def __dir__() -> list[str]:
    return usable(__name__, __all__)
