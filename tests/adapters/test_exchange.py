"""Exchanging the adapter of a cache, compared with eager PyTorch (D2, U3, B3)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobstore import errors, open_ptd, save_file
from blobstore.adapters import bind_adapter, load_adapter, load_adapters, save_adapter, set_adapter_strength
from blobstore.runtime import BlobCache, Program
from tests.adapters.caches import X, at_strength, eager, open_lora, save
from tests.adapters.nets import RANK, SCALE, adapter_of
from tests.helpers.beside import running
from tests.helpers.waiting import until
from tests.lowering.live import close

# Exchanging


@pytest.mark.way
def test_exchange(lora: Any) -> None:
    """Each load takes effect at the next call; a revert restores the adapter of the file (D2, U1)."""
    cache, method = open_lora(lora)
    close(method(*X), eager(None))
    for seed in (1, 2, 1):
        generation = cache.generation
        assert load_adapter(cache, save(lora, seed)) == cache.generation > generation
        close(method(*X), eager(seed))
    cache.revert()
    close(method(*X), eager(None))


@pytest.mark.parametrize("lora", [False], ids=["portable"], indirect=True)
def test_stock_runtime_takes_foundation_and_adapter(lora: Any, module_runner: Any) -> None:
    """ExecuTorch's C++ Module, which lacks the delegate, runs the portable program on both files, also on a saved
    one, which becomes an adapter by binding (D2)."""
    cache, method = open_lora(lora)
    load_adapter(cache, save(lora, 1))
    cache.save(lora.folder / "b.ptd")
    with pytest.raises(errors.AdapterError, match=r"b.ptd: the file does not record the foundation .* bind_adapter"):
        load_adapter(cache, lora.folder / "b.ptd")
    bind_adapter(lora.folder / "b.ptd", lora.folder / "bound.ptd", foundation=lora.foundation, scale=SCALE)
    cache.revert()
    load_adapter(cache, lora.folder / "bound.ptd")
    close(method(*X), eager(1))
    for file, seed in ((lora.adapter, None), (lora.folder / "bound.ptd", 1)):
        found = module_runner(lora.pte, [lora.foundation, file], [X[0].numpy()])
        np.testing.assert_allclose(found[0], eager(seed).numpy(), rtol=1e-5, atol=1e-5)


def test_another_scale(lora: Any) -> None:
    """If an adapter was trained with another scale than the program's, its `lora_b` is multiplied to make up for it."""
    path = save(lora, 1, scale=3 * SCALE)
    cache, method = open_lora(lora)
    load_adapter(cache, path, program_scale=SCALE)
    close(method(*X), at_strength(1, 3))
    set_adapter_strength(cache, 0.5)  # of the adapter, not of what makes up for the scale
    close(method(*X), at_strength(1, 1.5))
    bind_adapter(lora.adapter, lora.folder / "bound.ptd", foundation=lora.foundation, scale=SCALE)
    cache, _ = open_lora(lora, lora.folder / "bound.ptd")
    with pytest.raises(
        errors.AdapterError, match=r"its scale is 4.5, that of the adapter in .* is 1.5; .*program_scale"
    ):
        load_adapter(cache, path)
    for bad in (0, float("nan"), "x"):
        with pytest.raises(errors.AdapterError, match="program_scale"):
            load_adapter(cache, path, program_scale=bad)


@pytest.mark.parametrize("recorded", [False, True])
def test_an_adapter_of_peft_is_not_taken_for_one_of_the_program(lora: Any, recorded: bool) -> None:
    """Its scale is anything, so it counts, or the call is refused (L2)."""
    imported = {"blobstore.adapter.peft": "{}"}
    path = save(lora, 1, scale=2 * SCALE, metadata=imported)
    if recorded:
        bind_adapter(lora.adapter, lora.folder / "bound.ptd", foundation=lora.foundation, scale=SCALE)
    cache, method = open_lora(lora, lora.folder / "bound.ptd" if recorded else None)
    for call in (load_adapter,) if recorded else (load_adapter, lambda *given: load_adapters(given[0], [given[1]])):
        with pytest.raises(
            errors.AdapterError, match=r"its scale is 3\.0, .* give the factor of the program as `program_scale`"
        ):
            call(cache, path)
    assert cache.generation == 0
    load_adapters(cache, [path], program_scale=None if recorded else SCALE)
    close(method(*X), at_strength(1, 2))


# Two at once


def test_no_call_sees_half_an_adapter(lora: Any) -> None:
    """Every call computes with exactly one of the adapters while they are exchanged (B3)."""
    cache, _ = open_lora(lora)
    method = Program(lora.pte, cache).load_method()
    paths = [save(lora, seed) for seed in (1, 2)]
    load_adapter(cache, paths[0])
    expected = []
    for path in paths:
        load_adapter(cache, path)
        expected.append(method(*X).clone())
    seen = [0] * len(paths)

    def exchange() -> None:
        for path in paths:
            load_adapter(cache, path)

    def call() -> None:
        found = method(*X)
        (which,) = (number for number, one in enumerate(expected) if torch.equal(found, one))
        seen[which] += 1

    with running(exchange):
        until(lambda: sum(seen) >= 200 and min(seen) >= 5, meanwhile=call)


# Adapters that are refused


def broken(lora: Any, kind: str) -> Path:
    """The file of an adapter with one defect."""
    tensors = adapter_of(1)
    path = lora.folder / f"{kind}.ptd"
    if kind in {"unpaired", "nan"}:  # which `save_adapter` does not write
        tensors["l.0.lora_b.weight"][0, 0] = float("nan")
        if kind == "unpaired":
            del tensors["l.1.lora_b.weight"]
        save_file(tensors, path, metadata=dict(open_ptd(save(lora, 5)).metadata))
        return path
    if kind == "rank":
        tensors = adapter_of(1, rank=RANK + 1)
    elif kind == "shape":
        tensors["l.1.lora_a.weight"] = torch.zeros(RANK, 23)
    elif kind == "lacks":
        tensors = {name: t for name, t in tensors.items() if name.startswith("l.0")}
    elif kind == "module":
        tensors |= {name.replace("l.0", "l.7"): t for name, t in tensors.items()}
    elif kind == "dtype":
        tensors = {name: t.double() for name, t in tensors.items()}
    save_adapter(path, tensors, foundation=lora.foundation, scale=SCALE)
    return path


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("unpaired", errors.AdapterError, "'l.1.lora_a.weight' has no lora_b"),
        ("nan", errors.UpdateError, r"nan.ptd: .*'l.0.lora_b.weight'.*not finite"),
        ("rank", errors.LayoutError, r"rank.ptd: "),
        ("shape", errors.LayoutError, r"shape.ptd: .*l.1.lora_a.weight"),
        ("dtype", errors.LayoutError, r"dtype.ptd: "),
        ("lacks", errors.AdapterError, r"lacks.ptd: lacks 'l.1.lora_a.weight', 'l.1.lora_b.weight'"),
        ("module", errors.KeyNotFoundError, r"module.ptd: .*l.7.lora_a.weight"),
    ],
)
def test_broken_adapters_are_refused(lora: Any, kind: str, error: type[Exception], message: str) -> None:
    """The message names the file and the tensor, and nothing changes (B3)."""
    cache, method = open_lora(lora)
    before, generation = method(*X).clone(), cache.generation
    with pytest.raises(error, match=message):
        load_adapter(cache, broken(lora, kind))
    assert cache.generation == generation
    assert torch.equal(method(*X), before)


@pytest.mark.parametrize("mode", ["private", "copy"])
def test_replaced_files(lora: Any, mode: Any) -> None:
    """A cache knows the foundation that it opened, even after its files were replaced by others (D2)."""
    cache = BlobCache([lora.foundation, lora.adapter], mode)
    method = Program(lora.pte, cache).method()
    path = save(lora, 1)
    with BlobCache(lora.foundation) as changed:
        changed.update_blobs(
            {key: bytes(len(changed.get_data(key))) for key in changed if not key.startswith("metadata.")}
        )
        changed.save(lora.folder / "new.ptd")
    (lora.folder / "new.ptd").replace(lora.foundation)
    with pytest.raises(errors.AdapterError, match=r"2\.ptd: made for foundation"):
        load_adapter(cache, save(lora, 2))
    lora.foundation.unlink()
    load_adapter(cache, path)
    close(method(*X), eager(1))


def test_overwritten_files(lora: Any) -> None:
    """A file that was overwritten in place does not describe the cache any more (B5)."""
    cache = BlobCache([lora.foundation, lora.adapter], "copy")
    path = save(lora, 1)
    data = bytearray(lora.foundation.read_bytes())
    with open_ptd(lora.foundation) as blobs:
        key = next(key for key in blobs if blobs.bytes(key))
        start, _ = blobs.byte_range(key)
    data[start] ^= 1
    with lora.foundation.open("r+b") as file:
        file.write(data)
    with pytest.raises(errors.DataChangedError, match=rf"foundation\.ptd: the file was overwritten .*'{key}' differs"):
        load_adapter(cache, path)
    assert cache.generation == 0
