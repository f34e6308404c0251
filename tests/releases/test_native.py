"""The C++ library plans and commits what the Python package does (F2, F3, F4)."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blobstore.core.disk.locks import Lock
from blobstore.errors import (
    BlobStoreError,
    FileAccessError,
    IntegrityError,
    InvalidFileError,
    ReleaseError,
    TransferError,
    TrustError,
)
from blobstore.releases import Release, commit, compact, gc, plan, publish, pull
from blobstore.releases.index.index import check_file_name, parse_index, parse_table
from blobstore.runtime.native import native
from tests.releases.models import found, inputs, same, spoil, weights
from tests.releases.test_faults import HOSTILE

VERSIONS = ("1", "2", "3", "4")


class Fetch(NamedTuple):
    """As the library lists it."""

    url: str
    range: str | None
    size: int
    sha256: str
    file: str


class Missing(NamedTuple):
    name: str
    version: str
    sha256: str
    current: bool
    release_bytes: int
    bytes: int
    folder: bytes
    fetches: list[Fetch]


def lacks(release: Path, device: Path, **options: Any) -> Missing:
    values = native.missing(os.fsencode(release / "index.json"), os.fsencode(device), **options)
    return Missing(*values[:-1], [Fetch(*one) for one in values[-1]])


def take(release: Path, device: Path, **options: Any) -> tuple[str, str, str, bytes, bool, int]:
    done: tuple[str, str, str, bytes, bool, int] = native.commit(
        os.fsencode(release / "index.json"), os.fsencode(device), **options
    )
    return done


def content(root: Path, sha256: str, range_: str | None) -> bytes:
    data = (root / "files" / sha256).read_bytes()
    if range_ is None:
        return data
    first, last = range_.removeprefix("bytes=").split("-")
    return data[int(first) : int(last) + 1]


def download(root: Path, todo: Missing) -> None:
    """What a phone's downloader does."""
    for one in todo.fetches:
        assert one.url == f"files/{one.sha256}"
        data = content(root, one.sha256, one.range)
        assert len(data) == one.size
        Path(os.fsdecode(todo.folder), one.file).write_bytes(data)


def tables_of(release: Path) -> set[str]:
    index = json.loads((release / "index.json").read_text())
    return {file["table"]["sha256"] for file in index["files"] if "table" in file}


def update(release: Path, device: Path) -> Missing:
    """Fetch until nothing is missing, and commit; all that was missing, without tables."""
    fetched = []
    for _ in range(2):
        todo = lacks(release, device)
        fetched += todo.fetches
        download(release.parent.parent, todo)
    todo = lacks(release, device)
    assert not todo.fetches and not todo.bytes
    assert take(release, device)[4]
    fetched = [one for one in fetched if one.sha256 not in tables_of(release)]
    return todo._replace(fetches=fetched, bytes=sum(one.size for one in fetched))


def tree(folder: Path) -> dict[str, str | bytes | None]:
    """All that is in a folder."""
    return {
        path.relative_to(folder).as_posix(): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def last_weights() -> dict[str, np.ndarray]:
    tensors = weights(layers=12)
    tensors["layer2.weight"] = tensors["layer2.weight"] + np.float32(1)
    tensors["new"] = np.arange(50_000, dtype=np.float32)
    return tensors


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A first version with a pack, a delta, both in one file, and one with other small files."""
    folder = tmp_path_factory.mktemp("published")
    root = folder / "releases"
    publish(inputs(folder / "in", weights(layers=12), files=20), root, name="a", version="1")
    publish(inputs(folder / "in", last_weights(), files=20), root, name="a", version="2", base="1")
    compact(root, name="a", version="3", base="2")
    (folder / "in/tokenizer/3.json").write_text("new")
    (folder / "in/empty").write_bytes(b"")
    (folder / "in/ä 日本").write_bytes(b"named")
    publish(folder / "in", root, name="a", version="4", base="3")
    publish(folder / "in", root, name="b", version="1")
    return root / "a"


@pytest.mark.parametrize("versions", ["1234", "13", "24", "4", "1243"])
def test_plans_and_folders_are_equal(published: Path, tmp_path: Path, versions: str) -> None:
    """What Python plans without encoded forms is what C++ lists, and all files and links are the same afterwards."""
    for version in versions:
        release = published / version
        rollback = int(version) < 4 and "4" in versions[: versions.index(version)]
        todo = plan(release, tmp_path / "python", plain=True, allow_rollback=rollback)
        fetched = tmp_path / f"fetched{version}"
        fetched.mkdir()
        for one in todo.fetches:
            (fetched / one.file).write_bytes(content(published.parent, one.sha256, one.range))
        if rollback:
            with pytest.raises(TrustError, match="older than version"):
                lacks(release, tmp_path / "native")
            break
        last = update(release, tmp_path / "native")
        assert {one[1:] for one in last.fetches} == {
            (one.range, one.size, one.sha256, one.file) for one in todo.fetches
        }
        assert (last.name, last.version, last.sha256, last.release_bytes, last.bytes) == (
            todo.name,
            todo.version,
            todo.sha256,
            todo.release_bytes,
            todo.bytes,
        )
        commit(release, tmp_path / "python", fetched)
        assert tree(tmp_path / "native") == tree(tmp_path / "python")
        again = take(release, tmp_path / "native")
        assert again[:3] == ("a", version, todo.sha256) and not again[4]
        assert lacks(release, tmp_path / "native").current


def test_the_two_take_turns_in_one_folder(published: Path, tmp_path: Path) -> None:
    """Each goes on from what the other one left, also from merged files, and after gc."""
    device = tmp_path / "device"
    pull(published / "1", device)
    update(published / "2", device)
    assert not pull(published / "2", device).changed
    pull(published / "2", device, merge=True)
    fetched = update(published / "3", device).bytes
    assert fetched < sum(file.stat().st_size for file in (device / "current/").rglob("*")) / 20
    assert same(found(device / "current"), last_weights())
    gc(device)
    update(published / "4", device)
    assert (device / "current/ä 日本").read_bytes() == b"named" and (device / "current/empty").read_bytes() == b""


def test_a_server_without_ranges(published: Path, tmp_path: Path) -> None:
    """Whole objects are taken for ranges (F2)."""
    device = tmp_path / "device"
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
    rounds = [todo]
    if version != "1":  # the first list has tables, the second what follows from them
        rounds.append(after_tables(release, start, todo))
    before = tree(start / "current")
    for turn, todo in enumerate(rounds):
        for number, one in enumerate(todo.fetches):
            device = tmp_path / f"{turn}.{number}"
            shutil.copytree(start, device, symlinks=True)
            if turn == 0:
                shutil.rmtree(device / "incoming")
            again = lacks(release, device)
            download(published.parent, again)
            place = Path(os.fsdecode(again.folder), one.file)
            spoil(place, damage)
            with pytest.raises((IntegrityError, TransferError)):
                take(release, device)
            assert tree(device / "current") == before
            assert one.sha256 in {later.sha256 for later in lacks(release, device).fetches}
            update(release, device)
            assert tree(device / "current") == tree(updated(published, tmp_path, version) / "current")


def after_tables(release: Path, device: Path, todo: Missing) -> Missing:
    """Fetch the tables of a list alone; what is listed then."""
    tables = [one for one in todo.fetches if one.sha256 in tables_of(release)]
    download(release.parent.parent, todo._replace(fetches=tables))
    return lacks(release, device)


def updated(published: Path, folder: Path, version: str) -> Path:
    """A device with a version."""
    device = folder / f"updated{version}"
    if not device.exists():
        update(published / version, device)
    return device


def test_a_damaged_blob_that_is_here_is_fetched(published: Path, tmp_path: Path) -> None:
    """Also one that is damaged after the list was made (F4)."""
    device = tmp_path / "device"
    update(published / "2", device)
    path = (device / "current/model.ptd").resolve()
    bad = bytearray(path.read_bytes())
    bad[len(bad) // 2] ^= 1
    path.write_bytes(bad)
    todo = after_tables(published / "3", device, lacks(published / "3", device))
    assert 128 * 128 * 4 < todo.bytes < 2 * 128 * 128 * 4
    update(published / "3", device)
    assert same(found(device / "current"), last_weights())

    device = tmp_path / "other"
    update(published / "2", device)
    path = (device / "current/model.ptd").resolve()
    for _ in range(2):
        download(published.parent, lacks(published / "3", device))
    path.write_bytes(bad)
    with pytest.raises(IntegrityError):
        take(published / "3", device)
    update(published / "3", device)
    assert same(found(device / "current"), last_weights())


@pytest.mark.parametrize("when", ["before the list", "after the list"])
@pytest.mark.parametrize("damage", ["a bit", "a byte less", "a byte more", "missing", "of something else"])
def test_a_damaged_file_is_not_added_to(published: Path, tmp_path: Path, damage: str, when: str) -> None:
    """Files are added to a data set whose older files were compared with their digests, and are fetched again (F4, S1)."""
    device = tmp_path / "device"
    update(published / "1", device)
    path = (device / "current/model.ptd").resolve()
    if when == "after the list":
        for _ in range(2):
            download(published.parent, lacks(published / "2", device))
    spoil(path, damage)
    with pytest.raises(TransferError, match=r"'model\.(1\.)?ptd'.* not fetched"):
        take(published / "2", device)
    assert "1" in (device / "current").resolve().parent.parent.joinpath("indexes/newest").read_text().split()
    update(published / "2", device)
    assert same(found(device / "current", "model.ptd", "model.1.ptd"), last_weights())
    assert path.read_bytes() == (published.parent / "files" / path.name).read_bytes()


@pytest.mark.parametrize("keep", [1, 2, 9])
@pytest.mark.parametrize("merge", [False, True])
def test_both_collect_the_same(published: Path, tmp_path: Path, keep: int, merge: bool) -> None:
    """Also what Python merged, a release without its index, leftovers, and a release that a process has open (N1)."""
    first = tmp_path / "first"
    for version in ("1", "2", "4"):
        pull(published / version, first, merge=merge)
    plan(published / "3", first, allow_rollback=True)
    (first / "partial" / f"{'1' * 64}.part").write_bytes(bytes(10))
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


def test_what_is_not_collected(published: Path, tmp_path: Path) -> None:
    """A release that a process has open, and anything if the current index is damaged (F4, N1)."""
    device = tmp_path / "device"
    for wrong, message in ((0, "at least one release"), (1, "no release is installed")):
        with pytest.raises(ReleaseError, match=message):
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
    with pytest.raises(IntegrityError):
        native.collect_releases(os.fsencode(device))
    index.write_bytes(whole)
    assert tree(device) == before
    assert native.collect_releases(os.fsencode(device))[0] == 1
    assert same(found(device / "current"), last_weights())


def test_fetched_files_go_also_after_a_kill(published: Path, tmp_path: Path) -> None:
    """A process that was killed after its switch leaves ranges that no other step would remove (N1)."""
    device = tmp_path / "device"
    update(published / "2", device)
    (device / "incoming" / f"{'0' * 64}.0-99").write_bytes(bytes(100))
    assert not take(published / "2", device)[4]
    assert list((device / "incoming").iterdir()) == []


def test_what_is_refused(published: Path, tmp_path: Path) -> None:
    """Another name, another digest, an older release, a newer ExecuTorch; nothing changes (F4)."""
    device = tmp_path / "device"
    update(published / "2", device)
    before = tree(device)
    digest = hashlib.sha256((published / "4/index.json").read_bytes()).hexdigest()
    for call in (lacks, take):
        with pytest.raises(ReleaseError, match="another folder"):
            call(published.parent / "b/1", device)
        with pytest.raises(TrustError, match="expected the digest"):
            call(published / "4", device, sha256="0" * 64)
        with pytest.raises(TrustError, match="older than version 2"):
            call(published / "1", device)
    assert tree(device) == before
    with pytest.raises(TransferError, match="not fetched"):
        take(published / "4", device, sha256=digest)
    assert tree(device / "current") == tree(updated(published, tmp_path, "2") / "current")
    assert not lacks(published / "1", device, allow_rollback=True).fetches
    assert take(published / "1", device, allow_rollback=True)[1] == "1"
    with pytest.raises(FileAccessError):
        lacks(published / "nothing", device)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileAccessError):
        lacks(published / "1", tmp_path / "file")


@pytest.mark.parametrize("has", ["1.4", "1.4.9", "1", "x", "1.5..", "0.9999"])
def test_programs_need_their_executorch(published: Path, tmp_path: Path, has: str) -> None:
    """A release with programs is refused by an older one, and taken by the same or a newer one."""
    index = json.loads((published / "1/index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index))
    assert lacks(tmp_path, tmp_path / "device", executorch=has).fetches  # no programs
    index["files"].append({"name": "a.pte", "kind": "program", "sha256": "0" * 64, "size": 1})
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ReleaseError, match=r"need ExecuTorch 1\.5, this device has"):
        lacks(tmp_path, tmp_path / "device", executorch=has)
    for newer in ("1.5", "1.5.0", "1.5.1", "1.10", "2", ""):
        assert lacks(tmp_path, tmp_path / "device", executorch=newer).fetches


# Hostile input


def edited(release: Path, folder: Path, change: Callable[[Any], Any]) -> Path:
    """A release folder with another index."""
    index = json.loads((release / "index.json").read_text())
    change(index)
    folder.mkdir()
    (folder / "index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_index_is_refused(published: Path, tmp_path: Path, change: Any) -> None:
    """As Python refuses it, before anything is written (F4)."""
    release = edited(published / "1", tmp_path / "bad", change)
    with pytest.raises(InvalidFileError):
        plan(release, tmp_path / "python")
    for call in (lacks, take):
        with pytest.raises(InvalidFileError):
            call(release, tmp_path / "device")
    assert not (tmp_path / "device").exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff" * 50, b"[" * 100_000, b"null", b'{"format": "\\ud800"}', b'{"x":' + b"[" * 5_000_000],
    ids=["empty", "open", "list", "bytes", "deep", "null", "surrogate", "deep in a field"],
)
def test_what_is_no_index_at_all(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "index.json").write_bytes(data)
    with pytest.raises(InvalidFileError):
        lacks(tmp_path, tmp_path / "device")


def test_an_index_without_end(tmp_path: Path) -> None:
    """Larger ones are not read (F2)."""
    with (tmp_path / "index.json").open("wb") as file:
        file.truncate((1 << 26) + 1)
    with pytest.raises(InvalidFileError, match="more than"):
        lacks(tmp_path, tmp_path / "device")


def test_a_hostile_table_is_refused(published: Path, tmp_path: Path) -> None:
    """One that an index names, but that is of another file, overlaps, or refers to nothing."""
    device = tmp_path / "device"
    update(published / "2", device)
    index = json.loads((published / "3/index.json").read_text())
    [file] = (file for file in index["files"] if file["kind"] == "data")
    good = json.loads((published.parent / "files" / file["table"]["sha256"]).read_text())
    changes: list[Callable[[Any], Any]] = [
        lambda table: table.update(size=table["size"] + 1),
        lambda table: table["parts"].reverse(),
        lambda table: table["parts"][1].__setitem__(0, 1),
        lambda table: table["parts"][-1].__setitem__(1, 1 << 40),
        lambda table: table["parts"][0].__setitem__(1, 0),
        lambda table: table["parts"][0].__setitem__(2, "../x"),
        lambda table: table["parts"][0].__setitem__(3, [["copy", -1, 0, 0, ""]]),
        lambda table: table["parts"][0].__setitem__(3, [["zstd", 99, 0, 1]]),
        lambda table: table["parts"][0].__setitem__(3, [["zip", 0, 0, 1]]),
        lambda table: table["parts"].append([1]),
        lambda table: table.pop("parts"),
    ]
    before = tree(device / "current")
    for change in changes:
        table = copy.deepcopy(good)
        change(table)
        data = json.dumps(table).encode()
        file["table"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        with pytest.raises(InvalidFileError):
            parse_table(data, parse_index(json.dumps(index).encode(), "index").file(file["name"]), "table")
        (tmp_path / "index.json").write_text(json.dumps(index))
        (device / "incoming" / file["table"]["sha256"]).write_bytes(data)
        for call in (lacks, take):
            with pytest.raises(InvalidFileError):
                call(tmp_path, device)
    assert tree(device / "current") == before


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
    (folder / "index.json").write_text(json.dumps({**index, "files": [file]}))
    try:
        check_file_name(name)
        accepted = bool(name)
    except ReleaseError:
        accepted = False
    if accepted:
        assert lacks(folder, folder / "device").fetches
    else:
        with pytest.raises(InvalidFileError):
            lacks(folder, folder / "device")


VALUES = st.sampled_from(
    [
        *(None, True, 0, -1, 2**53 - 1, 2**53, 2**64, 1.0, 1.5, [], {}, [1], {"a": 1}),
        *("", "x", "../a", "A/B", "0" * 64, "G" * 64, "1.5", "a\n", "x" * 101, "x" * 1025, "é" * 1024),
        *("copy", "model.ptd", "MODEL.PTD", "tokenizer", "data", "program"),
    ]
)


@given(st.data())
def test_both_read_the_same_indexes(published: Path, data: st.DataObject) -> None:
    """Whatever value is changed, dropped or doubled (F4)."""
    index: Any = json.loads((published / "2/index.json").read_text())
    index["files"].append({"name": "p.pte", "kind": "program", "sha256": "0" * 64, "size": 3})
    index["programs"] = [{"name": "p.pte", "data": ["model.ptd"]}]
    index["files"] = index["files"][-8:] + [one for one in index["files"][:-8] if one["kind"] == "data"]
    index.pop("packs", None)
    at: Any = index
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
    text = json.dumps(index, ensure_ascii=data.draw(st.booleans()))
    folder = published.parent.parent / "changed"
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(text)
    try:
        parse_index(text.encode(), "index")
    except BlobStoreError:
        with pytest.raises(InvalidFileError):
            lacks(folder, folder / "device", executorch="")
    else:
        try:
            lacks(folder, folder / "device", executorch="")
        except ReleaseError as error:  # well-formed, and of a time to come
            assert "ahead of this machine's clock" in str(error) and index["published"] > time.time() + 86400


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
