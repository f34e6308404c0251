"""What a release claims is compared and bounded by the C++ library, too (F4, S1, S3)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import FileAccessError, IntegrityError, InvalidFileError, ReleaseError, TrustError
from blobstore.releases import pull
from tests.releases.test_native import content, download, lacks, published, take, tree, update  # noqa: F401 - a fixture


def edited(release: Path, folder: Path, change: Callable[[Any], object]) -> Path:
    """A copy of a release's index, with a change."""
    folder.mkdir(exist_ok=True)
    index = json.loads((release / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def list_programs(index: Any, number: int, sets: int) -> None:
    """Take a file for a program that is listed so many times, each with so many data sets."""
    file = next(file for file in index["files"] if file["kind"] == "other")
    file["kind"] = "program"
    index["programs"] = [{"name": file["name"], "data": [index["data"][0]["name"]] * sets}] * number


def add_file(index: Any, name: str, more: int = 0) -> None:
    """A file with the digest of another one, and a name that is made of its name."""
    file = next(file for file in index["files"] if file["kind"] == "other")
    index["files"].append({**file, "name": name.format(file["name"].upper()), "size": file["size"] + more})


def with_table(published: Path, device: Path, folder: Path, change: Callable[[Any, Any], object]) -> Path:  # noqa: F811
    """Version 3, with a changed entry of its data file and a changed table of it; the table was fetched."""

    def edit(index: Any) -> None:
        [file] = (one for one in index["files"] if one["kind"] == "data")
        table = json.loads((published.parent / "files" / file["table"]["sha256"]).read_text())
        change(file, table)
        data = json.dumps(table).encode()
        file["table"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        (device / "incoming" / file["table"]["sha256"]).write_bytes(data)

    return edited(published / "3", folder, edit)


@pytest.fixture
def device(published: Path, tmp_path: Path) -> Path:  # noqa: F811
    """It has version 2, and with that all blobs of version 3."""
    update(published / "2", tmp_path / "device")
    return tmp_path / "device"


@pytest.mark.long
def test_a_file_has_its_digest_after_its_parts(published: Path, device: Path, tmp_path: Path) -> None:  # noqa: F811
    """All parts are here and sound, but together they are another file than the index says (S1)."""

    sound: list[str] = []

    def change(file: Any, table: Any) -> None:
        sound.append(file["sha256"])
        file["sha256"] = table["sha256"] = "f" * 64

    before = tree(device / "current")
    wrong = with_table(published, device, tmp_path / "wrong", change)
    for one in lacks(wrong, device).fetches:  # what is no blob
        (device / "incoming" / one.file).write_bytes(content(published.parent, sound[0], one.range))
    assert not lacks(wrong, device).fetches
    with pytest.raises(IntegrityError, match="its parts give"):
        take(wrong, device)
    assert tree(device / "current") == before and not (device / "files" / ("f" * 64)).exists()


def test_a_table_is_the_one_that_the_index_names(published: Path, device: Path, tmp_path: Path) -> None:  # noqa: F811
    """Another one under its name is removed, to be fetched again (S1)."""
    release = with_table(published, device, tmp_path / "release", lambda file, table: None)
    [table] = (
        one["table"]["sha256"] for one in json.loads((release / "index.json").read_text())["files"][:] if "table" in one
    )
    place = device / "incoming" / table
    place.write_bytes(place.read_bytes().replace(b'"parts"', b' "parts"', 1)[: place.stat().st_size])
    for call in (lacks, take):
        data = place.read_bytes()
        with pytest.raises(IntegrityError, match="is not the table"):
            call(release, device)
        assert not place.exists()
        place.write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.__setitem__(3, [["copy", -1, 0, 0, "e" * 64]] * 5),
        lambda part: part.__setitem__(0, (1 << 53) - 1),
        lambda part: part.__setitem__(2, "G" * 64),
        lambda part: part.__setitem__(2, "A" * 64),
    ],
    ids=["forms", "place", "digits", "capitals"],
)
def test_what_a_table_claims(published: Path, device: Path, tmp_path: Path, change: Any) -> None:  # noqa: F811
    release = with_table(published, device, tmp_path / "release", lambda file, table: change(table["parts"][-1]))
    for call in (lacks, take):
        with pytest.raises(InvalidFileError):
            call(release, device)


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(published=1 << 53),
        lambda index: index["files"][0].update(sha256="G" * 64),
        lambda index: index["data"][0].update(name="../evil", files=["model.ptd"]),
        lambda index: index["packs"][0]["files"][0].__setitem__(1, index["packs"][0]["size"]),
        lambda index: index["files"].extend({**index["files"][0], "name": f"{i}"} for i in range(100_000)),
        lambda index: index.update(packs=index["packs"] * 100_001),
        lambda index: index["packs"][0].update(files=index["packs"][0]["files"][:1] * 100_001),
        lambda index: add_file(index, "{}"),
        lambda index: add_file(index, "{}/x"),
        lambda index: add_file(index, "new", more=1),
        lambda index: list_programs(index, 100_001, 0),
        lambda index: list_programs(index, 1, 100_001),
    ],
    ids=[
        "number",
        "digest",
        "data set",
        "pack",
        "files",
        "packs",
        "files of a pack",
        "one name",
        "a folder",
        "two sizes",
        "programs",
        "data of a program",
    ],
)
def test_what_an_index_claims(published: Path, tmp_path: Path, change: Any) -> None:  # noqa: F811
    release = edited(published / "1", tmp_path / "release", change)
    for call in (lacks, pull):
        with pytest.raises(InvalidFileError):
            call(release, tmp_path / "device")


def test_where_current_leads(published: Path, device: Path) -> None:  # noqa: F811
    """A link to elsewhere is not followed (S2)."""
    sound = str((device / "current").readlink())
    for target in ("../elsewhere", "releases/..", "releases/x", f"{sound}/..", f"x{sound}"):
        (device / "current").unlink()
        (device / "current").symlink_to(target)
        for call in (lacks, take):
            with pytest.raises(InvalidFileError, match="expected a link to a release"):
                call(published / "3", device)


def test_a_link_is_no_file_of_a_device(published: Path, device: Path) -> None:  # noqa: F811
    """Its length may be that of the file (S2)."""
    index = json.loads((published / "2/index.json").read_text())
    file = next(one for one in index["files"] if 0 < one["size"] < 1000)
    place = device / "files" / file["sha256"]
    place.unlink()
    place.symlink_to("x" * file["size"])
    assert place.lstat().st_size == file["size"]
    assert not lacks(published / "2", device).current


@pytest.mark.parametrize("writer", ["C++", "Python"])
def test_older_releases_are_refused_without_current(published: Path, tmp_path: Path, writer: str) -> None:  # noqa: F811
    """Both keep what was the newest beside the link that leads to it, and read what the other one wrote (F4)."""
    device = tmp_path / "device"
    if writer == "C++":
        update(published / "2", device)
    else:
        pull(published / "2", device)
    (device / "current").unlink()
    for call in (lacks, take):
        with pytest.raises(TrustError, match="older than version 2, which is or was"):
            call(published / "1", device)
    with pytest.raises(TrustError, match="older than version 2, which is or was"):
        pull(published / "1", device)
    mark = device / "indexes/newest"
    sound = mark.read_bytes()
    for damage in (b"", b"a", b"a 2", b"a 2 ", b"a 2 \n", b" 2 3\n", b"a  3\n", b"a 2 3", b"a 2 -3\n", b"a 2 3 4\n"):
        mark.write_bytes(damage)
        with pytest.raises(TrustError, match="it is unknown whether"):
            lacks(published / "3", device)
        with pytest.raises(TrustError, match="it is unknown whether"):
            pull(published / "3", device)
    mark.write_bytes(sound)
    pull(published / "1", device, allow_rollback=True)
    mark.write_bytes(sound)  # the switch to version 2 failed, and version 1 stays as it is
    assert lacks(published / "1", device).current
    assert take(published / "1", device)[1] == "1"
    assert not pull(published / "1", device).changed
    with pytest.raises(TrustError, match="older than version 2, which is or was"):
        pull(edited(published / "1", tmp_path / "another", lambda index: index.update(later=1)), device)
    pull(published / "2", device)
    pull(published / "1", device, allow_rollback=True)
    assert mark.read_bytes().split()[1] == b"1"


@pytest.mark.parametrize("time", [(1 << 53) - 1, 4_102_444_801])
def test_a_release_from_the_future(published: Path, tmp_path: Path, time: int) -> None:  # noqa: F811
    """It would be the last one (F4)."""
    release = edited(published / "1", tmp_path / "release", lambda index: index.update(published=time))
    for call in (lacks, take):
        with pytest.raises(ReleaseError, match="ahead of this machine's clock"):
            call(release, tmp_path / "device")


@pytest.mark.parametrize("record", ["newest", "{}.json", "{}.merged.json"])
def test_records_are_not_written_through_links(published: Path, tmp_path: Path, record: str) -> None:  # noqa: F811
    """Whoever may write to the folder would else choose which file of its owner is replaced (S2)."""
    device, victim = tmp_path / "device", tmp_path / "victim"
    victim.write_text("mine")
    pull(published / "1", device)
    place = device / "indexes" / record.format(hashlib.sha256((published / "2/index.json").read_bytes()).hexdigest())
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    before = (device / "current").readlink()
    merges = record.endswith(".merged.json")  # only Python does
    with pytest.raises(FileAccessError, match="a link is in its place"):
        pull(published / "2", device, merge=merges, allow_rollback=True)
    while not merges and (todo := lacks(published / "2", device, allow_rollback=True)).fetches:
        download(published.parent, todo)
    if not merges:
        with pytest.raises(FileAccessError, match="a link is in its place"):
            take(published / "2", device, allow_rollback=True)
    assert victim.read_text() == "mine" and (device / "current").readlink() == before
    place.unlink()
    assert pull(published / "2", device, merge=merges, allow_rollback=True).changed


@pytest.mark.parametrize("dangling", [False, True])
def test_objects_are_not_written_through_links(published: Path, tmp_path: Path, dangling: bool) -> None:  # noqa: F811
    """Also where an object is made of parts that are here; Python replaces the link (S2)."""
    device, victims = tmp_path / "device", tmp_path / "victims"
    victims.mkdir()
    pull(published / "2", device)
    while (todo := lacks(published / "3", device)).fetches:
        download(published.parent, todo)
    for file in json.loads((published / "3/index.json").read_text())["files"]:
        place, victim = device / "files" / file["sha256"], victims / file["sha256"]
        if not place.exists():
            if not dangling:
                victim.write_text("mine")
            place.symlink_to(victim)
    before = {one.name: one.read_bytes() for one in victims.iterdir()}
    with pytest.raises(FileAccessError, match="a link is in its place"):
        take(published / "3", device)
    assert {one.name: one.read_bytes() for one in victims.iterdir()} == before
    assert pull(published / "3", device).changed
    assert {one.name: one.read_bytes() for one in victims.iterdir()} == before
