"""Pruned weights are those of a base, and which are zero (P2). The oracle is torch's own pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn.utils import prune as _prune

from blobstore.pool import Pool
from blobstore.pool.derived import derive, made_size, split_steps
from blobstore.pool.pruned import find_pruning, prune
from tests.pool.test_layouts import back, bytes_of

pruning: Any = _prune

DTYPES = {"float32": "float", "bfloat16": "bfloat16", "float16": "half"}


def weights(dtype: str, seed: int = 0) -> torch.Tensor:
    return (torch.randn(128, 256, generator=torch.Generator().manual_seed(seed)) * 0.05).to(getattr(torch, dtype))


def pruned(weight: torch.Tensor, how: str) -> torch.Tensor:
    """As `torch.nn.utils.prune` leaves it: a product with a mask, in which zeros keep their signs."""
    layer = torch.nn.Linear(1, 1)
    layer.weight = torch.nn.Parameter(weight.clone())
    if how == "magnitude":
        pruning.l1_unstructured(layer, "weight", 0.5)
    elif how == "rows":
        pruning.ln_structured(layer, "weight", 0.5, n=2, dim=0)
    else:
        torch.manual_seed(0)
        pruning.random_unstructured(layer, "weight", 0.5)
    pruning.remove(layer, "weight")
    return layer.weight.detach()


def raw(weight: torch.Tensor) -> memoryview:
    return bytes_of(weight.clone().contiguous().view(torch.uint8).numpy())


@given(
    st.sampled_from(list(DTYPES)),
    st.integers(8, 400),
    st.floats(0.2, 1),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1 << 32),
)
def test_what_is_found_makes_the_zeros(
    dtype: str, count: int, share: float, by_size: bool, keeps_signs: bool, seed: int
) -> None:
    """Whatever is pruned, and how; oracle: numpy."""
    weight = weights(dtype, seed % 100).reshape(-1)[:count]
    order = weight.abs().float().argsort() if by_size else torch.randperm(count)
    dropped = order[: int(share * count)]
    wanted = weight.clone()
    wanted[dropped] = wanted[dropped] * 0 if keeps_signs else 0
    found = find_pruning(raw(wanted), raw(weight), DTYPES[dtype])
    if found is None:
        assert min(count_zeros(wanted), count_zeros(wanted[::61])) <= count / 8
        return
    step, mask = found
    made = torch.frombuffer(bytearray(prune(raw(weight), step, memoryview(mask))), dtype=weight.dtype)
    assert made_size(weight.nbytes, (step,)) == (weight.nbytes, len(mask))
    assert count_zeros(made - wanted) > (1 - 1 / 32) * count
    assert step.startswith("prune") or bytes(raw(made)) == bytes(raw(wanted))


def count_zeros(weight: torch.Tensor) -> int:
    return int((weight == 0).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("how", "most"), [("magnitude", 0.01), ("rows", 0.064), ("random", 0.064)])
def test_a_pruned_model_takes_its_mask(tmp_path: Path, dtype: str, how: str, most: float) -> None:
    """Or next to nothing, where the smallest magnitudes went; in narrow types, some of those that are equal did not."""
    weight = weights(dtype)
    save_file({"w": weight}, tmp_path / "whole.safetensors")
    save_file({"w": pruned(weight, how)}, tmp_path / "pruned.safetensors")
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(tmp_path / "whole.safetensors", "m@1")
        added = pool.add(tmp_path / "pruned.safetensors", "m@2")
        assert added.stored_bytes <= most * weight.nbytes
        assert back(pool, "m@2", tmp_path / "pruned.safetensors", tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pruned_fine_tune_takes_what_remains_of_its_difference(tmp_path: Path, dtype: str) -> None:
    """Its base is what the fine-tune is a difference to."""
    weight = weights(dtype)
    tuned = (weight.float() * (1 + 0.003 * torch.randn(weight.shape))).to(weight.dtype)
    for name, model in {"base": weight, "tuned": tuned, "pruned": pruned(tuned, "magnitude")}.items():
        save_file({"w": model}, tmp_path / f"{name}.safetensors")
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(tmp_path / "base.safetensors", "m@1")
        difference = pool.add(tmp_path / "tuned.safetensors", "m@2").stored_bytes
        added = pool.add(tmp_path / "pruned.safetensors", "m@3").stored_bytes
        assert added < 0.8 * difference
        assert back(pool, "m@3", tmp_path / "pruned.safetensors", tmp_path / "out")


def test_what_is_not_pruned_is_no_mask() -> None:
    weight = weights("float32")
    for other in (weight, weight * 1.001, weights("float32", 1)):
        assert find_pruning(raw(other), raw(weight), "float") is None
    half = pruned(weight, "magnitude")
    assert find_pruning(raw(half * 1.001), raw(half), "float") is None  # the base has the same zeros
    assert find_pruning(raw(half), raw(weight), "long") is None
    assert find_pruning(raw(half)[:-4], raw(weight), "float") is None


@pytest.mark.parametrize(
    "step",
    [
        "mask",
        "mask:2",
        "mask:8:+",
        "mask:2:*",
        "mask:2:+:7",
        "prune:4:+",
        "prune:4:+:-1",
        "prune:4:+:07",
        "prune:4:+:1e3",
        "prune:4:-:9999999999999",
    ],
)
def test_other_steps_are_not_known(step: str) -> None:
    assert split_steps(step) == ((), step)


def test_steps_from_hostile_tables() -> None:
    """Of odd sizes, with masks that are too short, two that need stored bytes, and thresholds beyond the type."""
    base = raw(weights("float32"))
    assert made_size(7, ("mask:2:+",)) is None
    assert derive(base, ("mask:4:+",), len(base), memoryview(b"1")) is None
    assert made_size(len(base), ("mask:4:+", "scale:256")) is None
    nothing = derive(base, ("prune:2:+:9999999999",), len(base))
    assert nothing is not None and not any(nothing)
