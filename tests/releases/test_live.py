"""A release in a running program: newer files win, and newer releases are taken in one commit (F1, F3, D2)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore import save_file
from blobstore.errors import ClosedError, ReleaseError
from blobstore.releases import Release, compact, gc, publish, pull
from blobstore.runtime import BlobCache
from tests.releases.models import Weights, inputs, same, weights
from tests.waiting import give_way


def release(place: Path, version: str, tensors: Weights, base: str | None = None, **options: Any) -> Path:
    """Publish a version, pull it, and return the folder of the device."""
    publish(inputs(place / "in", tensors), place / "r", name="a", version=version, base=base)
    pull(place / "r/a" / version, place / "device", **options)
    return place / "device"


def held(cache: BlobCache) -> Weights:
    return {key: cache.numpy(key).copy() for key in cache}


def with_layer(tensors: Weights, layer: int, value: float) -> Weights:
    return {**tensors, f"layer{layer}.weight": np.full((128, 128), value, np.float32)}


def test_a_delta_lies_over_its_foundation(tmp_path: Path) -> None:
    """The cache maps the foundation, and memory is needed for what changed (F1)."""
    release(tmp_path, "1", weights())
    device = release(tmp_path, "2", with_layer(weights(), 2, 7), base="1")
    files = set((device / "files").iterdir())
    with Release.open(device) as found:
        assert (found.version, len(found.cache.paths), found.cache.dirty) == ("2", 1, ("layer2.weight",))
        assert same(held(found.cache), with_layer(weights(), 2, 7))
        assert (found.path / "tokenizer/0.json").is_file()
    assert set((device / "files").iterdir()) == files


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


def test_new_keys_and_layouts_need_one_merged_file(tmp_path: Path) -> None:
    """It is made once, and lives as long as the release (F1)."""
    release(tmp_path, "1", weights())
    tensors = {**with_layer(weights(), 2, 7), "layer1.weight": np.ones((64, 3), np.float32), "new": np.ones(9, np.int8)}
    device = release(tmp_path, "2", tensors, base="1")
    for _ in range(2):
        with Release.open(device) as found:
            assert same(held(found.cache), tensors) and found.cache.dirty == ()
            files = set((device / "files").iterdir())
        gc(device)
    with Release.open(device) as found:
        assert same(held(found.cache), tensors)
    assert set((device / "files").iterdir()) <= files


def test_new_keys_alone_need_no_merged_file(tmp_path: Path) -> None:
    release(tmp_path, "1", weights())
    device = release(tmp_path, "2", {**weights(), "new": np.ones(9, np.int8)}, base="1")
    with Release.open(device) as found:
        assert len(found.cache.paths) == 2 and found.cache.dirty == ()
        assert same(held(found.cache), {**weights(), "new": np.ones(9, np.int8)})


@pytest.mark.parametrize("merge", [False, True])
def test_newer_releases_are_taken(tmp_path: Path, merge: bool) -> None:
    """One commit with what differs; changes of the program's own stay (D2)."""
    device = release(tmp_path, "1", weights(), merge=merge)
    with Release.open(device) as found:
        assert found.follow().keys == () and found.cache.generation == 0
        tensors = with_layer(weights(), 2, 7)
        found.cache.update({"layer0.weight": np.zeros((128, 128), np.float32)})
        for number in range(2, 5):
            tensors = with_layer(tensors, number, number)
            release(tmp_path, str(number), tensors, base=str(number - 1), merge=merge)
            before = found.cache.generation
            done = found.follow()
            assert done.taken and done.generation == before + 1 and done.version == found.version == str(number)
            assert set(done.keys) == {f"layer{number}.weight"}
            gc(device)  # the release that the cache was opened on may go
            assert same(held(found.cache), with_layer(tensors, 0, 0))
        compact(tmp_path / "r", name="a", version="5", base="4")
        pull(tmp_path / "r/a/5", device, merge=merge)
        done = found.follow()
        assert (done.taken, done.keys, found.version) == (True, (), "5")
        pull(tmp_path / "r/a/1", device, allow_rollback=True, merge=merge)
        assert found.follow().taken
        assert same(held(found.cache), with_layer(weights(), 0, 0))


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
        assert found.follow().reasons == ("the data set 'second.ptd' is new",)


def test_data_sets_are_chosen(tmp_path: Path) -> None:
    """Two models with the same names are two caches (F1)."""
    save_file({"layer0.weight": np.zeros(3, np.float32)}, inputs(tmp_path / "in", weights()) / "second.ptd")
    device = release(tmp_path, "1", weights())
    with pytest.raises(ReleaseError, match="other contents in another data set"):
        Release.open(device)
    with Release.open(device, data=["second.ptd"]) as found:
        assert list(found.cache) == ["layer0.weight"]
    with pytest.raises(ReleaseError, match="no data set 'third"):
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


@pytest.mark.long
def test_readers_see_whole_releases(tmp_path: Path) -> None:
    """While releases come, everything that is read at once is of one release (D2)."""
    device = release(tmp_path, "0", {key: np.zeros((128, 128), np.float32) for key in weights()})
    seen: set[float] = set()
    torn: list[set[float]] = []
    with Release.open(device) as found:
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                with found.cache.reading():
                    values = {float(value) for key in found.cache for value in found.cache.numpy(key)[::64, 5]}
                seen.update(values)
                if len(values) != 1:
                    torn.append(values)
                give_way()  # to the thread that pulls

        thread = threading.Thread(target=read)
        thread.start()
        try:
            for number in range(1, 11):
                release(tmp_path, str(number), {key: np.full((128, 128), number, np.float32) for key in weights()})
                assert found.follow().taken
                gc(device)
        finally:
            stop.set()
            thread.join()
    assert torn == [] and len(seen) > 1


@pytest.mark.long
@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3), min_size=1), min_size=1, max_size=4))
def test_the_newest_counts(tmp_path_factory: pytest.TempPathFactory, files: list[dict[str, int]]) -> None:
    """For any files, with any keys and layouts: the cache is the overlay (F1)."""
    place = tmp_path_factory.mktemp("any")
    expected: Weights = {}
    for number, file in enumerate(files):
        expected.update({key: np.full(1 + value // 3, value, np.float32) for key, value in file.items()})
        (place / "in").mkdir(exist_ok=True)
        save_file(expected, place / "in/model.ptd")
        base = str(number - 1) if number else None
        publish(place / "in", place / "r", name="a", version=str(number), base=base)
        pull(place / "r/a" / str(number), place / "device")
    with Release.open(place / "device") as found:
        assert same(held(found.cache), expected)
