"""A release folder frees what no release needs, and leads devices around what moved (F1, F3, R1)."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.codec.blobs import check_encoding, decode, encode
from blobstore.errors import DataChangedError, PoolError, ReleaseError
from blobstore.pool import Pool
from blobstore.publishing import beside, forms
from blobstore.publishing import publish as publishing
from blobstore.releases import gc, publish, pull, sweep
from blobstore.releases.index.index import Object
from blobstore.storage.objects import Objects
from tests.helpers.between import KilledError, between, die
from tests.releases.models import NOW, Weights, found, inputs, published_once, read_ways, same, weights
from tests.releases.server import serving


def version(number: int) -> Weights:
    """Weights that move a little with each version, and of which one layer is only in this one."""
    rng = np.random.default_rng(number)
    tensors = {
        key: (value * np.float32(1 + number * 1e-6)).astype(np.float32)
        for key, value in weights(layers=3, size=64).items()
    }
    return {**tensors, "own": rng.standard_normal(3000).astype(np.float32)}


@published_once
def releases(folder: Path) -> None:
    """Versions 1 to 4."""
    for number in range(1, 5):
        inputs(folder / "in", version(number), files=1)
        publish(folder / "in", folder / "releases", name="a", version=str(number))


def nbytes(releases: Path) -> int:
    return sum(
        path.stat().st_size
        for folder in ("packs", "files")
        for path in (releases / folder).rglob("*")
        if path.is_file()
    )


@pytest.mark.long
def test_forms_of_older_releases_go(releases: Path, tmp_path: Path) -> None:
    """At first they wait for devices that looked them up; all releases stay whole (F3)."""
    before = nbytes(releases)
    first = sweep(releases)
    assert (first.objects, first.rewritten, nbytes(releases)) == (0, 0, before)  # publishing led around them already
    assert first.waiting > 0
    assert sweep(releases).objects == 0  # the time is not over
    done = sweep(releases, keep=0)
    assert done.objects == first.waiting and done.freed == before - nbytes(releases) > 0
    assert sweep(releases, keep=0).objects == sweep(releases, keep=0).rewritten == 0
    for number in range(1, 5):
        pull(releases / f"a/{number}", tmp_path / str(number))
        assert same(found(tmp_path / str(number) / "current"), version(number))


@pytest.mark.long
def test_differences_for_the_newest_release_stay(releases: Path, tmp_path: Path) -> None:
    """A device with one of those before it fetches no more than before (F2)."""
    fetched = {}
    for when in ("before", "after"):
        for number in (1, 2, 3):
            device = tmp_path / f"{when} {number}"
            pull(releases / f"a/{number}", device)
            fetched[when, number] = pull(releases / "a/4", device).fetched_bytes
            assert same(found(device / "current"), version(4))
        if when == "before":
            for _ in range(3):
                sweep(releases, keep=0)
    for number in (1, 2, 3):
        assert fetched["after", number] <= fetched["before", number]


@pytest.mark.long
def test_a_dropped_release_is_withdrawn(releases: Path, tmp_path: Path) -> None:
    """The newest of those that are left becomes the latest one (F1)."""
    pull(releases / "a/4", tmp_path / "device")
    with Pool(releases) as pool:
        for dropped in ("a@4", "a@1"):
            pool.drop(dropped)
    assert sweep(releases, keep=0).withdrawn == 2
    for _ in range(2):
        sweep(releases, keep=0)
    assert not (releases / "a/4/index.json").exists() and not (releases / "a/1/ways.json.zst").exists()
    assert pull(releases / "a/latest", tmp_path / "new").version == "3"
    for number in (2, 3):
        pull(releases / f"a/{number}", tmp_path / str(number))
        assert same(found(tmp_path / str(number) / "current"), version(number))
    with Pool(releases) as pool:
        for dropped in ("a@2", "a@3"):
            pool.drop(dropped)
    for _ in range(3):
        sweep(releases, keep=0, grace=0)
    assert not (releases / "a/latest/index.json").exists()
    assert nbytes(releases) == 0


@pytest.mark.long
def test_a_version_that_was_dropped_can_be_published_again(releases: Path, tmp_path: Path) -> None:
    with Pool(releases) as pool:
        pool.drop("a@4")
    with pytest.raises(ReleaseError, match="published already"):  # devices may have it
        publish(tmp_path / "in", releases, name="a", version="4")
    sweep(releases)
    publish(tmp_path / "in", releases, name="a", version="4")
    pull(releases / "a/4", tmp_path / "device")
    assert same(found(tmp_path / "device/current"), version(4))


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "derive"),
    [("cast:half", lambda value: value.astype(np.float16)), ("layout:", lambda value: np.ascontiguousarray(value.T))],
)
def test_contents_that_the_pool_has_as_recipes(
    tmp_path: Path, recipe: str, derive: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Devices do not know these: a release leads them to bytes that they can read, whatever its earlier version has (R1)."""
    first = weights(layers=2, size=96)
    second = {key: derive(value) for key, value in first.items()}
    for version, model in (("1", first), ("2", second)):
        done = publish(inputs(tmp_path / "in", model, files=1), tmp_path / "releases", name="a", version=version)
        assert done.new_bytes > 0
    with Pool(tmp_path / "releases") as pool:
        assert any(encoding.startswith(recipe) for encoding in pool.stats().encodings)
    for _ in range(3):
        for version, model in (("1", first), ("2", second)):
            ways = read_ways(tmp_path / "releases/a" / version)["ways"]
            assert all(check_encoding(way[0]) for listed in ways for way in listed)
            pull(tmp_path / "releases/a" / version, tmp_path / "device")
            assert same(found(tmp_path / "device/current"), model)
        shutil.rmtree(tmp_path / "device")
        sweep(tmp_path / "releases", keep=0)


def test_a_pool_with_releases_is_collected_with_them(releases: Path, tmp_path: Path) -> None:
    """`pool gc` would take packs away that releases lead to; folders of devices are another matter (F3)."""
    with Pool(releases) as pool, pytest.raises(PoolError, match="releases are published from this pool"):
        pool.gc()
    pull(releases / "a/1", tmp_path / "device")
    with pytest.raises(ReleaseError, match="no release is installed"):
        gc(releases)
    with pytest.raises(ReleaseError, match="releases are pulled into this folder"):
        sweep(tmp_path / "device")
    with pytest.raises(ReleaseError, match="no release folder"):
        sweep(tmp_path / "nowhere")
    (releases / "releases.json").write_text("[]")
    with pytest.raises(ReleaseError, match=r"releases\.json"):
        sweep(releases)


@pytest.mark.long
def test_a_device_with_an_old_list_of_ways_looks_again(releases: Path, tmp_path: Path) -> None:
    """What it led to was removed meanwhile; the list of now is asked for past caches (F2)."""
    stale = (releases / "a/4/ways.json.zst").read_bytes()
    for number in (5, 6):
        publish(inputs(tmp_path / "in", version(number), files=1), releases, name="a", version=str(number))
    for _ in range(2):
        sweep(releases, keep=0)
    with serving(releases) as server:
        server.body = lambda path, times, data: stale if path.endswith("ways.json.zst") and times == 1 else data
        done = pull(f"{server.url}/a/4/index.json", tmp_path / "device", patience=NOW)
        assert done.changed and same(found(tmp_path / "device/current"), version(4))
        asked = [
            cache for (_, path, *_), (_, cache) in zip(server.log, server.conditions, strict=True) if "ways" in path
        ]
        assert asked == [None, "no-cache"]


def a_day_later(releases: Path) -> None:
    """Let everything that was noted as unused be so for more than a day."""
    noted = json.loads((releases / "releases.json").read_bytes())["unused"]
    (releases / "releases.json").write_text(
        json.dumps({"unused": {digest: since - 90_000 for digest, since in noted.items()}})
    )
    for path in (releases / "files").iterdir():
        os.utime(path, (path.stat().st_mtime - 90_000,) * 2)


def larger(number: int) -> Weights:
    """A fine-tune in float16: all values move a little with each version."""
    rng = np.random.default_rng(number)
    return {
        key: (value + rng.standard_normal(value.shape).astype(np.float32) * 3e-6).astype(np.float16)
        for key, value in weights(layers=6, size=256).items()
    }


@pytest.mark.long
def test_a_folder_stays_small_without_a_sweep(tmp_path: Path) -> None:
    """Forms of older releases wait for a day and then go as others are published; what they cost a device stays as it is:
    with nothing, at most 1.05 of the bytes that this release takes alone, and a difference for the one before (F2, F3)."""
    releases, sizes, devices = tmp_path / "releases", [], []
    for number in range(1, 7):
        if number > 1:
            a_day_later(releases)
        publish(inputs(tmp_path / "in", larger(number), files=1), releases, name="a", version=str(number))
        sizes.append(nbytes(releases))
        device = tmp_path / f"device {number}"
        devices.append(pull(releases / f"a/{number}", device).fetched_bytes)
        assert same(found(device / "current"), larger(number))
    alone = publish(tmp_path / "in", tmp_path / "alone", name="a", version="6")
    assert max(devices) <= 1.05 * alone.first_bytes + 2048
    pools = sum(path.stat().st_size for path in (releases / "packs").rglob("*") if path.is_file())
    assert sizes[-1] - pools < 2.5 * alone.stored_bytes  # forms of two releases; of all six they took twice as much
    assert sizes[-1] - sizes[-2] < 0.5 * alone.stored_bytes
    for number in (2, 5):
        pull(releases / "a/6", tmp_path / f"device {number}")
        assert same(found(tmp_path / f"device {number}/current"), larger(6))
    for number in range(1, 7):
        pull(releases / f"a/{number}", tmp_path / f"again {number}")
        assert same(found(tmp_path / f"again {number}/current"), larger(number))


def test_a_device_on_its_way_to_an_older_release(releases: Path, tmp_path: Path) -> None:
    """What its list leads to stays for a day after a newer release is published, even if a release of another name that led
    there, too, let go of it long ago, and something else goes, so that all releases are looked at again (F2, F3)."""
    old = read_ways(releases / "a/4")["objects"]
    for number in (5, 6, 7):
        noted = {sha256: 0 for sha256, _, *where in old if where != ["packs"]}
        assert noted
        if number > 5:
            (releases / "files" / ("f" * 64)).write_bytes(b"nothing needs it")
            noted["f" * 64] = 0
        (releases / "releases.json").write_text(json.dumps({"unused": noted}))
        a_day_later(releases)
        publish(inputs(tmp_path / "in", version(number), files=1), releases, name="a", version=str(number))
        there = {path.name for folder in ("files", "packs") for path in (releases / folder).rglob("*")}
        assert {sha256 for sha256, *_ in old} <= there
        old = read_ways(releases / f"a/{number}")["objects"]


def test_a_file_that_changes_while_it_is_published(
    releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What devices would fetch is compared with what the release says, and not with the file as it is by then."""
    real = publishing._Publisher.finish

    def meanwhile(publisher: Any, *arguments: Any) -> Any:
        path = max((tmp_path / "in").iterdir(), key=lambda one: one.stat().st_size)
        with path.open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(b"\x5a" * 1000)
        return real(publisher, *arguments)

    inputs(tmp_path / "in", {"own": version(4)["own"] + np.float32(1e-6)}, files=1)
    monkeypatch.setattr(publishing._Publisher, "finish", meanwhile)
    with pytest.raises(DataChangedError, match="changed while it was published"):
        publish(tmp_path / "in", releases, name="a", version="5")
    assert not (releases / "a/5/index.json").exists()


def test_damage_is_not_copied(tmp_path: Path) -> None:
    """Of a form that is brought together with others, what an earlier release has may be damaged or gone."""
    data = np.arange(5000, dtype="<f4").tobytes()
    (tmp_path / "file").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    content = forms._Content(digest, tmp_path / "file", 0, len(data), "float", ())
    maker: Any = object.__new__(forms.Forms)
    sound = b"".join(encode(memoryview(data), "planes:4"))
    for there in (None, sound, sound[:-1], b"x" + sound[1:], sound[:-9] + bytes(9)):
        maker._objects = SimpleNamespace(read=lambda *_, there=there: None if there is None else memoryview(there))
        form = forms.Form("planes:4", Object("0" * 64, len(sound)), 0, len(sound))
        named, encoding, stored, base = maker._copied(content, form)
        assert (named, base) == (digest, None)
        room = memoryview(bytearray(len(data)))
        assert b"".join(map(bytes, decode(encoding, len(data), memoryview(stored), None, room))) == data


@pytest.mark.long
@pytest.mark.parametrize("due", [False, True])
def test_a_publisher_that_is_killed_while_it_lets_go(
    due: bool, releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any change of that, all releases stay whole, and the next publisher lets go of it (F3)."""
    if due:
        a_day_later(releases)
    inputs(tmp_path / "in", version(5), files=1)
    for moment in range(20):
        copy = tmp_path / "copies" / str(moment)
        shutil.copytree(releases, copy, copy_function=shutil.copy2)
        ended = published_until(copy, moment, monkeypatch, tmp_path / "in")
        publish(tmp_path / "in", tmp_path / "copies" / str(moment), name="a", version="6")
        for number in (3, 4, 5):
            device = tmp_path / "devices" / f"{moment} {number}"
            pull(copy / f"a/{number}", device)
            assert same(found(device / "current"), version(number))
        beside_the_pool = [where for _, _, *where in read_ways(copy / "a/4")["objects"] if where != ["packs"]]
        assert not beside_the_pool
        if ended:
            break
    assert moment > (4 if due else 3)


def published_until(copy: Path, moment: int, monkeypatch: pytest.MonkeyPatch, files: Path) -> bool:
    """Publish version 5, and die at a change after the release is there; whether there was none at this moment."""
    real, begun = beside.let_go, list[int]()

    def let_go(*arguments: Any) -> None:
        begun.append(1)
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "let_go", let_go)
        changes = [(Objects, "put"), (Objects, "delete")]
        with between(changes, moment, die, lambda *_: begun) as made, contextlib.suppress(KilledError):
            publish(files, copy, name="a", version="5")
    return len(made) <= moment


@pytest.mark.slow
@pytest.mark.long
@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(["publish", "drop", "sweep", "other"]), st.integers(0, 9)), max_size=12))
def test_every_release_stays_whole(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]) -> None:
    """After any sequence of publishing, under two names, dropping and sweeping (F3, R1)."""
    place = tmp_path_factory.mktemp("any")
    there: dict[tuple[str, str], Weights] = {}
    for number, (step, which) in enumerate(steps):
        if step in {"publish", "other"}:
            name = "a" if step == "publish" else "b"
            there[name, str(number)] = version(which)
            inputs(place / "in", version(which), files=1)
            publish(place / "in", place / "releases", name=name, version=str(number))
        elif step == "drop" and there:
            name, dropped = sorted(there)[which % len(there)]
            with Pool(place / "releases") as pool:
                pool.drop(f"{name}@{dropped}")
            del there[name, dropped]
        elif step == "sweep" and (place / "releases").exists():
            sweep(place / "releases", keep=0)
    for (name, published), tensors in there.items():
        pull(place / f"releases/{name}/{published}", place / f"{name}-{published}")
        assert same(found(place / f"{name}-{published}" / "current"), tensors)
