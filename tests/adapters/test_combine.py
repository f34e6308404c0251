"""Several adapters at once: on programs while they run, and as one file (L3, D2)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blobstore import errors, save_file
from blobstore.adapters import (
    bind_adapter,
    combine_adapters,
    load_adapter,
    load_adapters,
    read_adapter,
    save_adapter,
    set_adapter_strength,
    set_adapter_strengths,
)
from blobstore.core.memory.layout import ScalarType
from blobstore.logical.steps import cast
from blobstore.runtime import BlobCache
from tests.adapters.caches import X, bits, open_lora
from tests.adapters.nets import SCALE, LoraNet, adapter_of, lower_lora, make
from tests.lowering.live import inputs

pytestmark = pytest.mark.long

ROOM = 6
"""The rank of the programs; those of the adapters are smaller."""
SCALES = {1: 1.5, 2: 0.7, 3: 4.0}
RANKS = {1: 2, 2: 3, 3: 1}


@pytest.fixture(scope="module", params=[False, True], ids=["portable", "delegated"])
def wide(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A program with room for several adapters, and three of them."""
    folder = tmp_path_factory.mktemp("wide")
    lower_lora(make(LoraNet, rank=ROOM), inputs(3, 16), folder, delegated=request.param)
    files = SimpleNamespace(
        folder=folder, pte=folder / "model.pte", foundation=folder / "foundation.ptd", adapter=folder / "adapter.ptd"
    )
    files.paths = {}
    for seed, scale in SCALES.items():
        files.paths[seed] = folder / f"{seed}.ptd"
        tensors = adapter_of(seed, rank=RANKS[seed])
        save_adapter(files.paths[seed], tensors, foundation=files.foundation, scale=scale)
    return files


def expected(strengths: dict[int, float]) -> torch.Tensor:
    """What eager PyTorch computes with the sum of products, each with its own scale and strength."""
    module = make(LoraNet, rank=ROOM)
    with torch.no_grad():
        for i, layer in enumerate(module.l):
            layer.lora_a.weight.zero_()
            layer.lora_b.weight.zero_()
            for seed, strength in strengths.items():
                tensors = adapter_of(seed, rank=RANKS[seed])
                product = tensors[f"l.{i}.lora_b.weight"] @ tensors[f"l.{i}.lora_a.weight"]
                layer.base.weight += strength * SCALES[seed] * product
        return module(*X)


def check(method: Any, strengths: dict[int, float]) -> None:
    torch.testing.assert_close(method(*X), expected(strengths), rtol=1e-4, atol=1e-4)


def test_none(wide: Any) -> None:
    """Without adapters, the programs compute what the foundation alone does."""
    cache, method = open_lora(wide)
    load_adapters(cache, [wide.paths[1]], program_scale=SCALE)
    load_adapters(cache, [])
    check(method, {})
    assert set_adapter_strengths(cache, []) == cache.generation
    check(method, {})
    before = bits(BlobCache(wide.adapter))
    cache.revert()
    assert {key: bits(cache)[key] for key in before} == before


def test_scales_alone(wide: Any) -> None:
    """Strengths change without the other tensors, and add up no rounding."""
    cache, method = open_lora(wide)
    load_adapters(cache, [wide.paths[1], (wide.paths[2], 0.5)], program_scale=SCALE)
    first = bits(cache)
    for strengths in ([0.3, 0.7], [0, 0], [-1, 5], [1, 0.1]):
        set_adapter_strengths(cache, strengths)
        check(method, dict(zip((1, 2), strengths, strict=True)))
    set_adapter_strengths(cache, [1, 0.5])
    assert bits(cache) == first
    with pytest.raises(errors.AdapterError, match="2 adapters are loaded, but 1 strengths are given"):
        set_adapter_strength(cache, 1)
    with pytest.raises(errors.AdapterError, match="strength nan is not a finite number"):
        set_adapter_strengths(cache, [1, float("nan")])
    with pytest.raises(errors.UnsupportedDataError, match="one strength for each adapter"):
        set_adapter_strengths(cache, 1)  # type: ignore[arg-type]
    assert bits(cache) == first
    cache.update({"l.0.lora_b.weight": torch.ones(24, ROOM)})
    with pytest.raises(errors.AdapterError, match=r"1\.ptd and \S*2\.ptd was loaded; load an adapter first"):
        set_adapter_strengths(cache, [1, 1])


def test_one_alone_is_what_load_adapter_stores(lora: Any) -> None:
    """To the bit, with a strength and with a scale of the program."""
    path = lora.folder / "one.ptd"
    save_adapter(path, adapter_of(1), foundation=lora.foundation, scale=0.7)
    cache, _ = open_lora(lora)
    other, _ = open_lora(lora)
    for strength in (1, 0.3):
        load_adapter(cache, path, program_scale=SCALE, strength=strength)
        load_adapters(other, [(path, strength)], program_scale=SCALE)
        assert bits(cache) == bits(other)
    set_adapter_strengths(cache, [0.9])
    set_adapter_strength(other, 0.9)
    assert bits(cache) == bits(other)


def test_what_is_refused(wide: Any, tmp_path: Path) -> None:
    """Nothing changes, and the message names the adapter (B3)."""
    cache, method = open_lora(wide)
    load_adapters(cache, [wide.paths[1]], program_scale=SCALE)
    before = bits(cache)
    large, elsewhere, features, more, foreign = (
        tmp_path / f"{name}.ptd" for name in ("large", "elsewhere", "features", "more", "foreign")
    )
    save_file({"l.0.weight": torch.ones(24, 16)}, tmp_path / "f.ptd")
    for path, tensors, foundation in (
        (large, adapter_of(5, rank=4), wide.foundation),
        (elsewhere, {"x.lora_a.weight": torch.ones(1, 16), "x.lora_b.weight": torch.ones(24, 1)}, wide.foundation),
        (features, {"l.0.lora_a.weight": torch.ones(1, 15), "l.0.lora_b.weight": torch.ones(24, 1)}, wide.foundation),
        (more, {**adapter_of(1), "norm": torch.ones(3)}, wide.foundation),
        (foreign, adapter_of(1), tmp_path / "f.ptd"),
    ):
        save_adapter(path, tensors, foundation=foundation, scale=1)
    for adapters, error, message in (
        (
            [wide.paths[2], large],
            errors.AdapterError,
            r"large\.ptd: module 'l\.0' has rank 4, but of the 6 in .* only 3 are left",
        ),
        ([elsewhere], errors.KeyNotFoundError, r"elsewhere\.ptd: module 'x' has no adapter in"),
        (
            [features],
            errors.LayoutError,
            r"features\.ptd: module 'l\.0' takes 15 and gives 24 features, in .* 16 and 24",
        ),
        ([more], errors.AdapterError, r"more\.ptd: 'norm' belong to no pair"),
        ([foreign], errors.AdapterError, r"foreign\.ptd: made for foundation"),
        ([(wide.paths[1], float("inf"))], errors.AdapterError, "strength inf is not a finite number"),
        ([(wide.paths[1], 1e39)], errors.UpdateError, "not finite"),
        (str(wide.paths[1]), errors.UnsupportedDataError, "expected a list of adapters"),
        (3, errors.UnsupportedDataError, "expected a list of adapters"),
    ):
        with pytest.raises(error, match=message):
            load_adapters(cache, adapters, program_scale=SCALE)
    with pytest.raises(errors.AdapterError, match=r"may be any of 0\.7, 1\.5; give it as `program_scale`"):
        load_adapters(cache, [wide.paths[1], wide.paths[2]])
    with pytest.raises(errors.AdapterError, match="other than 0"):
        load_adapters(cache, [wide.paths[1]], program_scale=0)
    assert bits(cache) == before
    check(method, {1: 1})
    for adapters, foundation, error, message in (
        ([], wide.foundation, errors.AdapterError, "give like="),
        ([wide.adapter], wide.foundation, errors.AdapterError, "records no foundation"),
        ([wide.paths[1]], tmp_path / "f.ptd", errors.AdapterError, "made for foundation"),
        ([wide.paths[1], features], wide.foundation, errors.LayoutError, r"features\.ptd: module 'l\.0' takes 15"),
    ):
        with pytest.raises(error, match=message):
            combine_adapters(adapters, tmp_path / "both.ptd", foundation=foundation)
    for output in (wide.paths[1], wide.foundation):
        with pytest.raises(errors.OutputPathError):
            combine_adapters([wide.paths[1]], output, foundation=wide.foundation)
    assert not (tmp_path / "both.ptd").exists()


def test_programs_without_adapters(plain: Any, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a.ptd", adapter_of(1), foundation=plain.model, scale=1)
    with pytest.raises(errors.AdapterError, match="its programs have no adapter; merge_adapter"):
        load_adapters(BlobCache(plain.model), [tmp_path / "a.ptd"])


def test_the_scale_that_the_files_record(wide: Any, tmp_path: Path) -> None:
    """The adapter that lies below the cache says what the programs multiply with."""
    bind_adapter(wide.adapter, tmp_path / "adapter.ptd", foundation=wide.foundation, scale=SCALE)
    cache, method = open_lora(wide, tmp_path / "adapter.ptd")
    load_adapters(cache, [wide.paths[2], wide.paths[3]])
    check(method, {2: 1, 3: 1})


@pytest.mark.parametrize("with_like", [False, True])
def test_one_file(wide: Any, tmp_path: Path, with_like: bool) -> None:
    """It adds what each adapter adds, and loads like any other."""
    bind_adapter(wide.adapter, tmp_path / "like.ptd", foundation=wide.foundation, scale=SCALE)
    shares = [(wide.paths[2], 1), (wide.paths[1], 0.5)]
    like = tmp_path / "like.ptd" if with_like else None
    combine_adapters(shares, tmp_path / "both.ptd", foundation=wide.foundation, like=like)
    adapter = read_adapter(tmp_path / "both.ptd")
    assert adapter.scale == (SCALE if with_like else SCALES[2])
    assert {pair.rank for pair in adapter.pairs} == {ROOM if with_like else RANKS[1] + RANKS[2]}
    cache, method = open_lora(wide)
    if with_like:
        load_adapter(cache, tmp_path / "both.ptd")
    else:
        load_adapters(cache, [tmp_path / "both.ptd"], program_scale=SCALE)
    check(method, {2: 1, 1: 0.5})
    if with_like:
        live, _ = open_lora(wide)
        load_adapters(live, shares, program_scale=SCALE)
        assert bits(live) == bits(cache)
        combine_adapters([], tmp_path / "none.ptd", foundation=wide.foundation, like=like)
        load_adapter(cache, tmp_path / "none.ptd")
        check(method, {})


_KINDS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    shares=st.lists(
        st.tuples(
            st.integers(1, 4),
            st.sampled_from([0.5, 1.0, 2.0, 3.0]),
            st.floats(-2, 2),
            st.sampled_from(_KINDS),
            st.sets(st.integers(0, 2), min_size=1),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_product_of_the_sum_is_the_sum_of_the_products(tmp_path: Path, shares: Any) -> None:
    """For any ranks, scales, strengths, dtypes and modules."""
    names = {0: "m", 1: "n.o", 2: "p"}
    save_file({f"{name}.weight": torch.ones(3, 5) for name in names.values()}, tmp_path / "f.ptd")
    wanted = {name: np.zeros((3, 5)) for name in names.values()}
    given_shares, present = [], set()
    for number, (rank, scale, strength, kind, modules) in enumerate(shares):
        generator, tensors = torch.Generator().manual_seed(number), {}
        for name in (names[index] for index in modules):
            a, b = (
                torch.randn(rank, 5, generator=generator).to(kind),
                torch.randn(3, rank, generator=generator).to(kind),
            )
            tensors |= {f"{name}.lora_a.weight": a, f"{name}.lora_b.weight": b}
            wanted[name] += strength * scale * (b.double() @ a.double()).numpy()
            present.add(name)
        path = tmp_path / f"{number}.ptd"
        save_adapter(path, tensors, foundation=tmp_path / "f.ptd", scale=scale)
        given_shares.append((path, strength))
    combine_adapters(given_shares, tmp_path / "sum.ptd", foundation=tmp_path / "f.ptd")
    adapter = read_adapter(tmp_path / "sum.ptd")
    assert {pair.module for pair in adapter.pairs} == present
    narrow = any(kind in (torch.float16, torch.bfloat16) for *_, kind, _ in shares)
    for pair in adapter.pairs:
        a, b = (cast(adapter.value(name), ScalarType.DOUBLE)[0] for name in (pair.a, pair.b))
        found = (adapter.scale or 0) * b @ a
        np.testing.assert_allclose(found, wanted[pair.module], atol=0.5 if narrow else 1e-4)
