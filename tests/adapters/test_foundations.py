"""Adapters are compared with the foundation that is computed with, whatever changed it and in whatever order (L5, D2)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore import adapters, save_file
from blobstore.errors import AdapterError
from blobstore.runtime import BlobCache, make_working_copy
from tests.adapters.nets import SCALE

SHAPES = {"m.weight": (7, 5), "v.weight": (7, 5), "m.lora_a": (2, 5), "m.lora_b": (7, 2)}
FOUNDATION = ("m.weight", "v.weight")
LORA = ("m.lora_a", "m.lora_b")


def numbers(seed: int, *names: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(SHAPES[name], np.float32) for name in names}


class Place:
    """Files of two foundations, "old" and "new", adapters for both, and a cache on the old one."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.weights = {"old": numbers(1, *FOUNDATION), "new": numbers(2, *FOUNDATION)}
        for which, tensors in self.weights.items():
            save_file(tensors, folder / f"{which}.ptd")
            adapters.save_adapter(self.adapter(which), numbers(3, *LORA), foundation=folder / f"{which}.ptd", scale=1)
        save_file({name: np.zeros(SHAPES[name], np.float32) for name in LORA}, folder / "adapter.ptd")
        files = [folder / "old.ptd", folder / "adapter.ptd"]
        if kind == "layered":
            self.owner = BlobCache(files[0])
            self.cache = BlobCache(files[1], base=self.owner)
        elif kind == "working copy":
            make_working_copy(files, folder / "live.ptd")
            self.owner = self.cache = BlobCache(folder / "live.ptd", "shared")
        else:
            self.owner = self.cache = BlobCache(files, "copy" if kind == "copy" else "private")

    def adapter(self, which: str) -> Path:
        return self.folder / f"for_{which}.ptd"

    def computes_with(self) -> str:
        """Which foundation a process would find that starts from what is in memory now."""
        saved = self.folder / "restarted.ptd"
        save_file({name: self.cache.numpy(name).copy() for name in FOUNDATION}, saved)
        found = adapters.foundation_fingerprint(saved)
        return {adapters.read_adapter(self.adapter(which)).foundation: which for which in self.weights}[found]

    def check(self, call: Callable[[Path], Any]) -> None:
        """Only the adapter for what is computed with is taken; the other one changes nothing."""
        now = self.computes_with()
        (other,) = {"old", "new"} - {now}
        generation = self.cache.generation
        with pytest.raises(AdapterError, match=rf"for_{other}\.ptd: made for foundation"):
            call(self.adapter(other))
        assert self.cache.generation == generation
        call(self.adapter(now))


@pytest.fixture(params=["layered", "one cache", "copy", "working copy"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.param)


def merge_once(cache: BlobCache, path: Path) -> None:
    adapters.merge_adapter(cache, path).undo()


CALLS: dict[str, Callable[[BlobCache, Path], Any]] = {
    "load_adapter": adapters.load_adapter,
    "load_adapters": lambda cache, path: adapters.load_adapters(cache, {path: 0.5}),
    "merge_adapter": merge_once,
}


@pytest.mark.parametrize("first", [False, True], ids=["asked later", "asked before"])
@pytest.mark.parametrize("name", CALLS)
def test_after_an_update(place: Place, name: str, first: bool) -> None:
    """An update, a file, a file with both, other bytes and back again: the verdict is that of a restarted process."""

    def call(path: Path) -> None:
        CALLS[name](place.owner if name == "merge_adapter" else place.cache, path)

    if first:
        place.check(call)
    place.owner.update(place.weights["new"])
    assert place.computes_with() == "new"
    place.check(call)
    place.owner.load(place.folder / "old.ptd")
    assert place.computes_with() == "old"
    place.check(call)
    place.owner.update({"v.weight": place.weights["new"]["v.weight"]})
    for which in ("old", "new"):  # it is half of each
        with pytest.raises(AdapterError, match="made for foundation"):
            call(place.adapter(which))
    place.owner.update(place.weights["new"])
    place.check(call)
    if place.owner.mode != "shared":
        place.owner.revert()
        assert place.computes_with() == "old"
        place.check(call)


def test_another_process_commits(tmp_path: Path) -> None:
    """In a shared working copy, what counts is what all processes compute with."""
    place = Place(tmp_path, "working copy")
    adapters.load_adapter(place.cache, place.adapter("old"))
    with BlobCache(tmp_path / "live.ptd", "shared") as other:  # has its own map, as another process has
        other.update(place.weights["new"])
        place.check(lambda path: adapters.load_adapter(place.cache, path))
        place.owner.update(place.weights["old"])
        place.check(lambda path: adapters.load_adapter(other, path))
    with BlobCache(tmp_path / "live.ptd", "shared") as later:
        place.check(lambda path: adapters.load_adapter(later, path))


def test_a_layer_that_covers_the_foundation(tmp_path: Path) -> None:
    """Programs compute with the fine-tune on top, so adapters for the file below are refused."""
    place = Place(tmp_path, "layered")
    layer = BlobCache([tmp_path / "new.ptd", tmp_path / "adapter.ptd"], base=place.owner)
    place.cache = layer
    assert place.computes_with() == "new"
    place.check(lambda path: adapters.load_adapter(layer, path))
    place.owner.update(place.weights["new"])  # which nobody sees through this layer
    place.check(lambda path: adapters.load_adapter(layer, path))


def test_merged_numbers_that_nobody_merged(place: Place) -> None:
    """What was merged adds up with other adapters for the same foundation; the same numbers by an update do not."""
    cache = place.owner
    merged = adapters.merge_adapter(cache, place.adapter("old"))
    adapters.load_adapter(place.cache, place.adapter("old"))
    numbers = cache.numpy("m.weight").copy()
    merged.undo()
    cache.update({"m.weight": numbers})
    with pytest.raises(AdapterError, match="made for foundation"):
        adapters.load_adapter(place.cache, place.adapter("old"))


def test_a_working_copy_knows_its_files(tmp_path: Path) -> None:
    """An adapter with more than LoRA is taken as on the separate files, also by a copy of a copy; and its scale counts."""
    files = [tmp_path / name for name in ("foundation.ptd", "adapter.ptd", "own.ptd")]
    save_file(numbers(1, "m.weight"), files[0])
    head = {**numbers(3, *LORA), "head.weight": np.ones((3, 7), np.float32)}
    save_file(head, files[1], metadata={"blobstore.adapter.scale": str(SCALE)})
    own = {name: tensor + 1 for name, tensor in head.items()}
    adapters.save_adapter(files[2], own, foundation=files[0], scale=SCALE)
    make_working_copy(files[:2], tmp_path / "live.ptd")
    make_working_copy([files[0], tmp_path / "live.ptd"], tmp_path / "again.ptd")
    for copy in ("live.ptd", "again.ptd"):
        with BlobCache(tmp_path / copy, "shared") as cache:
            for _ in range(2):
                adapters.load_adapter(cache, files[2])
                assert all(np.array_equal(cache.numpy(name), tensor) for name, tensor in own.items())
            adapters.save_adapter(tmp_path / "scaled.ptd", own, foundation=files[0], scale=2 * SCALE)
            with pytest.raises(AdapterError, match=rf"that of the adapter in .*{copy} is {SCALE}"):
                adapters.load_adapter(cache, tmp_path / "scaled.ptd")
            cache.update({"m.weight": cache.numpy("m.weight") + 1})
            with pytest.raises(AdapterError, match="made for foundation"):
                adapters.load_adapter(cache, files[2])


@pytest.mark.parametrize(
    "text", ["[", "[[0]]", "[[0,9]]", "[[2,1]]", "[[0,2,1,2]]", '[["a"]]', "3", f"[{','.join(['[0,4]'] * 17)}]"]
)
def test_what_a_working_copy_says_of_its_files_is_checked(tmp_path: Path, text: str) -> None:
    """The entry may be damaged like any other (S1)."""
    from blobstore.errors import InvalidFileError

    place = Place(tmp_path, "one cache")
    files = {**place.weights["old"], **numbers(3, *LORA)}
    save_file(files, tmp_path / "bad.ptd", metadata={"blobstore.working_copy.files": text})
    with pytest.raises(InvalidFileError, match=r"bad\.ptd"):
        adapters.load_adapter(BlobCache(tmp_path / "bad.ptd"), place.adapter("old"))
