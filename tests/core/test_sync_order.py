"""What has its name is on the disk, also after a power failure: bytes are synced before a rename, folders after it (B5, F3)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore import BlobStore, dedup_programs
from blobstore.core.disk.staging import Staging
from blobstore.releases import publish, pull
from blobstore.releases.index.objects import store_bytes


class Calls:
    """Records which files and folders are synced, and what is renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[tuple[int, int]] = []  # devices and inodes
        self.renamed: list[Path] = []
        self._loose: dict[str, Path] = {}  # renames whose folder was not synced since
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        status = os.fstat(descriptor)
        self.synced.append((status.st_dev, status.st_ino))
        for folder in list(self._loose):
            if os.path.samestat(Path(folder).stat(), status):
                self._loose.pop(folder, None)  # several threads sync

    def replace(self, source: Any, target: Any, *, dst_dir_fd: int | None = None) -> None:
        source, target = Path(source), Path(target)
        if dst_dir_fd is not None:
            target = Path(f"/proc/self/fd/{dst_dir_fd}").readlink() / target
        for path in [source, *source.rglob("*")] if source.is_dir() else [source]:
            status = path.lstat()
            if not path.is_symlink():  # a link is in its folder, whole
                assert (status.st_dev, status.st_ino) in self.synced, f"{path} is renamed to {target} but not synced"
        self._replace(source, target)
        self.renamed.append(target)
        self._loose[str(target.parent)] = target

    def check(self, *names: str) -> None:
        """All renames are on the disk, and these files are among them."""
        assert not self._loose, f"the folders of {list(map(str, self._loose.values()))} were not synced"
        assert set(names) <= {path.name for path in self.renamed}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def group(folder: Path, *, many: bool = False) -> None:
    """Files in two folders, one of them old."""
    (folder / "b").mkdir()
    (folder / "x").write_bytes(b"old")
    with Staging(folder=folder, many=True) if many else Staging() as staging:
        for name in ("x", "b/y"):
            with staging.open(folder / name) as file:
                file.write(b"new")


def test_a_group_of_many_files(calls: Calls, tmp_path: Path) -> None:
    """They are closed before the group is whole, but not before they are on the disk (B5)."""
    group(tmp_path, many=True)
    calls.check("x", "y")


def test_the_journal_is_on_the_disk_before_the_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And they are before it: nothing but what is synced is relied on when the first file gets its place (B5)."""
    calls = Calls(monkeypatch)
    record = calls.replace

    def replace(source: Any, target: Any) -> None:
        if Path(target).suffix == ".journal":
            assert len(calls.synced) >= 3  # the two files, and the journal itself
        if Path(target).name == "x":
            calls.check()
        record(source, target)

    monkeypatch.setattr(os, "replace", replace)
    group(tmp_path)
    calls.check("x", "y")
    assert [path.suffix or path.name for path in calls.renamed] == [".journal", ".journal", "x", "y"]


def test_every_folder_of_programs(lowered: Any, calls: Calls, tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        lowered.mlp().write(tmp_path / "in" / name, "m")
    dedup_programs(tmp_path / "in", tmp_path / "out")
    calls.check("shared.ptd", "m.pte")


def one_file(folder: Path) -> None:
    store = BlobStore()
    store.add("a", np.arange(10))
    store.write_ptd(folder / "a.ptd")


@pytest.mark.parametrize("write", [one_file, lambda folder: store_bytes(folder, b"bytes")], ids=["a .ptd", "an object"])
def test_one_file(write: Callable[[Path], object], calls: Calls, tmp_path: Path) -> None:
    write(tmp_path)
    assert len(calls.renamed) == 1
    calls.check()


@pytest.mark.parametrize("plain", [False, True])
def test_a_release(calls: Calls, tmp_path: Path, plain: bool) -> None:
    """Published, taken, and the next one, of which files are fetched whole and made of parts (F3)."""
    tensors = {f"w{i}": np.full((100, 100), i, np.float32) for i in range(3)}
    store = BlobStore()
    for version in ("1", "2"):
        for key, tensor in tensors.items():
            store.add(key, tensor)
        (tmp_path / "in/sub").mkdir(parents=True, exist_ok=True)
        store.write_ptd(tmp_path / "in/model.ptd")
        (tmp_path / "in/sub/notes").write_text(version)
        publish(tmp_path / "in", tmp_path / "releases", name="a", version=version, plain=plain)
        calls.check("index.json")
        pull(tmp_path / "releases/a" / version, tmp_path / "device")
        calls.check("current")
        store = BlobStore()
        tensors["w1"] = tensors["w1"] + 1
