"""Publishers and sweeps at the same time, without a lock, as in a bucket: every release stays whole (F1, F3)."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from blobstore.errors import ReleaseError
from blobstore.pool import Pool
from blobstore.publishing import publish as publishing
from blobstore.releases import publish, pull, push, sweep
from blobstore.releases.sources.oci_layout import LayoutTarget
from blobstore.storage.objects import Objects
from tests.helpers.between import between
from tests.releases.models import found, inputs, published_once, same, weights

KEEP = 3600.0
"""A sweep keeps for an hour what it sees for the first time."""


@published_once
def releases(folder: Path) -> None:
    """Version 1; what version 2 had was noted as unused long ago, and is there."""
    for version in ("1", "2"):
        inputs(folder / "in", weights(seed=int(version), layers=2, size=64), files=1)
        publish(folder / "in", folder / "releases", name="a", version=version, plain=True)
    with Pool(folder / "releases") as pool:
        pool.drop("a@2")
    sweep(folder / "releases", keep=KEEP)
    long_ago(folder / "releases")


def long_ago(releases: Path) -> None:
    """Let everything that is unused be so for long."""
    unused = json.loads((releases / "releases.json").read_bytes())["unused"]
    assert len(unused) > 1
    (releases / "releases.json").write_text(json.dumps({"unused": dict.fromkeys(unused, 0)}))
    for digest in unused:
        os.utime(releases / "files" / digest, (0, 0))


@pytest.fixture(autouse=True)
def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder is locked."""
    monkeypatch.setattr(publishing, "exclusive", lambda root: contextlib.nullcontext())


REQUESTS = [(Objects, name) for name in ("get", "entry", "put", "create", "place", "list", "delete")]


def is_of_releases(_: Objects, *arguments: object) -> bool:
    return not any(str(one).startswith(("tables/", "packs")) for one in arguments)


def check(releases: Path, version: str, folder: Path, *, plain: bool = True) -> None:
    """A release is whole, for those that decode and for those that do not."""
    device = folder / version
    pull(releases / "a" / version, device, plain=plain)
    assert same(found(device / "current"), weights(seed=2, layers=2, size=64))
    if version == "latest":
        return
    index = json.loads((releases / "a" / version / "index.json").read_bytes())
    for file in index["files"] if plain else ():
        assert hashlib.sha256((releases / "files" / file["sha256"]).read_bytes()).hexdigest() == file["sha256"]
    for listed in (releases / "a" / version).glob("*.json.zst"):
        ways = json.loads(zstandard.ZstdDecompressor().decompress(listed.read_bytes()))
        assert ways["index"] == hashlib.sha256((releases / "a" / version / "index.json").read_bytes()).hexdigest()
        for sha256, size, *where in ways["objects"]:
            place = releases / ("packs/" + sha256[:2] if where == ["packs"] else "files") / sha256
            assert place.stat().st_size == size
        contents = len(ways["ways"]) - len(ways["bases"])
        assert all(any(way[4:] in ([], [-1]) for way in some) for some in ways["ways"][:contents])


def each_pause(folder: Path, work: Callable[[Path], object], then: Callable[[Path], object]) -> int:
    """Do work on copies of a folder, each with another moment at which something else happens; the number of moments."""
    for moment in range(1000):
        copy = folder / "copies" / str(moment)
        shutil.copytree(folder / "releases", copy, copy_function=shutil.copy2)
        with between(REQUESTS, moment, lambda copy=copy: then(copy), is_of_releases) as made:
            work(copy)
        if len(made) <= moment:
            return moment
        check(copy, "3", folder / "devices" / str(moment))
    raise AssertionError("there is no end")


@pytest.mark.long
def test_a_sweep_beside_a_publisher(releases: Path, tmp_path: Path) -> None:
    """At any moment of publishing what was unused for long."""
    moments = each_pause(
        tmp_path,
        lambda copy: publish(tmp_path / "in", copy, name="a", version="3", plain=True),
        lambda copy: sweep(copy, keep=KEEP),
    )
    assert moments > 10


@pytest.mark.long
def test_a_publisher_beside_a_sweep(releases: Path, tmp_path: Path) -> None:
    """At any moment of a sweep that removes what was unused for long."""
    moments = each_pause(
        tmp_path,
        lambda copy: sweep(copy, keep=KEEP),
        lambda copy: publish(tmp_path / "in", copy, name="a", version="3", plain=True),
    )
    assert moments > 10


def test_what_is_stored_again_is_not_removed_meanwhile(
    releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a moment, though it was unused for long, and the sweep has not seen the release that needs it."""
    old = {path.name for path in (releases / "files").iterdir() if path.stat().st_mtime == 0}
    removed = []
    real = Objects.delete
    monkeypatch.setattr(Objects, "delete", lambda objects, path: removed.append(path) or real(objects, path))  # type: ignore[func-returns-value]
    for path in (releases / "files").iterdir():
        if path.name in old:
            path.unlink()  # or the publisher would leave whole files as they are

    def publish_again() -> None:
        publish(tmp_path / "in", releases, name="a", version="3", plain=True)

    with between([(Objects, "list")], 0, publish_again, lambda _, prefix: prefix == "files"):
        sweep(releases, keep=KEEP)
    stored_again = {path.name for path in (releases / "files").iterdir()} & old
    assert stored_again and not stored_again & {path.rpartition("/")[2] for path in removed}
    check(releases, "3", tmp_path)


def test_what_goes_while_a_sweep_looks_is_made_again(releases: Path, tmp_path: Path) -> None:
    """By another sweep that has not seen the release, once this one found it whole."""
    publish(tmp_path / "in", releases, name="a", version="3", plain=True)

    def lose() -> None:
        for path in (releases / "files").iterdir():
            path.unlink()

    with between([(Objects, "list")], 0, lose, lambda _, prefix: prefix == "files"):
        sweep(releases, keep=KEEP)
    check(releases, "3", tmp_path)


@pytest.mark.long
def test_no_release_leads_to_a_pack_that_will_go(releases: Path, tmp_path: Path) -> None:
    """Once a sweep ended, whatever is only in condemned packs is not needed any more."""
    shared = weights(seed=2, layers=2, size=64)
    large = {**shared, **{f"more{i}": value for i, value in enumerate(weights(seed=3).values())}}
    for version, tensors in (("3", large), ("4", shared)):
        publish(inputs(tmp_path / "in", tensors, files=1), releases, name="a", version=version)
    with Pool(releases) as pool:
        pool.drop("a@1")
        pool.drop("a@3")
    sweep(releases, keep=KEEP)
    with Pool(releases) as pool:
        condemned = {pack.hex() for (pack,) in pool.tables.query("SELECT pack FROM marks WHERE digest IS NULL")}
    assert condemned
    for pack in condemned:
        (releases / "packs" / pack[:2] / pack).unlink()
    check(releases, "4", tmp_path, plain=False)


class Bucket:
    """Objects of a folder that are published as in a bucket: one by one."""

    folder = None

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases appear in a folder as in a bucket."""
    real = publishing._Publisher._write

    def write(self: Any, *arguments: Any) -> None:
        self._objects = Bucket(self._objects)
        real(self, *arguments)

    monkeypatch.setattr(publishing._Publisher, "_write", write)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("before", ["ways.json.zst", "3/index.json"])
def test_two_publishers_of_one_version(
    before: str, releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index that was there first stays, with a list of ways of its own; the other publisher is told."""

    def first() -> None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(int(time.time()) + 60))
        publish(tmp_path / "in", releases, name="a", version="3", plain=True)

    steps = [(Objects, "put"), (Objects, "create")]
    with (
        between(steps, 0, first, lambda _, path, *rest: path.endswith(before)) as made,
        pytest.raises(ReleaseError, match="at the same time"),
    ):
        publish(tmp_path / "in", releases, name="a", version="3", plain=True)
    assert made
    check(releases, "3", tmp_path)
    check(releases, "latest", tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("lost", ["files", "ways", "the ways of another index"])
def test_a_publisher_that_was_killed_before_it_looked_again(
    lost: str, releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sweep makes again what the release lacks; so does the next publisher, for whom it is the one before."""
    monkeypatch.setattr(publishing, "mend", lambda pool, version: True)
    publish(tmp_path / "in", releases, name="a", version="3", plain=True)
    monkeypatch.undo()
    place = releases / "a/3/ways.json.zst"
    if lost == "files":
        ways = place.read_bytes()
        shutil.rmtree(releases / "files")
        assert place.read_bytes() == ways
    elif lost == "ways":
        place.unlink()
    else:
        shutil.copy(releases / "a/1/ways.json.zst", place)
    copy = tmp_path / "copy"
    shutil.copytree(releases, copy)
    sweep(copy, keep=KEEP)
    check(copy, "3", tmp_path / "swept")
    publish(tmp_path / "in", releases, name="a", version="4", plain=True)
    for version in ("3", "4") if lost != "files" else ("4",):
        check(releases, version, tmp_path / "published")


def test_a_push_beside_a_collection_of_its_target(
    releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that were there before belong to no manifest until the new one is there, and may go."""
    layout = f"oci:{tmp_path / 'layout'}"
    assert push(f"{layout}:1", releases / "a/1").sent_bytes > 0
    real = LayoutTarget.put_manifest

    def put_manifest(target: LayoutTarget, data: bytes) -> str:
        for blob in (tmp_path / "layout/blobs/sha256").iterdir():
            blob.unlink()
        return real(target, data)

    monkeypatch.setattr(LayoutTarget, "put_manifest", put_manifest)
    assert push(f"{layout}:1", releases / "a/1").sent_bytes > 0
    pull(f"{layout}:1", tmp_path / "device")
    assert same(found(tmp_path / "device/current"), weights(seed=1, layers=2, size=64))
