"""Threads that run while others commit: every output belongs to one generation."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blobstore.runtime import BlobCache, PackedStore, Program
from tests.helpers.beside import running
from tests.helpers.waiting import until
from tests.lowering.live import inputs, lower_through, seeded

pytestmark = pytest.mark.long


class Levels(nn.Module):
    """Two delegates with a kernel in between. All weights are one number, so that a torn call would be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, bias=False)
        self.second = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cumsum(self.first(x), 1))


def fill(module: nn.Module, value: float) -> dict[str, Tensor]:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("packed", [False, True], ids=["in memory", "in a packed file"])
def test_no_output_mixes_generations(packed: bool, tmp_path: Path) -> None:
    """Calls in several threads, while another one commits; weights are packed anew or written in place (B3, K3)."""
    module = seeded(Levels)
    values = [2.0**-6, 2.0**-5, 2.0**-4]
    states = [fill(module, value) for value in values]
    example = inputs(1, 32)
    example[0].fill_(1)
    path = lower_through({"forward": (module, example)}, tmp_path)
    store = PackedStore(tmp_path / "packed") if packed else None
    cache = BlobCache(tmp_path / "model.ptd", packed=store)
    programs = [Program(path, cache), Program(path, cache)]
    assert programs[0].backends().count("BlobStoreBackend") >= 1
    assert all(program.method() for program in programs)  # loaded, and packed, with the weights of the file
    allowed = []
    for state in states:
        cache.update_state_dict(state)
        allowed.append(programs[0].method()(*example))
    methods, calls, updates = [program.load_method() for program in programs], [0] * len(programs), 0

    def serve(number: int) -> None:
        found = methods[number](*example)
        assert any(torch.equal(found, one) for one in allowed)
        calls[number] += 1

    def update() -> None:
        nonlocal updates
        cache.update_state_dict(states[updates % 3])
        if updates % 7 == 0:
            assert torch.equal(programs[0].method()(*example), allowed[updates % 3])
        updates += 1

    with running(*(functools.partial(serve, number) for number in range(len(programs)))) as wrong:
        until(lambda: wrong or (updates >= 150 and min(calls) >= 150), meanwhile=update)
    assert store is None or (store.stats.builds, store.stats.repacked) == (1, 0)
