"""Checkpoints between Python and C++: a run that goes on in the other language is the run that was not broken (T2, N1)."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blobstore import errors, open_ptd
from blobstore.training import AdamW, TrainingProgram
from tests.runtime import hooks, native_programs
from tests.training import nets
from tests.training.test_adamw import _ExactRoots, fuses

pytestmark = pytest.mark.long

Make = Callable[[Any], torch.optim.Optimizer]

# As in runtime_bindings/tests/checkpoint_test.cpp
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adamw": lambda p: AdamW(p, lr=0.03, weight_decay=0.1),
    "amsgrad": lambda p: AdamW(p, lr=0.03, weight_decay=0.1, amsgrad=True),
}
OF_TORCH: dict[str, Make] = {
    **OPTIMIZERS,
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.1, amsgrad=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """The programs of the C++ tests."""
    path: Path = tmp_path_factory.mktemp("programs")
    native_programs.write(path)
    return path


@pytest.fixture(scope="module")
def test() -> Path:
    """The C++ program."""
    return hooks.built("checkpoint_test") / "tests" / "checkpoint_test"


class Runs:
    """Steps of the network of examples/xor.py, in both languages."""

    def __init__(self, test: Path, folder: Path) -> None:
        from examples import xor

        self.batch = (xor.INPUTS, xor.LABELS)
        self._test, self._files = test, (folder / "train.pte", folder / "xor.ptd")

    def python(self, make: Make, steps: int, source: Path | None, target: Path, base: list[Path] = []) -> None:  # noqa: B006
        training = TrainingProgram(self._files[0], data=self._files[1])
        optimizer = make(training.named_parameters().values())
        if source is not None:
            training.load(source, optimizer, base=base)
        for _ in range(steps):
            training.step(optimizer, *self.batch)
        training.save(target, optimizer, base=base)

    def cpp(self, kind: str, steps: int, source: Path | None, target: Path, base: list[Path] = []) -> str:  # noqa: B006
        """What it prints: nothing, or an error."""
        command = [self._test, *self._files, kind, steps, source or "-", target, *base]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def runs(test: Path, folder: Path) -> Runs:
    return Runs(test, folder)


def contents(path: Path) -> dict[str, tuple[Any, bytes]]:
    with open_ptd(path, verify=True) as file:
        return {
            key: (file.get_tensor_layout(key), bytes(file.get_data(key)))
            for key in file
            if file.get_tensor_layout(key) is not None
        }


@fuses
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_in_the_other_language(kind: str, runs: Runs, tmp_path: Path) -> None:
    """Parameters and the optimizer's state are equal to the bit, whoever makes which steps."""
    make = OPTIMIZERS[kind]
    runs.python(make, 8, None, tmp_path / "unbroken")
    runs.cpp(kind, 8, None, tmp_path / "unbroken cpp")
    runs.python(make, 5, None, tmp_path / "half")
    runs.cpp(kind, 3, tmp_path / "half", tmp_path / "python, cpp")
    runs.cpp(kind, 5, None, tmp_path / "half cpp")
    runs.python(make, 3, tmp_path / "half cpp", tmp_path / "cpp, python")
    with _ExactRoots():  # torch's own optimizer is the one that both are compared with
        runs.python(OF_TORCH[kind], 8, None, tmp_path / "torch")
    expected = contents(tmp_path / "torch")
    assert any("optimizer/" in key for key in expected) == (kind != "sgd")
    for name in ("unbroken", "unbroken cpp", "python, cpp", "cpp, python"):
        assert contents(tmp_path / name) == expected, name


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("base", [False, True])
def test_a_file_is_the_same_from_both_languages(base: bool, kind: str, runs: Runs, tmp_path: Path) -> None:
    """What one language read and saves without a step is the file that the other one wrote, byte by byte."""
    files: list[Path] = []
    if base:
        files.append(tmp_path / "base")
        runs.python(OPTIMIZERS[kind], 2, None, files[0])
    for make, name in ((OPTIMIZERS[kind], "first"), (OF_TORCH[kind], "of torch")):
        runs.python(make, 3, None, tmp_path / f"{name} whole")
        runs.python(make, 0, tmp_path / f"{name} whole", tmp_path / name, base=files)
        assert runs.cpp(kind, 0, tmp_path / name, tmp_path / f"{name} again", files) == ""
        assert (tmp_path / f"{name} again").read_bytes() == (tmp_path / name).read_bytes()


def test_options_come_from_the_checkpoint(runs: Runs, tmp_path: Path) -> None:
    """Also those that C++ does not know, such as what a scheduler keeps; numbers need not be floats."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = AdamW(parameters, lr=1, betas=(0.0, 0.5), weight_decay=0)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    runs.python(make, 4, None, tmp_path / "half")
    assert runs.cpp("adamw", 2, tmp_path / "half", tmp_path / "end") == ""
    runs.python(make, 2, tmp_path / "half", tmp_path / "expected")
    assert (tmp_path / "end").read_bytes() == (tmp_path / "expected").read_bytes()


def _put(path: str, value: Any) -> Callable[[Any, dict[str, Tensor]], None]:
    def change(contents: Any, tensors: dict[str, Tensor]) -> None:
        *folders, last = path.split(" ")
        for folder in folders:
            contents = contents[int(folder) if folder.isdecimal() else folder]
        if value is None:
            del contents[last]
        else:
            contents[last] = value

    return change


def _tensor(key: str, value: Tensor) -> Callable[[Any, dict[str, Tensor]], None]:
    def change(contents: Any, tensors: dict[str, Tensor]) -> None:
        assert key in tensors
        tensors[key] = value

    return change


INVALID_FILE, CHECKPOINT = 0, 25  # of ErrorKind
OPTIONS = "optimizer groups 0 options dict"
NAMES = ("hidden.bias", "hidden.weight", "out.bias", "out.weight")
GROUPS = [{"options": {"dict": {}}, "params": [name]} for name in NAMES]
HOSTILE: dict[str, tuple[int, str, Callable[[Any, dict[str, Tensor]], None]]] = {
    "version": (INVALID_FILE, "unknown version", _put("version", 1)),
    "no version": (INVALID_FILE, "version is missing", _put("version", None)),
    "no tensors": (INVALID_FILE, "tensors is missing", _put("tensors", None)),
    "tensors": (INVALID_FILE, "is not JSON", _put("tensors", [])),
    "names": (INVALID_FILE, "named twice", _put("parameters", ["out.bias", "out.bias"])),
    "unknown name": (INVALID_FILE, "not among the tensors", _put("parameters", ["unknown"])),
    "name": (INVALID_FILE, "a text is missing", _put("parameters", [1])),
    "unlisted": (INVALID_FILE, "the file does not", _put("tensors no", ["00"])),
    "digest": (INVALID_FILE, "a text is missing", _put("tensors no", [1])),
    "layout": (INVALID_FILE, "a layout is impossible", _put("tensors no", ["00", [6, [1], [0, 1]]])),
    "negative": (INVALID_FILE, "impossible number", _put("tensors no", ["00", [6, [-1], [0]]])),
    "huge": (INVALID_FILE, "overflows", _put("tensors no", ["00", [6, [2**31 - 1] * 3, [0, 1, 2]]])),
    "type": (INVALID_FILE, "a layout is impossible", _put("tensors no", ["00", [99, [1], [0]]])),
    "base": (CHECKPOINT, "none is given", _put("tensors no", ["00", [6, [1], [0]]])),
    "kind": (INVALID_FILE, "a text is missing", _put("optimizer kind", 3)),
    "no groups": (INVALID_FILE, "incomplete", _put("optimizer groups", None)),
    "no state": (INVALID_FILE, "incomplete", _put("optimizer state", None)),
    "state": (INVALID_FILE, "is no dictionary", _put("optimizer state out.bias", [])),
    "state of none": (INVALID_FILE, "in no group", _put("optimizer state nobody", {"dict": {}})),
    "kind of value": (INVALID_FILE, "unknown kind", _put(f"{OPTIONS} lr", {"odd": 1})),
    "two kinds": (INVALID_FILE, "too", _put(f"{OPTIONS} lr", {"float": "0x1.0p+0", "tuple": []})),
    "no kind": (INVALID_FILE, "no kind", _put(f"{OPTIONS} lr", {})),
    "float": (INVALID_FILE, "hexadecimal", _put(f"{OPTIONS} lr", {"float": "0x1.00000000000000p+0"})),
    "exponent": (INVALID_FILE, "hexadecimal", _put(f"{OPTIONS} lr", {"float": "0x1.0p+99999999999999999999"})),
    "plain float": (INVALID_FILE, "not an integer", _put(f"{OPTIONS} lr", 0.5)),
    "no tensor": (INVALID_FILE, "no tensor 'x'", _put(f"{OPTIONS} lr", {"tensor": "x"})),
    "tensor": (CHECKPOINT, "lr of the AdamW is not a number", _put(f"{OPTIONS} lr", {"tensor": "out.bias"})),
    "bool": (CHECKPOINT, "lr of the AdamW is not a number", _put(f"{OPTIONS} lr", True)),
    "lr": (CHECKPOINT, "lr must be", _put(f"{OPTIONS} lr", {"float": "-0x1.0p+0"})),
    "nan": (CHECKPOINT, "lr must be", _put(f"{OPTIONS} lr", {"float": "nan"})),
    "betas": (CHECKPOINT, "pair of numbers", _put(f"{OPTIONS} betas", {"tuple": [0]})),
    "beta": (CHECKPOINT, "betas must be", _put(f"{OPTIONS} betas", {"tuple": [0, 1]})),
    "flag": (CHECKPOINT, "neither true nor false", _put(f"{OPTIONS} amsgrad", 1)),
    "amsgrad": (CHECKPOINT, "lacks a running average", _put(f"{OPTIONS} amsgrad", True)),
    "coupled": (CHECKPOINT, "as Adam does", _put(f"{OPTIONS} decoupled_weight_decay", False)),
    "no option": (CHECKPOINT, "eps of the AdamW", _put(f"{OPTIONS} eps", None)),
    "unknown state": (CHECKPOINT, "has more, which", _put("optimizer state out.bias dict more", 1)),
    "no mean": (CHECKPOINT, "lacks a running average", _put("optimizer state out.bias dict exp_avg", None)),
    "plain mean": (CHECKPOINT, "not a tensor", _put("optimizer state out.bias dict exp_avg", 1)),
    "swapped": (CHECKPOINT, "must be float", _put("optimizer state out.bias dict exp_avg", {"tensor": "out.weight"})),
    "no step": (CHECKPOINT, "not a number of steps", _put("optimizer state out.bias dict step", None)),
    "steps": (CHECKPOINT, "not a number of steps", _tensor("optimizer/out.bias/step", torch.tensor(float("nan")))),
    "negative steps": (CHECKPOINT, "not a number of steps", _tensor("optimizer/out.bias/step", torch.tensor(-1.0))),
    "step's type": (CHECKPOINT, "not a number of steps", _tensor("optimizer/out.bias/step", torch.tensor(1))),
    "shape": (CHECKPOINT, "'out.bias' is", _tensor("out.bias", torch.zeros(3))),
    "dtype": (CHECKPOINT, "'out.bias' is", _tensor("out.bias", torch.zeros(2, dtype=torch.float64))),
    "parameters": (CHECKPOINT, "lacks the parameters", _put("parameters", ["out.bias"])),
    "frozen": (CHECKPOINT, "other frozen weights", _put("frozen", "00")),
    "another": (CHECKPOINT, "of optimizer RMSprop", _put("optimizer kind", "RMSprop")),
    "groups": (CHECKPOINT, "4 groups", _put("optimizer groups", GROUPS)),
}  # fmt: skip


OF_CPP = {
    *(
        *("float", "plain float", "tensor", "bool", "lr", "nan", "betas"),
        *("beta", "flag", "amsgrad", "coupled", "no option"),
    ),
    *("unknown state", "no mean", "plain mean", "swapped", "steps", "negative steps", "step's type"),
}
"""What Python leaves to torch, whose optimizers have options and a state of any kind."""


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_lies_is_one_error(case: str, runs: Runs, tmp_path: Path) -> None:
    """C++ names the file and the reason, and writes nothing."""
    runs.python(OPTIMIZERS["adamw"], 2, None, tmp_path / "good")
    kind, words, change = HOSTILE[case]
    nets.rewrite(tmp_path / "good", tmp_path / "bad", change)
    number, _, message = runs.cpp("adamw", 1, tmp_path / "bad", tmp_path / "end").partition(" ")
    assert number == str(kind), message
    assert message.startswith(f"{tmp_path / 'bad'}: ") and words in message
    assert not (tmp_path / "end").exists()


@pytest.mark.parametrize("case", [case for case in HOSTILE if case not in OF_CPP])
def test_python_refuses_it_too(case: str, folder: Path, tmp_path: Path) -> None:
    """With an error of the same kind, before anything is changed (B5)."""
    kind, _, change = HOSTILE[case]
    runs = Runs(Path(), folder)
    runs.python(OPTIMIZERS["adamw"], 2, None, tmp_path / "good")
    nets.rewrite(tmp_path / "good", tmp_path / "bad", change)
    error = {INVALID_FILE: errors.InvalidFileError, CHECKPOINT: errors.CheckpointError}[kind]
    with pytest.raises(error, match=str(tmp_path / "bad")):
        runs.python(OPTIMIZERS["adamw"], 0, tmp_path / "bad", tmp_path / "end")


def test_deeply_nested_lists_are_refused(runs: Runs, tmp_path: Path) -> None:
    """The stack does not overflow."""
    runs.python(OPTIMIZERS["adamw"], 1, None, tmp_path / "good")
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    nets.rewrite(tmp_path / "good", tmp_path / "bad", _put(f"{OPTIONS} lr", deep))
    message = runs.cpp("adamw", 1, tmp_path / "bad", tmp_path / "end")
    assert message.startswith("0 ") and "nested too deeply" in message


def test_what_goes_wrong(test: Path, folder: Path, tmp_path: Path) -> None:
    """Truncated and damaged files, other optimizers, other bases: one error each, and nothing changes."""
    for name in ("train.pte", "xor.ptd"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    done = subprocess.run([test, "train.pte", "xor.ptd"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
