"""What a release claims is compared and bounded by the C++ library, too (F4, S1, S3)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import FileAccessError, IntegrityError, InvalidFileError, TrustError
from blobstore.releases import pull
from tests.releases.test_native import (
    download,
    edited,
    lacks,
    parts_of,
    published,  # noqa: F401 - a fixture
    take,
    tree,
    update,
)


@pytest.fixture
def device(published: Path, tmp_path: Path) -> Path:  # noqa: F811
    """It has version 2, and with that all blobs of version 3."""
    update(published / "2", tmp_path / "device")
    return tmp_path / "device"


@pytest.mark.long
def test_a_file_has_its_digest_after_its_parts(published: Path, device: Path, tmp_path: Path) -> None:  # noqa: F811
    """All parts are here and sound, but together they are another file than the index says (S1)."""

    def change(index: Any) -> None:
        [file] = (one for one in index["files"] if one["kind"] == "data")
        file["sha256"] = "f" * 64

    before = tree(device / "current")
    wrong = edited(published / "2", tmp_path / "wrong", change)
    assert not lacks(wrong, device, allow_rollback=True).fetches
    with pytest.raises(IntegrityError, match="its parts give"):
        take(wrong, device, allow_rollback=True)
    assert tree(device / "current") == before and not (device / "files" / ("f" * 64)).exists()


def test_parts_are_those_that_the_index_names(published: Path, device: Path) -> None:  # noqa: F811
    """Another list under its name is removed, to be fetched again (S1)."""
    digest = parts_of(published / "3")
    place = device / "incoming" / digest
    data = (published.parent / "files" / digest).read_bytes()
    for call in (lacks, take):
        place.write_bytes(data.replace(b'"files":[[[0', b'"files":[[[1'))
        assert place.stat().st_size == len(data) and place.read_bytes() != data
        with pytest.raises(IntegrityError, match="is not the list of the parts"):
            call(published / "3", device)
        assert not place.exists()


def test_where_current_leads(published: Path, device: Path) -> None:  # noqa: F811
    """A link to elsewhere is not followed (S2)."""
    sound = str((device / "current").readlink())
    for target in ("../elsewhere", "releases/..", "releases/x", f"{sound}/..", f"x{sound}"):
        (device / "current").unlink()
        (device / "current").symlink_to(target)
        for call in (lacks, take, pull):
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


@pytest.mark.parametrize("record", ["newest", "{}.json"])
def test_records_are_not_written_through_links(published: Path, tmp_path: Path, record: str) -> None:  # noqa: F811
    """Whoever may write to the folder would else choose which file of its owner is replaced (S2)."""
    device, victim = tmp_path / "device", tmp_path / "victim"
    victim.write_text("mine")
    pull(published / "1", device)
    place = device / "indexes" / record.format(hashlib.sha256((published / "2/index.json").read_bytes()).hexdigest())
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    before = (device / "current").readlink()
    with pytest.raises(FileAccessError, match="a link is in its place"):
        pull(published / "2", device, allow_rollback=True)
    while (todo := lacks(published / "2", device, allow_rollback=True)).fetches:
        download(published.parent, todo)
    with pytest.raises(FileAccessError, match="a link is in its place"):
        take(published / "2", device, allow_rollback=True)
    assert victim.read_text() == "mine" and (device / "current").readlink() == before
    place.unlink()
    assert pull(published / "2", device, allow_rollback=True).changed


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
