"""Publishing trained weights to serving programs, compared with eager PyTorch (T2, U1, U2)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blobstore import errors, save_programs
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import TrainingProgram, lower_training
from tests.helpers.beside import running
from tests.helpers.waiting import until
from tests.lowering.live import close, lower_exported, lower_through, write
from tests.lowering.test_quantized import pt2e, put
from tests.training import nets


def train(joint: nets.Joint, training: TrainingProgram, steps: int = 5) -> nn.Module:
    """Train, and copy the trained weights into the model."""
    optimizer = torch.optim.Adam(training.named_parameters().values(), lr=0.02)
    for turn in range(steps):
        training.step(optimizer, *joint.batches[turn % len(joint.batches)])
    model = joint.eager()
    model.load_state_dict({**training.named_parameters(), **training.named_buffers()}, strict=False)
    return model


_lowered: dict[str, dict[str, bytes]] = {}


def once(name: str, folder: Path, make: Callable[[], object]) -> tuple[BlobCache, Program]:
    """Lower to `folder` once; further tests get copies of the files."""
    folder.mkdir()
    if name not in _lowered:
        make()
        _lowered[name] = {path.name: path.read_bytes() for path in folder.iterdir()}
    for file, content in _lowered[name].items():
        (folder / file).write_bytes(content)
    cache = BlobCache(sorted(folder.glob("*.ptd")))
    return cache, Program(folder / "model.pte", cache)


def portable(model: nn.Module, x: torch.Tensor, folder: Path) -> tuple[BlobCache, Program]:
    """An inference program by ExecuTorch's own lowering, with its weights in a data file."""

    def make() -> None:
        manager = lower({"forward": (nets.Scores(model), (x,))}, partitioners=list, external_constants=True)
        write(manager, folder)

    return once(f"portable {model}", folder, make)


def delegated(model: nn.Module, x: torch.Tensor, folder: Path) -> tuple[BlobCache, Program]:
    methods = {"forward": (nets.Scores(model), (x,))}
    return once(f"delegated {model}", folder, lambda: lower_through(methods, folder))


@pytest.mark.long
@pytest.mark.parametrize("make", [nets.xor, nets.convolutions, nets.lora], ids=["xor", "convolutions", "lora"])
@pytest.mark.parametrize("kind", [portable, delegated])
def test_the_next_call_uses_the_trained_weights(make: Any, kind: Any, tmp_path: Path) -> None:
    """Portable and delegated programs compute with the trained weights at once (T2)."""
    joint = make()
    training = joint.load(tmp_path / "train")
    x = joint.batches[0][0]
    cache, program = kind(joint.model, x, tmp_path / "serve")
    method = program.method()
    close(method(x), nets.Scores(joint.model)(x))
    for _ in range(3):
        model = train(joint, training)
        generation = cache.generation
        assert training.publish(cache) == cache.generation == generation + 1
        close(method(x), nets.Scores(model)(x))
    before = method(x)
    train(joint, training)
    assert torch.equal(method(x), before)  # nothing changes before publishing
    cache.revert()
    close(method(x), nets.Scores(joint.model)(x))


@pytest.mark.long
def test_int8(tmp_path: Path) -> None:
    """An int8 program quantizes what is published (X1, T2)."""
    joint = nets.convolutions()
    training, x = joint.load(tmp_path / "train"), joint.batches[0][0]
    eager = pt2e(nets.Scores(joint.model), (x,), is_per_channel=True)
    with quiet():
        path = lower_exported(torch.export.export(eager, (x,), strict=True), tmp_path / "serve")
    cache = BlobCache(tmp_path / "serve" / "model.ptd")
    method = Program(path, cache).method()
    close(method(x), eager(x), 0)
    for _ in range(2):
        for name, parameter in train(joint, training).named_parameters():
            put(eager, name, parameter)
        training.publish(cache)
        key = cache.tensors["fc.weight"].keys[0]
        assert bytes(cache.get_data(key)) == eager.get_buffer("fc.weight__quantized").numpy().tobytes()
        close(method(x), eager(x), 0.004)  # one quantization step: XNNPACK's int8 mean rounds ties differently


@pytest.mark.long
@pytest.mark.parametrize("folded", [True, False])
def test_normalization(folded: bool, tmp_path: Path) -> None:
    """Its parameters are trained, its statistics are buffers. A delegate that folded it stores neither separately; a program
    that serves in train() keeps its own statistics (T2)."""
    joint = nets.norm()
    training, x = joint.load(tmp_path / "train"), joint.batches[0][0]
    model = nets.Norm(nn.BatchNorm2d) if folded else joint.eager()
    model.load_state_dict(joint.model.state_dict())
    cache, program = delegated(model, x, tmp_path / "serve")
    assert folded or cache.tensors["norm.running_mean"].auxiliary
    method = program.method()
    for _ in range(2):
        model.load_state_dict(train(joint, training).state_dict())
        training.publish(cache)
        close(method(x), nets.Scores(model)(x))


@pytest.mark.long
def test_to_the_cache_that_it_runs_on(tmp_path: Path) -> None:
    """Without an argument the program's own cache is changed."""
    joint = nets.lora()
    training = joint.load(tmp_path / "train")
    cache = training.program.cache
    assert training.publish() == cache.generation == 1
    train(joint, training)
    training.publish()
    assert set(cache.dirty) == set(training.named_parameters())
    for name, tensor in training.named_parameters().items():
        assert torch.equal(cache.torch(name), tensor)
    again = TrainingProgram(tmp_path / "train" / "train.pte", cache)  # starts with the published weights
    for name, tensor in training.named_parameters().items():
        assert torch.equal(again.named_parameters()[name], tensor)


@pytest.mark.long
def test_parameters_that_the_cache_lacks(tmp_path: Path) -> None:
    """They are named in the error; without `strict` they are ignored."""
    joint = nets.xor()
    training = joint.load(tmp_path / "train")
    cache, program = portable_second(tmp_path / "serve")
    method, x = program.method(), torch.ones(4, 10)
    before, model = method(x), train(joint, training)
    with pytest.raises(errors.KeyNotFoundError, match=r"'first\.weight', 'first\.bias'"):
        training.publish(cache)
    assert torch.equal(method(x), before)
    assert (cache.generation, cache.dirty) == (0, ())
    training.publish(cache, strict=False)
    close(method(x), model.second(x))
    with pytest.raises(errors.KeyNotFoundError, match=r"first\.weight.*second\.bias"):
        training.publish(BlobCache())


def portable_second(folder: Path) -> tuple[BlobCache, Program]:
    """A program of the second layer alone."""

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(10, 2)

        def scores(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(x)

    return portable(Second(), torch.ones(4, 10), folder)


@pytest.mark.long
@pytest.mark.parametrize("kind", [portable, delegated])
def test_what_is_not_published(kind: Any, tmp_path: Path) -> None:
    """The error names a weight of another shape, and with `finite` one that has a NaN; nothing changes (B3)."""

    class Wider(nets.XOR):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 20), nn.Linear(20, 2)

    joint = nets.xor()
    training, x = joint.load(tmp_path / "train"), joint.batches[0][0]
    wider, _ = kind(Wider(), x, tmp_path / "wider")
    with pytest.raises(errors.LayoutError, match=r"first\.weight"):
        training.publish(wider)
    cache, _ = kind(joint.model, x, tmp_path / "serve")
    training.named_parameters()["second.bias"][0] = float("nan")
    with pytest.raises(errors.UpdateError, match=r"'second\.bias'.*not finite"):
        training.publish(cache, finite=True)
    for one in (wider, cache):
        assert (one.generation, one.dirty) == (0, ())
    training.publish(cache)
    assert cache.generation == 1


@pytest.mark.way
@pytest.mark.parametrize("kind", [portable, delegated])
def test_serving_while_training(kind: Any, tmp_path: Path) -> None:
    """Every answer is what one of the published states computes (B3)."""
    joint = nets.xor()
    training, x = joint.load(tmp_path / "train"), joint.batches[0][0]
    cache, program = kind(joint.model, x, tmp_path / "serve")
    methods = [program.load_method() for _ in range(2)]
    expected = [nets.Scores(joint.model)(x).detach()]
    seen: list[list[torch.Tensor]] = [[], []]
    serve = (lambda number=number: seen[number].append(methods[number](x)) for number in range(2))
    with running(*serve):
        for _ in range(20):
            expected.append(nets.Scores(train(joint, training))(x).detach())
            training.publish(cache)
        until(lambda: all(seen))
    states = torch.stack(expected)
    for outputs in seen:
        for output in outputs:
            assert (states - output).abs().amax(dim=(1, 2)).min() < 1e-5
    close(methods[0](x), expected[-1])


class FrozenNorm(nets.Norm):
    """Batch normalization in eval(): its parameters are trained on fixed statistics."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d)
        self.norm.running_mean.copy_(torch.linspace(-1, 1, 4))
        self.norm.running_var.copy_(torch.linspace(0.5, 2, 4))


@pytest.mark.long
@pytest.mark.parametrize("together", [True, False], ids=["one cache", "two caches"])
def test_normalization_of_fixed_statistics_that_was_folded(together: bool, tmp_path: Path) -> None:
    """The delegate combined the trained tensors with statistics, which are read from the training program's files."""
    torch.manual_seed(0)
    model = FrozenNorm().eval()
    x, labels = torch.randn(2, 1, 8, 8), torch.tensor([0, 2])
    with quiet():
        train_pte = write(lower_training(model, (x, labels), remove_view_copy=False), tmp_path / "train")
    served = FrozenNorm().eval()
    served.load_state_dict(model.state_dict())
    if not together:
        served.norm.running_var.mul_(3)
    cache, program = delegated(served, x, tmp_path / "serve")
    if together:
        cache = BlobCache([tmp_path / "train" / "model.ptd", tmp_path / "serve" / "model.ptd"])
        program = Program(tmp_path / "serve" / "model.pte", cache)
        training = TrainingProgram(train_pte, cache)
    else:
        training = TrainingProgram(train_pte, data=tmp_path / "train" / "model.ptd")
    optimizer = torch.optim.SGD(training.named_parameters().values(), lr=0.1)
    for _ in range(2):
        training.step(optimizer, x, labels)
        training.publish(cache)
        model.load_state_dict(training.named_parameters(), strict=False)
        close(program.method()(x), nets.Scores(model)(x))


def test_a_program_with_embedded_parameters(tmp_path: Path) -> None:
    """Publishing would not reach a program with embedded parameters, so a strict publish is refused."""
    joint = nets.xor()
    training, x = joint.load(tmp_path / "train"), joint.batches[0][0]
    cache, program = portable(joint.model, x, tmp_path / "serve")
    inside = write(lower({"forward": (nets.Scores(joint.model), (x,))}, partitioners=list), tmp_path / "inside")
    other = Program(inside, cache)
    model = train(joint, training)
    before = program.method()(x)
    with pytest.raises(errors.UpdateError, match=rf"method 'forward' of {inside} has constants like .*'first\.weight'"):
        training.publish(cache)
    assert torch.equal(program.method()(x), before)
    training.publish(cache, strict=False)
    close(program.method()(x), nets.Scores(model)(x))
    close(other.method()(x), nets.Scores(joint.model)(x))


class Wrapped(nn.Module):
    """A module that computes the loss of another one, whose parameters so get a prefix."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.net(x)
        return self.loss(scores, labels), scores.detach().argmax(1)


@pytest.mark.long
@pytest.mark.parametrize("serves", ["delegated", "portable", "nothing is loaded", "its own cache"])
def test_parameters_that_nothing_takes_that_serves(serves: str, tmp_path: Path) -> None:
    """The files have keys of these names, which only the training program uses: refused, with the names that serve (X4)."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 10), nn.Sigmoid(), nn.Linear(10, 2))
    x, labels = torch.randn(1, 2), torch.ones(1, dtype=torch.int64)
    options: dict[str, Any] = {"tag": "xor"}
    if serves == "portable":
        options |= {"partitioners": list}
    programs = {
        "train": lower_training(Wrapped(net), (x, labels), tag="xor"),
        "serve": lower({"forward": (net.eval(), (x,))}, **options),
    }
    save_programs(programs, tmp_path, keep_small=1024)
    cache = BlobCache(tmp_path / "xor.ptd")
    method = None if serves == "nothing is loaded" else Program(tmp_path / "serve.pte", cache).method()
    training = TrainingProgram(
        tmp_path / "train.pte", cache if serves == "its own cache" else BlobCache(tmp_path / "xor.ptd")
    )
    training.step(torch.optim.SGD(training.named_parameters().values(), lr=1.0), x, labels)
    for strict in (True, False):
        with pytest.raises(
            errors.UpdateError, match=r"no program that serves takes 'net\.0\.weight'.*may be '0\.weight'"
        ):
            training.publish(cache, strict=strict)
    with pytest.raises(errors.UpdateError, match=r"none of the tensors given can be updated"):
        cache.update_state_dict(training.named_parameters(), strict=False)
    assert (cache.generation, cache.dirty) == (0, ())
    trained = {name.removeprefix("net."): value for name, value in training.named_parameters().items()}
    cache.update_state_dict(trained)
    if method is not None:
        net.load_state_dict(trained)
        close(method(x), net(x))
