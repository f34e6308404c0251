"""The applications of examples/llm, from two adapters of PEFT to a release and a kill (L1, L3, T1, F1, N1)."""

import copy
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blobstore import save_programs
from blobstore.adapters import AdapterTags
from blobstore.releases import publish
from blobstore.runtime import BlobCache
from blobstore.training import lower_training
from tests.helpers import native_build
from tests.helpers.native_build import ROOT
from tests.llm import llama
from tests.llm.conftest import silent
from tests.llm.letters import MODEL, TOKENS
from tests.llm.test_training import LENGTH, module, train
from tests.releases.server import serving
from tests.runtime.application import build, build_java

pytestmark = pytest.mark.long

EXAMPLES, RUNNERS = ROOT / "examples" / "llm", ROOT / "tests" / "llm" / "runners"
TEXT = "tobeornottobethat"
SEEDS = {"one": 3, "two": 4}


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.tensor([llama.make_tokenizer(MODEL.vocab_size).encode(TEXT).ids])
    assert ids.shape == (1, LENGTH + 1)
    return ids[:, :-1], ids[:, 1:]


@pytest.fixture(scope="module")
def files(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a release has."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("model.pte", "foundation.ptd", "model_lora.ptd"):
        (folder / name).write_bytes((exported / "live" / name).read_bytes())
    (folder / "tokenizer.json").write_bytes((exported / "tokenizer.json").read_bytes())
    with silent():
        program = lower_training(module(MODEL), batch(), tag=AdapterTags("train_foundation", "train_adapter"))
    save_programs({"train": program}, folder, keep_small=1 << 14)
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters as PEFT saves those of transformers' models."""
    folder = tmp_path_factory.mktemp("peft")
    for name, seed in SEEDS.items():
        llama.write_peft(folder / name, MODEL.rotated(MODEL.adapter(seed)))
    return folder


def in_python(folder: Path, adapters: list[str]) -> list[str]:
    """The command of the application for a device and a server, whose places are `DEVICE` and `URL`."""
    options = [f"--adapter={one}" for one in adapters]
    return [sys.executable, "-W", "ignore", str(EXAMPLES / "app.py"), "DEVICE", "--from", "URL", *options]


def in_cpp(folder: Path, adapters: list[str]) -> list[str]:
    """With the runner of the tests in place of ExecuTorch's, as in Java."""
    return [str(build(RUNNERS, "requests_with_adapters").parent / "app"), "DEVICE", "URL", *adapters]


def in_java(folder: Path, adapters: list[str]) -> list[str]:
    jars = ("blobstore.jar", "blobstore_java_tests.jar", str(folder))
    command = native_build.java(build_java(), "-Xcheck:jni", jars=jars)
    path = command[command.index("-cp") + 1]
    native_build.run(
        "javac", "-Xlint:all", "-Werror", "-cp", path, "-d", folder, EXAMPLES / "App.java", RUNNERS / "LetterApp.java"
    )
    return [*command, "LetterApp", "DEVICE", "URL", *adapters]


APPS = {"app.py": in_python, "app.cpp": in_cpp, "App.java": in_java}


@pytest.fixture(scope="module", params=APPS)
def command(request: pytest.FixtureRequest, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("app")
    return APPS[request.param](folder, [f"{name}={adapters / name}" for name in SEEDS])


@contextmanager
def running(command: list[str], device: Path, url: str) -> Iterator[Callable[[str], str]]:
    """The application as a process, until it is killed; what it answers to a command."""
    places = {"DEVICE": str(device), "URL": url}
    with (
        device.with_suffix(".log").open("wb") as log,
        subprocess.Popen(
            [places.get(part, part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=native_build.ENVIRONMENT,
        ) as process,
    ):

        def answer(text: str) -> str:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, Path(log.name).read_text(encoding="utf-8", errors="replace")[-2000:]
            return line.rstrip("\n")

        try:
            yield answer
        finally:
            process.kill()


def said(tensors: dict[str, Tensor], prompt: str) -> str:
    return MODEL.tell(tensors, prompt, TOKENS)


def newer(files: Path, folder: Path) -> Path:
    """The same with another foundation."""
    shutil.copytree(files, folder)
    weights = MODEL.checkpoint(1)
    for name in ("foundation.ptd", "train_foundation.ptd"):
        cache = BlobCache(files / name)
        wrapped = {key: key.replace(".weight", ".linear.weight") for key in weights}
        known = {key if key in cache.tensors or key in cache else wrapped[key]: value for key, value in weights.items()}
        cache.update(known)
        cache.save(folder.with_suffix(".ptd"))
        folder.with_suffix(".ptd").replace(folder / name)
    return folder


def test_users_training_a_release_and_a_kill(command: list[str], files: Path, tmp_path: Path) -> None:
    """Every answer is that of eager PyTorch with the weights that should be there."""
    releases, device = tmp_path / "releases", tmp_path / "device"
    publish(files, releases, name="llama", version="1")
    first, second = ({name: {**MODEL.checkpoint(n), **MODEL.adapter(SEEDS[name])} for name in SEEDS} for n in (0, 1))
    eager = copy.deepcopy(module(MODEL))
    eager.load_state_dict(second["one"])
    train(eager, batch())
    texts = [said(first["one"], "once"), said(second["one"], "once"), said(dict(eager.state_dict()), "once")]
    assert len(set(texts)) == 3
    with serving(releases) as server:
        url = f"{server.url}/llama/latest/index.json"
        with running(command, device, url) as app:
            assert app("ask one once | two hello") == f"{texts[0]} | {said(first['two'], 'hello')}"
            publish(newer(files, tmp_path / "newer"), releases, name="llama", version="2")
            assert app("update") == "2"
            assert app("ask one once | two hello") == f"{texts[1]} | {said(second['two'], 'hello')}"
            assert app(f"train one {TEXT}").startswith("one ")
            assert app("ask one once | two hello") == f"{texts[2]} | {said(second['two'], 'hello')}"
        with running(command, device, url) as app:
            assert app("ask one once | two hello") == f"{texts[2]} | {said(second['two'], 'hello')}"


@pytest.mark.parametrize("name", APPS)
def test_it_has_about_a_hundred_lines(name: str) -> None:
    """Without blank lines, comments and imports."""
    text = re.sub(r'"""(?s:.*?)"""|/\*(?s:.*?)\*/', "", (EXAMPLES / name).read_text(encoding="utf-8"))
    others = re.compile(r"\s*(?://.*|#.*|import .*|from .*)?")
    assert len([line for line in text.splitlines() if not others.fullmatch(line)]) <= 115
