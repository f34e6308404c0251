"""Adapters on a cache, against eager PyTorch: exchanged, two in use at once, merged and taken out (D2, U2, B3)."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobstore.adapters import bind_adapter, load_adapter, merge_adapter, save_adapter
from blobstore.errors import (
    AdapterError,
    ClosedError,
    DataChangedError,
    KeyNotFoundError,
    LayoutError,
    UnsupportedDataError,
    UpdateError,
)
from blobstore.runtime import BlobCache, Program
from tests.adapters.nets import RANK, SCALE, LoraNet, adapter_of, lower_lora, lower_plain, make, plain_of, with_adapter
from tests.lowering.live import close, inputs
from tests.waiting import until

X = inputs(3, 16)


def eager(seed: int | None) -> torch.Tensor:
    module = make(LoraNet)
    with torch.no_grad():
        return (module if seed is None else with_adapter(module, adapter_of(seed)))(*X)


def merged(seed: int, amount: float) -> torch.Tensor:
    """What a plain layer computes whose weight is W + amount * B @ A."""
    module = plain_of(make(LoraNet))
    tensors = adapter_of(seed)
    with torch.no_grad():
        for i, layer in enumerate(module.l):
            layer.weight += amount * (tensors[f"l.{i}.lora_b.weight"] @ tensors[f"l.{i}.lora_a.weight"])
        return module(*X)


def save(lora: Any, seed: int, **options: Any) -> Any:
    path = lora.folder / f"{seed}.ptd"
    save_adapter(path, adapter_of(seed), **{"foundation": lora.foundation, "scale": SCALE, **options})
    return path


def open_lora(lora: Any, adapter: Any = None) -> tuple[BlobCache, Any]:
    cache = BlobCache(adapter or lora.adapter, base=BlobCache(lora.foundation))
    return cache, Program(lora.pte, cache).method()


# Exchanging


def test_exchange(lora: Any) -> None:
    cache, method = open_lora(lora)
    close(method(*X)[0], eager(None))
    for seed in (1, 2, 1):
        generation = cache.generation
        assert load_adapter(cache, save(lora, seed)) == cache.generation > generation
        close(method(*X)[0], eager(seed))
    cache.revert()
    close(method(*X)[0], eager(None))


@pytest.mark.parametrize("layout", ["one file each", "merged", "working copy", "copy"])
def test_however_the_cache_is_opened(lora: Any, layout: str) -> None:
    from blobstore.runtime import make_working_copy

    if layout == "one file each":
        cache = BlobCache([lora.foundation, lora.adapter])
    elif layout == "merged":
        make_working_copy([lora.foundation, lora.adapter], lora.folder / "all.ptd")
        cache = BlobCache(lora.folder / "all.ptd")
    elif layout == "working copy":
        make_working_copy([lora.foundation, lora.adapter], lora.folder / "all.ptd")
        cache = BlobCache(lora.folder / "all.ptd", "shared")
    else:
        cache = BlobCache([lora.adapter, lora.foundation], "copy")
    method = Program(lora.pte, cache).method()
    load_adapter(cache, save(lora, 1))
    close(method(*X)[0], eager(1))


def test_lowering_s_own_file_is_an_adapter_once_it_is_bound(lora: Any) -> None:
    """Its keys stay, so it can be loaded, and also be mapped in place of the other."""
    cache, method = open_lora(lora)
    load_adapter(cache, save(lora, 1))
    cache.save(lora.folder / "stored.ptd")
    with pytest.raises(AdapterError, match=r"stored.ptd: nothing is recorded .* bind_adapter"):
        load_adapter(cache, lora.folder / "stored.ptd")
    bind_adapter(lora.folder / "stored.ptd", lora.folder / "bound.ptd", foundation=lora.foundation, scale=SCALE)
    cache.revert()
    load_adapter(cache, lora.folder / "bound.ptd")
    close(method(*X)[0], eager(1))
    close(open_lora(lora, lora.folder / "bound.ptd")[1](*X)[0], eager(1))


@pytest.mark.parametrize("lora", [False], ids=["portable"], indirect=True)
def test_stock_runtime_takes_foundation_and_adapter(lora: Any, module_runner: Any) -> None:
    """The stock C++ Module; it does not have the delegate (D2)."""
    cache, _ = open_lora(lora)
    load_adapter(cache, save(lora, 1))
    cache.save(lora.folder / "b.ptd")
    bind_adapter(lora.folder / "b.ptd", lora.folder / "bound.ptd", foundation=lora.foundation, scale=SCALE)
    for file, seed in ((lora.adapter, None), (lora.folder / "bound.ptd", 1)):
        found = module_runner(lora.pte, [lora.foundation, file], [X[0].numpy()])
        np.testing.assert_allclose(found[0], eager(seed).numpy(), rtol=1e-5, atol=1e-5)


def test_another_scale(lora: Any) -> None:
    """The program multiplies with SCALE; an adapter that was trained with another one is made up for."""
    path = save(lora, 1, scale=3 * SCALE)
    cache, method = open_lora(lora)
    load_adapter(cache, path, program_scale=SCALE)
    module = with_adapter(make(LoraNet), adapter_of(1))
    with torch.no_grad():
        for layer in module.l:
            layer.lora_b.weight *= 3
        close(method(*X)[0], module(*X))
    bind_adapter(lora.adapter, lora.folder / "bound.ptd", foundation=lora.foundation, scale=SCALE)
    cache, _ = open_lora(lora, lora.folder / "bound.ptd")
    with pytest.raises(AdapterError, match=r"its scale is 4.5, that of the adapter in .* is 1.5; .*program_scale"):
        load_adapter(cache, path)
    for bad in (0, float("nan"), "x"):
        with pytest.raises(AdapterError, match="program_scale"):
            load_adapter(cache, path, program_scale=bad)


# Two at once


def test_two_callers_with_two_adapters_on_one_foundation(lora: Any) -> None:
    """W1, D2: each has its own program and cache; the foundation is one."""
    base = BlobCache(lora.foundation)
    caches = [BlobCache(lora.adapter, base=base) for _ in range(2)]
    methods = [Program(lora.pte, cache).method() for cache in caches]
    paths = {seed: save(lora, seed) for seed in range(4)}
    expected = {seed: eager(seed) for seed in paths}
    failures: list[BaseException] = []
    barrier = threading.Barrier(2)

    def serve(caller: int) -> None:
        try:
            barrier.wait()
            for turn in range(20):
                seed = 2 * caller + turn % 2
                load_adapter(caches[caller], paths[seed])
                close(methods[caller](*X)[0], expected[seed])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(caller,)) for caller in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert not base.dirty


def test_no_call_sees_half_an_adapter(lora: Any) -> None:
    """B3"""
    cache, _ = open_lora(lora)
    method = Program(lora.pte, cache).load_method()
    paths = [save(lora, seed) for seed in (1, 2)]
    load_adapter(cache, paths[0])
    expected = []
    for path in paths:
        load_adapter(cache, path)
        expected.append(method(*X)[0].clone())
    stop = threading.Event()
    seen = [0] * len(paths)

    def exchange() -> None:
        while not stop.is_set():
            for path in paths:
                load_adapter(cache, path)

    def call() -> None:
        found = method(*X)[0]
        (which,) = (number for number, one in enumerate(expected) if torch.equal(found, one))
        seen[which] += 1

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        until(lambda: sum(seen) >= 200 and min(seen) >= 5, meanwhile=call)
    finally:
        stop.set()
        thread.join()


# What cannot be loaded, and changes nothing


def corrupt(lora: Any, kind: str) -> Any:
    tensors = adapter_of(1)
    if kind == "unpaired":
        cache_file = lora.folder / "unpaired.ptd"
        from blobstore import open_ptd, save_file

        del tensors["l.1.lora_b.weight"]
        save_file(tensors, cache_file, metadata=dict(open_ptd(save(lora, 5)).metadata))
        return cache_file
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
    path = lora.folder / f"{kind}.ptd"
    save_adapter(path, tensors, foundation=lora.foundation, scale=SCALE)
    return path


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("unpaired", AdapterError, "'l.1.lora_a.weight' has no lora_b"),
        ("rank", LayoutError, r"rank.ptd: "),
        ("shape", LayoutError, r"shape.ptd: .*l.1.lora_a.weight"),
        ("dtype", LayoutError, r"dtype.ptd: "),
        ("lacks", AdapterError, r"lacks.ptd: lacks 'l.1.lora_a.weight', 'l.1.lora_b.weight'"),
        ("module", KeyNotFoundError, r"module.ptd: .*l.7.lora_a.weight"),
    ],
)
def test_refused(lora: Any, kind: str, error: type[Exception], message: str) -> None:
    cache, method = open_lora(lora)
    before, generation = method(*X)[0].clone(), cache.generation
    with pytest.raises(error, match=message):
        load_adapter(cache, corrupt(lora, kind))
    assert cache.generation == generation
    assert torch.equal(method(*X)[0], before)


def test_another_foundation_is_refused(lora: Any, tmp_path: Any) -> None:
    lower_lora(make(LoraNet, seed=7), X, tmp_path / "other", delegated=False)
    path = save(lora, 1, foundation=tmp_path / "other" / "foundation.ptd")
    cache, method = open_lora(lora)
    with pytest.raises(AdapterError, match=r"1.ptd: made for foundation [0-9a-f]{32}, .* has [0-9a-f]{32}"):
        load_adapter(cache, path)
    assert cache.generation == 0
    close(method(*X)[0], eager(None))


def test_not_finite_is_refused(lora: Any) -> None:
    from blobstore import open_ptd, save_file

    tensors = adapter_of(1)
    tensors["l.0.lora_b.weight"][0, 0] = float("nan")
    save_file(tensors, lora.folder / "nan.ptd", metadata=dict(open_ptd(save(lora, 1)).metadata))
    cache, _ = open_lora(lora)
    with pytest.raises(UpdateError, match=r"nan.ptd: .*'l.0.lora_b.weight'.*not finite"):
        load_adapter(cache, lora.folder / "nan.ptd")
    assert cache.generation == 0


def test_a_closed_cache(lora: Any, plain: Any) -> None:
    for use in (load_adapter, merge_adapter):
        cache = BlobCache(lora.adapter)
        cache.close()
        with pytest.raises(ClosedError):
            use(cache, save(lora, 1))


# Merging


def open_plain(plain: Any, mode: Any = "private") -> tuple[BlobCache, Any]:
    cache = BlobCache(plain.model, mode)
    return cache, Program(plain.pte, cache).method()


def bits(cache: BlobCache) -> dict[str, bytes]:
    with cache.reading():
        return {key: bytes(data) for key, data in cache.items()}


@pytest.mark.parametrize("alpha", [1.0, 0.5, -1.0])
def test_merge_and_undo(plain: Any, alpha: float) -> None:
    cache, method = open_plain(plain)
    before, first = bits(cache), method(*X)[0].clone()
    save_adapter(plain.folder / "a.ptd", adapter_of(1), foundation=plain.model, scale=SCALE)
    handle = merge_adapter(cache, plain.folder / "a.ptd", alpha)
    assert handle.weights == ("l.0.weight", "l.1.weight") and handle.generation == cache.generation == 1
    close(method(*X)[0], merged(1, alpha * SCALE))
    if alpha == 1:
        close(method(*X)[0], eager(1))
    handle.undo()
    assert bits(cache) == before
    assert torch.equal(method(*X)[0], first)
    with pytest.raises(AdapterError, match="already"):
        handle.undo()


def test_tensors_without_a_file(plain: Any) -> None:
    """Of PEFT's names, as numpy arrays, with a name given for one module."""
    cache, method = open_plain(plain)
    tensors = {
        name.replace("l.0.lora_a", "base_model.model.l.0.lora_A.default")
        .replace("l.0.lora_b", "base_model.model.l.0.lora_B.default")
        .replace("l.1", "head"): tensor.numpy()
        for name, tensor in adapter_of(1).items()
    }
    handle = merge_adapter(cache, tensors, scale=SCALE, names={"head": "l.1.weight"})
    close(method(*X)[0], eager(1))
    handle.undo()
    close(method(*X)[0], merged(1, 0))


def test_undo_gives_back_what_was_dirty(plain: Any) -> None:
    cache, _ = open_plain(plain)
    cache.update({"l.0.weight": torch.randn(24, 16)})
    before = bits(cache)
    handle = merge_adapter(cache, adapter_of(1))
    assert bits(cache) != before
    handle.undo()
    assert bits(cache) == before


def test_last_in_first_out(plain: Any) -> None:
    cache, method = open_plain(plain)
    handles, states = [], []
    for seed in (1, 2):
        states.append(bits(cache))
        handles.append(merge_adapter(cache, adapter_of(seed), scale=SCALE))
    with pytest.raises(AdapterError, match=r"changed after the adapter was merged in generation 1; undo first"):
        handles[0].undo()
    assert cache.generation == 2
    for handle, state in zip(reversed(handles), reversed(states), strict=True):
        handle.undo()
        assert bits(cache) == state
    close(method(*X)[0], merged(1, 0))


def test_different_weights_in_any_order(plain: Any) -> None:
    cache, _ = open_plain(plain)
    before, tensors = bits(cache), adapter_of(1)
    handles = [merge_adapter(cache, {n: t for n, t in tensors.items() if n.startswith(m)}) for m in ("l.0", "l.1")]
    for handle in handles:
        handle.undo()
    assert bits(cache) == before


def test_undo_after_a_change_is_refused(plain: Any) -> None:
    cache, _ = open_plain(plain)
    handle = merge_adapter(cache, adapter_of(1))
    cache.update({"l.1.weight": torch.zeros(8, 24)})
    state = bits(cache)
    with pytest.raises(AdapterError, match=r"'l.1.weight.*' changed after"):
        handle.undo()
    assert bits(cache) == state


def test_merging_in_a_shared_working_copy(plain: Any) -> None:
    from blobstore.runtime import make_working_copy

    make_working_copy(plain.model, plain.folder / "work.ptd")
    cache = BlobCache(plain.folder / "work.ptd", "shared")
    before = bits(cache)
    handle = merge_adapter(cache, adapter_of(1))
    assert bits(cache) != before
    handle.undo()
    assert bits(cache) == before


def test_merging_in_threads(plain: Any) -> None:
    """Merges wait for each other, so that none is lost."""
    cache, method = open_plain(plain)
    adapters = [adapter_of(seed) for seed in range(4)]
    threads = [threading.Thread(target=merge_adapter, args=(cache, adapter)) for adapter in adapters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    module = plain_of(make(LoraNet))
    with torch.no_grad():
        for i, layer in enumerate(module.l):
            for tensors in adapters:
                layer.weight += tensors[f"l.{i}.lora_b.weight"] @ tensors[f"l.{i}.lora_a.weight"]
        close(method(*X)[0], module(*X))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"l.0.lora_b.weight": None}, AdapterError, "'l.0.lora_a.weight' has no lora_b"),
        ({"l.0.lora_a.weight": torch.zeros(RANK + 1, 16)}, LayoutError, "has rank 4, .* rank 3"),
        ({"l.0.lora_a.weight": torch.zeros(RANK, 17)}, LayoutError, r"'l.0.weight' is \[24, 16\]"),
        ({"l.0.lora_a.weight": torch.zeros(RANK)}, LayoutError, "are not two matrices"),
        ({"l.0.lora_a.weight": torch.full((RANK, 16), float("inf"))}, UpdateError, "not finite"),
        ({"head.weight": torch.zeros(2, 2)}, AdapterError, "'head.weight' belong to no pair"),
        (
            {"x.lora_a.weight": torch.zeros(1, 2), "x.lora_b.weight": torch.zeros(2, 1)},
            KeyNotFoundError,
            "module 'x' has no weight in .*: 'x.base.weight', 'x.base_layer.weight', 'x.weight'",
        ),
    ],
)
def test_what_cannot_be_merged(plain: Any, change: Any, error: type[Exception], message: str) -> None:
    cache, _ = open_plain(plain)
    before = bits(cache)
    tensors = {name: t for name, t in {**adapter_of(1), **change}.items() if t is not None}
    with pytest.raises(error, match=message):
        merge_adapter(cache, tensors)
    assert cache.generation == 0
    assert bits(cache) == before


def test_arguments_of_merge(plain: Any) -> None:
    from blobstore.errors import UnsupportedDataError

    cache, _ = open_plain(plain)
    for adapter in (3, None, ["a"]):
        with pytest.raises(UnsupportedDataError):
            merge_adapter(cache, adapter)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedDataError):
        merge_adapter(cache, {"l.0.lora_a.weight": 3})
    with pytest.raises(AdapterError, match="alpha"):
        merge_adapter(cache, adapter_of(1), float("inf"))
    with pytest.raises(AdapterError, match="holds no adapter"):
        merge_adapter(cache, {})


# Wrong moves


def test_what_is_no_cache_and_no_mapping_is_told(plain: Any) -> None:
    cache = BlobCache(plain.model)
    path = plain.folder / "1.ptd"
    save_adapter(path, adapter_of(1), foundation=plain.model, scale=SCALE)
    for wrong in (None, "model.ptd", cache.paths):
        with pytest.raises(UnsupportedDataError, match="cache must be a BlobCache"):
            load_adapter(wrong, path)
        with pytest.raises(UnsupportedDataError, match="cache must be a BlobCache"):
            merge_adapter(wrong, path)
    for options in ({"names": ["l.0"]}, {"names": 5}, {"weights": 5}, {"weights": ["l.0.weight"]}):
        with pytest.raises(UnsupportedDataError, match="is to be a mapping by name"):
            merge_adapter(cache, path, **options)
    with pytest.raises(AdapterError, match="alpha .* is not a finite number"):
        merge_adapter(cache, path, alpha=10**400)
    assert cache.generation == 0


@pytest.mark.parametrize("mode", ["private", "copy"])
def test_files_that_were_replaced_tell_nothing(plain: Any, mode: Any) -> None:
    """An adapter for the new file is none for the cache, which still has the old one."""
    cache = BlobCache(plain.model, mode)
    method = Program(plain.pte, cache).method()
    with BlobCache(plain.model) as changed:
        changed.update({"l.0.weight": np.zeros((24, 16), np.float32)})
        changed.save(plain.folder / "new.ptd")
    (plain.folder / "new.ptd").replace(plain.model)
    path = plain.folder / "1.ptd"
    save_adapter(path, adapter_of(1), foundation=plain.model, scale=SCALE)
    with pytest.raises(
        DataChangedError, match=r"model\.ptd: the file is not the one that the cache has: 'l\.0\.weight"
    ):
        merge_adapter(cache, path)
    assert cache.generation == 0
    plain.model.unlink()
    merge_adapter(cache, adapter_of(1), SCALE)  # nothing has to be known of the foundation
    close(method(*X)[0], eager(1))


def test_tied_weights_are_one(tmp_path: Path) -> None:
    """By any of their names, but not by two at once: each adapter would be added to what the other is not in."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x)))

    module, x = make(Tied), inputs(3, 8)
    pte = lower_plain(module, x, tmp_path, delegated=True)
    cache = BlobCache(tmp_path / "model.ptd")
    method = Program(pte, cache).method()
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    adapters = [{f"{name}.lora_a.weight": a, f"{name}.lora_b.weight": b} for name in ("first", "second")]
    with pytest.raises(AdapterError, match="two modules have the weight 'first.weight'"):
        merge_adapter(cache, {**adapters[0], **adapters[1]})
    assert cache.generation == 0
    before = method(*x)[0].clone()
    for adapter, given in zip(adapters, (None, {"second.weight": module.second.weight}), strict=True):
        merged = merge_adapter(cache, adapter, weights=given)
        assert merged.weights == ("first.weight",)
        with torch.no_grad():
            changed = copy.deepcopy(module)
            changed.first.weight += b @ a
            close(method(*x)[0], changed(*x))
        merged.undo()
        assert torch.equal(method(*x)[0], before)


def test_scales_that_are_too_large_are_refused(lora: Any) -> None:
    cache, method = open_lora(lora)
    before = method(*X)[0].clone()
    for program_scale in (1e-45, 1e-320):
        with pytest.raises(UpdateError, match=r"1\.ptd: 'l\.\d\.lora_b\.weight' has values that are not finite"):
            load_adapter(cache, save(lora, 1), program_scale=program_scale)
    assert cache.generation == 0
    assert torch.equal(method(*X)[0], before)
