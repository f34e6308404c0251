"""Caches with and without an adapter, and what their programs must compute according to eager PyTorch."""

from pathlib import Path
from typing import Any

import torch

from blobstore.adapters import save_adapter
from blobstore.runtime import BlobCache, Program
from tests.adapters.nets import SCALE, LoraNet, adapter_of, make, plain_of, with_adapter
from tests.lowering.live import inputs

X = inputs(3, 16)


def eager(seed: int | None) -> torch.Tensor:
    """The output with an adapter, or with the branches as they were lowered."""
    module = make(LoraNet)
    with torch.no_grad():
        return (module if seed is None else with_adapter(module, adapter_of(seed)))(*X)


def at_strength(seed: int, strength: float) -> torch.Tensor:
    """The output with an adapter whose branches are multiplied."""
    module = with_adapter(make(LoraNet), adapter_of(seed))
    with torch.no_grad():
        for layer in module.l:
            layer.lora_b.weight *= strength
        return module(*X)


def merged(seed: int, amount: float) -> torch.Tensor:
    """The output of a net without branches whose weights are W + amount * B @ A."""
    module = plain_of(make(LoraNet))
    tensors = adapter_of(seed)
    with torch.no_grad():
        for i, layer in enumerate(module.l):
            layer.weight += amount * (tensors[f"l.{i}.lora_b.weight"] @ tensors[f"l.{i}.lora_a.weight"])
        return module(*X)


def save(lora: Any, seed: int, **options: Any) -> Path:
    """An adapter's file for the foundation of the fixture `lora`."""
    path = lora.folder / f"{seed}.ptd"
    save_adapter(path, adapter_of(seed), **{"foundation": lora.foundation, "scale": SCALE, **options})
    return path


def open_lora(lora: Any, adapter: Any = None) -> tuple[BlobCache, Any]:
    """A cache of the adapter on one of the foundation, and the method on it."""
    cache = BlobCache(adapter or lora.adapter, base=BlobCache(lora.foundation))
    return cache, Program(lora.pte, cache).method()


def open_plain(plain: Any, mode: Any = "private") -> tuple[BlobCache, Any]:
    """A cache of the fixture `plain`, and the method on it."""
    cache = BlobCache(plain.model, mode)
    return cache, Program(plain.pte, cache).method()


def bits(cache: BlobCache) -> dict[str, bytes]:
    """Copies of all blobs, from one generation."""
    with cache.reading():
        return {key: cache.bytes(key) for key in cache}
