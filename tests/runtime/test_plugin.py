"""libblobstore_backend.so in an application that has ExecuTorch's shared libraries and Module, and nothing else (X2)."""

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from blobstore import save_file
from blobstore.runtime import BlobCache
from tests.cpp import module_runner
from tests.helpers import native_build
from tests.helpers.native_build import ALONE, LIBRARY, MOST_BYTES, stripped
from tests.lowering.live import lower_through, seeded
from tests.runtime import hooks
from tests.runtime.application import install_library

pytestmark = pytest.mark.long

X = torch.ones(1, 8)


def make(seed: int) -> torch.nn.Module:
    return seeded(lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), seed)


def outputs(module: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return module(X)[0].numpy()


NET, TUNED, THIRD = (make(seed) for seed in range(3))


@pytest.fixture(scope="module")
def plugin() -> Path:
    return hooks.built("blobstore_backend") / "libblobstore_backend.so"


@pytest.fixture(scope="module")
def client() -> Path:
    """The application. Nothing of blobstore is linked to it."""
    native_build.need()
    source = Path(__file__).parent / "plugin"
    with native_build.folder("stock-client") as directory:
        native_build.build(source, directory, f"-DBLOBSTORE_INCLUDE={LIBRARY / 'include'}")
        built = directory / "stock_client"
    command = ["readelf", "-d", built]
    assert "blobstore" not in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return built


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with its weights in `model.ptd`, and `tuned.ptd`, a delta to a fine-tune."""
    folder = tmp_path_factory.mktemp("plugin")
    lower_through({"forward": (NET, (X,))}, folder)
    for name, net in (("tuned", TUNED), ("third", THIRD)):
        cache = BlobCache(folder / "model.ptd")
        cache.update_state_dict(net.state_dict())
        cache.save(folder / f"{name}.ptd", dirty_only=True)
    save_file({"unknown": np.ones(3, np.float32)}, folder / "other.ptd")
    return folder


@pytest.fixture
def steps(client: Path, files: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def run(*arguments: object) -> list[str]:
        """What the application prints for each step. A name such as "model.ptd" is that of a file."""
        texts = [str(files / str(part)) if str(part).endswith((".pte", ".ptd")) else str(part) for part in arguments]
        done = subprocess.run([client, *texts], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    return run


def same(lines: Sequence[str], *nets: torch.nn.Module) -> bool:
    assert len(lines) == len(nets)
    found = [[float(number) for number in line.split()] for line in lines]
    return all(np.allclose(a, outputs(net), atol=1e-5) for a, net in zip(found, nets, strict=True))


def test_an_application_needs_no_line_beyond_the_load(client: Path, plugin: Path, files: Path) -> None:
    """One that exists runs a live program whose weights come from its data file; without the library it cannot."""
    assert not np.allclose(outputs(NET), outputs(TUNED), atol=1e-2)
    runner = module_runner.build()
    program, data = files / "model.pte", [files / "model.ptd"]
    with pytest.raises(module_runner.ModuleRunnerError):
        runner(program, data, [X.numpy()])
    os.environ["LD_PRELOAD"] = str(plugin)
    try:
        [found] = runner(program, data, [X.numpy()])
    finally:
        del os.environ["LD_PRELOAD"]
    assert np.allclose(found[0], outputs(NET), atol=1e-5)


def test_the_functions_for_c_change_the_weights(steps: Callable[..., list[str]], plugin: Path) -> None:
    """An update from a delta and a revert reach the next call; a file of other keys is refused, and nothing changes (U1)."""
    lines = steps(
        *("load", plugin, "open", "model.ptd", "module", "model.pte", "model.ptd", "followers", "run"),
        *("update", "tuned.ptd", "generation", "run"),
        *("update", "other.ptd", "run"),
        *("revert", "generation", "run"),
        *("update", "third.ptd", "close", "run"),
    )
    assert lines[:4] == ["loaded", "done", "loaded", "1"]
    assert lines[5:7] == ["done", "1"] and lines[8].startswith("refused 4: ") and "unknown" in lines[8]
    assert lines[10:12] == ["done", "2"] and lines[13:15] == ["done", "closed"]
    assert same([lines[i] for i in (4, 7, 9, 12, 15)], NET, TUNED, TUNED, NET, THIRD)


def test_a_program_follows_a_working_copy(steps: Callable[..., list[str]], plugin: Path, tmp_path: Path) -> None:
    """What another process commits is in the next call, and in methods that are loaded later."""
    live = tmp_path / "live.ptd"
    lines = steps(
        *("load", plugin, "copy", "model.ptd", live, "share", live, "module", "model.pte", live, "run"),
        *("commit", live, "tuned.ptd", "run", "module", "model.pte", live, "run", "followers", "revert"),
        *("update", "model.ptd", "run"),
    )
    assert lines[:4] == ["loaded", "done", "done", "loaded"] and lines[5] == "another process: 0"
    assert lines[7] == "loaded" and lines[9] == "1" and lines[10].startswith("refused 8: ") and lines[11] == "done"
    assert same([lines[i] for i in (4, 6, 8, 12)], NET, TUNED, TUNED, NET)


def test_open_weights_serve_a_module_without_data_files(steps: Callable[..., list[str]], plugin: Path) -> None:
    """As where the application's interface takes a program alone."""
    lines = steps(
        *("load", plugin, "module", "model.pte", "-", "open", "model.ptd", "module", "model.pte", "-", "run"),
        *("update", "tuned.ptd", "run"),
    )
    assert re.match(r"error \d+: it takes blobs that are in no data file: '0", lines[1])
    assert lines[2:4] == ["done", "loaded"] and same([lines[4], lines[6]], NET, TUNED)


def test_weights_of_another_model_are_not_taken(
    steps: Callable[..., list[str]], plugin: Path, files: Path, tmp_path: Path
) -> None:
    """Equal names of other weights: the program keeps its own; and where only the names could tell, it is refused (B3)."""
    lower_through({"forward": (TUNED, (X,))}, tmp_path / "another")
    another = tmp_path / "another" / "model.ptd"
    lines = steps(
        *("load", plugin, "open", another, "module", "model.pte", "model.ptd", "followers", "run"),
        *("update", "third.ptd", "run"),
        *("open", "model.ptd", "module", "model.pte", "-", "module", "model.pte", "model.ptd", "followers"),
    )
    assert lines[3] == "0" and same([lines[4], lines[6]], NET, NET)
    assert "have one of them open while it is loaded" in lines[8] and lines[9:] == ["loaded", "1"]


def test_a_working_copy_that_is_missing_is_an_error_with_a_text(steps: Callable[..., list[str]], plugin: Path) -> None:
    _, refused = steps("load", plugin, "share", "/nowhere/live.ptd")
    assert refused.startswith("refused 3: /nowhere/live.ptd: ")


def test_it_exports_its_functions_alone(plugin: Path) -> None:
    """And all that it lacks is in the libraries that an application with ExecuTorch has."""
    command = ["nm", "-D", "--defined-only", plugin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    header = (LIBRARY / "include" / "blobstore_backend.h").read_text(encoding="utf-8")
    declared = re.findall(r"^[a-z].*?\b(blobstore_\w+)\(", header, re.MULTILINE)
    assert sorted(line.split()[-1] for line in text.splitlines()) == sorted(declared)
    needed = subprocess.run(["readelf", "-d", plugin], capture_output=True, text=True, check=True).stdout  # noqa: S607
    libraries = set(re.findall(r"NEEDED.*\[(.*)\]", needed))
    assert "libexecutorch.so" in libraries and not any("blobstore" in name or "xnnpack" in name for name in libraries)


def test_the_header_is_c(tmp_path: Path) -> None:
    native_build.need()
    source = tmp_path / "one.c"
    source.write_text(
        "#include <blobstore_backend.h>\nint main(void) { return (int)BLOBSTORE_OK; }\n", encoding="utf-8"
    )
    warnings = ("-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    native_build.run("cc", *warnings, f"-I{LIBRARY / 'include'}", source)


@pytest.mark.native
def test_it_is_small(tmp_path: Path) -> None:
    [library] = install_library().rglob("libblobstore_backend.so")
    assert stripped(library, tmp_path).stat().st_size <= MOST_BYTES[ALONE]
