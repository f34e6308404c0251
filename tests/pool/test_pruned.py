"""Pruned weights are those of a base, and which are zero (P2). The oracle is torch's own pruning."""

from functools import partial
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
from blobstore.pool.tables import Tables
from tests.helpers.between import between
from tests.pool.test_layouts import back, bytes_of

pruning: Any = _prune

DTYPES = {"float32": "float", "bfloat16": "bfloat16", "float16": "half"}


def weights(dtype: str, seed: int = 0) -> torch.Tensor:
    return (torch.randn(128, 256, generator=torch.Generator().manual_seed(seed)) * 0.05).to(getattr(torch, dtype))


def pruned(weight: torch.Tensor, how: str) -> torch.Tensor:
    """As `torch.nn.utils.prune` leaves it: a product with a mask, in which zeros keep their signs; or with plain zeros."""
    if how == "zeros":
        return torch.where(weight.abs() > weight.abs().float().median(), weight, torch.zeros_like(weight))
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
    assert split_steps(f"{step}+near:f2:0") == ((step,), "near:f2:0")  # as a table has it
    made = torch.frombuffer(bytearray(prune(raw(weight), step, memoryview(mask))), dtype=weight.dtype)
    assert made_size(weight.nbytes, (step,)) == (weight.nbytes, len(mask))
    assert count_zeros(made - wanted) > (1 - 1 / 32) * count
    assert step.startswith("prune") or bytes(raw(made)) == bytes(raw(wanted))


def count_zeros(weight: torch.Tensor) -> int:
    return int((weight == 0).sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("how", "most"), [("magnitude", 0.01), ("zeros", 0.01), ("rows", 0.064), ("random", 0.064)])
def test_a_pruned_model_takes_its_mask(pool: Pool, tmp_path: Path, dtype: str, how: str, most: float) -> None:
    """Or next to nothing, where the smallest magnitudes went; in narrow types, some of those that are equal did not."""
    weight = weights(dtype)
    save_file({"w": weight}, tmp_path / "whole.safetensors")
    save_file({"w": pruned(weight, how)}, tmp_path / "pruned.safetensors")
    pool.add(tmp_path / "whole.safetensors", "m@1")
    added = pool.add(tmp_path / "pruned.safetensors", "m@2")
    assert added.stored_bytes <= most * weight.nbytes
    assert back(pool, "m@2", tmp_path / "pruned.safetensors", tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pruned_fine_tune_takes_what_remains_of_its_difference(pool: Pool, tmp_path: Path, dtype: str) -> None:
    """Its base is what the fine-tune is a difference to."""
    weight = weights(dtype)
    tuned = (weight.float() * (1 + 0.003 * torch.randn(weight.shape))).to(weight.dtype)
    for name, model in {"base": weight, "tuned": tuned, "pruned": pruned(tuned, "magnitude")}.items():
        save_file({"w": model}, tmp_path / f"{name}.safetensors")
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


def test_steps_from_hostile_tables() -> None:
    """Of odd sizes, with masks that are too short, two that need stored bytes, and thresholds beyond the type."""
    base = raw(weights("float32"))
    assert made_size(7, ("mask:2:z",)) is None
    assert derive(base, ("mask:4:z",), len(base), memoryview(b"1")) is None
    assert made_size(len(base), ("mask:4:z", "scale:256")) is None
    nothing = derive(base, ("prune:2:z:9999999999",), len(base))
    assert nothing is not None and not any(nothing)


def test_a_step_that_no_table_can_have_is_not_stored(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is proved is what is read later: the text of a row, of which `+` ends a step."""
    weight = weights("float32")
    save_file({"w": weight}, tmp_path / "whole.safetensors")
    save_file({"w": pruned(weight, "zeros")}, tmp_path / "pruned.safetensors")

    def find_another(*arguments: Any) -> tuple[str, bytes] | None:
        found = find_pruning(*arguments)
        return found and (found[0].replace(":z", ":+"), found[1])

    monkeypatch.setattr("blobstore.pool.packs.find_pruning", find_another)
    pool.add(tmp_path / "whole.safetensors", "m@1")
    pool.add(tmp_path / "pruned.safetensors", "m@2")
    assert back(pool, "m@2", tmp_path / "pruned.safetensors", tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("is_adding", [True, False], ids=["added", "collected"])
def test_a_base_of_a_base_while_it_is_collected(tmp_path: Path, is_adding: bool) -> None:
    """A pruned fine-tune is added while all that it may follow from is dropped and collected, or the other way round: one
    before each change of a table that the other makes. It comes out to the bit, also after further collections (P4)."""
    weight = weights("bfloat16")
    tuned = (weight.float() * (1 + 0.003 * torch.randn(weight.shape))).to(weight.dtype)
    models = {"base": weight, "tuned": tuned, "pruned": pruned(tuned, "zeros")}
    paths = {name: tmp_path / f"{name}.safetensors" for name in models}
    for name, model in models.items():
        save_file({"w": model}, paths[name])

    def add(pool: Pool) -> None:
        pool.add(paths["pruned"], "m@pruned")

    def collect(pool: Pool) -> None:
        for name in ("base", "tuned"):
            pool.drop(f"m@{name}")
        for _ in range(2):
            pool.gc(keep=0)

    first, second = (add, collect) if is_adding else (collect, add)
    steps = depths = 0
    while True:
        place = tmp_path / f"pool-{steps}"
        with Pool(place, create=True) as pool, Pool(place) as other:
            pool.add(paths["base"], "m@base")
            pool.add(paths["tuned"], "m@tuned")
            with between([(Tables, "append"), (Tables, "delete")], steps, partial(second, other)) as reached:
                first(pool)
        if len(reached) <= steps:
            break
        with Pool(place) as pool:
            chains = "SELECT count(*) FROM blobs a JOIN blobs b ON a.base = b.digest WHERE b.base IS NOT NULL"
            depths = max(depths, pool.tables.query(chains)[0][0])
            for _ in range(2):
                assert back(pool, "m@pruned", paths["pruned"], tmp_path / "out"), steps
                pool.gc(keep=0)
        steps += 1
    assert steps > 3
    assert depths > 0
