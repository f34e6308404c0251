"""A name is updated only if the stored bytes follow from the model's own tensor: proved when a model is lowered (U1).

The law, for every kind of layer: the model's own weights, given again, change nothing, to the bit; other weights give
what lowering the changed model gives, to the bit; and what cannot be so is refused by its name, and changes nothing.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from blobstore.errors import UpdateError
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program
from tests.lowering import nets
from tests.lowering.live import (
    BlobStorePartitioner,
    Inputs,
    XnnpackPartitioner,
    inputs,
    lower_through,
    randomize,
    seeded,
    write,
)

pytestmark = pytest.mark.long

with quiet():
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower


class SharedNorm(nn.Module):
    """One normalization behind two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.relu(self.norm(self.first(x)))))


class SharedConvolution(nn.Module):
    """One convolution under two normalizations, which XNNPACK's exporter folds only once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.one, self.two = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.last = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(self.conv(torch.relu(self.one(self.conv(x))))).mean((2, 3)))


class Lines(nn.Module):
    """One-dimensional layers, to which lowering adds a dimension after their normalization was folded or replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)
        self.plain, self.alone = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.alone(torch.relu(self.plain(torch.relu(self.norm(self.conv(x))))))


class Perceptron(nn.Module):
    """Normalizations behind linear layers; the second has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.second, self.bare = nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.bare(self.second(torch.relu(self.norm(self.first(x)))))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Tied(nn.Module):
    """One weight for the embedding, which is outside delegates, and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.middle(self.words(x))))


class TwoDelegates(nn.Module):
    """One weight in two delegates, and a view of a larger memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.view = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.view.weight = nn.Parameter(torch.randn(16, 8)[8:])

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.second(torch.relu(self.first(x)).cumsum(-1)))


class Computed(nn.Module):
    """Weights that the graph computes: normalized, scaled, sliced, multiplied without a layer; a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = weight_norm(nn.Linear(8, 8))
        self.scaled, self.sliced = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(16, 8))
        self.right, self.gain = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(torch.relu(self.normed(x)), self.scaled * 2)
        return nn.functional.linear(x, self.sliced[8:]) @ self.right * self.gain


class Half(nn.Module):
    """Folding in float16 is not repeated; the last layer is not affected."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        self.half()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x)))


WORDS = (torch.tensor([[1, 2, 3]]),)
IMAGE = inputs(1, 3, 6, 6)
SHARED = {f"{norm}.{part}" for norm in ("one", "two") for part in ("weight", "bias", "running_mean", "running_var")}
HALF = {"conv.weight", "conv.bias", *(f"norm.{part}" for part in ("weight", "bias", "running_mean", "running_var"))}
KINDS: dict[str, tuple[type[nn.Module], Inputs, bool, set[str]]] = {
    "one normalization, two convolutions": (SharedNorm, IMAGE, True, set()),
    "one convolution, two normalizations": (SharedConvolution, IMAGE, True, {"conv.weight", "conv.bias"} | SHARED),
    "one dimension": (Lines, inputs(1, 3, 9), True, set()),
    "linear": (Perceptron, inputs(2, 8), True, set()),
    "transposed": (Transposed, IMAGE, True, set()),
    "tied": (Tied, WORDS, True, set()),
    "tied, inside the program": (Tied, WORDS, False, {"words.weight", "out.weight"}),
    "two delegates": (TwoDelegates, inputs(2, 8), True, set()),
    "computed": (Computed, inputs(2, 8), True, set()),
    "several layers": (nets.MLP, inputs(3, 16), True, set()),
    "normalizations": (nets.ConvNorm, inputs(2, 3, 6, 6), True, set()),
    "convolutions": (nets.Convolutions, inputs(1, 4, 8, 8), True, set()),
    "what is not packed": (nets.PReLU, inputs(1, 3, 8, 8), True, set()),
    "float16": (Half, (IMAGE[0].half(),), True, HALF),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_law(kind: str, tmp_path: Path) -> None:
    """After an update by name, the program computes what a new lowering does; what cannot is refused (U1)."""
    make, example, external, refused = KINDS[kind]
    module, config = seeded(make), {} if external else {"external_constants": False}
    randomize(module, 3)
    cache, run = open_program(lower_through({"forward": (module, example)}, tmp_path / "first", **config), example)
    before = run()
    own = module.state_dict()
    for name in refused:
        with pytest.raises(UpdateError, match=f"'{name}' cannot be updated: "):
            cache.update({name: own[name]})
    if refused:
        with pytest.raises(UpdateError, match="cannot (be updated|follow)"):
            cache.update_state_dict(own)
    cache.update_state_dict(own, strict=not refused)
    assert torch.equal(run(), before)
    others = {name: tensor for name, tensor in randomize(module, 4).items() if name not in refused}
    first = seeded(make)
    randomize(first, 3)
    with torch.no_grad():  # what is refused stays as it was
        for name in refused:
            module.state_dict()[name].copy_(first.state_dict()[name])
    again = lower_through({"forward": (module, example)}, tmp_path / "second", **config)
    cache.update_state_dict(others, strict=not refused)
    anew, run_anew = open_program(again, example)
    assert torch.equal(run(), run_anew())
    assert refused or {key: anew.bytes(key) for key in anew} == {key: cache.bytes(key) for key in cache}
    assert not torch.equal(run(), before)


def open_program(path: Path, example: Inputs):  # type: ignore[no-untyped-def]
    cache = BlobCache(path.with_name("model.ptd"))
    method = Program(path, cache).method()
    return cache, lambda: method(*example).clone()


def test_a_weight_that_a_pass_changed_is_refused(tmp_path: Path) -> None:
    """A pass between exporting and partitioning keeps the name and changes the numbers (U1)."""
    from torch.export import ExportedProgram

    module, example = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval(), inputs(2, 4)

    class Doubling(XnnpackPartitioner):  # type: ignore[misc]
        def transform_for_pre_decomposition(self, exported_program: ExportedProgram) -> ExportedProgram:
            program = super().transform_for_pre_decomposition(exported_program)
            program.state_dict["0.weight"] = nn.Parameter(program.state_dict["0.weight"].detach() * 2)
            return program

    with quiet():
        edge = to_edge_transform_and_lower(
            torch.export.export(module, example), partitioner=[BlobStorePartitioner(Doubling())]
        )
        path = write(edge.to_executorch(ExecutorchBackendConfig()), tmp_path)
    cache, run = open_program(path, example)
    before = run()
    with pytest.raises(UpdateError, match=r"'0\.weight' cannot be updated: it was changed between exporting"):
        cache.update_state_dict(module.state_dict())
    cache.update_state_dict(module.state_dict(), strict=False)
    assert torch.equal(run(), before)


class Chain(nn.Module):
    """As many delegates as layers: no delegate takes a cumulative sum."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).cumsum(-1)
        return x


def test_records_grow_with_the_model_and_not_with_its_square(tmp_path: Path) -> None:
    """Each tensor is described as often as it is stored, with any number of delegates (W3)."""
    sizes = []
    for layers in (3, 12):
        path = lower_through({"forward": (Chain(layers).eval(), inputs(2, 4))}, tmp_path / str(layers))
        cache = BlobCache(path.with_name("model.ptd"))
        records = [len(cache.get_data(key)) for key in cache if key.startswith("metadata.blobstore.")]
        assert len(cache.tensors) == 2 * layers
        sizes.append(sum(records))
    assert sizes[1] <= 4.2 * sizes[0]


def test_constants_outside_delegates_are_known_in_every_method(tmp_path: Path) -> None:
    """One delegate of each program lists what the program has outside of them (U1)."""
    module, example = seeded(Computed), inputs(2, 8)
    path = lower_through({"forward": (module, example), "again": (module, example)}, tmp_path, external_constants=False)
    cache = BlobCache(path.with_name("model.ptd"))
    for name in ("gain", "scaled", "sliced"):
        with pytest.raises(UpdateError, match=f"'{name}' cannot be updated: no data file has it under its name"):
            cache.update({name: module.get_parameter(name)})
