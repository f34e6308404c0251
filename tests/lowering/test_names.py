"""The names and tensors that an update takes: state, ties, buffers that are not persistent (U1, U3)."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blobstore.errors import KeyNotFoundError, UpdateError
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program
from tests.lowering.live import close, inputs, lower_exported, lower_through, plugin, randomize, seeded, write

with quiet():
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower


class Stateful(nn.Module):
    """A cache of keys, a counter, running statistics, a buffer that is not persistent, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("cache", torch.zeros(4, 8))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scale", torch.linspace(1, 2, 8), persistent=False)
        self.head = nn.Linear(8, 8)
        self.head.register_buffer("mask", torch.linspace(0, 1, 64).reshape(8, 8), persistent=False)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        y = self.linear(x) * self.scale
        self.cache.index_copy_(0, position, y)
        self.steps.add_(1)
        self.mean.mul_(0.5).add_(0.5 * y.detach().mean(0))
        return nn.functional.linear(self.cache, self.head.mask, self.head.bias) + self.mean + self.steps


def fresh(module: Stateful) -> Stateful:
    """The same weights with the state that a program starts with."""
    copy = Stateful().eval()
    copy.load_state_dict(module.state_dict())
    for name in ("cache", "steps", "mean"):
        getattr(copy, name).zero_()
    return copy


@pytest.mark.long
def test_state_is_no_weight(tmp_path: Path) -> None:
    """A whole state dict is accepted and state in it skipped; state by name is refused with the reason (U1)."""
    module = seeded(Stateful)
    example = (*inputs(1, 8), torch.tensor([2]))
    with torch.no_grad():
        path = lower_through({"forward": (module, example)}, tmp_path)
    cache = BlobCache(tmp_path / "model.ptd")
    state = randomize(module, 1)
    module.scale.copy_(torch.linspace(1, 2, 8))
    module.head.mask.copy_(torch.linspace(0, 1, 64).reshape(8, 8))
    assert set(state) > {"unused", "cache", "steps", "mean"}
    cache.update_state_dict(state)
    eager, method = fresh(module), Program(path, cache).method()
    with torch.no_grad():
        for _ in range(3):
            close(method(*example), eager(*example))
    for name in ("cache", "steps", "mean"):
        assert cache.tensors[name].auxiliary
        with pytest.raises(UpdateError, match=f"'{name}' cannot be updated: it is not a weight but state"):
            cache.update({name: getattr(module, name)})
    with pytest.raises(UpdateError, match=r"'cache': it is not a weight but state"):
        cache.update_state_dict({"cache": module.cache}, strict=False)
    with pytest.raises(UpdateError, match=r"lacks 'linear\.bias'"):
        cache.update_state_dict({name: tensor for name, tensor in state.items() if name != "linear.bias"})
    with pytest.raises(KeyNotFoundError, match="unused"):
        cache.update({"unused": module.unused})


class Scaled(nn.Module):
    """A weight and a factor that are multiplied in every call, for a delegate and for a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.eye(8)), nn.Parameter(torch.ones(8, 1))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.linear(x, self.weight * self.factor))


@pytest.mark.long
def test_tensors_that_were_computed_ahead_are_refused(tmp_path: Path) -> None:
    """Weights of which the program has only a product would not change (U1)."""
    from executorch.exir.passes.constant_prop_pass import constant_prop_pass

    module = seeded(Scaled)
    with torch.no_grad(), quiet():
        exported = constant_prop_pass(torch.export.export(module, inputs(2, 8)))
    path = lower_exported({"forward": exported}, tmp_path)
    cache = BlobCache(tmp_path / "model.ptd")
    forward, state = Program(path, cache).method(), dict(module.state_dict())
    before = forward(*inputs(2, 8)).clone()
    with pytest.raises(UpdateError, match=r"no program has 'weight' and 'factor', and '_prop_tensor_constant\d' may"):
        cache.update_state_dict(randomize(seeded(Scaled), 3))
    assert torch.equal(forward(*inputs(2, 8)), before)
    cache.update_state_dict({name: value for name, value in state.items() if name.startswith("linear.")})


class Tied(nn.Module):
    """One matrix: looked up by a kernel, multiplied by a delegate, or both only looked up."""

    def __init__(self, *, delegated: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False) if delegated else nn.Embedding(16, 8)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(16 if delegated else 8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.head(torch.tanh(x)) if isinstance(self.head, nn.Linear) else x * self.head(15 - tokens)
        return self.last(x)


class TiedLayers(nn.Module):
    """Two tied layers, both in a delegate."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.linspace(-1, 1, 8) * tokens[:, None]
        return self.last(self.head(torch.tanh(self.embed(x))))


MAKERS = {
    "one of two delegated": lambda: Tied(delegated=True),
    "portable": lambda: Tied(delegated=False),
    "delegated": TiedLayers,
}


@pytest.mark.long
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("kind", MAKERS)
def test_tied_tensors_under_each_name(kind: str, strict: bool, tmp_path: Path) -> None:
    """Every name works, whichever the exporter kept; contradicting values change nothing (U1, B3)."""
    module = seeded(MAKERS[kind])
    tokens = torch.tensor([1, 2, 3])
    exported = torch.export.export(module, (tokens,), strict=strict)
    with quiet():
        edge = to_edge_transform_and_lower(exported, partitioner=plugin()())
        path = write(edge.to_executorch(ExecutorchBackendConfig(external_constants=lambda _: "model")), tmp_path)
    cache = BlobCache(tmp_path / "model.ptd")
    method = Program(path, cache).method()

    def check() -> None:
        with torch.no_grad():
            close(method(tokens), module(tokens))

    check()
    names = ("embed.weight", "head.weight")
    for name in names:
        with torch.no_grad():
            module.embed.weight.mul_(-1.5)
        cache.update({name: module.embed.weight})
        check()
    for name in names:
        state = randomize(module, len(name))
        cache.update_state_dict({key: tensor for key, tensor in state.items() if key == name or key not in names})
        check()
    cache.update_state_dict(randomize(module, 3))
    check()
    for change in (cache.update, cache.update_state_dict):
        for first, second in (names, names[::-1]):
            other = torch.zeros(module.embed.weight.shape)
            with pytest.raises(UpdateError, match="another name of"):
                change({**module.state_dict(), first: module.embed.weight, second: other})
    check()
