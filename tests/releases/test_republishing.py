"""Release folders of the first format, with foundations and deltas, are published again (F1, R3)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from blobstore import open_ptd
from blobstore.errors import BlobStoreError, InvalidFileError, ReleaseError
from blobstore.releases import publish, pull, republish, sweep
from tests.releases.models import Weights, found, inputs, same, weights
from tests.releases.test_registry import keys

OLD = Path(__file__).parents[1] / "data" / "releases-1"
"""Versions 1 to 3 of `a`, each with a delta to the one before, and `b` 1; an earlier build wrote it."""


def tensors(version: int) -> Weights:
    """What the data file had when it was published."""
    found = {f"layer{i}.weight": np.full((16, 16), i, np.float32) for i in range(4)}
    if version >= 2:
        found["layer1.weight"] += np.float32(0.5)
        found["new"] = np.arange(40, dtype=np.int32)
    if version >= 3:
        found["layer1.weight"] += np.float32(1)
    return found


def test_every_release_is_there_again(tmp_path: Path) -> None:
    """One data file each, adapters and small files as they were, and the order of the versions."""
    private, public = keys(tmp_path, "one")
    done = republish(OLD, tmp_path / "new", sign=private)
    assert [one.version for one in done if one.name == "a"] == ["1", "2", "3"] and len(done) == 4
    device = tmp_path / "device"
    for version in (1, 2, 3):
        pull(tmp_path / f"new/a/{version}", device, key=public)
        assert same(found(device / "current"), tensors(version))
        with open_ptd(device / "current/lora.ptd") as adapter:
            assert adapter.metadata == {"blobstore.adapter.foundation": "0" * 32}
            assert adapter.numpy("lora")[0] == version
        for i in range(9):
            assert (device / f"current/tokenizer/{i}.json").read_text() == f"{{{i}, {version}}}"
        assert len([path for path in (device / "current").rglob("*") if path.is_file()]) == 11
    pull(tmp_path / "new/b/latest", tmp_path / "other", key=public)
    assert same(found(tmp_path / "other/current"), tensors(3))
    assert republish(OLD, tmp_path / "new") == []  # again: nothing is left to do


def test_what_it_was_is_said(tmp_path: Path) -> None:
    """An old folder is refused by everything that would write or read it as a new one."""
    old = shutil.copytree(OLD, tmp_path / "old")
    inputs(tmp_path / "in", weights(layers=1))
    with pytest.raises(ReleaseError, match="older format; `blobstore republish`"):
        publish(tmp_path / "in", old, name="a", version="4")
    with pytest.raises(ReleaseError, match="older format"):
        sweep(old)
    with pytest.raises(InvalidFileError, match="older format"):
        pull(old / "a/3", tmp_path / "device")
    with pytest.raises(ReleaseError, match="no release in the format"):
        republish(tmp_path / "in", tmp_path / "new")


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["data"][0].update(name="../evil"),
        lambda index: index["data"][0].update(files=[]),
        lambda index: index["data"][0].update(files=["nothing.ptd"]),
        lambda index: index["files"][0].update(name="/evil"),
        lambda index: index["files"][0].update(sha256="../x"),
        lambda index: index.update(files=7),
    ],
)
def test_a_hostile_old_index(tmp_path: Path, change: object) -> None:
    """Nothing leads out of the folder (S2)."""
    old = shutil.copytree(OLD, tmp_path / "old")
    index = json.loads((old / "a/2/index.json").read_text())
    change(index)  # type: ignore[operator]
    (old / "a/2/index.json").write_text(json.dumps(index))
    with pytest.raises(BlobStoreError):
        republish(old, tmp_path / "new")
    assert not list(tmp_path.rglob("evil*"))


def test_a_device_goes_on(tmp_path: Path) -> None:
    """It has an old release, whose age still counts; it takes the next one (F4)."""
    device = tmp_path / "device"
    index = (OLD / "a/2/index.json").read_bytes()
    import hashlib

    digest = hashlib.sha256(index).hexdigest()
    (device / "indexes").mkdir(parents=True)
    (device / f"releases/{digest}").mkdir(parents=True)
    (device / f"indexes/{digest}.json").write_bytes(index)
    (device / "current").symlink_to(f"releases/{digest}")
    republish(OLD, tmp_path / "new")
    older = json.loads((tmp_path / "new/a/1/index.json").read_text()) | {"published": 1}
    (tmp_path / "new/a/1/index.json").write_text(json.dumps(older))
    with pytest.raises(BlobStoreError, match="version 1 is older than version 2"):
        pull(tmp_path / "new/a/1", device)
    assert pull(tmp_path / "new/a/3", device).changed
    assert same(found(device / "current"), tensors(3))
