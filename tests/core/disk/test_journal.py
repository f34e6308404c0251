"""The journal of a group of files: what a process writes there, another one reads and finishes (B5)."""

import json
import os

import pytest
import torch

import blobstore
from blobstore.core.disk.journal import Journal, Move, identity
from blobstore.core.disk.names import journal_name, temporary_beside


def staged(folder, name, old=b"old", new=b"new"):
    """A move before its rename: the old file (if any) with its backup, and the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / name
    move = Move(place, temporary_beside(place), temporary_beside(place), None, None)
    move.temporary.write_bytes(new)
    if old is not None:
        place.write_bytes(old)
        os.link(place, move.backup)
    return Move(place, move.temporary, move.backup, identity(place), identity(move.temporary))


def contents(*moves):
    return [move.place.read_bytes() if move.place.exists() else None for move in moves]


def test_a_copy_is_read_back_in_any_folder_of_the_group(tmp_path):
    """Paths are relative, so the folders can be moved together."""
    moves = [staged(tmp_path / "a", "x"), staged(tmp_path / "b" / "c", "y", old=None)]
    journal = Journal(moves, [tmp_path / "a", tmp_path / "b" / "c"])
    for folder in journal.folders:
        path = folder / journal_name()
        path.write_bytes(journal.text(folder))
        read = Journal.read(path)
        assert [move.place.resolve() for move in read.moves] == [move.place for move in moves]
        assert [(move.temporary.name, move.backup.name, move.before, move.after) for move in read.moves] == [
            (move.temporary.name, move.backup.name, move.before, move.after) for move in moves
        ]
        assert [other.resolve() for other in read.folders] == journal.folders


def test_an_interrupted_group_is_finished(tmp_path):
    """Some renames are done, others are not; a second call changes nothing."""
    moves = [staged(tmp_path, "a"), staged(tmp_path, "b"), staged(tmp_path, "c", old=None)]
    journal = Journal(moves, [tmp_path])
    moves[0].do()
    for _ in range(2):
        journal.finish()
        assert contents(*moves) == [b"new", b"new", b"new"]


def test_a_group_with_an_undone_rename_is_undone(tmp_path):
    """The process was killed while it put the old files back, so the new state cannot be reached."""
    moves = [staged(tmp_path, "a"), staged(tmp_path, "b", old=None), staged(tmp_path, "c")]
    for move in moves:
        move.do()
    moves[2].undo()
    assert not moves[2].possible()
    Journal(moves, [tmp_path]).finish()
    assert contents(*moves) == [b"old", None, b"old"]


def test_a_group_is_undone_if_a_rename_fails_again(tmp_path, monkeypatch):
    """The old files return from their backups."""
    moves = [staged(tmp_path, "a"), staged(tmp_path, "b")]
    real = os.replace

    def replace(source, target):
        if source == moves[1].temporary:
            raise PermissionError(1, "Operation not permitted")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    Journal(moves, [tmp_path]).finish()
    assert contents(*moves) == [b"old", b"old"]


def test_a_file_that_was_put_there_after_the_kill_stays(tmp_path):
    """Neither finishing nor undoing touches it, whether or not the rename was done before."""
    moves = [staged(tmp_path, "a"), staged(tmp_path, "b")]
    moves[1].do()
    for move in moves:
        (tmp_path / "theirs").write_bytes(b"theirs")
        os.replace(tmp_path / "theirs", move.place)
        move.do()
        move.undo()
    assert contents(*moves) == [b"theirs", b"theirs"]


def test_leftovers_are_the_copies_the_temporary_files_and_the_backups(tmp_path):
    """In the order of their removal: the first copy of the journal goes first."""
    moves = [staged(tmp_path / "a", "x"), staged(tmp_path / "b", "y")]
    journal = Journal(moves, [tmp_path / "a", tmp_path / "b"])
    assert list(journal.leftovers("name")) == [
        tmp_path / "a" / "name", tmp_path / "b" / "name",
        moves[0].temporary, moves[0].backup, moves[1].temporary, moves[1].backup,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda first, second: first.update(place=second["temporary"]),
        lambda first, second: first.update(place="sub/" + journal_name()),
        lambda first, second: first.update(after=None),
        lambda first, second: first.update(temporary=second["temporary"]),
        lambda first, second: first.update(backup=second["temporary"]),
        lambda first, second: second.update(place="sub/../a", before=None),
    ],
)
def test_a_journal_that_no_group_writes_is_none(tmp_path, change):
    """Names of its own twice, a temporary name as an output's, or moves that do not follow each other."""
    text = json.loads(Journal([staged(tmp_path, "a"), staged(tmp_path, "b")], [tmp_path]).text(tmp_path))
    path = tmp_path / journal_name()
    path.write_text(json.dumps(text))
    assert Journal.read(path) is not None
    change(*text["files"])
    path.write_text(json.dumps(text))
    assert Journal.read(path) is None


def test_a_group_may_write_a_file_twice(tmp_path):
    """The second move replaces what the first one put there."""
    first, second = staged(tmp_path, "a"), staged(tmp_path, "b", old=None)
    second = Move(first.place, second.temporary, second.backup, first.after, second.after)
    path = tmp_path / journal_name()
    path.write_bytes(Journal([first, second], [tmp_path]).text(tmp_path))
    journal = Journal.read(path)
    assert journal is not None
    journal.finish()
    assert identity(first.place) == second.after


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[",
        b"[" * 100000,
        b"[]",
        b"\xff",
        b'{"blobstore.journal": 2}',
        b'{"blobstore.journal": 1, "folders": [], "files": []}',
        b'{"blobstore.journal": 1, "folders": ["."], "files": [{"place": "precious", "temporary": "theirs", "backup": '
        b'"theirs", "before": null, "after": null}]}',
        b'{"blobstore.journal": 1, "folders": ["."], "files": [{"place": "precious", "temporary": 5}]}',
    ],
)
def test_a_malformed_journal_changes_nothing(tmp_path, text):
    """The next writer ignores it."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".blobstore-0123456789abcdef01234567.journal").write_bytes(text)
    (tmp_path / ".blobstore-000000000000000000000000.journal").symlink_to(tmp_path / "precious")
    blobstore.save_file({"w": torch.ones(2)}, tmp_path / "w.ptd")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "theirs").read_text() == "theirs"
