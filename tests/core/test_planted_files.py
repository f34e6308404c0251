"""Hidden files that someone put into a folder lead nowhere else (S2)."""

import json
import os
from pathlib import Path

import pytest

from blobstore.core.disk import recovery
from blobstore.core.disk.journal import Journal, Move
from blobstore.core.disk.locks import Lock
from blobstore.core.disk.names import journal_name
from blobstore.core.disk.recovery import recover
from tests.core.disk.test_journal import staged


def planted(folder: Path) -> tuple[Move, Path]:
    """A move that is not done yet, and the journal that tells of it."""
    left, place = staged(folder, "x"), folder / journal_name()
    place.write_bytes(Journal([left], [folder]).text(folder))
    return left, place


def test_a_link_is_no_journal_and_no_lock(tmp_path: Path) -> None:
    """It may lead to a file of another folder."""
    _, sound = planted(tmp_path / "there")
    link = tmp_path / "there" / journal_name()
    link.symlink_to(sound)
    assert Journal.read(sound) is not None
    with pytest.raises(OSError):
        Journal.read(link)
    with pytest.raises(OSError):
        Lock().take(link)


def test_a_journal_is_a_file_and_not_large(tmp_path: Path) -> None:
    """Nothing is read of a pipe, which would wait, or of gigabytes (S3)."""
    _, place = planted(tmp_path)
    assert Journal.read(place) is not None
    os.truncate(place, 1 << 40)
    assert Journal.read(place) is None
    folder = tmp_path / journal_name()
    folder.mkdir()
    assert Journal.read(folder) is None


def test_a_journal_is_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another user owns, or everybody may write to, renames nothing (S2)."""
    left, place = planted(tmp_path)
    place.chmod(0o666)
    assert Journal.read(place) is None
    recover(tmp_path)
    assert left.place.read_bytes() == b"old"
    place.chmod(0o600)
    user = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: user + 1)
        assert Journal.read(place) is None
    assert Journal.read(place) is not None


@pytest.mark.parametrize("name", ["../victim", "victim", "/etc/passwd", ".blobstore-x.tmp", 5])
def test_a_journal_names_only_hidden_files(tmp_path: Path, name: str | int) -> None:
    """Others are neither renamed nor removed."""
    (tmp_path / "in").mkdir()
    for victim in (tmp_path / "victim", tmp_path / "in/victim"):
        victim.write_bytes(b"mine")
    _, place = planted(tmp_path / "in")
    text = json.loads(place.read_text())
    for field in ("temporary", "backup"):
        place.write_text(json.dumps({**text, "files": [{**text["files"][0], field: name}]}))
        assert Journal.read(place) is None
        recover(tmp_path / "in")
        assert (tmp_path / "victim").read_bytes() == (tmp_path / "in/victim").read_bytes() == b"mine"


def test_a_group_that_was_not_committed_stays_old(tmp_path: Path) -> None:
    """Its journal is in the other folder only: that in the first one is written last."""
    (tmp_path / "first").mkdir()
    (tmp_path / "other").mkdir()
    left = staged(tmp_path / "other", "x")
    journal = Journal([left], [tmp_path / "first", tmp_path / "other"])
    (tmp_path / "other" / journal_name()).write_bytes(journal.text(tmp_path / "other"))
    recover(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["x"]
    assert left.place.read_bytes() == b"old"


def test_files_of_another_user_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither their journals nor their temporary files count."""
    left, _ = planted(tmp_path)
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(recovery.os, "geteuid", lambda: os.getuid() + 1)
    recover(tmp_path)
    assert sorted(tmp_path.iterdir()) == before and left.place.read_bytes() == b"old"
    monkeypatch.undo()
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and left.place.read_bytes() == b"new"


def test_a_group_that_another_process_finishes_keeps_its_files(tmp_path: Path) -> None:
    """Its temporary files have no lock of their own."""
    left, journal = planted(tmp_path)
    other = Lock()
    assert other.take(journal)
    recover(tmp_path)
    assert left.temporary.read_bytes() == b"new"
    other.close()
    recover(tmp_path)
    assert left.place.read_bytes() == b"new"
