"""Earlier findings of fuzzing stay fixed (B5), and the mutations and the replay of findings work."""

import os
import subprocess
import sys

import numpy as np

from blobstore import open_ptd, save_file
from campaigns.fuzz import replay, targets
from campaigns.fuzz.budget import MEGABYTES
from campaigns.fuzz.mutators import MUTATORS, reseal


def test_earlier_findings():
    """Each file is read or refused, by Python and C++ alike, within two seconds and 300 MB."""
    process = subprocess.run(
        [sys.executable, "-m", "campaigns.fuzz.replay"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr


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
    assert "signal 14" in replay.replay("tried", b"")


def test_minimized_input_has_the_same_finding(monkeypatch):
    monkeypatch.setitem(targets.TARGETS, "tried", lambda data: {}[1] if b"bad" in data else None)
    assert replay.minimize("tried", b"some bytes and bad ones") == b"bad"


def test_readers_that_disagree_are_a_finding(monkeypatch, tmp_path):
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "file.ptd")
    good = (tmp_path / "file.ptd").read_bytes()
    assert replay.replay("ptd", good) == ""
    monkeypatch.setattr(targets, "open_ptd", lambda path: open_ptd("/nowhere"))
    assert "DisagreementError" in replay.replay("ptd", good)


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


def test_mutations_of_json_are_json():
    for seed in range(50):
        changed = MUTATORS["baseline"](b'{"a":[1,2,{"b":null}]}', 4096, seed, lambda data, most: data)
        assert (
            changed.startswith((b"{", b"[", b'"'))
            or changed in (b"null", b"true")
            or changed.lstrip(b"-")[:1].isdigit()
        )
