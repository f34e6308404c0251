"""The C++ library lists and commits what a pull by the Python package fetches and makes (F2, F3, F4)."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blobstore import errors
from blobstore.core.codec import blobs
from blobstore.core.disk.locks import Lock
from blobstore.releases import Release, gc, publish, pull
from blobstore.releases.device.pull import PullOptions
from blobstore.releases.index.index import check_file_name, parse_index
from blobstore.releases.index.parts import parse_parts
from blobstore.releases.index.ways import parse_ways
from blobstore.runtime.native import native
from campaigns.fuzz import releases as targets
from campaigns.fuzz.answers import tree
from tests.releases.models import found, inputs, read_ways, same, spoil, weights
from tests.releases.recording import Asked, recorded_pull

VERSIONS = ("1", "2", "3", "4")


class Fetch(NamedTuple):
    """As the library lists it."""

    url: str
    range: str | None
    size: int
    sha256: str
    file: str

    @property
    def place(self) -> tuple[str, int, int]:
        """The object, the first byte, and the first byte behind the last one."""
        start = int(self.range.removeprefix("bytes=").split("-")[0]) if self.range else 0
        assert self.range in (f"bytes={start}-{start + self.size - 1}", None)
        assert self.file == self.sha256 + (f".{self.range.removeprefix('bytes=')}" if self.range else "")
        return self.sha256, start, start + self.size


class Missing(NamedTuple):
    name: str
    version: str
    sha256: str
    current: bool
    release_bytes: int
    bytes: int
    folder: bytes
    fetches: list[Fetch]

    @property
    def places(self) -> Asked:
        return {one.place for one in self.fetches}


def lacks(release: Path, device: Path, **options: Any) -> Missing:
    values = native.missing(os.fsencode(release / "index.json"), os.fsencode(device), **options)
    return Missing(*values[:-1], [Fetch(*one) for one in values[-1]])


def take(release: Path, device: Path, **options: Any) -> tuple[str, str, str, bytes, bool, int]:
    done: tuple[str, str, str, bytes, bool, int] = native.commit(
        os.fsencode(release / "index.json"), os.fsencode(device), **options
    )
    return done


def content(root: Path, sha256: str, range_: str | None) -> bytes:
    place = root / "packs" / sha256[:2] / sha256
    data = (place if place.exists() else root / "files" / sha256).read_bytes()
    if range_ is None:
        return data
    first, last = range_.removeprefix("bytes=").split("-")
    return data[int(first) : int(last) + 1]


def download(root: Path, todo: Missing) -> None:
    """What a phone's downloader does."""
    for one in todo.fetches:
        assert one.url in {f"files/{one.sha256}", f"packs/{one.sha256[:2]}/{one.sha256}"}
        assert (root / one.url).exists()
        data = content(root, one.sha256, one.range)
        assert len(data) == one.size
        Path(os.fsdecode(todo.folder), one.file).write_bytes(data)


def parts_of(release: Path) -> str:
    """The digest of the list of parts."""
    digest: str = json.loads((release / "index.json").read_text())["parts"][0]
    return digest


def update(release: Path, device: Path, **options: Any) -> Missing:
    """Fetch until nothing is missing, and commit; all that was missing, without the list of parts."""
    fetched = []
    for _ in range(2):
        todo = lacks(release, device, **options)
        fetched += todo.fetches
        download(release.parent.parent, todo)
    todo = lacks(release, device, **options)
    assert not todo.fetches and not todo.bytes
    assert take(release, device, **options)[4]
    fetched = [one for one in fetched if one.sha256 != parts_of(release)]
    return todo._replace(fetches=fetched, bytes=sum(one.size for one in fetched))


def installed(device: Path) -> dict[str, str | bytes | None]:
    """All that is in the folder of a device, but for empty folders of what was fetched."""
    return {name: data for name, data in tree(device).items() if name not in {"incoming", "partial"}}


def middle_weights() -> dict[str, np.ndarray]:
    """A layer is another one, and there is a new one."""
    tensors = weights(layers=12)
    tensors["layer2.weight"] = weights(seed=2, layers=1)["layer0.weight"]
    tensors["new"] = np.arange(50_000, dtype=np.float32)
    return tensors


def last_weights() -> dict[str, np.ndarray]:
    """All layers but two are a little different."""
    rng, tensors = np.random.default_rng(9), middle_weights()
    for name in list(tensors)[2:12]:
        tensors[name] = (tensors[name] * (1 + rng.standard_normal(tensors[name].shape) * 1e-5)).astype(np.float32)
    return tensors


def publish_all(folder: Path, root: Path, *, plain: bool) -> Path:
    """A first version, one with new layers, one with layers that are near to those, and one with other small files."""
    inputs(folder / "in", weights(layers=12), files=20)
    (folder / "in/noise").write_bytes(np.random.default_rng(3).bytes(20_000))
    publish(folder / "in", root, name="a", version="1", plain=plain)
    publish(inputs(folder / "in", middle_weights(), files=20), root, name="a", version="2", plain=plain)
    publish(inputs(folder / "in", last_weights(), files=20), root, name="a", version="3", plain=plain)
    (folder / "in/tokenizer/3.json").write_text("new")
    (folder / "in/empty").write_bytes(b"")
    (folder / "in/ä 日本").write_bytes(b"named")
    publish(folder / "in", root, name="a", version="4", plain=plain)
    publish(folder / "in", root, name="b", version="1", plain=plain)
    return root / "a"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    return publish_all(folder, folder / "releases", plain=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with whole files."""
    folder = tmp_path_factory.mktemp("whole")
    return publish_all(folder, folder / "releases", plain=True)


def test_there_are_all_kinds_of_ways(published: Path) -> None:
    """Otherwise these tests would say little."""
    ways = read_ways(published / "3")["ways"]
    assert {way[0].split(":")[0] for listed in ways for way in listed} == {"raw", "planes", "near"}


@pytest.mark.parametrize("versions", ["1234", "13", "24", "4", "1243"])
@pytest.mark.parametrize("plain", [False, True])
def test_ranges_and_folders_are_equal(published: Path, whole: Path, tmp_path: Path, versions: str, plain: bool) -> None:
    """What Python fetches is what C++ lists, and all files and links are the same afterwards."""
    releases = whole if plain else published
    for version in versions:
        release = releases / version
        rollback = int(version) < 4 and "4" in versions[: versions.index(version)]
        if rollback:
            with pytest.raises(errors.TrustError, match="older than version"):
                lacks(release, tmp_path / "native")
            break
        last = update(release, tmp_path / "native", plain=plain)
        done, asked = recorded_pull(release, tmp_path / "python", PullOptions(plain=plain))
        assert last.places == asked and last.bytes == sum(stop - start for _, start, stop in asked)
        assert last[:3] == (done.name, done.version, done.sha256) and last.release_bytes == done.release_bytes
        assert installed(tmp_path / "native") == installed(tmp_path / "python")
        again = take(release, tmp_path / "native")
        assert again[:3] == ("a", version, done.sha256) and not again[4]
        assert lacks(release, tmp_path / "native").current


def test_of_whole_files_and_other_forms_both_choose_the_same(whole: Path, tmp_path: Path) -> None:
    device, other = tmp_path / "device", tmp_path / "other"
    for version in "134":
        assert update(whole / version, device).places == recorded_pull(whole / version, other, PullOptions())[1]
    assert tree(device / "current") == tree(other / "current")


def test_a_whole_file_that_is_wrong(whole: Path, device: Path) -> None:
    """It only gets another name, once it was compared with its digest (F4)."""
    for _ in range(2):
        todo = lacks(whole / "1", device, plain=True)
        download(whole.parent, todo)
    assert todo.bytes > 0 and all(one.range is None for one in todo.fetches)
    one = max(todo.fetches, key=lambda one: one.size)
    place = device / "incoming" / one.file
    data = place.read_bytes()
    place.write_bytes(bytes(len(data)))
    with pytest.raises(errors.IntegrityError, match="expected"):
        take(whole / "1", device, plain=True)
    assert not place.exists() and not (device / "files" / one.sha256).exists()
    place.write_bytes(data)
    assert take(whole / "1", device, plain=True)[4]


def test_the_two_take_turns_in_one_folder(published: Path, device: Path) -> None:
    """Each goes on from what the other one left, also after gc."""
    pull(published / "1", device)
    update(published / "2", device)
    assert not pull(published / "2", device).changed
    fetched = update(published / "3", device).bytes
    assert fetched < sum(file.stat().st_size for file in (device / "current/").rglob("*")) / 3
    assert same(found(device / "current"), last_weights())
    gc(device)
    update(published / "4", device)
    assert (device / "current/ä 日本").read_bytes() == b"named" and (device / "current/empty").read_bytes() == b""


def with_ways(release: Path, folder: Path, change: Callable[[Any], object]) -> Path:
    """The release with a changed list of ways, in a folder of its own."""
    folder.mkdir()
    shutil.copy(release / "index.json", folder)
    ways = read_ways(release)
    change(ways)
    (folder / "ways.json.zst").write_text(json.dumps(ways))
    return folder


def contents_of(release: Path) -> list[str]:
    """The digests of the contents of a release, by their numbers."""
    parts = json.loads((release.parent.parent / "files" / parts_of(release)).read_text())
    return list(dict.fromkeys(part[2] for listed in parts["files"] for part in listed))


def chained(release: Path, folder: Path) -> Path:
    """Version 3, where what is a difference is that alone, and its bases can be fetched."""
    old = read_ways(release.parent / "2")
    by_digest = dict(zip(contents_of(release.parent / "2"), old["ways"], strict=False))

    def change(ways: Any) -> None:
        count = len(ways["ways"]) - len(ways["bases"])
        ways["ways"] = [[way for way in some if way[0].startswith("near")][:1] or some for some in ways["ways"]]
        for number, (digest, _) in enumerate(ways["bases"]):
            for encoding, place, at, stored, *_ in by_digest[digest]:
                ways["ways"][count + number].append([encoding, len(ways["objects"]) + place, at, stored])
        ways["objects"] += old["objects"]

    return with_ways(release, folder, change)


def test_chains_of_differences(published: Path, tmp_path: Path) -> None:
    """A base that is not here is made first, used, and removed."""
    release = chained(published / "3", tmp_path / "release")
    device, other = tmp_path / "device", tmp_path / "other"
    for _ in range(2):
        todo = lacks(release, device)
        download(published.parent, todo)
    assert not lacks(release, device).fetches
    assert take(release, device)[4]
    assert same(found(device / "current"), last_weights()) and not list((device / "incoming").iterdir())
    pull(published / "3", other)
    assert {one.name for one in (device / "files").iterdir()} == {one.name for one in (other / "files").iterdir()}


def test_a_chain_of_differences_that_is_wrong(published: Path, tmp_path: Path) -> None:
    """Every content of a chain is compared; what was fetched for it goes, and nothing else is left (F4)."""
    release, start = chained(published / "3", tmp_path / "release"), tmp_path / "start"
    for _ in range(2):
        download(published.parent, lacks(release, start))
    names = [one.name for one in (start / "incoming").iterdir() if one.name != parts_of(release)]
    assert len(names) > 2
    for number, name in enumerate(names):
        device = tmp_path / str(number)
        shutil.copytree(start, device, symlinks=True)
        place = device / "incoming" / name
        data = place.read_bytes()
        place.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(errors.IntegrityError):
            take(release, device)
        assert {one.name for one in place.parent.iterdir()} == {*names, parts_of(release)} - {name}
        assert not (device / "current").is_symlink()
        place.write_bytes(data)
        assert take(release, device)[4]


def test_a_way_that_is_not_known_is_left_out(published: Path, tmp_path: Path) -> None:
    """A later version may encode otherwise."""

    def change(ways: Any) -> None:
        for listed in ways["ways"]:
            listed.insert(0, ["zip:9+", 0, 0, 0])
            listed.insert(0, ["near:u4:0", 0, 0, 0])  # without a base

    release = with_ways(published / "2", tmp_path / "release", change)
    pull(published / "1", tmp_path / "device")
    pull(published / "1", tmp_path / "other")
    todo = lacks(release, tmp_path / "device")
    assert todo.fetches == lacks(published / "2", tmp_path / "other").fetches
    none = with_ways(published / "2", tmp_path / "none", lambda ways: ways.update(ways=[[]] * len(ways["ways"])))
    download(published.parent, todo)
    for call in (lacks, take):
        with pytest.raises(errors.ReleaseError, match="no form of the content"):
            call(none, tmp_path / "device")


def test_where_the_ways_are(published: Path, whole: Path, tmp_path: Path) -> None:
    """Beside the index, or where the application says; a release with whole files can do without."""
    for releases in (published, whole):
        device = tmp_path / releases.parent.parent.name
        alone = tmp_path / f"alone-{device.name}"
        alone.mkdir()
        shutil.copy(releases / "1/index.json", alone)
        download(releases.parent, lacks(alone, device))
        if releases == published:
            with pytest.raises(errors.ReleaseError, match=r"fetch ways\.json\.zst"):
                lacks(alone, device)
        else:
            assert {one.url.split("/")[0] for one in lacks(alone, device).fetches} == {"files"}
        with pytest.raises(errors.FileAccessError):
            lacks(alone, device, ways=os.fsencode(tmp_path / "nothing"))
        shutil.copy(releases / "1/ways.json.zst", tmp_path / "elsewhere")
        elsewhere = {"ways": os.fsencode(tmp_path / "elsewhere")}
        assert lacks(alone, device, **elsewhere) == lacks(releases / "1", device)
        with pytest.raises(errors.InvalidFileError, match="expected the ways of the index"):
            lacks(alone, device, ways=os.fsencode(releases / "2/ways.json.zst"))


@given(st.data())
def test_both_decode_the_same_bytes(data: st.DataObject) -> None:
    """Whatever is wrong with what is stored: both give the same bytes, or none."""
    size = data.draw(st.integers(0, 300))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    blob, base = (rng.integers(0, 4, size, np.uint8).tobytes() for _ in range(2))
    encoding = data.draw(st.sampled_from(["planes:1", "planes:2", "near:u1:2", "near:f2:0", "near:u4:4", "near:f8:2"]))
    stored = bytearray(b"".join(blobs.encode(memoryview(blob), encoding, memoryview(base))))
    for _ in range(data.draw(st.integers(0, 3))):
        if stored:
            stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    stored += data.draw(st.binary(max_size=2))
    size += data.draw(st.sampled_from([0, 0, 0, 1])) if size < len(base) else 0
    if b"\x28\xb5\x2f\xfd" in stored:  # what a damaged frame gives is up to the version of zstd
        return
    try:
        decoded = b"".join(map(bytes, blobs.decode(encoding, size, memoryview(bytes(stored)), memoryview(base))))
    except blobs.DecodeError:
        with pytest.raises(ValueError):
            native.decoded(encoding, size, bytes(stored), base)
    else:
        assert native.decoded(encoding, size, bytes(stored), base) == decoded


def test_a_server_without_ranges(published: Path, device: Path) -> None:
    """Whole objects are taken for ranges (F2)."""
    update(published / "2", device)
    for _ in range(2):
        todo = lacks(published / "3", device)
        for one in todo.fetches:
            Path(os.fsdecode(todo.folder), one.file).write_bytes(content(published.parent, one.sha256, None))
    assert take(published / "3", device)[4]
    assert same(found(device / "current"), last_weights())


@pytest.mark.parametrize(
    "damage", ["a bit", "a byte less", "a byte more", "missing", "of something else"], ids=lambda text: text
)
@pytest.mark.parametrize("version", ["1", "2", "3"])
def test_nothing_wrong_is_committed(published: Path, tmp_path: Path, damage: str, version: str) -> None:
    """The old release stays, and what is wrong is listed again (F3, F4)."""
    release, start = published / version, tmp_path / "start"
    if version != "1":
        update(published / str(int(version) - 1), start)
    todo = lacks(release, start)
    rounds = [todo, after_parts(release, start, todo)]
    before = tree(start / "current")
    for turn, todo in enumerate(rounds):
        for number, one in enumerate(todo.fetches):
            device = tmp_path / f"{turn}.{number}"
            shutil.copytree(start, device, symlinks=True)
            if turn == 0:
                shutil.rmtree(device / "incoming")
            for _ in range(2):
                again = lacks(release, device)
                download(published.parent, again)
            place = Path(os.fsdecode(again.folder), one.file)
            spoil(place, damage)
            with pytest.raises((errors.IntegrityError, errors.TransferError)):
                take(release, device)
            assert tree(device / "current") == before
            assert one.sha256 in {later.sha256 for later in lacks(release, device).fetches}
            update(release, device)
            assert tree(device / "current") == tree(updated(published, tmp_path, version) / "current")


def after_parts(release: Path, device: Path, todo: Missing) -> Missing:
    """Fetch the list of parts; what is listed then."""
    download(release.parent.parent, todo)
    return lacks(release, device)


def updated(published: Path, folder: Path, version: str) -> Path:
    """A device with a version."""
    device = folder / f"updated{version}"
    if not device.exists():
        update(published / version, device)
    return device


def test_a_damaged_blob_that_is_here_is_fetched(published: Path, device: Path, tmp_path: Path) -> None:
    """Also one that is damaged after the list was made (F4)."""
    update(published / "2", device)
    path = (device / "current/model.ptd").resolve()
    bad = bytearray(path.read_bytes())
    bad[len(bad) // 2] ^= 1
    path.write_bytes(bad)
    todo = after_parts(published / "3", device, lacks(published / "3", device))
    sound = updated(published, tmp_path, "2")
    assert todo.bytes > after_parts(published / "3", sound, lacks(published / "3", sound)).bytes
    update(published / "3", device)
    assert same(found(device / "current"), last_weights())

    device = tmp_path / "other"
    update(published / "2", device)
    path = (device / "current/model.ptd").resolve()
    for _ in range(2):
        download(published.parent, lacks(published / "3", device))
    path.write_bytes(bad)
    with pytest.raises(errors.TransferError, match="were not fetched"):
        take(published / "3", device)
    update(published / "3", device)
    assert same(found(device / "current"), last_weights())


@pytest.mark.parametrize("keep", [1, 2, 9])
def test_both_collect_the_same(published: Path, tmp_path: Path, keep: int) -> None:
    """Also what pulls that did not end left (N1)."""
    first = tmp_path / "first"
    for version in ("1", "2", "4"):
        pull(published / version, first)
    (first / "incoming").mkdir()
    (first / "incoming" / f"{'0' * 64}.0-99").write_bytes(bytes(100))
    (first / "files" / ("2" * 64)).write_bytes(bytes(20))
    (first / "files" / "own").write_bytes(b"kept")
    other = tmp_path / "other"
    shutil.copytree(first, other, symlinks=True)
    done = gc(first, keep=keep)
    assert native.collect_releases(os.fsencode(other), keep) == (done.releases, done.files, done.nbytes, done.in_use)
    assert done.releases == max(0, 3 - keep) and tree(first) == {
        name: data for name, data in tree(other).items() if not name.startswith("incoming")
    }
    assert not list((other / "incoming").iterdir()) and (other / "files/own").exists()
    assert native.collect_releases(os.fsencode(other), keep) == (0, 0, 0, 0)
    assert not lacks(published / "4", other).fetches


def test_what_is_not_collected(published: Path, device: Path) -> None:
    """A release that a process has open, and anything if the current index is damaged (F4, N1)."""
    for wrong, message in ((0, "at least one release"), (1, "no release is installed")):
        with pytest.raises(errors.ReleaseError, match=message):
            native.collect_releases(os.fsencode(device), wrong)
    assert not device.exists()
    update(published / "1", device)
    with Release.open(device):
        update(published / "4", device)
        before = tree(device / "releases")
        assert native.collect_releases(os.fsencode(device))[3] == 1
        assert tree(device / "releases") == before
        for digest in {name.split("/")[0] for name in before}:
            assert found(device / "releases" / digest)
    index = device / "indexes" / f"{device.joinpath('current').readlink().name}.json"
    whole, before = index.read_bytes(), tree(device)
    index.write_bytes(whole[:-1])
    with pytest.raises(errors.IntegrityError):
        native.collect_releases(os.fsencode(device))
    index.write_bytes(whole)
    assert tree(device) == before
    assert native.collect_releases(os.fsencode(device))[0] == 1
    assert same(found(device / "current"), last_weights())


def test_fetched_files_go_also_after_a_kill(published: Path, device: Path) -> None:
    """A process that was killed after its switch leaves ranges that no other step would remove (N1)."""
    update(published / "2", device)
    (device / "incoming" / f"{'0' * 64}.0-99").write_bytes(bytes(100))
    assert not take(published / "2", device)[4]
    assert list((device / "incoming").iterdir()) == []


def test_what_is_refused(published: Path, device: Path, tmp_path: Path) -> None:
    """Another name, another digest, an older release, a newer ExecuTorch; nothing changes (F4)."""
    update(published / "2", device)
    before = tree(device)
    digest = hashlib.sha256((published / "4/index.json").read_bytes()).hexdigest()
    for call in (lacks, take):
        with pytest.raises(errors.ReleaseError, match="another folder"):
            call(published.parent / "b/1", device)
        with pytest.raises(errors.TrustError, match="expected the digest"):
            call(published / "4", device, sha256="0" * 64)
        with pytest.raises(errors.TrustError, match="older than version 2"):
            call(published / "1", device)
    assert tree(device) == before
    with pytest.raises(errors.TransferError, match="not fetched"):
        take(published / "4", device, sha256=digest)
    assert tree(device / "current") == tree(updated(published, tmp_path, "2") / "current")
    assert update(published / "1", device, allow_rollback=True).version == "1"
    with pytest.raises(errors.FileAccessError):
        lacks(published / "nothing", device)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(errors.FileAccessError):
        lacks(published / "1", tmp_path / "file")


@pytest.mark.parametrize("has", ["1.4", "1.4.9", "1", "x", "1.5..", "0.9999"])
def test_programs_need_their_executorch(published: Path, tmp_path: Path, has: str) -> None:
    """A release with programs is refused by an older one, and taken by the same or a newer one."""
    index = json.loads((published / "1/index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert lacks(tmp_path, tmp_path / "device", executorch=has).fetches  # no programs
    index["files"].append({"name": "a.pte", "kind": "program", "sha256": "0" * 64, "size": 1})
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(errors.ReleaseError, match=r"need ExecuTorch 1\.5, this device has"):
        lacks(tmp_path, tmp_path / "device", executorch=has)
    for newer in ("1.5", "1.5.0", "1.5.1", "1.10", "2", ""):
        assert lacks(tmp_path, tmp_path / "device", executorch=newer).fetches


# Hostile input


def edited(release: Path, folder: Path, change: Callable[[Any], Any]) -> Path:
    """A release folder with another index."""
    index = json.loads((release / "index.json").read_text())
    change(index)
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def of_kind(index: Any, kind: str) -> Any:
    """The first file of a kind."""
    return next(file for file in index["files"] if file["kind"] == kind)


def with_file(index: Any, name: str, more: int = 0) -> None:
    """Add a file with the contents of another one, and a name that is made of that one's."""
    file = of_kind(index, "other")
    index["files"].append({**file, "name": name.format(file["name"].upper()), "size": file["size"] + more})


HOSTILE: dict[str, Callable[[Any], object]] = {
    **{
        name: lambda index, name=name: index["files"][0].update(name=name)
        for name in ("../../evil", "a/./b", "a//b", "/etc/passwd", "C:\\evil", "a\nb", ".blobstore-0.tmp", "")
    },
    "a name twice": lambda index: with_file(index, "{}"),
    "a file as a folder": lambda index: with_file(index, "{}/x"),
    "two sizes": lambda index: with_file(index, "new", more=1),
    "a digest that leads out": lambda index: index["files"][0].update(sha256="../" * 20 + "0000"),
    "a digest of other letters": lambda index: index["files"][0].update(sha256="G" * 64),
    "a digest in capitals": lambda index: index.update(parts=["B" * 64, 10]),
    "a negative size": lambda index: index["files"][0].update(size=-1),
    "a size without end": lambda index: index["files"][0].update(size=1 << 60),
    "a time without end": lambda index: index.update(published=1 << 53),
    "parts without end": lambda index: index.update(parts=["0" * 64, (1 << 28) + 1]),
    "packed parts": lambda index: index.update(parts=[*index["parts"][:2], "packs"]),
    "parts elsewhere": lambda index: index.update(parts=[*index["parts"][:2], "../.."]),
    "data of nothing": lambda index: of_kind(index, "other").update(kind="program", data=["nothing.ptd"]),
    "data that is none": lambda index: of_kind(index, "other").update(kind="program", data=["tokenizer/1.json"]),
    "data of no program": lambda index: of_kind(index, "other").update(data=["model.ptd"]),
    "another format": lambda index: index.update(format="blobstore.release.9"),
    "no files": lambda index: index.pop("files"),
    "a number as a name": lambda index: index.update(name=7),
    "a name with a break": lambda index: index.update(name="a\n"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_index_is_refused(published: Path, tmp_path: Path, change: Callable[[Any], object]) -> None:
    """By both libraries, before anything is written (F4, S3)."""
    release = edited(published / "1", tmp_path / "bad", change)
    with pytest.raises(errors.InvalidFileError):
        pull(release, tmp_path / "python")
    assert not [path for path in (tmp_path / "python").rglob("*") if not path.is_dir()]
    for call in (lacks, take):
        with pytest.raises(errors.InvalidFileError):
            call(release, tmp_path / "device")
    assert not (tmp_path / "device").exists()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["files", "data"])
def test_an_index_that_lists_too_much(published: Path, tmp_path: Path, kind: str) -> None:
    """More files, or data files of a program, than any release has (S3)."""

    def change(index: Any) -> None:
        if kind == "files":
            index["files"].extend({**index["files"][0], "name": f"{i}"} for i in range(100_000))
        else:
            of_kind(index, "other").update(kind="program", data=["model.ptd"] * 100_001)

    test_a_hostile_index_is_refused(published, tmp_path, change)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff" * 50, b"[" * 100_000, b"null", b'{"format": "\\ud800"}', b'{"x":' + b"[" * 5_000_000],
    ids=["empty", "open", "list", "bytes", "deep", "null", "surrogate", "deep in a field"],
)
def test_what_is_no_index_at_all(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "index.json").write_bytes(data)
    for call in (pull, lacks):
        with pytest.raises(errors.InvalidFileError):
            call(tmp_path, tmp_path / "device")


def test_an_index_without_end(tmp_path: Path) -> None:
    """Larger ones are not read (F2)."""
    with (tmp_path / "index.json").open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(errors.InvalidFileError, match="more than"):
        lacks(tmp_path, tmp_path / "device")


def with_parts(release: Path, device: Path, change: Callable[[Any], object]) -> tuple[Path, bytes]:
    """The release with a changed list of parts, which was fetched; a folder with its index, and the list."""
    index = json.loads((release / "index.json").read_text())
    parts = json.loads((release.parent.parent / "files" / index["parts"][0]).read_text())
    change(parts)
    data = json.dumps(parts).encode()
    index["parts"] = [hashlib.sha256(data).hexdigest(), len(data)]
    folder = device.parent / "changed"
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(json.dumps(index))
    (device / "incoming").mkdir(parents=True, exist_ok=True)
    (device / "incoming" / index["parts"][0]).write_bytes(data)
    return folder, data


PARTS: dict[str, Callable[[Any], object]] = {
    "another format": lambda parts: parts.update(format="blobstore.parts.2"),
    "a file less": lambda parts: parts["files"].pop(),
    "a file more": lambda parts: parts["files"].append([]),
    "backwards": lambda parts: parts["files"][0].reverse(),
    "an overlap": lambda parts: parts["files"][0][1].__setitem__(0, 1),
    "behind the end": lambda parts: parts["files"][0][-1].__setitem__(1, 1 << 40),
    "nothing": lambda parts: parts["files"][0][0].__setitem__(1, 0),
    "before the start": lambda parts: parts["files"][0][0].__setitem__(0, -1),
    "a place without end": lambda parts: parts["files"][0][-1].__setitem__(0, (1 << 53) - 1),
    "a digest that leads out": lambda parts: parts["files"][0][0].__setitem__(2, "../x"),
    "capitals": lambda parts: parts["files"][0][0].__setitem__(2, "A" * 64),
    "two sizes": lambda parts: parts["files"][0][0].__setitem__(2, parts["files"][0][1][2]),
    "too few": lambda parts: parts["files"][0].append([1]),
    "no files": lambda parts: parts.pop("files"),
}


@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS)
def test_hostile_parts_are_refused(published: Path, device: Path, change: Any) -> None:
    """A list that an index names, but that is of other files, overlaps, or leads out (F4)."""
    folder, data = with_parts(published / "2", device, change)
    index = parse_index((folder / "index.json").read_bytes(), "index")
    with pytest.raises(errors.InvalidFileError):
        parse_parts(data, index, "parts")
    for call in (lacks, take):
        with pytest.raises(errors.InvalidFileError):
            call(folder, device)
    assert not list((device / "files").iterdir())


WAYS: dict[str, Callable[[Any], object]] = {
    "another format": lambda ways: ways.update(format="blobstore.ways.2"),
    "of another index": lambda ways: ways.update(index="0" * 64),
    "a content less": lambda ways: ways["ways"].pop(),
    "a content more": lambda ways: ways["ways"].append([]),
    "an object below": lambda ways: ways["ways"][0].append(["planes:1", -1, 0, 1]),
    "capitals": lambda ways: ways["ways"][0].append(["PLANES", 0, 0, 1]),
    "a base of another size": lambda ways: ways["ways"][0].append(["near:u1:0", 0, 0, 1, 1]),
    "no object": lambda ways: ways["ways"][0].append(["planes:1", len(ways["objects"]), 0, 1]),
    "behind the end": lambda ways: ways["ways"][0].append(["planes:1", 0, ways["objects"][0][1], 1]),
    "raw of another size": lambda ways: ways["ways"][0].append(["raw", 0, 0, 1]),
    "no base": lambda ways: ways["ways"][0].append(["near:u1:0", 0, 0, 1, len(ways["ways"])]),
    "itself as a base": lambda ways: ways["ways"][0].append(["near:u1:0", 0, 0, 1, 0]),
    "a base below": lambda ways: ways["ways"][0].append(["near:u1:0", 0, 0, 1, -2]),
    "an encoding with a break": lambda ways: ways["ways"][0].append(["raw\n", 0, 0, 1]),
    "ways without end": lambda ways: ways["ways"].__setitem__(0, [["x", 0, 0, 0]] * 65),
    "a folder": lambda ways: ways["objects"].append(["0" * 64, 1, "../.."]),
    "two sizes": lambda ways: ways["objects"].append(None),
}


@pytest.mark.parametrize("change", WAYS.values(), ids=WAYS)
def test_hostile_ways_are_refused(published: Path, tmp_path: Path, change: Any) -> None:
    """They are not signed; nothing that they say leads out or takes memory (F4)."""
    refuse_ways(published, with_ways(published / "2", tmp_path / "release", change), tmp_path / "device")


def refuse_ways(published: Path, release: Path, device: Path) -> None:
    """Both libraries do, of the release in a folder of its own."""
    download(published.parent, lacks(release, device))
    data = (release / "index.json").read_bytes()
    index = parse_index(data, "index")
    parts = parse_parts((published.parent / "files" / index.parts.sha256).read_bytes(), index, "parts")
    with pytest.raises(errors.InvalidFileError):
        parse_ways((release / "ways.json.zst").read_bytes(), hashlib.sha256(data).hexdigest(), parts, "ways")
    for call in (lacks, take):
        with pytest.raises(errors.InvalidFileError):
            call(release, device)


@pytest.mark.parametrize("behind", [lambda frame: b"\0", lambda frame: frame], ids=["a byte", "a frame"])
def test_nothing_is_behind_the_frame_of_ways(published: Path, tmp_path: Path, behind: Callable[[bytes], bytes]) -> None:
    """Neither reader takes the first of what a list may be, and leaves the rest (F4)."""
    release = tmp_path / "release"
    release.mkdir()
    shutil.copy(published / "2" / "index.json", release)
    frame = (published / "2" / "ways.json.zst").read_bytes()
    (release / "ways.json.zst").write_bytes(frame + behind(frame))
    refuse_ways(published, release, tmp_path / "device")


NAMES = st.text(st.sampled_from('aB./\\:*?"<>|\0\n\x7f\x85 \u00a0\u3000\u200aé日'), max_size=8)


@given(NAMES)
@example(".blobstore-x")
@example("a/" * 32 + "a")
@example("a/" * 31 + "a")
@example("é" * 128)
@example("é" * 127)
def test_names_lead_into_the_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """Both libraries accept the same names (F4)."""
    folder = tmp_path_factory.mktemp("names")
    file = {"name": name, "kind": "other", "sha256": "0" * 64, "size": 1}
    index = {"format": "blobstore.release.1", "name": "a", "version": "1", "published": 0, "executorch": "1.5"}
    (folder / "index.json").write_text(json.dumps({**index, "files": [file], "parts": ["0" * 64, 1]}))
    try:
        check_file_name(name)
        accepted = bool(name)
    except errors.ReleaseError:
        accepted = False
    if accepted:
        assert lacks(folder, folder / "device").fetches
    else:
        with pytest.raises(errors.InvalidFileError):
            lacks(folder, folder / "device")


VALUES = st.sampled_from(
    [
        *(None, True, 0, -1, 2**53 - 1, 2**53, 2**64, 1.0, 1.5, [], {}, [1], {"a": 1}),
        *("", "x", "../a", "A/B", "0" * 64, "G" * 64, "1.5", "a\n", "x" * 101, "x" * 1025, "é" * 1024),
        *("raw", "planes:2", "near:f4:2", "near:f1:2", "model.ptd"),
        *("MODEL.PTD", "tokenizer", "data", "program", "packs"),
    ]
)


def mutate(value: Any, data: st.DataObject) -> None:
    """Change, drop or double something that is somewhere in JSON."""
    at = value
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not at[key] or not isinstance(at[key], dict | list) or data.draw(st.integers(0, 4)) == 0:
            break
        at = at[key]
    match data.draw(st.sampled_from(["change", "change", "drop", "double"])):
        case "change":
            at[key] = data.draw(VALUES)
        case "drop":
            del at[key]
        case "double" if isinstance(at, list):
            at.append(copy.deepcopy(at[key]))


@pytest.mark.parametrize("what", ["index", *(pytest.param(one, marks=pytest.mark.long) for one in ("parts", "ways"))])
@given(data=st.data())
def test_both_read_the_same_lists(published: Path, what: str, data: st.DataObject) -> None:
    """Whatever value is changed, dropped or doubled; and both ask for the same bytes (F4)."""
    release = published / "2" if what == "index" else targets.published()[1] / "www/fuzz/2"
    listed: Any = json.loads((release / "index.json").read_text())
    if what == "parts":
        listed = json.loads((release.parents[1] / "files" / listed["parts"][0]).read_text())
    elif what == "ways":
        listed = read_ways(release)
    else:
        program = {"name": "p.pte", "kind": "program", "sha256": "0" * 64, "size": 3, "data": ["model.ptd"]}
        listed["files"] = [*(one for one in listed["files"] if one["kind"] == "data"), *listed["files"][-8:], program]
    mutate(listed, data)
    text = json.dumps(listed, separators=(",", ":"), ensure_ascii=data.draw(st.booleans()))
    with contextlib.suppress(errors.BlobStoreError):
        getattr(targets, what)(text.encode())


@pytest.mark.long
def test_a_long_wait_for_the_folder_is_not_silent(published: Path, tmp_path: Path) -> None:
    """Whoever may read a folder can lock it; the process that waits says for which one, and goes on (S3)."""
    update(published / "1", tmp_path / "device")
    code = "import sys; from blobstore.runtime.native import native; native.collect_releases(sys.argv[1].encode(), 1)"
    holder = Lock()
    assert holder.take(tmp_path / "device", shared=True)
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "device"], stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline().decode()
            assert line == f"blobstore: {tmp_path}/device/: waiting for another process, which has locked it\n"
            assert process.poll() is None
        finally:
            holder.close()
        assert (process.wait(), process.stderr.read()) == (0, b"")
