"""New weights that XNNPACK refuses: the update fails with the reason, and everything continues with the old weights."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blobstore.errors import ProgramError
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program, delegate_stats, make_working_copy
from tests.helpers.beside import running
from tests.helpers.waiting import until
from tests.lowering.live import close, inputs, lower_exported, seeded
from tests.lowering.test_quantized import pt2e, put

pytestmark = pytest.mark.long


class Parts(nn.Module):
    """Three delegates, with kernels in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.cumsum(self.second(torch.cumsum(self.first(x), 1)), 1))


NAMES = [f"{layer}.weight" for layer in ("first", "second", "third")]
EXAMPLE = inputs(2, 8)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.fx.GraphModule]:
    folder = tmp_path_factory.mktemp("parts")
    eager = pt2e(seeded(Parts), EXAMPLE, is_per_channel=True)
    with quiet():
        return lower_exported(torch.export.export(eager, EXAMPLE, strict=True), folder), eager


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(8, 8, generator=generator) * 0.5 - 0.25 for name in NAMES}


def expected(eager: torch.fx.GraphModule, tensors: dict[str, Tensor]) -> Tensor:
    for name, tensor in tensors.items():
        put(eager, name, tensor)
    result: Tensor = eager(*EXAMPLE)
    return result


@pytest.mark.parametrize("mode", ["private", "copy", "shared"])
def test_the_old_weights_go_on(lowered: tuple[Path, torch.fx.GraphModule], mode: str, tmp_path: Path) -> None:
    """The error has the reason, and no delegate, key or generation changes (B3)."""
    path, eager = lowered
    make_working_copy(path.parent / "model.ptd", tmp_path / "model.ptd")
    cache = BlobCache(tmp_path / "model.ptd", mode)  # type: ignore[arg-type]
    loaded = delegate_stats().handles
    methods = [Program(path, cache).method(), Program(path, cache).method()]
    assert delegate_stats().handles == loaded + 2 * 3
    # another cache has nothing to do with it, but shares XNNPACK's own cache of packed weights
    other = Program(path, BlobCache(path.parent / "model.ptd")).method()
    untouched = other(*EXAMPLE)
    cache.update(weights(0))
    good = expected(eager, weights(0))
    generation, stats = cache.generation, delegate_stats()
    for name in NAMES:  # whichever fails, others may have been prepared before
        bad = {**weights(1), f"{name}.scale": -torch.ones(8)}
        with pytest.raises(
            ProgramError, match="nothing was changed.*'forward'.*'XnnpackBackend' cannot be initialized"
        ):
            cache.update(bad)
        assert cache.generation == generation
        for method in (*methods, *reversed(methods)):
            close(method(*EXAMPLE), good, 0)
        assert torch.equal(other(*EXAMPLE), untouched)
        assert delegate_stats().names == stats.names
    # and what was prepared for the same generation is not taken for what comes now
    cache.update(weights(2))
    assert cache.generation == generation + 1
    for method in methods:
        close(method(*EXAMPLE), expected(eager, weights(2)), 0)
    if mode != "shared":
        cache.revert([key for key in cache.dirty if key.startswith("first.")])
        whole = {**weights(2), "first.weight": seeded(Parts).first.weight.detach()}
        for method in methods:
            close(method(*EXAMPLE), expected(eager, whole), 0)


def test_a_load_and_a_transaction_fail_too(lowered: tuple[Path, torch.fx.GraphModule], tmp_path: Path) -> None:
    """Loading a file and committing a transaction are updates like any other (U3, B3)."""
    path, eager = lowered
    cache = BlobCache(path.parent / "model.ptd")
    bad = BlobCache(path.parent / "model.ptd")
    bad.update({"second.weight.scale": torch.zeros(8)})  # no program runs on it
    bad.save(tmp_path / "bad.ptd", dirty_only=True)
    method = Program(path, cache).method()
    before = method(*EXAMPLE)
    with pytest.raises(ProgramError, match="nothing was changed"):
        cache.load(tmp_path / "bad.ptd")
    with pytest.raises(ProgramError, match="nothing was changed"), cache.transaction() as pending:
        pending["third.weight.scale"] = -torch.ones(8)
    assert cache.generation == 0
    assert not cache.dirty
    assert torch.equal(method(*EXAMPLE), before)
    # a program that comes later cannot be loaded on such weights; a revert brings it back
    with pytest.raises(ProgramError, match="cannot be initialized"):
        Program(path, bad).method()
    bad.revert()
    assert torch.equal(Program(path, bad).method()(*EXAMPLE), before)
    assert eager is not None


def test_serving_goes_on_while_updates_fail(lowered: tuple[Path, torch.fx.GraphModule]) -> None:
    """XNNPACK's own cache is in disorder during a failed update; no call sees it (B3)."""
    path, _ = lowered
    cache = BlobCache(path.parent / "model.ptd")
    other = BlobCache(path.parent / "model.ptd")
    allowed = Program(path, cache).method()(*EXAMPLE)
    caches = (cache, cache, other)
    calls, updates = [0] * len(caches), 0
    methods = [Program(path, one).method() for one in caches]

    def serve(number: int) -> None:
        assert torch.equal(methods[number](*EXAMPLE), allowed)
        calls[number] += 1

    def fail() -> None:
        nonlocal updates
        with pytest.raises(ProgramError):
            cache.update({**weights(updates), f"{NAMES[updates % 3]}.scale": -torch.ones(8)})
        updates += 1

    with running(*(functools.partial(serve, number) for number in range(len(caches)))) as wrong:
        until(lambda: wrong or (updates >= 60 and min(calls) >= 60), meanwhile=fail)
