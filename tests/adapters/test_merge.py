"""Merging adapters into weights and taking them out again, compared with eager PyTorch (D2, U2, B3)."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore import errors
from blobstore.adapters import import_peft, inspect_adapters, merge_adapter, read_adapter, save_adapter
from blobstore.runtime import BlobCache, Program
from tests.adapters.caches import X, bits, eager, merged, open_plain
from tests.adapters.nets import RANK, SCALE, adapter_of, lower_plain, make, write_peft
from tests.lowering.live import close, inputs


@pytest.mark.long
@pytest.mark.parametrize("alpha", [1.0, 0.5, -1.0])
def test_merge_and_undo(plain: Any, alpha: float) -> None:
    """Undoing restores every byte, once (B3)."""
    cache, method = open_plain(plain)
    before, first = bits(cache), method(*X).clone()
    save_adapter(plain.folder / "a.ptd", adapter_of(1), foundation=plain.model, scale=SCALE)
    handle = merge_adapter(cache, plain.folder / "a.ptd", alpha)
    assert handle.weights == ("l.0.weight", "l.1.weight") and handle.generation == cache.generation == 1
    close(method(*X), merged(1, alpha * SCALE))
    if alpha == 1:
        close(method(*X), eager(1))
    later = merge_adapter(cache, adapter_of(2), scale=SCALE)
    with pytest.raises(errors.AdapterError, match=r"changed after the adapter was merged in generation 1; undo first"):
        handle.undo()
    later.undo()
    handle.undo()
    assert bits(cache) == before
    assert torch.equal(method(*X), first)
    with pytest.raises(errors.AdapterError, match="already"):
        handle.undo()


@pytest.mark.long
def test_tied_weights_are_one(tmp_path: Path) -> None:
    """An adapter may name a tied weight by any of its names, if the caller wants the tie. Two names at once are refused, as
    one would overwrite the other."""

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
    with pytest.raises(errors.AdapterError, match="two modules have the weight 'first.weight'"):
        merge_adapter(cache, {**adapters[0], **adapters[1]}, tied=True)
    for adapter, other in zip(adapters, ("second.weight", "first.weight"), strict=True):
        with pytest.raises(
            errors.AdapterError, match=rf"also as '{other}', which the adapter would change, too; .*`tied`"
        ):
            merge_adapter(cache, adapter)
    assert cache.generation == 0
    before = method(*x).clone()
    for adapter, given in zip(adapters, (None, {"second.weight": module.second.weight}), strict=True):
        save_adapter(tmp_path / "a.ptd", adapter, foundation=tmp_path / "model.ptd", scale=1)
        (fit,) = inspect_adapters(tmp_path / "model.ptd", [tmp_path / "a.ptd"]).adapters
        assert fit.fits
        folder = write_peft(tmp_path / "peft", adapter)
        import_peft(folder, tmp_path / "imported.ptd", foundation=tmp_path / "model.ptd")
        assert set(read_adapter(tmp_path / "imported.ptd").contents) == set(adapter)
        merged = merge_adapter(cache, adapter, weights=given, tied=True)
        assert merged.weights == ("first.weight",)
        with torch.no_grad():
            changed = copy.deepcopy(module)
            changed.first.weight += b @ a
            close(method(*x), changed(*x))
        merged.undo()
        assert torch.equal(method(*x), before)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"l.0.lora_a.weight": torch.zeros(RANK, 17)}, errors.LayoutError, r"'l.0.weight' is \[24, 16\]"),
        ({"l.0.lora_a.weight": torch.full((RANK, 16), float("inf"))}, errors.UpdateError, "not finite"),
        ({"head.weight": torch.zeros(2, 2)}, errors.AdapterError, "'head.weight' belong to no pair"),
        (
            {"x.lora_a.weight": torch.zeros(1, 2), "x.lora_b.weight": torch.zeros(2, 1)},
            errors.KeyNotFoundError,
            "module 'x' has no weight in .*: 'x.base.weight', 'x.base_layer.weight', 'x.linear.weight', 'x.weight'",
        ),
    ],
)
def test_what_cannot_be_merged(plain: Any, change: Any, error: type[Exception], message: str) -> None:
    """Nothing changes, and the message names the tensor (B3)."""
    cache, _ = open_plain(plain)
    before = bits(cache)
    tensors = {**adapter_of(1), **change}
    with pytest.raises(error, match=message):
        merge_adapter(cache, tensors)
    assert cache.generation == 0
    assert bits(cache) == before


def test_what_is_no_number_and_no_adapter(plain: Any) -> None:
    """Nothing changes."""
    cache, _ = open_plain(plain)
    for alpha in (10**400, float("inf")):
        with pytest.raises(errors.AdapterError, match="alpha .* is not a finite number"):
            merge_adapter(cache, adapter_of(1), alpha)
    with pytest.raises(errors.AdapterError, match="not an adapter"):
        merge_adapter(cache, {})
    assert cache.generation == 0
