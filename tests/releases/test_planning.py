"""Applications that download themselves: a plan, and a commit of what was fetched (F2, F3, F4)."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import blobstore
from blobstore import open_ptd
from blobstore.core.memory.digest import sha256
from blobstore.errors import BlobStoreError, IntegrityError, InvalidFileError, ReleaseError, TransferError, TrustError
from blobstore.releases import Plan, commit, gc, plan, publish, pull
from blobstore.releases.index.index import Object
from blobstore.releases.sources.fetched import FetchedSource, fetched_name
from blobstore.releases.sources.source import Found
from tests.releases.models import NOW, found, inputs, published_once, same, spoil, weights
from tests.releases.server import Server, serving
from tests.releases.test_registry import keys


def changed() -> dict[str, np.ndarray]:
    tensors = weights()
    tensors["layer2.weight"] = tensors["layer2.weight"] + np.float32(1)
    return tensors


@published_once
def releases(folder: Path) -> None:
    """Versions 1 to 3: a first one, a layer changed, and a small file changed."""
    root = folder / "releases"
    publish(inputs(folder / "in", weights()), root, name="a", version="1", plain=True)
    publish(inputs(folder / "in", changed()), root, name="a", version="2", plain=True)
    (folder / "in/tokenizer/0.json").write_text("other")
    publish(folder / "in", root, name="a", version="3", plain=True)


@pytest.fixture
def server(releases: Path) -> Iterator[Server]:
    with serving(releases) as server:
        yield server


def download(todo: Plan, folder: Path) -> Path:
    """What a phone's downloader does."""
    folder.mkdir(exist_ok=True)
    for one in todo.fetches:
        request = urllib.request.Request(one.url, headers={"Range": one.range} if one.range else {})  # noqa: S310
        with urllib.request.urlopen(request) as answer:  # noqa: S310 - on this machine
            data = answer.read()
        (folder / one.file).write_bytes(data)
        if one.range is None:
            assert (len(data), sha256(data)) == (one.size, one.sha256)
    return folder


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_each_version_is_planned_and_committed(server: Server, tmp_path: Path, ranges: bool, plain: bool) -> None:
    """No more than a pull fetches, and the commit asks no server; servers without ranges will do (F2)."""
    server.ranges = ranges
    device, planned = tmp_path / "device", []
    for version in ("1", "2", "3"):
        url = f"{server.url}/a/{version}/index.json"
        todo = plan(url, device, plain=plain, patience=NOW)
        assert (todo.current, todo.version) == (False, version)
        planned.append(todo.bytes)
        fetched = download(todo, tmp_path / version)
        requests = len(server.log)
        done = commit(url, device, fetched)
        assert done.changed and done.version == version and len(server.log) == requests
        assert plan(url, device, patience=NOW).current
        assert not commit(url, device, tmp_path).changed
    assert same(found(device / "current"), changed())
    assert planned[1] < planned[0] / 3 and planned[2] < planned[0] / 20
    assert not pull(url, device, patience=NOW).changed


def test_a_plan_is_not_more_than_a_pull(server: Server, tmp_path: Path) -> None:
    """It lists what a pull that was interrupted has not fetched yet (F2)."""
    url = f"{server.url}/a/1/index.json"
    before = plan(url, tmp_path / "device", plain=True, patience=NOW)

    def fault(handler: Any, times: int) -> bool:
        if "/files/" in handler.path and len(server.log) > 5:
            handler.answer(404)
            return True
        return False

    server.fault = fault
    with pytest.raises(TransferError):
        pull(url, tmp_path / "device", plain=True, threads=1, patience=NOW)
    server.fault = lambda handler, times: False
    after = plan(url, tmp_path / "device", plain=True, patience=NOW)
    assert 0 < after.bytes < before.bytes
    commit(url, tmp_path / "device", download(after, tmp_path / "fetched"))
    assert same(found(tmp_path / "device/current"), weights())


@pytest.mark.long
@pytest.mark.parametrize(
    "damage", ["a bit", "a byte less", "a byte more", "missing", "of something else"], ids=lambda text: text
)
@pytest.mark.parametrize("version", ["1", "2", "3"])
def test_nothing_wrong_is_committed(server: Server, tmp_path: Path, damage: str, version: str) -> None:
    """The old release stays; a new plan lists what is still needed (F3, F4)."""
    url = f"{server.url}/a/{version}/index.json"

    def installed(device: Path) -> Plan:
        if version != "1":
            pull(f"{server.url}/a/1/index.json", device, patience=NOW)
        return plan(url, device, patience=NOW)

    todo = installed(tmp_path / "0")
    assert todo.fetches
    for number, one in enumerate(todo.fetches, 1):
        device = tmp_path / str(number)
        fetched = download(installed(device), tmp_path / f"fetched{number}")
        spoil(fetched / one.file, damage)
        with pytest.raises((IntegrityError, InvalidFileError, TransferError)):
            commit(url, device, fetched)
        if version == "1":
            assert not (device / "current").exists()
        else:
            assert same(found(device / "current"), weights())
        again = plan(url, device, patience=NOW)
        assert not again.current and one.sha256 in {later.sha256 for later in again.fetches}
        commit(url, device, download(again, tmp_path / f"good{number}"))
        assert same(found(device / "current"), weights() if version == "1" else changed())


def test_a_damaged_blob_that_is_here_is_planned(server: Server, tmp_path: Path) -> None:
    """The commit could not fetch it (F4)."""
    device = tmp_path / "device"
    done = pull(f"{server.url}/a/2/index.json", device, patience=NOW)
    path = (done.path / "model.ptd").resolve()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    tensors = {**changed(), "layer0.weight": -weights()["layer0.weight"]}
    publish(inputs(tmp_path / "in", tensors), tmp_path / "releases", name="a", version="4")
    url = f"{server.url}/a/4/index.json"
    todo = plan(url, device, patience=NOW)
    commit(url, device, download(todo, tmp_path / "fetched"))
    assert same(found(device / "current"), tensors)
    assert todo.bytes < todo.release_bytes / 2


def test_a_damaged_base_that_is_here_is_planned(server: Server, tmp_path: Path) -> None:
    """A difference to it would be of no use; the plan has the content whole, and so does the commit (F4)."""
    device = tmp_path / "device"
    done = pull(f"{server.url}/a/1/index.json", device, patience=NOW)
    path = (done.path / "model.ptd").resolve()
    with open_ptd(path) as data_map:
        start, _ = data_map.byte_range("layer2.weight")
    data = bytearray(path.read_bytes())
    data[start + 99] ^= 1
    path.write_bytes(data)
    url = f"{server.url}/a/2/index.json"
    todo = plan(url, device, patience=NOW)
    assert commit(url, device, download(todo, tmp_path / "fetched")).changed
    assert same(found(device / "current"), changed())


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


def test_what_pull_refuses(tmp_path: Path) -> None:
    """Unsigned, signed by another key, older, of another name: at the plan and at the commit (F4)."""
    private, public = keys(tmp_path, "one")
    _, other = keys(tmp_path, "other")
    root, device = tmp_path / "releases", tmp_path / "device"
    publish(inputs(tmp_path / "in", weights()), root, name="a", version="1")
    publish(inputs(tmp_path / "in", changed()), root, name="a", version="2", sign=private)
    publish(tmp_path / "in", root, name="b", version="1")
    with pytest.raises(TrustError, match="not signed"):
        plan(root / "a/1", device, key=public)
    one = download(plan(root / "a/1", device), tmp_path / "one")
    with pytest.raises(TrustError, match="not signed"):
        commit(root / "a/1", device, one, key=public)
    assert not (device / "current").exists()
    two = download(plan(root / "a/2", device, key=public), tmp_path / "two")
    with pytest.raises(TrustError, match="not signed by"):
        commit(root / "a/2", device, two, key=other)
    assert commit(root / "a/2", device, two, key=public).version == "2"
    for again in range(2):  # a rollback is accepted by none of the steps, or by both
        with pytest.raises(TrustError, match="older than version 2"):
            if again:
                commit(root / "a/1", device, one)
            else:
                plan(root / "a/1", device)
        if not again:
            plan(root / "a/1", device, allow_rollback=True)
    assert commit(root / "a/1", device, one, allow_rollback=True).version == "1"
    with pytest.raises(ReleaseError, match="another folder"):
        plan(root / "b/1", device)


def test_a_commit_needs_its_plan(tmp_path: Path) -> None:
    """Of the same reference, and undamaged; gc removes plans (F3)."""
    root, device = tmp_path / "releases", tmp_path / "device"
    publish(inputs(tmp_path / "in", weights()), root, name="a", version="1")
    pull(root / "a/1", device)
    publish(inputs(tmp_path / "in", changed()), root, name="a", version="2")
    fetched = download(plan(root / "a/2", device), tmp_path / "fetched")
    with pytest.raises(ReleaseError, match="found one of"):
        commit(root / "a/1", device, fetched)
    place = device / "incoming/plan.json"
    good = place.read_text()
    record = json.loads(good)
    for bad in (good[:-9], json.dumps({**record, "sha256": "0" * 64}), json.dumps({**record, "format": "other"}), "["):
        place.write_text(bad)
        with pytest.raises(InvalidFileError):
            commit(root / "a/2", device, fetched)
    place.write_text(good)
    with pytest.raises(BlobStoreError, match="nowhere"):
        commit(root / "a/2", device, tmp_path / "nowhere")
    gc(device)
    with pytest.raises(ReleaseError, match="no plan"):
        commit(root / "a/2", device, fetched)
    assert same(found(device / "current"), weights())


@given(st.data())
def test_any_pieces_of_an_object_will_do(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A range is read from whatever files have its bytes (F2)."""
    content = bytes(range(100))
    wanted = Object(sha256(content), len(content))
    folder = tmp_path_factory.mktemp("pieces")
    have: set[int] = set()
    places = st.tuples(st.integers(0, 99), st.integers(1, 100)).filter(lambda pair: pair[0] < pair[1])
    for start, stop in data.draw(st.lists(places, max_size=6)):
        whole = data.draw(st.booleans())
        (folder / fetched_name(wanted, start, stop)).write_bytes(content if whole else content[start:stop])
    for path in folder.iterdir():
        size = path.stat().st_size
        first = int(path.name.split(".")[1].split("-")[0]) if size < 100 else 0
        have.update(range(first, first + size))
    source = FetchedSource(folder, "test", Found("0" * 64, b""), None, None)
    start, stop = data.draw(places)
    with source.open(wanted, start, stop) as body:
        if set(range(start, stop)) <= have:
            assert b"".join(body.pieces) == content[start:stop]
        else:
            with pytest.raises(TransferError, match="not in the fetched files"):
                b"".join(body.pieces)


def test_publishing_predicts_what_devices_fetch(tmp_path: Path) -> None:
    """Also of many files of which some are equal: a device fetches those once (F1)."""
    generator = np.random.default_rng(0)
    folder = tmp_path / "in"
    folder.mkdir()
    base = {f"layer.{i}": (generator.standard_normal((256, 256)) * 0.02).astype(np.float32) for i in range(6)}
    for number in range(9):
        own = {**base, "own": np.full((64, 64), number // 3, np.float32)}  # three files of each kind are equal
        blobstore.save_file(own, folder / f"{number}.ptd")
    first = publish(folder, tmp_path / "releases", name="a", version="1")
    with serving(tmp_path / "releases") as server:
        device = tmp_path / "device"
        pulled = pull(f"{server.url}/a/1/index.json", device)
        assert pulled.fetched_bytes == first.first_bytes
        for number in range(9):
            changed = {**base, "own": np.full((64, 64), number // 3 + 0.5, np.float32)}
            blobstore.save_file(changed, folder / f"{number}.ptd", force=True)
        second = publish(folder, tmp_path / "releases", name="a", version="2")
        pulled = pull(f"{server.url}/a/2/index.json", device)
        assert second.update_bytes is not None and second.update_bytes < first.first_bytes / 3
        assert pulled.fetched_bytes == second.update_bytes


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("files", [1, 40])
def test_publishing_predicts_to_the_byte(tmp_path: Path, files: int, plain: bool) -> None:
    """What a device without anything fetches, and one with the release before; where nothing is new, it is the index (F1)."""
    tensors = weights(layers=6, size=32)
    with serving(tmp_path / "releases") as server:
        for version in ("1", "2", "3"):
            done = publish(
                inputs(tmp_path / "in", tensors, files=files),
                tmp_path / "releases",
                name="a",
                version=version,
                plain=plain,
            )
            place = f"{server.url}/a/{version}/index.json"
            server.log.clear()
            assert pull(place, tmp_path / f"new {version}").fetched_bytes == done.first_bytes
            several = [asked for _, _, asked, _ in server.log if asked and "," in asked]
            assert bool(several) == (version != "1")  # contents of the first release lie between others
            folder = pull(tmp_path / "releases/a" / version, tmp_path / f"folder {version}")
            assert folder.fetched_bytes == done.first_bytes or plain  # whole files of a folder cost less than decoding
            if done.update_bytes is not None:
                assert pull(place, tmp_path / f"new {int(version) - 1}").fetched_bytes == done.update_bytes
            index = (tmp_path / "releases/a" / version / "index.json").stat().st_size
            assert pull(place, tmp_path / f"new {version}").fetched_bytes == index
            changed = {key: tensors[key] * np.float32(1.00001) for key in ("layer1.weight", "layer4.weight")}
            tensors = {**tensors, **changed}


@pytest.mark.long
def test_publishing_predicts_what_devices_fetch_of_a_zoo(tmp_path: Path) -> None:
    """Teams with fine-tunes, halves, transposed copies and adapters, in two formats (F1)."""
    generator = np.random.default_rng(0)
    base = {f"layer.{i}": generator.standard_normal((64, 64), np.float32) * np.float32(0.02) for i in range(4)}
    base["embed"] = generator.standard_normal((500, 64), np.float32)
    for number in range(60):
        team, kind = divmod(number, 6)
        own = {
            0: base,
            1: {**base, "embed": base["embed"] + np.float32(team)},
            2: {name: tensor.astype(np.float16) for name, tensor in base.items()},
            3: {**base, "head": np.ascontiguousarray(base["embed"].T), "mask": np.zeros((256, 64), np.float32)},
            4: {f"lora.{i}": generator.standard_normal((8, 64), np.float32) for i in range(4)},
            5: {**base, "own": np.full((64, 64), number, np.float32)},
        }[kind]
        path = tmp_path / "in" / f"team-{team}" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 2:
            safetensors.numpy.save_file(own, f"{path}.safetensors")
        else:
            blobstore.save_file(own, f"{path}.ptd")
    published = publish(tmp_path / "in", tmp_path / "releases", name="zoo", version="1")
    with serving(tmp_path / "releases") as server:
        pulled = pull(f"{server.url}/zoo/1/index.json", tmp_path / "device")
    assert pulled.files == 60 and pulled.fetched_bytes == published.first_bytes
    assert published.first_bytes < published.release_bytes / 2
