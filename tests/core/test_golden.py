"""What releases left behind: their files stay readable, and the names that their users wrote stay (R3, B5, H1).

Each folder `tests/data/<major>.<minor>` was written by that release, see tests/core/golden.py. The numbers are in this module
and come from no code of ours.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import blobstore
from blobstore.adapters import read_adapter
from blobstore.releases import pull
from blobstore.runtime import BlobCache, Program
from blobstore.training import TrainingProgram
from tests.core import golden
from tests.helpers.terminal import printed
from tests.releases.models import read_ways, write_ways

VERSION = ".".join(blobstore.__version__.split(".")[:2])
RELEASES = sorted(path for path in golden.DATA.iterdir() if path.name[0].isdigit())
WEIGHT = np.arange(12, dtype=np.float32).reshape(3, 4)
BIAS = np.array([0.5, -1.0, 2.0], np.float32)
X = np.ones((1, 4), np.float32)
OUTPUT = [[6.5, 21.0, 40.0]]  # X @ WEIGHT.T + BIAS

release = pytest.mark.parametrize("folder", RELEASES, ids=lambda path: path.name)


def output(program: Path, data: Path) -> list[list[float]]:
    with BlobCache(data) as cache:
        return Program(program, cache).method()(torch.from_numpy(X)).tolist()


def test_this_version_has_a_folder() -> None:
    """`python -m tests.core.golden` writes it before the first release of a minor version."""
    assert VERSION in [path.name for path in RELEASES]


@release
def test_a_program_runs_and_its_weights_change(folder: Path) -> None:
    """Its delegate, the records of lowering and the data file."""
    assert output(folder / "model.pte", folder / "model.ptd") == OUTPUT
    with BlobCache(folder / "model.ptd") as cache:
        method = Program(folder / "model.pte", cache).method()
        cache.update({"weight": np.zeros_like(WEIGHT)})
        assert method(torch.from_numpy(X)).tolist() == [BIAS.tolist()]


@release
def test_a_data_file_is_whole(folder: Path) -> None:
    for path in sorted(folder.rglob("*.ptd")):
        with blobstore.open_ptd(path, verify=True) as data:
            assert len(data) > 0
    with blobstore.open_ptd(folder / "weights.ptd") as data:
        assert np.array_equal(np.frombuffer(data.bytes("layer.weight"), np.float32), WEIGHT.ravel())


@release
def test_a_deduplicated_folder_is_extended(folder: Path, tmp_path: Path) -> None:
    """A later run adds a program to it, and the program from before keeps its weights."""
    shutil.copytree(folder / "slim", tmp_path / "slim")
    shutil.copy(folder / "whole.pte", tmp_path / "other.pte")
    before = (tmp_path / "slim" / "shared.ptd").stat().st_size
    blobstore.dedup_programs([tmp_path / "other.pte"], tmp_path / "slim")
    for name in ("whole.pte", "other.pte"):
        assert output(tmp_path / "slim" / name, tmp_path / "slim" / "shared.ptd") == OUTPUT
    assert (tmp_path / "slim" / "shared.ptd").stat().st_size == before


@release
def test_an_adapter_is_read(folder: Path) -> None:
    adapter = read_adapter(folder / "adapter.ptd")
    assert adapter.scale == 2.0
    assert np.array_equal(adapter.tensors["layer.lora_b.weight"], np.full((3, 1), 2, np.float32))
    assert adapter.foundation == blobstore.adapters.foundation_fingerprint(folder / "model.ptd")


@pytest.mark.long
@release
def test_training_continues(folder: Path) -> None:
    """From a checkpoint, with the momentum of the optimizer."""
    with BlobCache(folder / "weights.ptd") as cache:
        training = TrainingProgram(folder / "train.pte", cache)
        optimizer = torch.optim.SGD(training.named_parameters().values(), lr=0.5, momentum=0.9)
        training.load(folder / "checkpoint.ptd", optimizer)
        # d(mean of squares)/d(output) = 2/3 * output; one step of 0.5 takes a third of the output from each weight
        stepped = WEIGHT - np.array(OUTPUT, np.float32).T / 3
        weight = training.named_parameters()["layer.weight"]
        assert np.allclose(weight.detach().numpy(), stepped, rtol=1e-6)
        momentum = optimizer.state[weight]["momentum_buffer"]
        assert np.allclose(momentum.numpy(), np.broadcast_to(np.array(OUTPUT, np.float32).T * 2 / 3, (3, 4)), rtol=1e-6)


@release
def test_a_release_is_pulled(folder: Path, tmp_path: Path) -> None:
    pull(str(folder / "release" / "model" / "1"), tmp_path / "device")
    for name in ("model.pte", "model.ptd"):
        assert (tmp_path / "device" / "current" / name).read_bytes() == (folder / name).read_bytes()


@release
def test_a_report_is_a_baseline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    printed = golden.printed(["report", "whole.pte", "--no-cache", "--baseline", "report.json", "--json"])
    changes = json.loads(printed)["changes"]
    assert [changes[field] for field in ("bytes", "saves", "new", "gone", "added")] == [0, 0, [], [], []]


@release
def test_a_later_index_is_read_or_refused_by_its_format(folder: Path, tmp_path: Path) -> None:
    """As docs/stability.md says: new fields are ignored, a later format is an error of the library."""
    shutil.copytree(folder / "release", tmp_path / "release")
    path = tmp_path / "release" / "model" / "1" / "index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**index, "later": {"than": "this"}}), encoding="utf-8")
    changed = {
        **read_ways(path.parent),
        "index": hashlib.sha256(path.read_bytes()).hexdigest(),
        "later": {"than": "this"},
    }
    write_ways(path.parent, changed)
    pull(str(path.parent), tmp_path / "device")
    assert (tmp_path / "device" / "current" / "model.pte").exists()
    path.write_text(json.dumps({**index, "format": "blobstore.release.2"}), encoding="utf-8")
    with pytest.raises(blobstore.errors.InvalidFileError, match=r"blobstore\.release\.2"):
        pull(str(path.parent), tmp_path / "other")


@release
def test_a_later_report_is_read_or_refused_by_its_version(folder: Path, tmp_path: Path) -> None:
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    for changes, code in (({"later": 1}, 0), ({"version": report["version"] + 1}, 3)):
        (tmp_path / "baseline.json").write_text(json.dumps({**report, **changes}), encoding="utf-8")
        baseline = ("--baseline", tmp_path / "baseline.json")
        printed("report", folder / "whole.pte", "--no-cache", "--json", *baseline, code=code)


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return golden.surface(golden.DATA / VERSION, tmp_path_factory.mktemp("device"))


def positional(parameters: list[str]) -> list[str]:
    return [one.rstrip("=") for one in (parameters[: parameters.index("*")] if "*" in parameters else parameters)]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["python", "commands", "json", "headers"])
def test_nothing_public_is_gone(kind: str, now: dict[str, Any]) -> None:
    """In releases of one minor version, and from 1.0 on in those of one major version. What is new is no matter."""
    for folder in RELEASES:
        if folder.name != VERSION and (folder.name.split(".")[0] == "0" or folder.name[0] != VERSION[0]):
            continue
        recorded = json.loads((folder / "public.json").read_text(encoding="utf-8"))[kind]
        for group, names in recorded.items():
            missing = sorted(set(names) - set(now[kind].get(group, ())))
            assert not missing, f"{group} had {missing} in {folder.name}"


@pytest.mark.long
def test_calls_stay_possible(now: dict[str, Any]) -> None:
    """No parameter is gone or moved, and what is new has a default."""
    recorded = json.loads((golden.DATA / VERSION / "public.json").read_text(encoding="utf-8"))["python"]
    for module, names in recorded.items():
        for name, before in names.items():
            after = now["python"][module][name]
            plain = [one.rstrip("=") for one in after]
            assert {one.rstrip("=") for one in before} <= set(plain), f"{module}.{name}: {before}, now {after}"
            assert positional(after)[: len(positional(before))] == positional(before), f"{module}.{name}"
            optional = {one.rstrip("=") for one in after if one.endswith("=") or one in {"*", "**"}}
            assert {one for one in plain if one not in optional} <= {one.rstrip("=") for one in before}, name


@pytest.mark.long
def test_the_surface_has_what_users_write(now: dict[str, Any]) -> None:
    """An empty list would let everything pass."""
    assert now["python"]["blobstore"]["save_file"] == ["tensors", "filename", "metadata=", "*", "force="]
    assert "BlobCache.update" in now["python"]["blobstore.runtime"]
    assert {"--output", "-o", "--json", "inputs"} <= set(now["commands"]["blobstore dedup"])
    assert "--limit" in now["commands"]["blobstore packed gc"]
    assert "files[].regions[].digest" in now["json"]["report"] and "[].path" in now["json"]["inspect"]
    assert "cache.h" in now["headers"]["blobstore"]
