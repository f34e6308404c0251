"""A release is published once, and a folder fetches what it lacks (F1, F2, F3)."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore import open_ptd
from blobstore.core.disk.locks import Lock
from blobstore.errors import FileAccessError, ReleaseError, TrustError
from blobstore.releases import gc, publish, pull, push
from blobstore.releases.index.index import Index, schema
from blobstore.releases.index.parts import Parts
from blobstore.releases.index.ways import Ways
from tests.releases.models import NOW, found, inputs, published_once, read_ways, same, weights
from tests.releases.server import serving


@published_once
def releases(folder: Path) -> None:
    """Versions 1 to 3: a first one, one layer changed and one new, and one small file changed."""
    root = folder / "releases"
    publish(inputs(folder / "in", weights(), files=20), root, name="assistant", version="1")
    publish(inputs(folder / "in", expected(), files=20), root, name="assistant", version="2")
    (folder / "in/tokenizer/0.json").write_text("other")
    publish(folder / "in", root, name="assistant", version="3")


def expected() -> dict[str, np.ndarray]:
    tensors = weights()
    tensors["layer2.weight"] = tensors["layer2.weight"] + np.float32(1)
    tensors["new"] = np.arange(50_000, dtype=np.float32)
    return tensors


def test_lists_follow_their_schemas(releases: Path) -> None:
    """jsonschema accepts what was published (F1)."""
    import jsonschema  # three seconds, which one process alone takes

    for version in ("1", "2", "3"):
        index = json.loads((releases / "assistant" / version / "index.json").read_text())
        jsonschema.validate(index, schema(Index))
        jsonschema.validate(json.loads((releases / "files" / index["parts"][0]).read_text()), schema(Parts))
        jsonschema.validate(read_ways(releases / "assistant" / version), schema(Ways))
    latest = (releases / "assistant/latest/index.json").read_bytes()
    assert latest == (releases / "assistant/3/index.json").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("source", ["folder", "server", "layout"])
def test_a_device_with_a_much_older_release(source: str, tmp_path: Path) -> None:
    """It takes differences to what was in between, of which a list of its own says; without it, everything (F2)."""
    tensors = weights(layers=3, size=64)
    for number in range(1, 8):
        tensors = {key: value * np.float32(1 + 1e-6) for key, value in tensors.items()}
        publish(inputs(tmp_path / "in", tensors, files=1), tmp_path / "releases", name="a", version=str(number))
    newest = tmp_path / "releases/a/7"
    push(f"oci:{tmp_path}/layout:7", newest)
    with serving(tmp_path / "releases") as server:
        where = {"folder": newest, "server": f"{server.url}/a/7/index.json", "layout": f"oci:{tmp_path}/layout:7"}[
            source
        ]
        fetched = {}
        for device in ("new", "much older", "much older, without the list"):
            if device != "new":
                pull(tmp_path / "releases/a/2", tmp_path / device)
            if "without" in device:
                (newest / "earlier.json.zst").unlink()
            fetched[device] = pull(where, tmp_path / device, patience=NOW).fetched_bytes
            assert same(found(tmp_path / device / "current"), tensors)
    assert fetched["much older"] < 0.7 * fetched["new"]
    if source != "layout":  # which has a copy
        assert fetched["much older, without the list"] > 0.9 * fetched["new"]


def test_each_content_is_stored_once(releases: Path, tmp_path: Path) -> None:
    """Also if it is in a release of another name (F1, R1)."""
    before = sum(path.stat().st_size for path in (releases / "packs").rglob("*") if path.is_file())
    done = publish(tmp_path / "in", releases, name="other", version="1")
    after = sum(path.stat().st_size for path in (releases / "packs").rglob("*") if path.is_file())
    assert (done.new_bytes, after) == (0, before)
    pull(releases / "other/1", tmp_path / "device")
    assert same(found(tmp_path / "device/current"), expected())


@pytest.mark.way
@pytest.mark.parametrize("kind", ["folder", "server", "server without ranges"])
def test_each_version_follows_the_one_before(releases: Path, tmp_path: Path, kind: str) -> None:
    """From everywhere, and the third is assembled from blobs that are here (F2)."""
    with serving(releases) as server:
        server.ranges = kind == "server"
        place = str(releases) if kind == "folder" else server.url
        device = tmp_path / "device"
        fetched = []
        for version in ("1", "2", "3"):
            index = f"{place}/assistant/{version}/index.json"
            done = pull(index, device, patience=NOW)
            assert done.changed and done.version == version
            fetched.append(done.fetched_bytes)
            assert not pull(index, device, patience=NOW).changed
        assert same(found(device / "current"), expected())
        assert fetched[2] < fetched[0] / 10
        if kind == "server":
            assert fetched[0] < 0.95 * done.release_bytes  # it travelled as byte planes
            assert fetched[1] < fetched[0] / 1.5
            small = {file["sha256"] for file in json.loads((releases / "assistant/1/index.json").read_text())["files"]}
            assert len(server.log) < 20 < len(small)  # small files came together


def test_gc_keeps_what_is_needed(releases: Path, device: Path) -> None:
    """The current release stays, and one that a process has locked (F3)."""
    first = pull(releases / "assistant/1", device)
    pull(releases / "assistant/2", device)
    pull(releases / "assistant/3", device)
    lock = Lock()
    assert lock.take(first.path, shared=True)
    done = gc(device)
    assert (done.releases, done.in_use) == (1, 1)
    assert (first.path / "model.ptd").exists()
    lock.close()
    assert gc(device).releases == 1
    assert not first.path.exists()
    assert same(found(device / "current"), expected())
    with pytest.raises(ReleaseError, match="at least one"):
        gc(device, keep=0)


def test_older_and_other_releases_are_refused(releases: Path, device: Path, tmp_path: Path) -> None:
    """A server cannot take a device back (F4)."""
    pull(releases / "assistant/2", device)
    with pytest.raises(TrustError, match="version 1 is older than version 2"):
        pull(releases / "assistant/1", device)
    assert pull(releases / "assistant/1", device, allow_rollback=True).version == "1"
    publish(inputs(tmp_path / "in", weights()), releases, name="other", version="9")
    with pytest.raises(ReleaseError, match="another folder"):
        pull(releases / "other/9", device)
    with pytest.raises(ReleaseError, match="published already"):
        publish(tmp_path / "in", releases, name="other", version="9")


def test_a_pinned_digest_is_compared(releases: Path, tmp_path: Path) -> None:
    """What a client trusts is one digest (F4)."""
    with pytest.raises(TrustError, match="expected the digest"):
        pull(f"{releases}/assistant/1/index.json@sha256:{'0' * 64}", tmp_path / "device")
    assert not (tmp_path / "device").exists()


KILLS = """
import sys
from pathlib import Path
from blobstore.releases import publish, pull
from tests.helpers.interruptions import kills
template, places, source = map(Path, sys.argv[2:])
work = {
    "pull": lambda folder: pull(source, folder),
    "publish": lambda folder: publish(source, folder, name="a", version="3"),
}[sys.argv[1]]
list(kills(places, template, work))
"""


def killed_at_each_call(work: str, template: Path, places: Path, source: Path) -> list[Path]:
    """Copies of a folder that were left by processes that ended before each system call; in the last one, all was done."""
    places.mkdir()
    command = [sys.executable, "-c", KILLS, work, str(template), str(places), str(source)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert done.returncode == 0, done.stderr
    return sorted(places.iterdir(), key=lambda path: int(path.name))


@pytest.mark.slow
@pytest.mark.long
def test_a_kill_leaves_the_old_release_or_the_new_one(releases: Path, tmp_path: Path) -> None:
    """Before every call that changes a folder; the next pull goes on (F3)."""
    template = tmp_path / "template"
    pull(releases / "assistant/1", template)
    devices = killed_at_each_call("pull", template, tmp_path / "kills", releases / "assistant/2")
    assert len(devices) > 15
    seen = set()
    for device in devices:
        tensors = found(device / "current")
        seen.add("new" in tensors)
        assert same(tensors, expected() if "new" in tensors else weights())
        pull(releases / "assistant/2", device)
        assert same(found(device / "current"), expected())
        gc(device)
        assert list(device.rglob(".blobstore-*")) == []
    assert seen == {False, True}


def test_a_full_disk_leaves_the_old_release(releases: Path, device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pull with more room goes on (F3)."""
    pull(releases / "assistant/1", device)
    real, room = os.pwrite, 20_000

    def pwrite(number: int, data: memoryview, at: int) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(28, "No space left on device")
        room -= len(data[:4096])
        return real(number, data[:4096], at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(FileAccessError, match="No space left"):
        pull(releases / "assistant/2", device)
    monkeypatch.undo()
    assert same(found(device / "current"), weights())
    pull(releases / "assistant/2", device)
    assert same(found(device / "current"), expected())


def test_a_damaged_base_that_is_here_is_not_used(releases: Path, device: Path) -> None:
    """A difference to it would be of no use; the content is fetched whole (F4)."""
    path = (pull(releases / "assistant/1", device).path / "model.ptd").resolve()
    with open_ptd(path) as data_map:
        start, _ = data_map.byte_range("layer2.weight")
    data = bytearray(path.read_bytes())
    data[start + 99] ^= 1
    path.write_bytes(data)
    pull(releases / "assistant/2", device)
    assert same(found(device / "current"), expected())


def test_parts_of_a_file_that_is_fetched_whole(tmp_path: Path) -> None:
    """Another file is made of its bytes, before it gets its place (F2)."""
    tensors = weights()
    (tmp_path / "in").mkdir()
    blobstore.save_file(tensors, tmp_path / "in/whole.ptd")
    blobstore.save_file({"one": tensors["layer1.weight"], "own": np.zeros(9)}, tmp_path / "in/a.ptd")
    publish(tmp_path / "in", tmp_path / "releases", name="a", version="1", plain=True)
    for number in range(5):  # threads could be lucky
        pull(tmp_path / "releases/a/1", tmp_path / f"device{number}", plain=True)
        assert same(found(tmp_path / f"device{number}/current", "whole.ptd"), tensors)


def test_a_folder_can_be_moved(releases: Path, tmp_path: Path) -> None:
    """Links are relative (F1)."""
    pull(releases / "assistant/1", tmp_path / "device")
    shutil.move(tmp_path / "device", tmp_path / "elsewhere")
    assert same(found(tmp_path / "elsewhere/current"), weights())


@pytest.mark.slow
@pytest.mark.long
def test_a_publish_that_was_killed_is_done_again(tmp_path: Path) -> None:
    """Before every call that changes a folder: what devices see is the release before or this one, and the next try goes
    on (F3, R2)."""
    releases, first = tmp_path / "releases", weights(layers=2, size=16)
    publish(inputs(tmp_path / "in", first, files=1), releases, name="a", version="2")
    second = {key: value * 2 for key, value in first.items()}
    inputs(tmp_path / "in", second, files=1)
    *killed, _ = killed_at_each_call("publish", releases, tmp_path / "kills", tmp_path / "in")
    assert len(killed) > 30
    for folder in killed:
        seen = pull(folder / "a/latest", tmp_path / "devices" / folder.name).version
        assert same(found(tmp_path / "devices" / folder.name / "current"), second if seen == "3" else first)
        with contextlib.suppress(ReleaseError):  # it was published when it was killed
            publish(tmp_path / "in", folder, name="a", version="3")
        assert pull(folder / "a/latest", tmp_path / "devices" / folder.name).version == "3"
        assert same(found(tmp_path / "devices" / folder.name / "current"), second)
        assert list(folder.rglob(".blobstore-*")) == []
