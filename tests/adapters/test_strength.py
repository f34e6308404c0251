"""How much of a loaded adapter the programs use (N1, D2, B3)."""

import os
from typing import Any

import numpy as np
import pytest
import torch

from blobstore import errors, open_ptd
from blobstore.adapters import load_adapter, set_adapter_strength
from tests.adapters.caches import X, at_strength, bits, eager, open_lora, save
from tests.lowering.live import close


def test_strength(lora: Any) -> None:
    """Each change takes effect at the next call; 0 turns the adapter off, and 1 restores what was loaded; the
    file is not needed again (N1, D2)."""
    cache, method = open_lora(lora)
    load_adapter(cache, save(lora, 1))
    loaded = bits(cache)
    for strength in (0.5, 0, -2, 1 / 3, 1e-30):
        generation = cache.generation
        assert set_adapter_strength(cache, strength) == cache.generation > generation
        close(method(*X), at_strength(1, strength))
    set_adapter_strength(cache, 1)
    assert bits(cache) == loaded
    close(method(*X), eager(1))
    set_adapter_strength(cache, 0)
    path = save(lora, 2)
    load_adapter(cache, path)  # the strength was that of the adapter before it, not of the cache
    close(method(*X), eager(2))
    path.unlink()
    set_adapter_strength(cache, 0.5)
    close(method(*X), at_strength(2, 0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "x", 10**400])
def test_strengths_that_are_no_numbers(lora: Any, bad: Any) -> None:
    """Each is an AdapterError, and nothing changes."""
    cache, _ = open_lora(lora)
    path = save(lora, 1)
    with pytest.raises(errors.AdapterError, match="strength .* is not a finite number"):
        load_adapter(cache, path, strength=bad)
    assert cache.generation == 0
    load_adapter(cache, path)
    with pytest.raises(errors.AdapterError, match="strength .* is not a finite number"):
        set_adapter_strength(cache, bad)
    assert cache.generation == 1


def test_a_strength_that_overflows(lora: Any) -> None:
    """The message names the adapter and the tensor, and nothing changes (B3)."""
    cache, method = open_lora(lora)
    load_adapter(cache, save(lora, 1))
    before = method(*X).clone()
    with pytest.raises(errors.UpdateError, match=r"1\.ptd: 'l\.\d\.lora_b\.weight' has values that are not finite"):
        set_adapter_strength(cache, 1e300)
    assert torch.equal(method(*X), before)
    set_adapter_strength(cache, np.float32(0.5))
    close(method(*X), at_strength(1, 0.5))


def test_an_overwritten_file(lora: Any) -> None:
    """A strength never starts from other bytes than those that were loaded (B5)."""
    cache, method = open_lora(lora)
    path = save(lora, 1)
    load_adapter(cache, path)
    before = method(*X).clone()
    with open_ptd(path) as blobs:
        start, _ = blobs.byte_range("l.1.lora_b.weight")
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\1")
    with pytest.raises(errors.IntegrityError, match=r"1\.ptd: .*l\.1\.lora_b\.weight"):
        set_adapter_strength(cache, 0.5)
    os.truncate(path, 100)
    with pytest.raises(errors.FileAccessError, match=r"1\.ptd"):
        set_adapter_strength(cache, 0.5)
    assert torch.equal(method(*X), before)
