"""Training without gradients, on programs that only serve (T1, T2)."""

import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import blobstore
from blobstore import errors
from blobstore.adapters import AdapterTags
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import MeZO
from tests.adapters.nets import LoraLinear
from tests.lowering.live import plugin
from tests.runtime import hooks

pytestmark = pytest.mark.long

Loss = Callable[[], Tensor]


def batch() -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    return torch.randn(32, 32, generator=chance), torch.randint(0, 3, (32,), generator=chance)


@pytest.fixture(scope="module", params=["portable", "delegated", "4 bits"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `serve.pte`, `foundation.ptd` and `adapter.ptd`; a program of each kind."""
    torch.manual_seed(0)
    layers, tags = (LoraLinear(32, 16), LoraLinear(16, 3)), AdapterTags()
    for layer in layers:
        nn.init.zeros_(layer.lora_b.weight)
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1]).eval()
    made = tmp_path_factory.mktemp(request.param)
    if request.param == "4 bits":
        from torchao.quantization.granularity import PerGroup
        from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig, quantize_

        with quiet():
            config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
            quantize_(net, config, lambda module, name: name == "0.base")
    partitioners = list if request.param == "portable" else plugin(tags)
    program = lower({"forward": (net, batch()[:1])}, partitioners=partitioners, external_constants=tags)
    result = blobstore.save_programs({"serve": program}, made, keep_small=64)
    assert [path.name for path in result.data_files] == ["adapter.ptd", "foundation.ptd"]
    return made


def opened(folder: Path) -> tuple[BlobCache, Loss]:
    cache = BlobCache(folder / "adapter.ptd", base=BlobCache(folder / "foundation.ptd"))
    method = Program(folder / "serve.pte", cache).method()
    x, labels = batch()
    return cache, lambda: functional.cross_entropy(method(x), labels)


def weights(cache: BlobCache, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    return {name: cache.tensors.value(name)[0].astype(np.float64) for name in names}


NAMES = ("0.lora_a.weight", "0.lora_b.weight", "2.lora_a.weight", "2.lora_b.weight")


def test_a_program_that_serves_learns(folder: Path) -> None:
    """The loss falls, and nothing but the adapter changes."""
    cache, loss = opened(folder)
    optimizer = MeZO(cache, lr=0.03)
    assert optimizer.names == NAMES
    first = float(loss())
    losses = [optimizer.step(loss) for _ in range(300)]
    assert losses[0] == pytest.approx(first, abs=1e-3)
    assert float(loss()) < 0.85 * first
    assert optimizer.steps == 300
    assert len(cache.dirty) == len(NAMES) and cache.base is not None and cache.base.dirty == ()


def test_a_step_is_that_of_the_paper(folder: Path) -> None:
    """Forth, back, and against the difference of the losses; the direction is what the losses were computed at."""
    cache, loss = opened(folder)
    lr, eps = 0.25, 1e-2
    optimizer = MeZO(cache, lr=lr, eps=eps, seed=5)
    before, seen = weights(cache, NAMES), []

    def watched() -> float:
        seen.append((weights(cache, NAMES), float(loss())))
        return seen[-1][1]

    mean = optimizer.step(watched)
    (forth, high), (back, low) = seen
    assert mean == pytest.approx((high + low) / 2, rel=1e-12)
    for name, after in weights(cache, NAMES).items():
        z = (forth[name] - back[name]) / (2 * eps)
        np.testing.assert_allclose(forth[name] - before[name], eps * z, atol=1e-6)
        np.testing.assert_allclose(after, before[name] - lr * (high - low) / (2 * eps) * z, atol=1e-5)


def direction(seed: int, step: int, name: str, count: int) -> np.ndarray:
    """Written a second time after the definition: SplitMix64 by position, and the method of Box and Muller."""

    def mixed(bits: int) -> int:
        bits = (bits + 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB % 2**64
        return bits ^ (bits >> 31)

    key, numbers = mixed(seed) ^ step, []
    for byte in name.encode():
        key = mixed(key ^ byte)
    for position in range(0, count, 2):
        bits = mixed(key ^ mixed(position))
        first, second = ((part + 0.5) / 2**32 for part in (bits >> 32, bits % 2**32))
        radius, angle = math.sqrt(-2 * math.log(first)), 2 * math.pi * second
        numbers += [radius * math.cos(angle), radius * math.sin(angle)]
    return np.array(numbers[:count])


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of zeros, which show directions."""
    path = tmp_path_factory.mktemp("noise") / "zeros.ptd"
    store = blobstore.BlobStore()
    for name in ("one", "other"):
        store.add(name, torch.zeros(99, 101))
    store.add("whole", torch.zeros(4, dtype=torch.int32))
    store.write_ptd(path)
    return path


def seen(path: Path, seed: int, steps: int = 1) -> list[dict[str, np.ndarray]]:
    """The directions of the first steps."""
    cache = BlobCache(path)
    optimizer, found = MeZO(cache, lr=0, eps=1, seed=seed), []
    for _ in range(steps):
        moved: list[dict[str, np.ndarray]] = []

        def loss() -> float:
            moved.append(weights(cache, optimizer.names))  # noqa: B023
            return 0

        optimizer.step(loss)
        found.append(moved[0])
    return found


def test_directions(noise: Path) -> None:
    """Of the normal distribution, others in each step, of each seed and for each name, and the same everywhere."""
    first, second = seen(noise, 0, steps=2)
    (third,) = seen(noise, 2**64 - 1)
    assert set(first) == {"one", "other"}
    np.testing.assert_allclose(second["one"].ravel(), direction(0, 1, "one", 9999), atol=1e-6)
    np.testing.assert_allclose(third["other"].ravel(), direction(2**64 - 1, 0, "other", 9999), atol=1e-6)
    columns = np.stack([one[name].ravel() for one in (first, second, third) for name in sorted(one)])
    error = 4 / math.sqrt(columns.shape[1])  # four standard deviations
    for power, moment in enumerate((0.0, 1.0, 0.0, 3.0), start=1):
        assert np.abs((columns**power).mean(1) - moment).max() < 8 * error
    assert np.abs(np.corrcoef(columns) - np.eye(len(columns))).max() < error
    for shift in (1, 2, 101):
        assert np.abs((columns[:, shift:] * columns[:, :-shift]).mean(1)).max() < error
    shares = [(np.abs(columns) < bound).mean() for bound in (0.5, 1, 2, 3)]
    np.testing.assert_allclose(shares, [math.erf(bound / math.sqrt(2)) for bound in (0.5, 1, 2, 3)], atol=error / 2)


def test_the_same_in_cpp(noise: Path, tmp_path: Path) -> None:
    """To the bit."""
    command = [hooks.built("mezo_test") / "tests" / "mezo_test", noise, "3", tmp_path / "cpp.ptd"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    cache = BlobCache(noise)
    optimizer = MeZO(cache, lr=0.01, eps=0.01, seed=7)
    for _ in range(3):
        optimizer.step(lambda: abs(float(cache.numpy("one")[0, 0]) - 1))
    with blobstore.open_ptd(tmp_path / "cpp.ptd") as found:
        for name in optimizer.names:
            assert np.any(cache.numpy(name))
            np.testing.assert_array_equal(found.numpy(name), cache.numpy(name))


def test_going_on_where_another_run_stopped(folder: Path, tmp_path: Path) -> None:
    """Weights and the number of steps are all that there is."""
    cache, loss = opened(folder)
    whole = MeZO(cache, lr=0.1, seed=3)
    for _ in range(3):
        whole.step(loss)
    cache.save(tmp_path / "three.ptd")
    expected = [whole.step(loss) for _ in range(3)]
    cache, loss = opened(folder)
    cache.load(tmp_path / "three.ptd")
    resumed = MeZO(cache, lr=0.1, seed=3)
    resumed.steps = 3
    assert [resumed.step(loss) for _ in range(3)] == expected
    assert resumed.steps == 6


def test_errors_leave_the_tensors_as_they_were(folder: Path) -> None:
    """Whichever of the two losses it is, and whatever it raises."""
    cache, loss = opened(folder)
    optimizer = MeZO(cache)
    before = weights(cache, NAMES)
    for at in (0, 1):
        for wrong in (math.nan, math.inf, "text", KeyboardInterrupt()):
            count = iter(range(2))

            def bad() -> object:
                if next(count) != at:  # noqa: B023
                    return loss()
                if isinstance(wrong, BaseException):  # noqa: B023
                    raise wrong  # noqa: B023
                return wrong  # noqa: B023

            error = {str: errors.TrainingError, float: errors.NotFiniteLossError}.get(type(wrong), KeyboardInterrupt)
            with pytest.raises(error):
                optimizer.step(bad)
            for name, value in weights(cache, NAMES).items():
                np.testing.assert_array_equal(value, before[name])
    assert optimizer.steps == 0


def test_what_cannot_be_trained(folder: Path, noise: Path) -> None:
    """Each reason is an error that names it."""
    cache, _ = opened(folder)
    for option in ({"lr": -1.0}, {"lr": math.nan}, {"eps": 0.0}, {"eps": math.inf}):
        with pytest.raises(errors.TrainingError, match=next(iter(option))):
            MeZO(cache, **option)
    with pytest.raises(errors.KeyNotFoundError, match="missing"):
        MeZO(cache, names=["missing"])
    with pytest.raises(errors.UnsupportedOperationError, match=r"'2.base.bias' is in the base of the cache"):
        MeZO(cache, names=["2.base.bias"])
    with pytest.raises(errors.UnsupportedOperationError, match="'whole' is not float32"):
        MeZO(BlobCache(noise), names=["one", "whole"])
    with pytest.raises(errors.TrainingError, match="no float32 tensor of its own"):
        MeZO(BlobCache((), base=BlobCache(noise)))
    with pytest.raises(errors.UnsupportedDataError, match="must be a BlobCache, not a str"):
        MeZO("adapter.ptd")  # type: ignore[arg-type]
    optimizer = MeZO(cache, lr=0.5)
    with pytest.raises(errors.TrainingError, match="lr"):
        optimizer.lr = -1
    assert optimizer.lr == 0.5
    optimizer.lr = 0.25
    assert "4 tensors, lr=0.25, eps=0.001, seed=0, 0 steps" in repr(optimizer)


def test_weights_that_are_stored_in_another_form(tmp_path: Path) -> None:
    """They cannot be read back, which is said before the first step."""
    tags = AdapterTags()
    net, x = nn.Sequential(nn.Conv2d(3, 4, 2)), torch.ones(1, 3, 5, 5)
    program = lower({"forward": (net, (x,))}, partitioners=plugin(tags), external_constants=tags)
    (data,) = blobstore.save_programs({"serve": program}, tmp_path, keep_small=64).data_files
    with pytest.raises(errors.UpdateError, match="'0.weight' cannot be read back"):
        MeZO(BlobCache(data))
