"""Exchanging the adapter of a cache while programs run on it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from blobstore.adapters.adapter_file import Adapter, check_scale, read_adapter
from blobstore.adapters.foundation import content_keys
from blobstore.adapters.lora_names import quoted, raise_first
from blobstore.adapters.on_cache import (
    CacheAdapters,
    cache_adapters,
    check_foundation,
    check_open_cache,
    named_origin,
    turn,
)
from blobstore.errors import AdapterError, UpdateError
from blobstore.logical import steps
from blobstore.memory.layout import ScalarType

if TYPE_CHECKING:
    from blobstore.runtime import BlobCache

__all__ = ["load_adapter"]


def load_adapter(cache: BlobCache, path: str | os.PathLike[str], *, program_scale: float | None = None) -> int:
    """Exchange the adapter that the programs on a cache run with, in one commit.

    The tensors of the file are stored in the layouts that the programs use. One file therefore serves portable
    programs, delegated ones, and quantized ones whose lowering recorded their scales. The first call for a cache
    computes the fingerprint of its foundation; only files without digests are read whole for that.

    Args:
        cache: must already have the tensors of an adapter: that of the lowering or any other.
        path: an adapter that records its foundation; see `save_adapter` and `bind_adapter`.
        program_scale: the factor that the program multiplies the product with. If it is not given, the scale of the
            adapter must be the one that the cache's files record, if they record any. If it differs from the adapter's
            scale, the adapter's `lora_b` is multiplied so that the program computes what the adapter was trained for.

    Returns:
        The new generation of the cache. `cache.revert()` restores the adapter in the cache's file.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
        DataChangedError: a file of the cache was overwritten in place after it was opened, so its foundation is
            unknown.
        AdapterError: the adapter is for another foundation or does not record one; a tensor of a pair is missing; it
            lacks tensors of the programs, which would keep those of the last adapter; or its scale is another one.
            Nothing was changed; the same holds for all errors below.
        KeyNotFoundError: the cache lacks a tensor.
        LayoutError: a tensor has another shape or dtype in the cache.
        UpdateError: a tensor has infinities or NaN, or cannot be changed, or not in all loaded programs.
        UnsupportedDataError: `cache` is not a `BlobCache`.
    """
    check_open_cache(cache)
    adapter = read_adapter(path)
    check_foundation(cache, adapter)
    raise_first(adapter.unpaired)  # the update itself refuses infinities and NaN
    known = cache_adapters(cache)
    logical, stored = _values(adapter, _factor(cache, known, adapter, program_scale))
    missing = known.lora - {cache.tensors[name].name if name in cache.tensors else name for name in adapter.contents}
    if missing:
        raise AdapterError(
            f"{adapter.path}: lacks {quoted(missing)}, so {cache.name} would keep those of another adapter"
        )
    with turn(cache), named_origin(adapter.path):
        if stored and logical:
            raise UpdateError(f"{quoted(stored)} are quantized and others are not; lower the adapter as a whole")
        cache.tensors.check_reach(logical)
        return cache.update_blobs(stored) if stored else cache.update(logical, finite=True)


def _factor(cache: BlobCache, known: CacheAdapters, adapter: Adapter, program_scale: float | None) -> float:
    """The factor for `lora_b` that makes up for the scale in the program."""
    if adapter.scale is None:
        return 1.0
    if program_scale is None:
        if known.scales - {adapter.scale}:
            have = ", ".join(map(repr, sorted(known.scales)))
            raise AdapterError(
                f"{adapter.path}: its scale is {adapter.scale!r}, that of the adapter in {cache.name} is {have}; give the "
                "factor of the program as program_scale="
            )
        return 1.0
    number = check_scale(program_scale, "program_scale")
    if number == 0:
        raise AdapterError("program_scale is 0, so no adapter has an effect on this program")
    return adapter.scale / number


def _values(adapter: Adapter, factor: float) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """The tensors of an adapter in the form of updates: by name or, if they are quantized, as blobs by key."""
    halves = {pair.b for pair in adapter.pairs}
    logical: dict[str, Any] = {}
    try:
        for name in adapter.contents:
            value = adapter.value(name)
            if factor != 1 and name in halves:
                with np.errstate(over="ignore", invalid="ignore"):  # the update refuses infinities and NaN
                    value = steps.cast((steps.floats(value) * np.float32(factor), ScalarType.FLOAT), value[1])
            logical[name] = steps.tensor_of(value)
    except UpdateError:
        if factor != 1:
            raise
        return {}, {key: adapter.blobs[key] for key in content_keys(adapter.blobs)}
    return logical, {}
