"""Packed weights of shared working copies: commits of any process reach all of them, and nothing is packed (K1, K3)."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from blobstore import open_ptd
from blobstore.runtime import BlobCache, PackedStore, delegate_stats, make_working_copy
from tests.cli.test_exit_codes import run
from tests.helpers.native_build import ROOT
from tests.runtime import packed_files
from tests.runtime.hooks import environment
from tests.runtime.packed_files import Running, ones, spoil
from tests.runtime.packed_files import mlp_weights as weights
from tests.runtime.test_packed import KINDS

KILLED = """
from blobstore_runtime import _native
cache = BlobCache(live, "shared", packed=packed)
_native.crash_at({})
cache.update(weights(1))
"""


class Copy:
    """A program and a working copy of its weights."""

    example = ones(2, 16)

    def __init__(self, lowered: Path, folder: Path) -> None:
        self.folder, self.packed = folder, folder / "packed"
        for name in ("model.pte", "model.ptd"):
            shutil.copyfile(lowered / name, folder / name)
        make_working_copy([folder / "model.ptd"], folder / "live.ptd")

    def start(self, packed: PackedStore | None = None) -> Running:
        return Running.open(self.folder, self.example, packed, data="live.ptd", mode="shared")

    def store(self, **options: Any) -> PackedStore:
        return PackedStore(self.packed, **options)

    def expected(self) -> list[bytes]:
        """What a process computes that packs everything now."""
        return self.start()()

    def elsewhere(self, code: str, *, hooks: Path | None = None) -> int:
        """Run code in another process, perhaps in a build with test hooks. Its exit code."""
        text = f"""
            from blobstore.runtime import BlobCache, PackedStore
            from tests.runtime.packed_files import mlp_weights as weights
            live, packed = {str(self.folder / "live.ptd")!r}, {str(self.packed)!r}
        """
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(text) + textwrap.dedent(code)]
        return subprocess.run(command, cwd=ROOT, check=False, env=environment(hooks) if hooks else None).returncode


@pytest.fixture
def copy(mlp: Path, tmp_path: Path) -> Copy:
    return Copy(mlp, tmp_path)


@pytest.mark.long
def test_a_commit_packs_nothing(copy: Copy) -> None:
    """Programs on two caches follow it, and one that is loaded afterwards has it, too."""
    store = copy.store()
    plain, first, second = copy.start(), copy.start(store), copy.start(store)
    original = plain()
    assert first() == second() == original
    assert (store.stats.builds, store.stats.fallbacks) == (1, 0)
    for seed in range(4):
        inits = delegate_stats().inits
        first.cache.update(weights(seed))
        changed = first()
        assert second() == changed != original
        assert (delegate_stats().inits, store.stats.repacked) == (inits, 0)
        assert plain() == changed
    inits = delegate_stats().inits
    late = copy.start(copy.store())
    assert late() == changed
    assert late.cache.packed is not None
    assert (late.cache.packed.stats.hits, late.cache.packed.stats.builds) == (1, 0)
    assert delegate_stats().inits == inits + 1  # it found everything in the file
    assert store.stats.written > 0


def test_another_process_with_a_store_and_no_program(copy: Copy) -> None:
    """It writes into the file itself, so even a process that is not notified computes with the new weights."""
    store = copy.store()
    running = copy.start(store)
    path = packed_files.only(copy.packed)
    before = path.read_bytes()
    assert copy.elsewhere("BlobCache(live, 'shared', packed=packed).update(weights(1))") == 0
    after = path.read_bytes()
    entries = [e for e in packed_files.read(path, changes=True).entries if not e.name.startswith("blobstore:")]
    changed = [e for e in entries if before[e.offset :][: e.size] != after[e.offset :][: e.size]]
    assert len(changed) == 2 < len(entries)
    inits = delegate_stats().inits
    written = store.stats.written
    assert running() == copy.expected()
    assert delegate_stats().inits == inits + 1  # that of `expected`
    assert store.stats.written == written  # it was done


@pytest.mark.long
def test_another_process_without_a_store(copy: Copy) -> None:
    """The next process that reads catches up."""
    store = copy.store()
    running = copy.start(store)
    original = running()
    for seed in range(3):
        assert copy.elsewhere(f"BlobCache(live, 'shared').update(weights({seed}))") == 0
        inits = delegate_stats().inits
        changed = running()
        assert delegate_stats().inits == inits
        assert changed == copy.expected() != original
    assert store.stats.repacked == 0


@pytest.mark.long
def test_the_counters_were_lost(copy: Copy) -> None:
    """The digests of the blobs reveal commits that were not counted."""
    copy.start(copy.store())()
    for seed in range(3):
        copy.folder.joinpath("live.ptd.commits").unlink(missing_ok=True)
        assert copy.elsewhere(f"BlobCache(live, 'shared').update(weights({seed}))") == 0
        assert copy.start(copy.store())() == copy.expected()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("point", [4, 5, 6, 7, 8, 9, 10])
def test_a_process_that_is_killed_in_a_commit(point: int, copy: Copy, hooks: Path) -> None:
    """From its mark on the commit happens, and packed weights never differ from the weights."""
    store = copy.store()
    running = copy.start(store)
    original = running()
    assert copy.elsewhere(KILLED.format(point), hooks=hooks) == -signal.SIGKILL
    changed = running()
    assert changed == copy.expected() == copy.start(copy.store())() != original
    running.cache.update(weights(2))
    assert running() == copy.expected() != changed
    assert (store.stats.dropped, store.stats.repacked) == (0, 0)


def test_a_killed_commit_that_had_not_begun(copy: Copy, hooks: Path) -> None:
    running = copy.start(copy.store())
    original = running()
    assert copy.elsewhere(KILLED.format(3), hooks=hooks) == -signal.SIGKILL
    assert running() == copy.expected() == original


@pytest.mark.parametrize("commits", [0, 1])
def test_damage_at_rest_is_found(commits: int, copy: Copy) -> None:
    """In any entry, as it was packed or as a commit wrote it: `verify` names it, and the next load builds anew (K2)."""
    running = copy.start(copy.store())
    for seed in range(commits):
        running.cache.update(weights(seed))
    expected = running()
    del running
    path = packed_files.only(copy.packed)
    data = path.read_bytes()
    assert [(file.problem, file.unchecked) for file in copy.store().verify()] == [("", 0)]
    for entry in packed_files.read(path, changes=True).entries:
        if entry.name.startswith("blobstore:"):
            continue
        damaged = bytearray(data)
        damaged[entry.offset + entry.size // 2] ^= 1
        spoil(path, bytes(damaged))
        [file] = copy.store().verify()
        assert file.problem.startswith(f"entry '{entry.name}' has the digest ")
        store = copy.store()
        assert copy.start(store)() == expected
        assert (store.stats.dropped, store.stats.builds) == (1, 1)
        for made in packed_files.files(copy.packed):
            made.unlink()
        path.write_bytes(data)


@pytest.mark.long
def test_verify_says_what_it_could_not_compare(copy: Copy, hooks: Path) -> None:
    """An entry that a killed process was writing, until the next load makes it anew (K2)."""
    copy.start(copy.store())()
    assert copy.elsewhere(KILLED.format(9), hooks=hooks) == -signal.SIGKILL
    [file] = copy.store().verify()
    assert (file.problem, file.unchecked) == ("", 1)
    done = run("packed", "verify", copy.packed)
    assert (done.returncode, "1 of 5 entries not compared" in done.stdout) == (0, True), done.stdout
    assert json.loads(run("packed", "verify", copy.packed, "--json").stdout)[0]["unchecked"] == 1
    assert copy.start(copy.store())() == copy.expected()
    assert [(file.problem, file.unchecked) for file in copy.store().verify()] == [("", 0)]


def test_what_was_packed_of_a_damaged_blob(copy: Copy) -> None:
    """The file says what an entry was made of, and not what it should have been, so a blob that is whole again counts."""
    copy.start(copy.store())()
    assert copy.elsewhere("BlobCache(live, 'shared').update(weights(1))") == 0
    expected = copy.expected()
    live = copy.folder / "live.ptd"
    with open_ptd(live) as data_map:
        [key] = [key for key in data_map if len(data_map.get_data(key)) == 24 * 16 * 4]  # that was changed
        place = data_map.byte_range(key)[0] + 3

    def flip() -> None:
        with live.open("r+b") as file:
            file.seek(place)
            [byte] = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    flip()
    assert copy.start(copy.store())() != expected  # what a process packs now
    flip()
    assert copy.start(copy.store())() == expected


def test_damaged_keys_are_found(copy: Copy) -> None:
    expected = copy.start(copy.store())()
    path = packed_files.only(copy.packed)
    [keys] = [entry for entry in packed_files.read(path, changes=True).entries if entry.name == "blobstore:keys"]
    data = bytearray(path.read_bytes())
    data[keys.offset + 5] ^= 1
    spoil(path, bytes(data))
    store = copy.store()
    assert copy.start(store)() == expected
    assert (store.stats.dropped, store.stats.builds) == (1, 1)


@pytest.mark.long
def test_another_program_on_the_same_copy(copy: Copy) -> None:
    """It makes a new file with the entries of both; programs that run go on in the old one."""
    store = copy.store()
    _, example = KINDS["convolutions"](copy.folder / "b")
    make_working_copy([copy.folder / "model.ptd", copy.folder / "b" / "model.ptd"], copy.folder / "both.ptd")
    (copy.folder / "other.pte").write_bytes((copy.folder / "b" / "model.pte").read_bytes())

    def one(packed: PackedStore | None) -> Running:
        return Running.open(copy.folder, copy.example, packed, data="both.ptd", mode="shared")

    def two(packed: PackedStore | None) -> Running:
        return Running.open(copy.folder, example, packed, name="other", data="both.ptd", mode="shared")

    first, second, late = one(store), two(store), one(store)
    assert (store.stats.builds, store.stats.fallbacks) == (2, 1)  # the second one has transposed convolutions
    for seed in range(2):
        first.cache.update(weights(seed))
        assert first() == late() == one(None)()
        assert second() == two(None)()
    assert store.stats.repacked == 0


def test_two_copies_never_meet(copy: Copy) -> None:
    store = copy.store()
    make_working_copy([copy.folder / "model.ptd"], copy.folder / "second.ptd")
    first = copy.start(store)
    second = Running.open(copy.folder, copy.example, store, data="second.ptd", mode="shared")
    original = second()
    first.cache.update(weights(1))
    assert first() == copy.expected() != original == second()


def test_a_folder_of_another_user(mlp: Path, public: Path) -> None:
    """Without the right to write to the file, weights are packed to the heap, and the statistics say so."""
    copy = Copy(mlp, public)
    copy.start(copy.store())()
    text = """
        import os
        from tests.runtime.packed_files import Running
        import numpy as np
        from pathlib import Path
        example = (np.ones((2, 16), np.float32),)
        os.chmod(live, 0o666), os.chmod(live + ".commits", 0o666)
        plain = Running.open(Path(live).parent, example, data="live.ptd", mode="shared")()
        os.seteuid(65534)
        store = PackedStore(packed)
        running = Running.open(Path(live).parent, example, store, data="live.ptd", mode="shared")
        assert running() == plain
        os.seteuid(0)
        assert store.stats.fallbacks == 1, store.stats
        assert [reason for reason in store.stats.reasons if "cannot follow" in reason], store.stats
    """
    assert copy.elsewhere(text) == 0


def test_the_cache_alone_without_a_program(copy: Copy) -> None:
    """A store without files for a working copy does no harm."""
    cache = BlobCache(copy.folder / "live.ptd", "shared", packed=copy.packed)
    cache.update(weights(1))
    assert not copy.packed.exists()
    assert copy.start(copy.store())() == copy.expected()
