"""Which blobs of a data file can take the place of others in a cache."""

from __future__ import annotations

from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.formats.ptd.reader import PtdDataMap

__all__ = ["replaceable"]


def replaceable(old: PtdDataMap, new: PtdDataMap, key: str) -> bool:
    """Whether the blob of a key can take the place of another one in a cache: its size and layout are the same, and it
    is not one of the records that describe other blobs."""
    return (
        not key.startswith(KEY_PREFIX)
        and len(old.get_data(key)) == len(new.get_data(key))
        and old.get_tensor_layout(key) == new.get_tensor_layout(key)
    )
