"""A store as the output of ExecuTorch's own `NamedDataStore`."""

from __future__ import annotations

from blobstore.core.store import BlobStore
from blobstore.runtime.executorch import DataEntry, NamedDataStoreOutput, ScalarType, TensorLayout

__all__ = ["to_named_data"]


def to_named_data(store: BlobStore) -> NamedDataStoreOutput:
    """The contents of a store as ExecuTorch's own `NamedDataStore` returns them, for code that takes its output.

    Untagged blobs are in `pte_data`, others in `external_data`. Every blob is copied, because ExecuTorch takes `bytes`.

    Raises:
        MissingDependencyError: executorch 1.5 is not installed; this is raised when the function is imported.
    """
    entries = store.entries()
    blobs = {entry.blob: bytes(entry.data) for entry in entries}
    places = {blob: place for place, blob in enumerate(blobs)}
    output = NamedDataStoreOutput(list(blobs.values()), {}, {})
    for entry in entries:
        layout = entry.layout and TensorLayout(
            ScalarType(int(entry.layout.scalar_type)), list(entry.layout.sizes), list(entry.layout.dim_order)
        )
        tag = store.tag(entry.key)
        keys = output.pte_data if tag is None else output.external_data.setdefault(tag, {})
        keys[entry.key] = DataEntry(places[entry.blob], entry.alignment, layout)
    return output
