"""What is installed is compared before something is built on it; nothing is written that has no room (F3, S1, S3)."""

import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blobstore.errors import BlobStoreError, FileAccessError, InvalidFileError
from blobstore.releases import Release, publish, pull
from tests.releases.models import found, inputs, published_once, same, spoil, weights, write_ways


@published_once
def releases(folder: Path) -> None:
    """Version 1, and two more with one more blob each."""
    root, tensors = folder / "releases", weights()
    publish(inputs(folder / "in", tensors), root, name="a", version="1")
    for version in (2, 3):
        tensors[f"new{version}"] = np.arange(50_000 * version, dtype=np.float32)
        publish(inputs(folder / "in", tensors), root, name="a", version=str(version))


def damaged(device: Path) -> list[str]:
    """The objects that do not have the digest that is their name."""
    return [
        one.name for one in (device / "files").iterdir() if hashlib.sha256(one.read_bytes()).hexdigest() != one.name
    ]


@pytest.mark.parametrize("name", ["model.ptd", "tokenizer/0.json"])
@pytest.mark.parametrize("damage", ["a bit", "of something else", "missing"])
def test_verify_repairs_what_is_installed(releases: Path, device: Path, name: str, damage: str) -> None:
    """Every file is compared with its digest, and a damaged one is fetched again, also if nothing is new (F3, S1)."""
    pull(releases / "a/1", device)
    spoil((device / "current" / name).resolve(), damage)
    done = pull(releases / "a/1", device, verify=True)
    assert (done.changed, done.new_files) == (False, 1)
    assert not damaged(device)
    assert same(found(device / "current"), weights())
    assert pull(releases / "a/1", device, verify=True).new_files == 0


def test_a_release_is_not_made_of_damage(releases: Path, device: Path) -> None:
    """Contents that are here are compared as they are used, and damaged ones are fetched (S1)."""
    pull(releases / "a/2", device)
    spoil((device / "current/model.ptd").resolve(), "a bit")
    done = pull(releases / "a/3", device)
    target = (device / "current/model.ptd").resolve()
    assert hashlib.sha256(target.read_bytes()).hexdigest() == target.name
    assert done.fetched_bytes < done.release_bytes  # sound ones were not
    with Release.open(device) as release:
        assert np.array_equal(release.cache.numpy("new3"), np.arange(150_000, dtype=np.float32))


def hostile(releases: Path, size: int, parts: list[Any]) -> tuple[Path, bytes]:
    """A release of one file with these parts; their list."""
    digest = "7" * 64
    listed = json.dumps({"format": "blobstore.parts.1", "files": [parts]}).encode()
    named = hashlib.sha256(listed).hexdigest()
    index = json.loads((releases / "a/1/index.json").read_text())
    index |= {"version": "9", "published": index["published"] + 9, "parts": [named, len(listed)]}
    index["files"] = [{"name": "z.ptd", "kind": "data", "sha256": digest, "size": size}]
    (releases / "files" / named).write_bytes(listed)
    (releases / "a/9").mkdir(exist_ok=True)
    data = json.dumps(index).encode()
    (releases / "a/9/index.json").write_bytes(data)
    ways = {"format": "blobstore.ways.1", "index": hashlib.sha256(data).hexdigest(), "objects": [["5" * 64, 9]]}
    ways |= {"bases": [], "ways": [[["planes:1", 0, 0, 9]]] * len(parts)}
    write_ways(releases / "a/9", ways)
    return releases / "a/9", listed


def committed_by_cpp(release: Path, device: Path, table: bytes) -> Any:
    """The same in C++, with the table as fetched."""
    from blobstore.runtime.native import native

    (device / "incoming").mkdir(exist_ok=True)
    (device / "incoming" / hashlib.sha256(table).hexdigest()).write_bytes(table)
    return native.commit(os.fsencode(release / "index.json"), os.fsencode(device))


@pytest.mark.parametrize("size", [(1 << 20) + 1, 1 << 40, (1 << 53) - 2])
@pytest.mark.parametrize("parts", [[], [[0, 1, "0" * 64]]])
@pytest.mark.parametrize("language", ["Python", "C++"])
def test_zeros_that_nothing_names_are_not_written(
    releases: Path, device: Path, size: int, parts: list[Any], language: str
) -> None:
    """A table must cover its file but for padding, and the file must fit on the disk (S3)."""
    pull(releases / "a/1", device)
    before = sorted(one.name for one in (device / "files").iterdir())
    release, table = hostile(releases, size + len(parts), parts)
    with pytest.raises(BlobStoreError, match="no part covers|are available"):
        if language == "Python":
            pull(release, device)
        else:
            committed_by_cpp(release, device, table)
    assert sorted(one.name for one in (device / "files").iterdir()) == before
    assert (device / "current/model.ptd").exists()


def test_a_release_without_room_fails_before_it_writes(
    releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file, and the bytes that are needed and available (S3)."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=512, f_blocks=1000))
    with pytest.raises(FileAccessError, match=r"needs \d+ bytes.* and 5120 are available") as error:
        pull(releases / "a/1", tmp_path / "device")
    index = json.loads((releases / "a/1/index.json").read_text())
    assert error.value.path.name == next(file["sha256"] for file in index["files"] if file["name"] == "model.ptd")
    assert not list((tmp_path / "device/files").iterdir())
    assert not [path for path in (tmp_path / "device/partial").rglob("*") if path.is_file()]


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            one.bind(path.name)
        finally:
            os.chdir(here)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), a_socket], ids=["pipe", "device", "socket"]
)
@pytest.mark.parametrize("place", ["index", "objects", "signatures", "key", "installed", "input", "layout"])
def test_only_regular_files_are_read(releases: Path, tmp_path: Path, make: Callable[[Path], None], place: str) -> None:
    """A pipe, a device or a socket is refused at once, wherever a file is read (S1)."""
    device, key = tmp_path / "device", None
    if place in {"signatures", "key"}:
        pytest.importorskip("cryptography")
        key = tmp_path / "key"
        make(key)
    release: str | Path = releases / "a/1"
    if place == "index":
        (releases / "a/1/index.json").unlink()
        make(releases / "a/1/index.json")
    elif place == "objects":
        for one in [*(releases / "files").iterdir(), *(releases / "packs").glob("*/*")]:
            one.unlink()
            make(one)
    elif place == "installed":
        pull(releases / "a/1", device)
        target = (device / "current/model.ptd").resolve()
        target.unlink()
        make(target)
        assert pull(releases / "a/1", device).new_files == 1
        assert not damaged(device)
        return
    elif place == "layout":
        (tmp_path / "oci").mkdir()
        make(tmp_path / "oci/index.json")
        release = f"oci:{tmp_path}/oci:1"
    with pytest.raises((FileAccessError, InvalidFileError, BlobStoreError)):
        if place == "input":
            make(tmp_path / "in/pipe")
            publish(tmp_path / "in", tmp_path / "other", name="a", version="1")
        else:
            pull(release, device, key=key)
