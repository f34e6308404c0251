"""Earlier findings of fuzzing stay fixed (B5), and the mutations and the replay of findings work."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from blobstore import open_ptd, save_file
from blobstore.errors import InvalidFileError, TransferError
from campaigns.fuzz import disk, releases, replay, seeds, targets
from campaigns.fuzz.answers import ANSWER, KIND
from campaigns.fuzz.budget import MEGABYTES
from campaigns.fuzz.mutators import reseal


@pytest.mark.long
def test_earlier_findings():
    """Each file is read or refused, by Python and C++ alike, within two seconds and 300 MB."""
    process = subprocess.run(
        [sys.executable, "-m", "campaigns.fuzz.replay"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.long
def test_replay_reports_every_kind_of_finding(monkeypatch):
    def hang(data):
        while True:
            sum(range(100_000))

    kinds = {
        b"ends": (lambda data: os.kill(os.getpid(), 9), "signal 9"),
        b"raises": (lambda data: data.index(b"x"), "ValueError"),
        b"grows": (lambda data: np.ones((MEGABYTES + 50) << 17), "MB"),
        b"refuses": (lambda data: open_ptd("/nowhere"), ""),
    }
    for what, (target, reason) in kinds.items():
        monkeypatch.setitem(targets.TARGETS, "tried", target)
        found = replay.replay("tried", what)
        assert reason in found and bool(found) == bool(reason), found
    monkeypatch.setattr(replay, "SECONDS", 0.1)
    monkeypatch.setitem(targets.TARGETS, "tried", hang)
    assert "signal 15" in replay.replay("tried", b"")


def test_a_sealed_mutation_gets_past_the_digests(tmp_path):
    """A change in the head breaks its digest; after sealing, the reader sees the change itself."""
    path = tmp_path / "file.ptd"
    save_file({"name": np.ones(3, np.float32)}, path, metadata={"a": "b"})
    data = bytearray(path.read_bytes())
    data[data.index(b"name")] = ord("N")
    path.write_bytes(data)
    assert not targets.check("ptd", bytes(data))
    reseal(data)
    path.write_bytes(data)
    assert list(open_ptd(path)) == ["Name"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Inputs that need no lowering, by target and name."""
    work = tmp_path_factory.mktemp("seeds")
    parts = (seeds.releases_of(work), seeds.interrupted(work), seeds.adapters_of(work))
    return {(target, name): data for part in parts for target, name, data in part}


MADE = {"adapter", "commits", "encoded", "http", "index", "journal", "parts", "peft", "ways"}


@pytest.mark.long
def test_what_the_library_makes_is_accepted(made, monkeypatch):
    """Indexes, parts, ways, encoded contents, answers of servers, journals and adapters: each target gets to its end."""
    monkeypatch.setattr(releases, "PATIENCE", replace(releases.PATIENCE, read=60))  # another process may need the core
    assert {target for target, _ in made} == MADE
    refused = [one for one, data in made.items() if not targets.check(one[0], data)]
    assert not refused


def test_a_journal_counts_only_with_its_digest(made):
    """A process that was killed in a commit left new weights; with another byte in the journal, nothing is written (B3)."""
    _, copy = disk.working_copy()
    for change, replayed in ((b"", True), (b"\xff", False)):
        data = made["commits", "killed"]
        copy.put(copy.adopt(data[: disk.PAGE] + change + data[disk.PAGE + len(change) :]))
        assert disk.is_sealed(copy.beside.read_bytes()) is replayed
        assert targets.check("commits", copy.beside.read_bytes()) is replayed


def test_what_must_not_happen_is_a_finding(made, monkeypatch):
    def outside(folder):
        (folder.parent / "outside" / "sentinel").write_text("new")

    def half(reference, device, **options):
        (device / "current").mkdir(parents=True)
        raise TransferError("half of it")

    def refused(data, where):
        raise InvalidFileError(where, "it is Tuesday")

    wrong = {
        "journal": (disk, "recover", outside, "a file outside was changed"),
        "http": (releases, "pull", half, "left a release"),
        "index": (releases, "parse_index", refused, "Python gives InvalidFileError"),
    }
    for target, (module, name, instead, reason) in wrong.items():
        data = next(data for (of, _), data in made.items() if of == target)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, instead)
            assert reason in replay.replay(target, data)


def test_a_server_with_other_bytes_installs_nothing(made):
    """A flipped bit in any answer with a body: the whole release or none, and an error of the tree (F2)."""
    kind, mark, rest = made["http", "web"].partition(KIND)
    pieces = rest.split(ANSWER)
    for number, piece in enumerate(pieces):
        changed = [*pieces[:number], piece[:-1] + bytes([piece[-1] ^ 1]), *pieces[number + 1 :]]
        assert not targets.check("http", kind + mark + ANSWER.join(changed))
