"""What adapters take of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blobstore.runtime import BlobCache

__all__ = ["native_tensors_of"]


def native_tensors_of(cache: BlobCache) -> Any:
    """The native module's tensors of a cache; UnsupportedDataError for anything but a `BlobCache`, ClosedError for a closed
    one."""
    from blobstore.runtime.cache import check_cache  # here, because adapter files alone need no cache

    check_cache(cache, "cache")
    cache.get_num_keys()  # raises if it is closed
    return cache.tensors._native
