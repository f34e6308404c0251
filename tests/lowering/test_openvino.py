"""OpenVINO inside: its weights lie in its payload, leave holes there, and change by name (O1).

What ExecuTorch's own lowering for OpenVINO gives, in its own runtime, is what everything is compared with, to the bit.
"""

import builtins
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.errors import LayoutError, MissingDependencyError, UnsupportedDataError, UpdateError
from blobstore.lowering.export import lower, quiet
from blobstore.lowering.openvino import comparable, openvino_partitioner
from blobstore.programs import save_programs
from blobstore.runtime import BlobCache, Program
from tests.lowering.live import BlobStorePartitioner, XnnpackPartitioner, inputs, randomize, seeded

pytestmark = pytest.mark.long

with quiet():
    from executorch.backends.xnnpack.partition.config.gemm_configs import ConvolutionConfig

pytest.importorskip("openvino")

Methods = dict[str, tuple[nn.Module, tuple[Tensor, ...]]]


def wrapped() -> list[Any]:
    return [BlobStorePartitioner(openvino_partitioner())]


def stock() -> list[Any]:
    return [openvino_partitioner()]


def lowered(methods: Methods, folder: Path, partitioners: Callable[[], list[Any]] = wrapped) -> Path:
    """Lower methods; the partitioner prints which operators OpenVINO does not take."""
    with redirect_stdout(io.StringIO()):
        program = lower(methods, partitioners=partitioners, external_constants=lambda node: "model")
    save_programs({"model": program}, folder)
    return folder / "model.pte"


def run(program: Path, methods: Methods, cache: BlobCache | None = None) -> dict[str, Tensor]:
    beside = sorted(program.parent.glob("*.ptd"))  # of XNNPACK's own lowering
    if cache is None and beside:
        cache = BlobCache(beside)
    loaded = Program(program, cache) if cache is not None else Program(program)
    return {name: loaded.method(name)(*example).clone() for name, (_, example) in methods.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


class Plain(nn.Module):
    """Linear layers as a transformer has them: a normalization, equal biases, an embedding, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        for layer in self.layers:
            nn.init.zeros_(layer.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Methods, Path]:
    """Two methods of one model, lowered through blobstore."""
    module = seeded(Layers)
    methods: Methods = {"short": (module, inputs(3, 16)), "long": (module, inputs(7, 16))}
    return methods, lowered(methods, tmp_path_factory.mktemp("two"))


@pytest.mark.long
def test_two_methods(two: tuple[Methods, Path], tmp_path: Path) -> None:
    """Outputs are those of the backend's own lowering, before and after updates, and the weights are there once (R1,
    U1, U3)."""
    methods, program = two
    module = methods["short"][0]
    data = program.with_name("model.ptd")
    tensors = sum(tensor.nbytes for tensor in module.state_dict().values())
    cache = BlobCache(data)
    assert sum(len(blob) for key, blob in cache.views() if not key.startswith(KEY_PREFIX)) == tensors
    before = run(lowered(methods, tmp_path / "stock", stock), methods)
    same(run(program, methods, cache), before)
    loaded = Program(program, cache)
    held = {name: loaded.method(name) for name in methods}
    for seed in (1, 2):
        changed = seeded(Layers, seed)
        anew: Methods = {name: (changed, example) for name, (_, example) in methods.items()}
        cache.update_state_dict(changed.state_dict())
        expected = run(lowered(anew, tmp_path / str(seed), stock), anew)
        same({name: held[name](*example) for name, (_, example) in methods.items()}, expected)
    cache.revert()
    same({name: held[name](*example) for name, (_, example) in methods.items()}, before)


def test_values_that_are_equal_now(tmp_path: Path) -> None:
    """Equal biases, a normalization that does nothing yet, and tied weights each change by name (U1)."""
    tokens = (torch.tensor([1, 5, 2]),)
    methods: Methods = {"forward": (seeded(Plain), tokens)}
    program = lowered(methods, tmp_path / "ours")
    same(
        run(program, methods, cache := BlobCache(tmp_path / "ours/model.ptd")),
        run(lowered(methods, tmp_path / "stock", stock), methods),
    )
    assert not [name for name, tensor in cache.tensors.items() if tensor.refusal]
    changed = seeded(Plain)
    randomize(changed, 3)
    cache.update_state_dict(changed.state_dict())
    methods = {"forward": (changed, tokens)}
    same(run(program, methods, cache), run(lowered(methods, tmp_path / "anew", stock), methods))


class Folded(nn.Module):
    """A normalization that is folded into a linear layer, and a layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 24, bias=False), nn.BatchNorm1d(24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


def test_what_was_folded_is_refused(tmp_path: Path) -> None:
    """A folded normalization is not in the payload; the message says so, the rest changes (B3, U1)."""
    module, example = seeded(Folded), inputs(3, 16)
    randomize(module, 1)
    methods: Methods = {"forward": (module, example)}
    program = lowered(methods, tmp_path / "ours")
    cache = BlobCache(tmp_path / "ours/model.ptd")
    before = run(program, methods, cache)
    same(before, run(lowered(methods, tmp_path / "stock", stock), methods))
    with pytest.raises(UpdateError, match=r"'first\.weight' cannot be updated: it is not in the payload.*combined"):
        cache.update({"first.weight": torch.zeros(24, 16), "second.bias": torch.ones(8)})
    same(run(program, methods, cache), before)
    randomize(module.second, 2)
    cache.update_state_dict(module.state_dict(), strict=False)
    same(run(program, methods, cache), run(lowered(methods, tmp_path / "anew", stock), methods))


class _Alone(nn.Module):
    """One weight, as it is or combined."""

    def __init__(self, weight: nn.Parameter, *, combined: bool) -> None:
        super().__init__()
        self.w, self.combined = weight, combined

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.w + 1 if self.combined else self.w.t())


def test_a_method_that_cannot_follow_refuses_for_all(tmp_path: Path) -> None:
    """Also if nothing else of its part is in the data file, and if it is in another program (N3, X4)."""
    weight = nn.Parameter(inputs(4, 4)[0])
    methods: Methods = {
        "follows": (_Alone(weight, combined=False).eval(), inputs(2, 4)),
        "stays": (_Alone(weight, combined=True).eval(), inputs(3, 4)),
    }
    lowered(methods, tmp_path / "one")
    with redirect_stdout(io.StringIO()):
        apart = {name: lower({name: method}, partitioners=wrapped) for name, method in methods.items()}
    save_programs(apart, tmp_path / "two")
    for folder in ("one", "two"):
        cache = BlobCache(tmp_path / folder / "model.ptd")
        for program in sorted((tmp_path / folder).glob("*.pte")):
            for name in (loaded := Program(program, cache)).method_names:
                loaded.method(name)
        with pytest.raises(UpdateError, match="combined it with other constants"):
            cache.update({"w": torch.zeros(4, 4)})


@pytest.mark.parametrize("wrong", [{"device": None}, {"device": 1}, {"device": ""}, {"foo": 1}])
def test_wrong_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedDataError):
        openvino_partitioner(**wrong)


class Mixed(nn.Module):
    """A convolution, which XNNPACK gets here, between linear layers, which OpenVINO gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.second = nn.Linear(16, 24), nn.Conv1d(1, 4, 3), nn.Linear(22, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(torch.tanh(self.first(x)).unsqueeze(1)))
        return self.second(x).mean(1)


@pytest.mark.long
def test_two_backends_in_one_program(tmp_path: Path) -> None:
    """One update reaches the parts of XNNPACK and of OpenVINO in one commit; a refused one reaches neither (U1, B3)."""

    def both(wrap: Callable[[Any], Any]) -> Callable[[], list[Any]]:
        return lambda: [wrap(XnnpackPartitioner(configs=[ConvolutionConfig])), wrap(openvino_partitioner())]

    module, example = seeded(Mixed), inputs(3, 16)
    methods: Methods = {"forward": (module, example)}
    program = lowered(methods, tmp_path / "ours", both(BlobStorePartitioner))
    assert b"XnnpackBackend" in program.read_bytes()
    assert b"OpenvinoBackend" in program.read_bytes()
    cache = BlobCache(tmp_path / "ours/model.ptd")
    before = run(program, methods, cache)
    same(before, run(lowered(methods, tmp_path / "stock", both(lambda inner: inner)), methods))
    held = Program(program, cache).method()
    generation = cache.generation
    with pytest.raises(LayoutError):
        cache.update({"conv.bias": torch.ones(4), "first.bias": torch.ones(5)})
    same({"forward": held(*example)}, before)
    changed = seeded(Mixed, 4)
    cache.update_state_dict(changed.state_dict())
    assert cache.generation == generation + 1
    methods = {"forward": (changed, example)}
    same({"forward": held(*example)}, run(lowered(methods, tmp_path / "anew", both(lambda inner: inner)), methods))


def test_payloads_that_are_none_of_openvino() -> None:
    """They are compared as they are, and not taken apart."""
    for data in (b"", b"x" * 20, bytes(48), b"\1" * 200, (48).to_bytes(8, "little") * 6 + b"y" * 48):
        assert comparable(data) == data


def test_without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install (B3)."""
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "openvino":
            raise ImportError("No module named 'openvino'")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("executorch.backends.openvino")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingDependencyError, match=r"'openvino'.*pip install --no-deps 'openvino>=2025"):
        openvino_partitioner()
