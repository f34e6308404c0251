"""What adapters must know about a cache: its foundation, its scales and its LoRA tensors; and whose turn it is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.adapters.adapter_file import Adapter, recorded_scale
from blobstore.adapters.foundation import FOUNDATION, fingerprint, named_tensors
from blobstore.adapters.lora_names import is_lora
from blobstore.errors import AdapterError, KeyNotFoundError, LayoutError, UpdateError
from blobstore.formats.data_map import MergedDataMap
from blobstore.formats.ptd.reader import PtdDataMap

if TYPE_CHECKING:
    from blobstore.runtime import BlobCache

__all__ = ["CacheAdapters", "cache_adapters", "check_foundation", "check_open_cache", "named_origin", "turn"]


@dataclass(frozen=True)
class CacheAdapters:
    """What does not change while a cache is open.

    Attributes:
        foundations: the fingerprints that an adapter for this cache may record.
        scales: the scales that adapters among its files record.
        lora: the names of the LoRA tensors of its programs.
    """

    foundations: frozenset[str]
    scales: frozenset[float]
    lora: frozenset[str]


_turns: weakref.WeakKeyDictionary[BlobCache, threading.Lock] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[BlobCache, CacheAdapters] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards both


def check_open_cache(cache: BlobCache) -> None:
    """Raise UnsupportedDataError if an argument is not a `BlobCache`, and ClosedError if it is closed."""
    from blobstore.runtime.cache import check_cache  # here, because adapter files alone need no native package

    check_cache(cache, "cache")
    cache.get_num_keys()  # raises if it is closed


def turn(cache: BlobCache) -> threading.Lock:
    """The lock to hold from reading weights of a cache until the commit of weights that were computed from them."""
    with _lock:
        return _turns.setdefault(cache, threading.Lock())


def cache_adapters(cache: BlobCache) -> CacheAdapters:
    """What adapters must know about a cache; its files are read at the first call.

    Raises:
        As `BlobCache.files`.
    """
    with _lock:
        known = _known.get(cache)
        if known is None:
            known = _known[cache] = _learn(cache)
        return known


def _learn(cache: BlobCache) -> CacheAdapters:
    """Read the files of a cache and its bases. A foundation may be any one of them, or all together."""
    files = _files(cache)
    foundations: set[str] = set()
    for blobs in [*files, MergedDataMap(files)] if len(files) > 1 else files:
        if any(not is_lora(key) for key in named_tensors(blobs)):
            foundations.add(fingerprint(blobs))
    if (
        not foundations
    ):  # the program may embed its foundation; then only the file of its adapter records which one it is
        foundations = {file.metadata[FOUNDATION] for file in files if FOUNDATION in file.metadata}
    scales = {scale for file in files if (scale := recorded_scale(file)) is not None}
    lora = {name for name in named_tensors(cache, cache.tensors) if is_lora(name)}
    return CacheAdapters(frozenset(foundations), frozenset(scales), frozenset(lora))


def _files(cache: BlobCache) -> list[PtdDataMap]:
    return [*cache.files, *(_files(cache.base) if cache.base is not None else ())]


def check_foundation(cache: BlobCache, adapter: Adapter) -> None:
    """Raise AdapterError if an adapter was not made for the foundation of a cache, or does not record its own."""
    if adapter.foundation is None:
        raise AdapterError(
            f"{adapter.path}: the file does not record the foundation that it was made for; bind_adapter() adds it"
        )
    foundations = cache_adapters(cache).foundations
    if adapter.foundation not in foundations:
        have = " or ".join(sorted(foundations)) or "none"
        raise AdapterError(f"{adapter.path}: made for foundation {adapter.foundation}, {cache.name} has {have}")


@contextmanager
def named_origin(origin: object) -> Iterator[None]:
    """Put the file that tensors came from in front of the messages of errors about them."""
    try:
        yield
    except (AdapterError, KeyNotFoundError, LayoutError, UpdateError) as error:
        if str(error).startswith(f"{origin}: "):
            raise
        raise type(error)(f"{origin}: {error}") from error
