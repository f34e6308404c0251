"""The C++ API on real programs: values, training, and applications without exceptions (N1, N3)."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobstore.training import TrainingProgram
from tests.runtime import hooks, native_programs

pytestmark = pytest.mark.long


def run(*command: object) -> list[str]:
    """The lines that a test prints."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def xor() -> Any:
    """The module examples/xor.py."""
    from examples import xor

    return xor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """The programs of the C++ tests."""
    path: Path = tmp_path_factory.mktemp("programs")
    native_programs.write(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("target", ["headers", "headers_without_exceptions"])
def test_each_header_compiles_by_itself(target: str) -> None:
    """Without warnings, also with -fno-exceptions -fno-rtti (N3)."""
    hooks.built(target)


@pytest.mark.long
def test_values_of_programs(folder: Path) -> None:
    """Outputs own their memory, inputs change only if the caller allows it, and wrong ones are refused (N1)."""
    run(hooks.built("program_test") / "tests" / "program_test", folder)


def test_a_read_only_array_is_never_written_to(tmp_path: Path) -> None:
    """Also by a method that changes its input and has no memory planned for it."""
    from blobstore.runtime import Program

    for planned in (True, False):
        native_programs.write_increment(tmp_path / "increment.pte", planned=planned)
        method = Program(tmp_path / "increment.pte").method()
        x = np.arange(4, dtype=np.float32)
        x.flags.writeable = False
        assert method(x)[1].tolist() == [2, 4, 6, 8] and x.tolist() == [0, 1, 2, 3]
        x = x.copy()
        assert method(x)[1].tolist() == [2, 4, 6, 8] and x.tolist() == [1, 2, 3, 4]  # as for any writable input


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.5},
        {"lr": 0.5, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_training(options: dict[str, Any], xor: Any, folder: Path) -> None:
    """The native SGD steps as torch.optim.SGD does on the same gradients (N1)."""
    steps = 20
    training = TrainingProgram(folder / "train.pte", data=folder / "xor.ptd")
    optimizer = torch.optim.SGD(training.named_parameters().values(), **options)
    losses = [float(training.step(optimizer, xor.INPUTS, xor.LABELS)[0]) for _ in range(steps)]
    values = [options.get(name, 0) for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov")]
    test = hooks.built("training_test") / "tests" / "training_test"
    lines = run(test, folder / "train.pte", folder / "xor.ptd", *map(float, values), steps)
    found = {words[0]: [float(word) for word in words[1:]] for words in map(str.split, lines[steps:])}
    np.testing.assert_allclose([float(line.split()[1]) for line in lines[:steps]], losses, rtol=1e-5)
    assert set(found) == set(training.named_parameters())
    for name, tensor in training.named_parameters().items():
        np.testing.assert_allclose(found[name], tensor.flatten().numpy(), rtol=1e-4, atol=1e-6)


def test_without_exceptions(xor: Any, folder: Path, tmp_path: Path) -> None:
    """An application that is compiled without exceptions gets errors with messages, runs, updates and trains (N3)."""
    test = hooks.built("facade_test") / "tests" / "facade_test"
    before, zeroed, published, started_again = (
        torch.tensor([float(word) for word in line.split()]).reshape(4, 2)
        for line in run(
            test, *(folder / name for name in ("train.pte", "serve.pte", "xor.ptd")), tmp_path / "delta.ptd"
        )
    )
    torch.manual_seed(0)
    net = xor.Net()
    torch.testing.assert_close(before, net(xor.INPUTS))
    trained = xor.TrainingNet()
    trained.load_state_dict(net.state_dict())
    with torch.no_grad():
        net.hidden.weight.zero_()
    torch.testing.assert_close(zeroed, net(xor.INPUTS))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5, momentum=0.9)
    for _ in range(10):
        optimizer.zero_grad()
        trained(xor.INPUTS, xor.LABELS)[0].backward()
        optimizer.step()
    torch.testing.assert_close(published, xor.Net.forward(trained, xor.INPUTS), rtol=1e-4, atol=1e-5)
    assert torch.equal(started_again, published)
