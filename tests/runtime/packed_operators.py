"""As a program: changes the weights of one model in every order of load and change, and prints a line for each.

A process of its own, because what goes wrong inside XNNPACK ends the process.
"""

import sys
import tempfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blobstore import save_programs
from blobstore.lowering import lower
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, PackedStore, Program, make_working_copy
from tests.lowering.live import seeded

CHANNELS = 16


class PerPixel(nn.Module):
    """A linear layer over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": PerPixel,
    "convolution": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    "grouped": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS),
    "folded": lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS)),
    "prelu": lambda: nn.PReLU(CHANNELS),
    "transposed 1x1": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 1),
    "transposed 2x2/2": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2),
    "transposed 3x3/2": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, 2, bias=False),
    "transposed grouped": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, 2, groups=2),
}
HALF = "half"  # the first word of a row whose weights are float16
ROWS = (
    [(kind,) for kind in KINDS]
    + [(HALF, kind) for kind in KINDS if kind != "folded"]  # batch norms are folded in float32 only
    + [pair for pair in combinations(KINDS, 2) if any(kind.startswith("transposed") for kind in pair)]
)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def model_of(row: tuple[str, ...]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = nn.Sequential(*(KINDS[kind]() for kind in row if kind != HALF))
        return module.half() if HALF in row else module

    return make


def changed(row: tuple[str, ...]) -> nn.Module:
    module = seeded(model_of(row))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) / 8)
    return module


def check(row: tuple[str, ...], folder: Path) -> None:
    """Print a line for each way; end with an error if an output is not that of the module."""
    before, after, x = seeded(model_of(row)), changed(row), torch.rand(1, CHANNELS, 8, 8)
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    if HALF in row:
        x, tolerance = x.half(), {"rtol": 2e-2, "atol": 5e-3}
    with quiet():
        program = lower(before, (x,), tag="model")
    save_programs({"model": program}, folder)
    for mode in ("private", "shared"):
        data, store = folder / "model.ptd", folder / mode
        if mode == "shared":
            make_working_copy(data, folder / "live.ptd")
            data = folder / "live.ptd"

        def same(run: Any, module: nn.Module, way: str, mode: str = mode) -> None:
            torch.testing.assert_close(run(x), module(x), **tolerance)
            say(", ".join((*row, mode, way)))

        cache = BlobCache(data, mode, packed=PackedStore(store))
        first = Program(folder / "model.pte", cache).method()
        same(first, before, "as lowered")
        cache.update_state_dict(after.state_dict())
        same(first, after, "loaded before the change")
        same(Program(folder / "model.pte", cache).method(), after, "loaded beside one that was there")
        cache.revert() if mode == "private" else cache.update_state_dict(before.state_dict())
        same(first, before, "changed back")
        del first, cache
        cache = BlobCache(data, mode, packed=PackedStore(store))
        cache.update_state_dict(after.state_dict())
        run = Program(folder / "model.pte", cache).method()
        same(run, after, "loaded after the change")
        one = next(iter(dict(after.named_parameters())))
        half = seeded(model_of(row))
        half.load_state_dict({**before.state_dict(), one: after.state_dict()[one]})
        cache.update_state_dict(half.state_dict())
        same(run, half, "one changed")
        if mode == "shared":
            BlobCache(data, mode).update_state_dict(after.state_dict())  # by a cache without a store
            late = Program(folder / "model.pte", BlobCache(data, mode), packed=PackedStore(store)).method()
            same(late, after, "changed without the store")


if __name__ == "__main__":
    part, parts = int(sys.argv[1]), int(sys.argv[2])
    for each in ROWS[part::parts]:
        with tempfile.TemporaryDirectory() as made:
            check(each, Path(made))
    say("done")
