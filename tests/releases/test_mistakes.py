"""What users do by mistake, and what an index may not do with it (F3, F4)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore import save_file
from blobstore.errors import BlobStoreError, InvalidFileError, ReleaseError, TransferError
from blobstore.native import native
from blobstore.releases import Patience, Release, commit, compact, gc, plan, publish, pull
from blobstore.releases.index import parse_index
from tests.releases.models import found, inputs, same, weights


@pytest.fixture
def releases(tmp_path: Path) -> Path:
    """A release and a delta."""
    root, tensors = tmp_path / "releases", weights()
    publish(inputs(tmp_path / "in", tensors), root, name="a", version="1")
    tensors["layer2.weight"] = tensors["layer2.weight"] + np.float32(1)
    publish(inputs(tmp_path / "in", tensors), root, name="a", version="2", base="1")
    return root


def edited(release: Path, change: Any) -> Path:
    path = release / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    return release


SETS = {
    "that leads out": "../../../evil",
    "that is absolute": "/evil",
    "of another file": "tokenizer/0.json",
    "of another system": "C:\\evil",
}


@pytest.mark.parametrize("name", SETS.values(), ids=SETS)
def test_a_data_set_cannot_have_a_name(releases: Path, tmp_path: Path, name: str) -> None:
    """Merged, a data set becomes a file of its name (F4)."""
    release = edited(releases / "a/2", lambda index: index["data"][0].update(name=name))
    with pytest.raises(InvalidFileError):
        pull(release, tmp_path / "device", merge=True)
    with pytest.raises(InvalidFileError):
        native.missing(os.fsencode(release / "index.json"), os.fsencode(tmp_path / "device"))
    assert not (tmp_path / "device/current").exists() and not list(tmp_path.rglob("evil*"))


def test_a_release_folder_is_no_device(releases: Path, tmp_path: Path) -> None:
    """gc would remove what is published there; and the other way round."""
    before = sorted(path.relative_to(releases) for path in releases.rglob("*"))
    for call in (pull, plan):
        with pytest.raises(ReleaseError, match="releases are published in this folder"):
            call(releases / "a/1", releases)
    with pytest.raises(ReleaseError, match="releases are published in this folder"):
        native.missing(os.fsencode(releases / "a/1/index.json"), os.fsencode(releases))
    assert sorted(path.relative_to(releases) for path in releases.rglob("*")) == before
    pull(releases / "a/1", tmp_path / "device")
    with pytest.raises(ReleaseError, match="releases are pulled into this folder"):
        publish(tmp_path / "in", tmp_path / "device", name="a", version="9")


def test_a_link_to_a_folder_is_not_left_out(tmp_path: Path) -> None:
    """A release without its files would be worse than an error (F1)."""
    inputs(tmp_path / "in", weights())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").write_text("1")
    (tmp_path / "in/linked").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ReleaseError, match="links to folders"):
        publish(tmp_path / "in", tmp_path / "releases", name="a", version="1")


def test_a_version_that_exists_is_refused_before_any_work(releases: Path, tmp_path: Path) -> None:
    """Nothing is stored (F1)."""
    before = sorted((releases / "files").iterdir())
    inputs(tmp_path / "in", weights(seed=3))
    for call in (
        lambda: publish(tmp_path / "in", releases, name="a", version="2"),
        lambda: compact(releases, name="a", version="2", base="1"),
    ):
        with pytest.raises(ReleaseError, match="published already"):
            call()
    assert sorted((releases / "files").iterdir()) == before


def test_an_impossible_executorch_is_refused_before_any_work(tmp_path: Path) -> None:
    inputs(tmp_path / "in", weights())
    with pytest.raises(ReleaseError, match="not a version"):
        publish(tmp_path / "in", tmp_path / "releases", name="a", version="1", executorch="new")
    assert not (tmp_path / "releases/a").exists()


@pytest.mark.parametrize("needed", ["1.5", "1.5.1", "2"])
def test_programs_need_their_executorch(releases: Path, tmp_path: Path, lowered: Any, needed: str) -> None:
    """An older one is refused, by name or as it is installed; data alone runs anywhere."""
    (tmp_path / "in/a.pte").write_bytes(lowered.counter().pte)
    publish(tmp_path / "in", releases, name="a", version="3", executorch=needed)
    release, device = releases / "a/3", tmp_path / "device"
    for has in ("1.4", "1", "0.9.9"):
        for call in (pull, plan):
            with pytest.raises(ReleaseError, match=rf"need ExecuTorch {needed}, this device has {has}"):
                call(release, device, executorch=has)
    plan(release, device, executorch="3")
    with pytest.raises(ReleaseError, match="need ExecuTorch"):
        commit(release, device, tmp_path, executorch="1.4")
    assert not (device / "current").exists()
    for has in (needed, "2.0.0", "10"):
        pull(release, tmp_path / has, executorch=has)
    if needed == "2":  # above what is installed
        with pytest.raises(ReleaseError, match="need ExecuTorch 2, this device has 1"):
            pull(release, device)
        with pytest.raises(ReleaseError, match="need ExecuTorch 2, this device has 1"):
            Release.open(tmp_path / "10")
    else:
        pull(release, device)
    pull(releases / "a/1", tmp_path / "data", executorch="0.1")


@pytest.mark.parametrize("failures", [1, 60, 5000])
def test_patience_of_any_length(failures: int) -> None:
    """The time to wait is bounded, however often a request failed."""
    waited: list[float] = []
    Patience(attempts=10_000, pause=waited.append).wait(failures, None)
    assert 0 < waited[0] <= 45


def test_commands_that_run_twice(releases: Path, tmp_path: Path) -> None:
    """A second run changes nothing (F3)."""
    device = tmp_path / "device"
    pull(releases / "a/1", device)
    first = sorted((path, path.lstat().st_mtime_ns) for path in device.rglob("*") if path.is_file())
    assert not pull(releases / "a/1", device).changed
    assert gc(device).files == gc(device).files == 0
    assert plan(releases / "a/1", device).current
    assert not commit(releases / "a/1", device, tmp_path).changed
    gc(device)
    assert sorted((path, path.lstat().st_mtime_ns) for path in device.rglob("*") if path.is_file()) == first


def test_keys_that_are_removed_and_come_back(tmp_path: Path) -> None:
    """They stay in older files, and count again when they are published again (F1)."""
    root, tensors = tmp_path / "releases", weights()
    publish(inputs(tmp_path / "in", tensors), root, name="a", version="1")
    less = {key: value for key, value in tensors.items() if key != "layer1.weight"}
    assert publish(inputs(tmp_path / "in", less), root, name="a", version="2", base="1").removed_keys == 1
    assert publish(inputs(tmp_path / "in", tensors), root, name="a", version="3", base="2").new_bytes == 0
    pull(root / "a/3", tmp_path / "device", merge=True)
    assert same(found(tmp_path / "device/current"), tensors)


def test_two_hundred_data_files(tmp_path: Path) -> None:
    """Published, changed, pulled and collected; few requests and few open files are needed (F2)."""
    root, device = tmp_path / "releases", tmp_path / "device"
    (tmp_path / "in").mkdir()
    for version in (1, 2):
        for i in range(200):
            save_file({"w": np.full(64, i * (version if i % 10 == 0 else 1), np.float32)}, tmp_path / f"in/{i}.ptd")
        publish(tmp_path / "in", root, name="a", version=str(version), base="1" if version == 2 else None)
        assert pull(root / f"a/{version}", device).files == (200 if version == 1 else 219)
    for i in range(200):
        names = [f"{i}.ptd"] + ([f"{i}.1.ptd"] if i and i % 10 == 0 else [])
        assert found(device / "current", *names)["w"][0] == i * (2 if i % 10 == 0 else 1)


def test_looking_up_files_takes_no_longer_with_more_of_them() -> None:
    """An index may have 100,000; the lookup of each is one step."""
    file = {"kind": "other", "sha256": "0" * 64, "size": 1}
    index = {"format": "blobstore.release.1", "name": "a", "version": "1", "published": 0, "executorch": "1.5"}
    files = [{**file, "name": str(i)} for i in range(100_000)]
    parsed = parse_index(json.dumps({**index, "files": files}).encode(), "index")
    assert [parsed.file(str(i)).name for i in range(100_000)] == [str(i) for i in range(100_000)]


def test_an_error_names_what_is_missing(releases: Path, tmp_path: Path) -> None:
    """A source that lost a file leaves the device as it was (F3)."""
    pull(releases / "a/1", tmp_path / "device")
    index = json.loads((releases / "a/2/index.json").read_text())
    new = next(file for file in index["files"] if file["name"] == "model.1.ptd")
    (releases / "files" / new["sha256"]).unlink()
    with pytest.raises(BlobStoreError, match=new["sha256"]) as caught:
        pull(releases / "a/2", tmp_path / "device")
    assert not isinstance(caught.value, TransferError)
    assert same(found(tmp_path / "device/current"), weights())
