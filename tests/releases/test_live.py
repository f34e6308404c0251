"""A release in a running program: newer files win, and newer releases are taken in one commit (F1, F3, D2)."""

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore import save_file
from blobstore.adapters import save_adapter
from blobstore.errors import ClosedError, IntegrityError, ReleaseError
from blobstore.releases import Release, gc, publish, pull
from blobstore.runtime import BlobCache
from tests.releases.models import Weights, inputs, same, weights


def release(place: Path, version: str, tensors: Weights, **options: Any) -> Path:
    """Publish a version, pull it, and return the folder of the device."""
    publish(inputs(place / "in", tensors), place / "r", name="a", version=version)
    pull(place / "r/a" / version, place / "device", **options)
    return place / "device"


def held(cache: BlobCache) -> Weights:
    return {key: cache.numpy(key).copy() for key in cache}


def with_layer(tensors: Weights, layer: int, value: float) -> Weights:
    return {**tensors, f"layer{layer}.weight": np.full((128, 128), value, np.float32)}


def test_a_closed_release_follows_nothing(tmp_path: Path) -> None:
    """Whether or not there is a newer one, the message names the release's folder."""
    device = release(tmp_path, "1", weights())
    with Release.open(device) as found:
        pass
    for version in ("2", "3"):
        with pytest.raises(ClosedError, match="device: the release is closed$"):
            found.follow()
        release(tmp_path, version, with_layer(weights(), 2, 7))
    found.close()


@pytest.mark.long
def test_newer_releases_are_taken(tmp_path: Path) -> None:
    """One commit with what differs; changes of the program's own stay (D2)."""
    device = release(tmp_path, "1", weights())
    with Release.open(device) as found:
        assert found.follow().keys == () and found.cache.generation == 0
        tensors = with_layer(weights(), 2, 7)
        found.cache.update({"layer0.weight": np.zeros((128, 128), np.float32)})
        for number in range(2, 5):
            tensors = with_layer(tensors, number, number)
            release(tmp_path, str(number), tensors)
            before = found.cache.generation
            done = found.follow()
            assert done.taken and done.generation == before + 1 and done.version == found.version == str(number)
            assert set(done.keys) == {f"layer{number}.weight"}
            gc(device)  # the release that the cache was opened on may go
            assert same(held(found.cache), with_layer(tensors, 0, 0))
        release(tmp_path, "5", tensors)
        done = found.follow()
        assert (done.taken, done.keys, found.version) == (True, (), "5")
        pull(tmp_path / "r/a/1", device, allow_rollback=True)
        assert found.follow().taken
        assert same(held(found.cache), with_layer(weights(), 0, 0))


@pytest.mark.long
def test_what_is_equal_is_not_read(tmp_path: Path) -> None:
    """Equal contents are known by the digests of the release: a switch costs what changed (D2)."""
    many = {f"layer{number}": np.full(1 << 20, number, np.float32) for number in range(16)}
    device = release(tmp_path, "1", {**many, "small": np.zeros(64, np.float32)})
    with Release.open(device) as found:
        release(tmp_path, "2", {**many, "small": np.ones(64, np.float32)})
        before = page_faults()
        assert found.follow().keys == ("small",)
        assert page_faults() - before < 512  # to touch both files takes 2,048, of 16 pages each
        assert found.cache.numpy("small")[5] == 1


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.long
def test_more_than_blobs_must_be_opened_again(tmp_path: Path) -> None:
    """It says why, and nothing changes until then; other files are named (D2)."""
    device = release(tmp_path, "1", weights())
    changes: list[tuple[Weights, str]] = [
        ({**weights(), "new": np.ones(3, np.float32)}, "'new' is new"),
        ({key: value for key, value in weights().items() if key != "layer0.weight"}, "'layer0.weight' is gone"),
        ({**weights(), "layer0.weight": np.ones((128, 64), np.float32)}, "'layer0.weight' has another layout"),
        ({**weights(), "layer0.weight": np.ones((128, 128), np.int32)}, "'layer0.weight' has another layout"),
    ]
    with Release.open(device) as found:
        for number, (tensors, reason) in enumerate(changes, 2):
            release(tmp_path, str(number), with_layer(tensors, 5, 5))
            done = found.follow()
            assert not done.taken and reason in " ".join(done.reasons)
            assert (found.version, found.cache.generation) == ("1", 0)
            with Release.open(device) as again:
                assert same(held(again.cache), with_layer(tensors, 5, 5))
        (tmp_path / "in/tokenizer/0.json").write_text("other")
        publish(tmp_path / "in", tmp_path / "r", name="a", version="8")
        inputs(tmp_path / "in", weights())
        (tmp_path / "in/tokenizer/0.json").write_text("other")
        publish(tmp_path / "in", tmp_path / "r", name="a", version="9")
        pull(tmp_path / "r/a/9", device)
        done = found.follow()
        assert done.taken and done.files == ("tokenizer/0.json",)
        save_file({"x": np.ones(3, np.float32)}, tmp_path / "in/second.ptd")
        publish(tmp_path / "in", tmp_path / "r", name="a", version="10")
        pull(tmp_path / "r/a/10", device)
        assert found.follow().reasons == ("the data file 'second.ptd' is new",)


def test_adapters_that_change_are_named(tmp_path: Path) -> None:
    """They must be loaded again, but for those in the cache's own files, which follow (D2)."""
    foundation = inputs(tmp_path / "in", weights()) / "model.ptd"
    german = tmp_path / "in/german.ptd"

    def adapted(version: str, value: float) -> Path:
        pair = {"layer0.lora_a": np.full((2, 128), value, np.float32), "layer0.lora_b": np.ones((128, 2), np.float32)}
        save_adapter(german, pair, foundation=foundation, scale=1)
        return release(tmp_path, version, weights())

    device = adapted("1", 1)
    with Release.open(device) as found, Release.open(device, data=["model.ptd", "german.ptd"]) as own:
        adapted("2", 2)
        done = found.follow()
        assert (done.taken, done.keys, done.files, found.version) == (True, (), ("german.ptd",), "2")
        done = own.follow()
        assert (done.taken, done.keys, done.files) == (True, ("layer0.lora_a",), ())
        assert own.cache.numpy("layer0.lora_a")[1, 5] == 2
        german.unlink()
        release(tmp_path, "3", weights())
        done = found.follow()
        assert (done.taken, done.files) == (True, ("german.ptd",))
        assert own.follow().reasons == ("the data file 'german.ptd' is gone",)


def test_data_files_are_chosen(tmp_path: Path) -> None:
    """Two models with the same names are two caches (F1)."""
    save_file({"layer0.weight": np.zeros(3, np.float32)}, inputs(tmp_path / "in", weights()) / "second.ptd")
    device = release(tmp_path, "1", weights())
    with pytest.raises(ReleaseError, match="other contents in another data file"):
        Release.open(device)
    with Release.open(device, data=["second.ptd"]) as found:
        assert list(found.cache) == ["layer0.weight"]
    with pytest.raises(ReleaseError, match="no data file 'third"):
        Release.open(device, data=["third.ptd"])
    with pytest.raises(ReleaseError, match="no release"):
        Release.open(tmp_path / "nowhere")


def test_gc_leaves_an_open_release(tmp_path: Path) -> None:
    """Its programs and tokenizers are read when they are needed (F3)."""
    found = Release.open(release(tmp_path, "1", weights()))
    device = release(tmp_path, "2", with_layer(weights(), 1, 1))
    # another open file of the folder counts as another process
    assert gc(device).in_use == 1
    assert (found.path / "model.ptd").is_file()
    assert same(held(found.cache), weights())
    path = found.path
    assert found.follow().taken and found.path != path
    assert gc(device).in_use == 0 and not path.exists()
    found.close()


def test_files_are_told_apart(tmp_path: Path) -> None:
    """The library says what each file of a release is, so that no application guesses by names (F1)."""
    inputs(tmp_path / "in", weights(), files=1)
    save_file({"x": np.ones(3, np.float32)}, tmp_path / "in/second.ptd")
    publish(tmp_path / "in", tmp_path / "r", name="a", version="1")
    pull(tmp_path / "r/a/1", tmp_path / "device")
    with Release.open(tmp_path / "device") as found:
        kinds = {"model.ptd": "data", "second.ptd": "data", "tokenizer/0.json": "other"}
        assert {file.name: (file.kind, file.data) for file in found.files()} == {
            name: (kind, ()) for name, kind in kinds.items()
        }
        assert set(found.cache) == {*weights(), "x"}
        assert (found.path / "tokenizer/0.json").is_file()


@pytest.mark.parametrize("damaged", ["index", "list of parts"])
def test_damage_is_found_before_anything_changes(tmp_path: Path, damaged: str) -> None:
    """Whether in the index of the newer release, or in what says which blobs are equal, which is whole otherwise: it is an
    error, and the old weights stay (F3, B5)."""
    device = release(tmp_path, "1", weights())
    with Release.open(device) as found:
        release(tmp_path, "2", with_layer(weights(), 2, 7))
        path = device / "indexes" / f"{(device / 'current').readlink().name}.json"
        if damaged == "list of parts":
            path = device / "files" / json.loads(path.read_bytes())["parts"][0]
        good = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(good.replace(b"a", b"b"))
        with pytest.raises(IntegrityError, match="expected the SHA-256 that is its name"):
            found.follow()
        path.write_bytes(good)
        assert (found.version, found.cache.generation) == ("1", 0) and same(held(found.cache), weights())
        assert found.follow().taken and found.version == "2"
