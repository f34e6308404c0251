"""The Java face of the runtime, under the checks of JNI: what it computes is compared with torch and numpy (N1, N3)."""

import codecs
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

from blobstore import BlobStore
from blobstore.adapters import foundation_fingerprint
from blobstore.core.memory.dtypes import torch_dtype
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.lowering.export import quiet
from blobstore.releases import publish
from runtime_bindings.tests import inputs as native_inputs
from tests.helpers import native_build
from tests.helpers.native_build import LIBRARY
from tests.releases import models as releases
from tests.runtime import native_programs
from tests.runtime.application import build_java

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def library() -> Path:
    """The folder with the library and the classes."""
    return build_java()


@pytest.fixture(scope="module")
def command(library: Path) -> list[str]:
    """The command that runs a class of the tests."""
    options = ("-Xcheck:jni", "-XX:-CreateCoredumpOnCrash", "-XX:+ErrorFileToStdout")
    return native_build.java(library, *options, jars=("blobstore.jar", "blobstore_java_tests.jar"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files that the Java tests take."""
    path = tmp_path_factory.mktemp("java")
    native_inputs.write_tensors(path)
    native_inputs.write_adapters(path / "adapters")
    native_programs.write(path / "programs")
    write_numbers(path / "programs" / "numbers.pte")
    write_deep(path / "deep.ptd")
    shutil.copy(path / "plain.ptd", path / "w\u00e4\u4e16\U0001d11e.ptd")
    (path / "text.txt").write_text("no program, and no tensors")
    save_file(fine_tune(), path / "fine_tune.safetensors")
    for version, seed in (("1", 1), ("2", 2)):
        source = releases.inputs(path / f"release{version}", releases.weights(seed))
        for name in ("serve.pte", "xor.ptd"):
            shutil.copy(path / "programs" / name, source / name)
        publish(source, path / "published", name="model", version=version)
    return path


class Numbers(nn.Module):
    def forward(self, x: torch.Tensor, count: int, factor: float, add: bool) -> torch.Tensor:
        return x * factor + count if add else x


def write_numbers(path: Path) -> None:
    """A program that takes an int, a float and a bool."""
    with quiet():
        from executorch.exir import to_edge

        exported = torch.export.export(Numbers(), (torch.ones(2), 3, 0.5, True), strict=True)
        path.write_bytes(to_edge(exported).to_executorch().buffer)


def write_deep(path: Path) -> None:
    """Tensors of 16, 17 and 64 dimensions, each under its number."""
    store = BlobStore()
    for rank in (16, 17, 64):
        number = np.array([rank], np.float32)
        store.add(str(rank), number.tobytes(), layout=TensorLayout(ScalarType.FLOAT, (1,) * rank, tuple(range(rank))))
    store.write_ptd(path)


def fine_tune() -> dict[str, np.ndarray]:
    """Other weights of examples/xor.py."""
    shapes = {"hidden.weight": (10, 2), "hidden.bias": (10,), "out.weight": (2, 10), "out.bias": (2,)}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def run(command: list[str], *arguments: object) -> str:
    """What a class of the tests prints. The checks of JNI print warnings, or end the process."""
    texts = [*command, *map(str, arguments)]
    done = subprocess.run(texts, env=native_build.ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("WARNING", "FATAL", "JNI"):
        assert word not in done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def printed(command: list[str], folder: Path) -> list[list[str]]:
    """The words of each line that a run of all checks printed; every check passed."""
    copy = folder.parent / f"{folder.name}-run"  # the checks write to it
    shutil.copytree(folder, copy)
    lines = [line.split() for line in run(command, "dev.blobstore.Checks", copy).splitlines()]
    assert len([line for line in lines if line[0] == "ok"]) == 27
    return [line[1:] for line in lines if line[0] == "value"]


def found(printed: list[list[str]], name: str) -> np.ndarray:
    """The numbers that were printed once under a name."""
    words = name.split()
    [line] = [line for line in printed if line[: len(words)] == words and re.match(r"^-?\d|NaN", line[len(words)])]
    return np.array([float(word) for word in line[len(words) :]], np.float32)


def net(**changes: torch.Tensor) -> Any:
    """The network of examples/xor.py as `export` makes it, with other weights."""
    from examples import xor

    torch.manual_seed(0)
    made = xor.Net()
    made.load_state_dict({**made.state_dict(), **{name.replace("__", "."): value for name, value in changes.items()}})
    return made


def scores(model: Any) -> np.ndarray:
    from examples import xor

    with torch.no_grad():
        return model(xor.INPUTS).numpy().flatten()


def test_each_kind_of_error_is_a_class(printed: list[list[str]]) -> None:
    """In the order of the C++ header, with the parents that the classes of Python have (N3)."""
    from blobstore import errors

    header = (LIBRARY / "include" / "blobstore" / "error.h").read_text(encoding="utf-8")
    body = re.search(r"enum class ErrorKind \{(.*?)\};", header, re.DOTALL)
    assert body
    kinds = re.findall(r"^\s*(\w+),", body[1], re.MULTILINE)
    lines = [line[1:] for line in printed if line[0] == "kind"]
    assert [line[0] for line in lines] == kinds
    renamed = {"Unsupported": "UnsupportedOperation"}
    for kind, parent in lines:
        in_python = getattr(errors, f"{renamed.get(kind, kind)}Error").__bases__[0].__name__
        assert parent == ("BlobStoreException" if in_python == "BlobStoreError" else in_python.removesuffix("Error"))


def test_the_dtypes_have_the_numbers_of_executorch(printed: list[list[str]]) -> None:
    lines = [line[1:] for line in printed if line[0] == "dtype"]
    assert [(int(number), int(size)) for number, _, size in lines] == [(t.value, t.itemsize) for t in ScalarType]
    for number, name, _ in lines:
        if not name.startswith("Q"):  # torch has a name of its own for these
            assert f"torch.{name.lower()}" == str(torch_dtype(ScalarType(int(number))))


def test_a_program_runs_and_follows_updates(printed: list[list[str]]) -> None:
    """As eager torch does, before and after each update by name (N1, U1)."""
    zero = torch.zeros(10, 2)
    tuned = {name: torch.from_numpy(value) for name, value in fine_tune().items()}
    for name, model in {
        "scores": net(),
        "scores again": net(),
        "scores after errors": net(),
        "scores of a closed program": net(),
        "zeroed": net(hidden__weight=zero),
        "partly": net(hidden__weight=zero),
        "zeroed in a closed cache": net(hidden__weight=zero),
        "fine-tuned": net(**{name.replace(".", "__"): value for name, value in tuned.items()}),
    }.items():
        np.testing.assert_allclose(found(printed, name), scores(model), atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(found(printed, "hidden.bias"), net().hidden.bias.detach().numpy())
    np.testing.assert_array_equal(found(printed, "numbers"), [3.5, 4])


def test_training_steps_as_torch_does(printed: list[list[str]]) -> None:
    from examples import xor

    model = xor.TrainingNet()
    model.load_state_dict(net().state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(xor.INPUTS, xor.LABELS)[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(found(printed, "losses"), losses, rtol=1e-4)
    trained = model.hidden.weight.detach().numpy().flatten()
    np.testing.assert_allclose(found(printed, "trained"), trained, rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(found(printed, "trained still"), found(printed, "trained"))
    published = net(**{name.replace(".", "__"): value for name, value in model.state_dict().items()})
    np.testing.assert_allclose(found(printed, "published"), scores(published), rtol=1e-3, atol=1e-4)


def test_a_run_of_java_goes_on_in_python(printed: list[list[str]], folder: Path) -> None:
    from blobstore.training import AdamW, TrainingProgram
    from examples import xor

    programs = folder / "programs"
    training = TrainingProgram(programs / "train.pte", data=programs / "xor.ptd")
    optimizer = AdamW(training.named_parameters().values())
    training.load(folder.parent / f"{folder.name}-run" / "java.checkpoint", optimizer)
    training.step(optimizer, xor.INPUTS, xor.LABELS)
    weight = training.named_parameters()["hidden.weight"]
    np.testing.assert_array_equal(found(printed, "adamw"), weight.numpy().flatten())
    expected = TrainingProgram(programs / "train.pte", data=programs / "xor.ptd")
    optimizer = AdamW(expected.named_parameters().values(), lr=0.03, weight_decay=0.1)
    for _ in range(4):
        expected.step(optimizer, xor.INPUTS, xor.LABELS)
    assert torch.equal(weight, expected.named_parameters()["hidden.weight"])


def test_adapters_and_packed_weights(printed: list[list[str]], folder: Path) -> None:
    weight = np.arange(35, dtype=np.float32).reshape(7, 5)
    product = np.full((7, 2), 2, np.float32) @ np.full((2, 5), 2, np.float32)
    np.testing.assert_array_equal(found(printed, "merged"), (weight + np.float32(0.5) * product).flatten())
    assert ["fingerprint", foundation_fingerprint(folder / "adapters" / "foundation.ptd")] in printed
    torch.manual_seed(0)
    layers = [nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 301), nn.ReLU(), nn.Linear(301, 20)]
    with torch.no_grad():
        expected = nn.Sequential(*layers)(torch.ones(1, 300)).numpy().flatten()
    np.testing.assert_allclose(found(printed, "packed"), expected, atol=1e-4)


def test_releases_bring_their_weights(printed: list[list[str]]) -> None:
    for version, seed in ((1, 1), (2, 2)):
        expected = releases.weights(seed)["layer0.weight"].flatten()[5]
        assert found(printed, f"release {version}")[0] == expected


def test_a_release_is_opened_and_followed(printed: list[list[str]]) -> None:
    """Its files are of their kinds, and one commit has the blobs of the newer one."""
    files = {line[1]: line[2:] for line in printed if line[0] == "file"}
    assert files == {
        "model.ptd": ["DATA"],
        "serve.pte": ["PROGRAM", "xor.ptd"],
        "xor.ptd": ["DATA"],
        **{f"tokenizer/{i}.json": ["OTHER"] for i in range(3)},
    }
    assert ["followed", ",".join(sorted(releases.weights()))] in printed
    assert found(printed, "followed weight")[0] == releases.weights(2)["layer0.weight"].flatten()[5]


def test_training_without_gradients_is_that_of_python(printed: list[list[str]], folder: Path) -> None:
    from blobstore.runtime import BlobCache, Program
    from blobstore.training import MeZO
    from examples import xor

    cache = BlobCache(folder / "programs" / "xor.ptd")
    serve = Program(folder / "programs" / "serve.pte", cache)["forward"]
    optimizer = MeZO(cache, lr=0.05, eps=1e-2, seed=7, names=["hidden.weight"])

    def loss() -> float:
        values = np.asarray(serve(xor.INPUTS), np.float32).flatten().astype(np.float64)
        return float((values * values * np.arange(1, values.size + 1)).sum())

    for _ in range(10):
        optimizer.step(loss)
    weight = np.asarray(cache["hidden.weight"]).flatten()
    assert not np.array_equal(weight, net().hidden.weight.detach().numpy().flatten())
    np.testing.assert_allclose(found(printed, "mezo"), weight, rtol=1e-4, atol=1e-6)


def test_a_missing_library_says_where_it_is_looked_for(library: Path, tmp_path: Path) -> None:
    jars = [library / name for name in ("blobstore.jar", "blobstore_java_tests.jar")]
    classes = ":".join(map(str, jars))
    command = ["java", f"-Djava.library.path={tmp_path}", "-cp", classes, "dev.blobstore.Checks", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    expected = f"libblobstore_jni.so must be in a folder of -Djava.library.path={tmp_path}, and ExecuTorch's libraries"
    assert expected in done.stdout


def test_texts_that_are_no_utf_8(library: Path) -> None:
    """Bytes of file names, for example. Python says what of them is a character; all others are U+FFFD, one by one."""
    codecs.register_error("each byte", lambda error: ("\ufffd", error.start + 1))
    random = np.random.default_rng(0)
    texts = [bytes(random.choice([0x2E, 0x80, 0xBF, 0xC3, 0xE0, 0xED, 0xF0, 0xF4, 0x90, 0xA0], 6)) for _ in range(2000)]
    texts += [bytes([first]) + b"\x90\x80\x80" for first in range(256)]
    texts += ["\0 a\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff".encode()]
    test = library / "java_text_test"
    lines = "".join(f"{text.hex()}\n" for text in texts)
    done = subprocess.run([test], input=lines, capture_output=True, text=True, check=True)
    *printed, refused = done.stdout.splitlines()
    assert refused == "a string has half of a surrogate pair"
    for text, line in zip(texts, printed, strict=True):
        expected = text.decode("utf-8", "each byte")
        assert line.split() == [expected.encode("utf-16-be").hex(), "same" if expected.encode() == text else "other"]


def test_threads_use_change_and_close_the_same_objects(command: list[str], folder: Path) -> None:
    """Each call sees one generation, and an object that is closed meanwhile is refused or finishes (N2)."""
    lines = run(command, "dev.blobstore.Races", folder, 1).splitlines()
    assert lines == ["ok updates", "ok closing", "ok one optimizer"]


@pytest.mark.parametrize("how", ["return", "exit", "halt"])
def test_the_process_ends_while_threads_are_in_calls(how: str, command: list[str], folder: Path) -> None:
    assert run(command, "dev.blobstore.AtExit", folder, how) == "ending\n"


def test_the_library_exports_what_java_calls_and_nothing_else(library: Path) -> None:
    """No second copy of a function of the runtime can be taken for that of another library (N4)."""
    symbols = ["nm", "-D", "--defined-only", library / "libblobstore_jni.so"]
    lines = subprocess.run(symbols, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[-1].partition("@")[0] for line in lines] == ["JNI_OnLoad"]
