"""Newer releases and the adapters that are loaded above their foundation: both together, or what does not fit is named (L5, D2)."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from blobstore import save_file
from blobstore.adapters import load_adapter, load_adapters, save_adapter, set_adapter_strength
from blobstore.errors import AdapterError, UnsupportedDataError
from blobstore.releases import Release, publish, pull
from blobstore.runtime import BlobCache
from blobstore.runtime.native import native

SHAPES = {"m.weight": (7, 5), "m.lora_a": (2, 5), "m.lora_b": (7, 2)}
LORA = ("m.lora_a", "m.lora_b")
Tensors = dict[str, np.ndarray]


def numbers(seed: int, *names: str) -> Tensors:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(SHAPES[name], np.float32) for name in names}


def held(release: Release) -> Tensors:
    return {name: release.cache.numpy(name).copy() for name in SHAPES}


class Shop:
    """Publishes versions of a foundation with adapters, and pulls them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.inputs, self.device = folder, folder / "in", folder / "device"
        self.inputs.mkdir()
        save_file({name: np.zeros(SHAPES[name], np.float32) for name in LORA}, self.inputs / "adapter.ptd")

    def release(self, version: str, foundation: int, adapter: int, scale: float = 1) -> None:
        """Numbers by their seeds."""
        save_file(numbers(foundation, "m.weight"), self.inputs / "foundation.ptd")
        for name, seed in (("left", adapter), ("up", adapter + 100)):
            tensors = numbers(seed, *LORA)
            save_adapter(self.inputs / f"{name}.ptd", tensors, foundation=self.inputs / "foundation.ptd", scale=scale)
        publish(self.inputs, self.folder / "r", name="a", version=version)
        self.pull(version)

    def pull(self, version: str) -> None:
        pull(self.folder / "r/a" / version, self.device, allow_rollback=True)

    def own(self, name: str, seed: int = 50) -> Path:
        """A user's own adapter, for the foundation that was released last."""
        path = self.folder / name
        save_adapter(path, numbers(seed, *LORA), foundation=self.inputs / "foundation.ptd", scale=1)
        return path


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    made = Shop(tmp_path)
    made.release("1", foundation=1, adapter=11)
    return made


@pytest.fixture
def opened(shop: Shop) -> Iterator[Release]:
    """The first version, open."""
    with Release.open(shop.device) as release:
        yield release


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_an_adapter_of_the_foundation_before(opened: Release, shop: Shop) -> None:
    """The verdict after a follow is that of opening again; going back, it is the other one."""
    mine = shop.own("mine.ptd")
    shop.release("2", foundation=2, adapter=12)
    assert opened.follow().taken
    again = Release.open(shop.device)
    for one in (opened, again):
        with pytest.raises(AdapterError, match=r"mine\.ptd: made for foundation"):
            load_adapter(one.cache, mine)
        load_adapter(one.cache, opened.path / "left.ptd")
    again.close()
    shop.pull("1")
    set_adapter_strength(opened.cache, 0)
    assert opened.follow().taken
    with pytest.raises(AdapterError, match="made for foundation"):
        set_adapter_strength(opened.cache, 1)
    load_adapter(opened.cache, mine)


def test_a_new_foundation_is_not_put_under_an_old_adapter(opened: Release, shop: Shop) -> None:
    """Nothing changes, and the file is named; turned off, or exchanged for one that fits, it is in nobody's way."""
    mine = shop.own("mine.ptd")
    load_adapter(opened.cache, mine, strength=0.5)
    before = held(opened)
    shop.release("2", foundation=2, adapter=12)
    for adapters in ("keep", "release"):
        done = opened.follow(adapters)
        assert (done.taken, done.keys, done.unfit, done.adapters) == (False, (), (str(mine),), ())
        assert any("mine.ptd was made for foundation" in reason for reason in done.reasons)
        assert same(held(opened), before) and opened.version == "1"
    set_adapter_strength(opened.cache, 0)
    done = opened.follow()
    assert (done.taken, done.keys, done.unfit) == (True, ("m.weight",), ())
    with pytest.raises(AdapterError, match=r"mine\.ptd: made for foundation"):
        set_adapter_strength(opened.cache, 0.5)
    assert same(held(opened), {**before, **numbers(2, "m.weight"), "m.lora_b": np.zeros((7, 2), np.float32)})


def test_both_in_one_commit(opened: Release, shop: Shop) -> None:
    """The release's own adapter comes with its foundation, under its name, with its strength and for its scale."""
    load_adapter(opened.cache, opened.path / "left.ptd")
    set_adapter_strength(opened.cache, 0.5)
    shop.release("2", foundation=2, adapter=12, scale=2)
    generation = opened.cache.generation
    assert not opened.follow().taken
    done = opened.follow("release")
    assert (done.taken, done.adapters, done.unfit, done.files) == (True, ("left.ptd",), (), ("up.ptd",))
    assert done.generation == opened.cache.generation == generation + 1
    assert set(done.keys) == set(SHAPES)
    wanted = {**numbers(2, "m.weight"), **numbers(12, *LORA)}
    assert same(held(opened), {**wanted, "m.lora_b": wanted["m.lora_b"] * np.float32(2 * 0.5)})
    set_adapter_strength(opened.cache, 1)
    assert same(held(opened), {**wanted, "m.lora_b": wanted["m.lora_b"] * np.float32(2)})


@pytest.mark.long
def test_a_newer_adapter_on_the_same_foundation(opened: Release, shop: Shop) -> None:
    """It is taken if the caller wants the release's; what fits stays otherwise."""
    load_adapter(opened.cache, opened.path / "left.ptd")
    shop.release("2", foundation=1, adapter=12)
    done = opened.follow()
    assert (done.taken, done.keys, done.files, done.adapters) == (True, (), ("left.ptd", "up.ptd"), ())
    assert same(held(opened), {**numbers(1, "m.weight"), **numbers(11, *LORA)})
    shop.release("3", foundation=1, adapter=13)
    load_adapter(opened.cache, opened.path / "left.ptd")
    done = opened.follow("release")
    assert (done.taken, set(done.keys), done.adapters) == (True, set(LORA), ("left.ptd",))
    assert same(held(opened), {**numbers(1, "m.weight"), **numbers(13, *LORA)})
    mine = shop.own("mine.ptd")
    load_adapter(opened.cache, mine)
    shop.release("4", foundation=1, adapter=14)
    assert opened.follow("release").taken
    assert same(held(opened), {**numbers(1, "m.weight"), **numbers(50, *LORA)})


def test_the_release_has_it_no_more(opened: Release, shop: Shop) -> None:
    """What cannot be exchanged must fit."""
    load_adapter(opened.cache, opened.path / "left.ptd")
    left = opened.path / "left.ptd"
    save_file(numbers(2, "m.weight"), shop.inputs / "foundation.ptd")
    (shop.inputs / "left.ptd").unlink()
    publish(shop.inputs, shop.folder / "r", name="a", version="2")
    pull(shop.folder / "r/a/2", shop.device)
    done = opened.follow("release")
    assert (done.taken, done.unfit) == (False, (str(left),))
    # the release's up.ptd is still that for the foundation before
    load_adapter(opened.cache, opened.path / "up.ptd")
    done = opened.follow("release")
    assert not done.taken and "up.ptd" in " ".join(done.reasons)
    assert same(held(opened), {**numbers(1, "m.weight"), **numbers(111, *LORA)})


def test_what_was_trained_in_the_cache(opened: Release, shop: Shop) -> None:
    """Tensors of an adapter that no file has belong to the foundation that they were trained on."""
    trained = numbers(60, *LORA)
    load_adapter(opened.cache, opened.path / "left.ptd")
    opened.cache.update(trained)
    shop.release("2", foundation=2, adapter=12)
    for adapters in ("keep", "release"):
        done = opened.follow(adapters)
        assert not done.taken and "was trained or changed there" in " ".join(done.reasons)
    assert same(held(opened), {**numbers(1, "m.weight"), **trained})
    shop.release("3", foundation=1, adapter=12)
    assert opened.follow().taken  # nothing moves below it
    assert same(held(opened), {**numbers(1, "m.weight"), **trained})


@pytest.mark.long
def test_the_adapter_of_the_cache_itself(shop: Shop) -> None:
    """One that the cache was opened on follows with the foundation; what was loaded over it stays whole if it fits."""
    with Release.open(shop.device, data=["foundation.ptd", "left.ptd"]) as opened:
        for foundation in (2, 3, 4):
            shop.release(str(foundation), foundation, adapter=12)
            done = opened.follow()
            assert (done.taken, done.files) == (True, ("up.ptd",))
            assert same(held(opened), {**numbers(foundation, "m.weight"), **numbers(12, *LORA)})
        mine = shop.own("mine.ptd")
        load_adapter(opened.cache, mine)
        shop.release("5", foundation=4, adapter=15)
        assert opened.follow().taken
        assert same(held(opened), {**numbers(4, "m.weight"), **numbers(50, *LORA)})
        shop.release("6", foundation=6, adapter=16)
        assert opened.follow().unfit == (str(mine),)


def test_layers_above_the_release(opened: Release, shop: Shop) -> None:
    """Each has an adapter of its own; all must fit, or be off."""
    mine = shop.own("mine.ptd")
    layers = [BlobCache(shop.inputs / "adapter.ptd", base=opened.cache) for _ in range(3)]
    load_adapter(layers[0], mine)
    load_adapters(layers[1], [])
    shop.release("2", foundation=2, adapter=12)
    assert opened.follow("release").unfit == (str(mine),)
    set_adapter_strength(layers[0], 0)
    load_adapters(layers[2], {mine: 1})
    done = opened.follow()
    assert (done.taken, done.unfit) == (False, (str(mine),))
    layers[2].revert()
    assert opened.follow().taken
    for layer in layers:
        with pytest.raises(AdapterError, match="made for foundation"):
            load_adapter(layer, mine)
        load_adapter(layer, opened.path / "left.ptd")


@pytest.mark.long
def test_requests_above_the_release(shop: Shop) -> None:
    """They are compared again when they begin, so nothing is refused for their sake; `unfit` has their names."""
    mine = shop.own("mine.ptd")
    with Release.open(shop.device) as live:
        layer = BlobCache(shop.inputs / "adapter.ptd", base=live.cache)
        queue = native.RunnerQueue([layer._native], None)
        queue.set_adapter("mine", bytes(mine))
        for number in range(2):  # whether a request had it or not
            shop.release(f"{number}.2", foundation=2, adapter=12)
            done = live.follow()
            assert (done.taken, done.unfit) == (True, ("mine",))
            with pytest.raises(AdapterError, match=r"mine\.ptd: made for foundation"):
                queue.begin("prompt", "mine", 1.0, None, None)
            queue.begin("prompt", "", 1.0, None, None).end()
            assert not layer.numpy("m.lora_b").any()
            shop.release(f"{number}.3", foundation=1, adapter=12)
            assert live.follow().unfit == ()
            queue.begin("prompt", "mine", 1.0, None, None).end()
            assert np.array_equal(layer.numpy("m.lora_b"), numbers(50, *LORA)["m.lora_b"])
        queue.close()


def test_folders_of_peft(shop: Shop, tmp_path: Path) -> None:
    """They do not say what they were made for, so a new foundation is not put under them."""
    from tests.adapters.nets import write_peft  # torch

    torch = pytest.importorskip("torch")
    save_file(
        {"m.lora_a.weight": np.zeros((2, 5), np.float32), "m.lora_b.weight": np.zeros((7, 2), np.float32)},
        shop.inputs / "adapter.ptd",
    )
    shop.release("1.1", foundation=1, adapter=11)
    peft = write_peft(tmp_path / "peft", {"m.lora_a.weight": torch.ones(2, 5), "m.lora_b.weight": torch.ones(7, 2)})
    with Release.open(shop.device) as mine:
        load_adapter(mine.cache, peft, program_scale=1.5)
        shop.release("2", foundation=2, adapter=12)
        done = mine.follow()
        assert (done.taken, done.unfit) == (False, (str(peft),))
        assert "does not record its foundation" in " ".join(done.reasons)


def seeds_in(cache: BlobCache) -> tuple[int, int | None]:
    """Those of the foundation and of the user's own adapter in one generation; None if that is off."""
    foundations = {numbers(which, "m.weight")["m.weight"].tobytes(): which for which in (1, 2)}
    adapters = {numbers(50 + which, *LORA)["m.lora_b"].tobytes(): which for which in (1, 2)}
    with cache.reading():
        foundation, b = cache.bytes("m.weight"), cache.bytes("m.lora_b")
    return foundations[foundation], adapters[b] if np.frombuffer(b, np.float32).any() else None


@pytest.mark.long
def test_loads_and_follows_at_the_same_time(shop: Shop, tmp_path: Path) -> None:
    """At no moment is an adapter above a foundation that it was not made for."""
    own = {}
    for which in (2, 1):
        shop.release(f"1.{which}", foundation=which, adapter=10 + which)
        own[which] = shop.own(f"{which}.ptd", seed=50 + which)
    with Release.open(shop.device) as live:
        layer = BlobCache(shutil.copy(shop.inputs / "adapter.ptd", tmp_path), base=live.cache)
        load_adapter(layer, own[1])
        stop = threading.Event()

        def load() -> None:
            while not stop.is_set():
                for path in own.values():
                    with suppress(AdapterError):
                        load_adapter(layer, path)
                    set_adapter_strength(layer, 0)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            for number in range(20):
                shop.pull(f"1.{2 - number % 2}")
                taken = False
                while not taken:
                    foundation, adapter = seeds_in(layer)
                    assert adapter in (None, foundation)
                    taken = live.follow().taken
        finally:
            stop.set()
            thread.join()
        assert live.cache.generation == 20


def test_wrong_choices(shop: Shop) -> None:
    """Anything else is refused."""
    with Release.open(shop.device) as live:
        for wrong in ("Keep", None, 1, "off"):
            with pytest.raises(UnsupportedDataError, match="adapters must be 'keep' or 'release'"):
                live.follow(wrong)  # type: ignore[arg-type]
