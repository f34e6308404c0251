"""Exchanging the adapter of a cache, and changing its strength, while programs run on it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from blobstore.adapters.adapter_file import check_scale
from blobstore.adapters.foundation import library
from blobstore.adapters.on_cache import native_tensors_of
from blobstore.adapters.peft_folder import adapter_path

if TYPE_CHECKING:
    from blobstore.runtime import BlobCache

__all__ = ["load_adapter", "set_adapter_strength"]


def load_adapter(
    cache: BlobCache,
    path: str | os.PathLike[str],
    *,
    program_scale: float | None = None,
    strength: float = 1.0,
) -> int:
    """Exchange the adapter that the programs on a cache run with, in one commit.

    The tensors of the file are stored in the layouts that the programs use. One file therefore serves portable
    programs, delegated ones, and quantized ones whose lowering recorded their scales.

    The adapter must be made for the foundation as it is now: updates, releases that were followed, reverts and commits by
    other processes count. Adapters that are merged do not, because their sum with this one is meant. The first call for a
    cache computes the fingerprint of its foundation; only files without digests are read whole for that, and blobs that
    changed since the last call.

    PEFT's folders are taken as they are, as by `import_peft`: modules get the names of the programs, smaller ranks and
    missing modules are filled up with zeros, fused modules are split, and rows of q and k are reordered if the rotary tables
    in the foundation say so. Scales are made up for in `lora_b`, rounded once. Such a folder does not record what it was
    made for, so only names and shapes are compared.

    Args:
        cache: must already have the tensors of an adapter: that of the lowering or any other.
        path: an adapter that records its foundation; see `save_adapter` and `bind_adapter`. Or an adapter as PEFT saved it: a
            folder, or its name on Hugging Face's Hub, if it is in the local cache; see below.
        program_scale: the factor that the program multiplies the product with. If it is not given, the scale of the
            adapter must be the one that the cache's files record, if they record any. If it differs from the adapter's
            scale, the adapter's `lora_b` is multiplied so that the program computes what the adapter was trained for.
        strength: how much of the adapter the programs use: 1 is what it was trained for, 0 turns it off;
            `set_adapter_strength` changes it later.

    Returns:
        The new generation of the cache. `cache.revert()` restores the adapter in the cache's file.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
        DataChangedError: a file of the cache was overwritten in place after it was opened, so its foundation is
            unknown.
        AdapterError: the adapter is for another foundation than the weights are now or does not record one; a tensor of a pair is missing; it
            lacks tensors of the programs, which would keep those of the last adapter; or its scale is another one.
            Nothing was changed; the same holds for all errors below.
        KeyNotFoundError: the cache lacks a tensor.
        LayoutError: a tensor has another shape or dtype in the cache.
        UpdateError: a tensor has infinities or NaN, or cannot be changed, or not in all loaded programs.
        UnsupportedDataError: `cache` is not a `BlobCache`.
    """
    tensors = native_tensors_of(cache)
    name = os.fsencode(adapter_path(path))
    scale = None if program_scale is None else check_scale(program_scale, "program_scale")
    return int(library().load_adapter(tensors, name, scale, check_scale(strength, "strength")))


def set_adapter_strength(cache: BlobCache, strength: float) -> int:
    """Change how much of the adapter that `load_adapter` loaded last the programs use, in one commit.

    `lora_b` becomes the strength times the one in the adapter's file, which stays mapped. So repeated changes add up no
    rounding, and strength 1 restores exactly what `load_adapter` stored.

    Args:
        cache: the cache that the adapter was loaded into.
        strength: 1 is what the adapter was trained for, 0 turns it off.

    Returns:
        The new generation of the cache.

    Raises:
        AdapterError: no adapter was loaded, its tensors were changed or reverted since, the strength is not a finite number,
            or the foundation is another one now, for which only strength 0 is possible. Nothing was changed; the same holds for all errors below.
        UpdateError: the result has infinities or NaN, or the adapter is stored quantized.
        FileAccessError, IntegrityError: the adapter's file was truncated or overwritten in place.
        UnsupportedDataError: `cache` is not a `BlobCache`.
    """
    tensors = native_tensors_of(cache)
    return int(library().set_adapter_strength(tensors, check_scale(strength, "strength")))
