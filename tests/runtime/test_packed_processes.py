"""Packed stores where something is missing, full or forbidden, and with several processes (K1, K2)."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore.runtime import PackedStore, make_working_copy
from tests.helpers.waiting import until
from tests.lowering import nets
from tests.lowering.live import lower_through, seeded
from tests.runtime import packed_files
from tests.runtime.packed_files import Running, ones, read, run_child

pytestmark = pytest.mark.long

INPUT = ones(2, 16)
NOBODY = 65534
SYSTEM = ("/usr/bin/env",)  # finds commands
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> Iterator[list[Path]]:
    """Three small programs with different weights, which every user may read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        lower_through({"forward": (seeded(nets.MLP), (torch.ones(2, 16),))}, first := Path(name, "0"))
        folders = [first]
        for seed in (1, 2):
            folders.append(Path(name, str(seed)))
            shutil.copytree(first, folders[-1])
            running = Running.open(first, INPUT)
            running.cache.update({"layers.0.weight": torch.full((24, 16), seed / 4)})
            running.cache.save(folders[-1] / "model.ptd")
        yield folders


@pytest.fixture
def model(models: list[Path]) -> Path:
    return models[0]


def expected(model: Path) -> list[str]:
    return [one.hex() for one in Running.open(model, INPUT)()]


def fallback(stats: dict[str, Any] | Any, reason: str) -> None:
    """Check that one delegate packed to the heap, and why."""
    found = stats if isinstance(stats, dict) else vars(stats)
    assert (found["builds"], found["hits"], found["fallbacks"]) == (0, 0, 1)
    assert [one for one in found["reasons"] if reason in one], found["reasons"]


def test_a_limit_on_the_size_of_files(model: Path, tmp_path: Path) -> None:
    """The system refuses to write the file: the program runs, and nothing is left (K2)."""
    for most in (0, 1, 5000, 9000):
        found = run_child(folder=model, sizes=[2, 16], packed=tmp_path / "packed", most=most)
        assert found["outputs"] == expected(model)
        assert found["files"] == [] and found["stats"]["builds"] == 0
        assert found["stats"]["fallbacks"] == 1 and found["stats"]["reasons"]
        assert [one.name for one in (tmp_path / "packed").iterdir()] in ([], ["building.lock"])


@as_root
def test_a_full_disk(model: Path, tmp_path: Path) -> None:
    """The file does not fit: the program runs, the reason is known, and nothing is left (K2)."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        [*SYSTEM, "mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", disk], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("this machine mounts nothing")
    try:
        found = run_child(folder=model, sizes=[2, 16], packed=disk / "packed")
        assert found["outputs"] == expected(model)
        fallback(found["stats"], "No space left on device")
        assert [one.name for one in (disk / "packed").iterdir()] == ["building.lock"]
    finally:
        subprocess.run([*SYSTEM, "umount", disk], check=True)


@as_root
def test_a_folder_that_is_not_writable(model: Path, public: Path) -> None:
    """Another user maps a file that is there, and otherwise packs to the heap (K2)."""
    options = {"folder": model, "sizes": [2, 16], "packed": public / "packed", "user": NOBODY}
    found = run_child(**options)
    assert found["outputs"] == expected(model)
    fallback(found["stats"], "Permission denied")
    assert not (public / "packed").exists()
    Running.open(model, INPUT, public / "packed")
    before = sorted(path.name for path in (public / "packed").iterdir())
    found = run_child(**options)
    assert found["outputs"] == expected(model)
    assert (found["stats"]["hits"], found["stats"]["fallbacks"]) == (1, 0)
    assert found["stats"]["verified_bytes"] == 0
    assert sorted(path.name for path in (public / "packed").iterdir()) == before


@as_root
def test_a_damaged_file_of_another_user(model: Path, public: Path) -> None:
    """It cannot be removed, and is not used (K2)."""
    Running.open(model, INPUT, public / "packed")
    path = packed_files.only(public / "packed")
    content = bytearray(path.read_bytes())
    content[read(path).entries[0].offset] ^= 1
    packed_files.spoil(path, bytes(content))
    found = run_child(folder=model, sizes=[2, 16], packed=public / "packed", user=NOBODY)
    assert found["outputs"] == expected(model)
    assert (found["stats"]["hits"], found["stats"]["fallbacks"], found["stats"]["builds"]) == (0, 1, 0)
    assert any("damaged" in one for one in found["stats"]["reasons"])
    assert path.read_bytes() == content


@as_root
@pytest.mark.parametrize(("user", "mode"), [(NOBODY, 0o444), (0, 0o646)])
def test_a_file_that_anyone_may_have_planted(user: int, mode: int, model: Path, public: Path) -> None:
    """In a folder where all users may make files, one of another user, or that others may write to, is not used (S2)."""
    folder = public / "packed"
    Running.open(model, INPUT, folder)
    folder.chmod(0o1777)
    path = packed_files.only(folder)
    store = PackedStore(folder)
    Running.open(model, INPUT, store)
    assert (store.stats.hits, store.stats.builds) == (1, 0)
    os.chown(path, user, user)
    path.chmod(mode)
    store = PackedStore(folder)
    assert Running.open(model, INPUT, store)() == Running.open(model, INPUT)()
    assert store.stats.builds == 1
    assert any("another user" in reason for reason in store.stats.reasons)


def test_a_folder_that_is_deleted_while_it_is_used(model: Path, tmp_path: Path) -> None:
    """What runs goes on; the next load builds a file again (K2)."""
    store = PackedStore(tmp_path / "packed")
    running = Running.open(model, INPUT, store)
    before = running()
    shutil.rmtree(tmp_path / "packed")
    assert running() == before
    running.cache.update({"layers.0.weight": torch.zeros(24, 16)})
    running.cache.revert()
    assert running() == before
    again = Running.open(model, INPUT, store)
    assert again() == before
    assert store.stats.builds == 2 and store.stats.fallbacks == 0
    read(packed_files.only(tmp_path / "packed"))


@pytest.mark.parametrize(
    ("folder", "options", "reason"),
    [
        ("/".join(["x" * 60] * 4), {}, "ExecuTorch takes paths of up to 255 bytes"),
        ("packed", {"limit": 1000}, "bytes is needed, the limit of the store is 1000"),
        ("mine", {}, ""),  # a file came to the place of the folder after the store was opened
    ],
)
def test_a_store_that_can_have_no_file(
    folder: str, options: dict[str, Any], reason: str, model: Path, tmp_path: Path
) -> None:
    """The program runs, and the reason is known (K2)."""
    store = PackedStore(tmp_path / folder, **options)
    (tmp_path / "mine").write_text("mine")
    assert [one.hex() for one in Running.open(model, INPUT, store)()] == expected(model)
    fallback(store.stats, reason)
    assert packed_files.files(tmp_path / folder) == [] and (tmp_path / "mine").read_text() == "mine"


def test_two_processes_at_once(model: Path, tmp_path: Path) -> None:
    """One builds; all compute the same (K1)."""
    processes = [
        packed_files.child(folder=model, sizes=[2, 16], packed=tmp_path / "packed", barrier=True) for _ in range(3)
    ]
    for process in processes:
        assert packed_files.report(process) == {}
    for process in processes:
        packed_files.tell(process, "go")
    found = [packed_files.report(process) for process in processes]
    for process in processes:
        packed_files.end(process)
    assert all(one["outputs"] == expected(model) for one in found)
    assert sum(one["stats"]["builds"] for one in found) == 1
    assert sum(one["stats"]["fallbacks"] for one in found) == 0
    read(packed_files.only(tmp_path / "packed"))


def test_a_process_that_is_killed_while_it_builds(model: Path, tmp_path: Path) -> None:
    """Nobody waits for it, the next load builds the file, and what it left goes (K2)."""
    packed = tmp_path / "packed"
    for sign in ("building.lock", ".blobstore-*", "*.packed"):
        shutil.rmtree(packed, ignore_errors=True)
        process = packed_files.child(folder=model, sizes=[2, 16], packed=packed, barrier=True)
        assert packed_files.report(process) == {}
        packed_files.tell(process, "go")
        until(lambda sign=sign: list(packed.glob(sign)) or packed_files.files(packed), lambda: None)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        store = PackedStore(packed)
        assert [one.hex() for one in Running.open(model, INPUT, store)()] == expected(model)
        assert (store.stats.hits, store.stats.fallbacks, store.stats.dropped) == (1, 0, 0)
        store.gc()
        name = packed_files.only(packed).name
        assert sorted(path.name for path in packed.iterdir()) == sorted([name, f"{name}.used", "building.lock"])


def use(path: Path, seconds: int) -> None:
    """Set when a file was last used."""
    for one in (path, Path(f"{path}.used")):
        os.utime(one, (seconds, seconds))


def test_the_least_recently_used_goes_first(models: list[Path], tmp_path: Path) -> None:
    """When a new file needs the room, and when `gc` is asked to (K2)."""
    store = PackedStore(tmp_path)
    paths = []
    for model in models[:2]:
        Running.open(model, INPUT, store)
        [path] = set(packed_files.files(tmp_path)) - set(paths)
        paths.append(path)
    size = paths[0].stat().st_size
    use(paths[0], 2_000)
    use(paths[1], 1_000)
    assert [file.path for file in store.list()] == paths
    tight = PackedStore(tmp_path, limit=2 * size)
    Running.open(models[2], INPUT, tight)
    assert paths[0].exists() and not paths[1].exists()
    assert len(packed_files.files(tmp_path)) == 2
    removed = PackedStore(tmp_path, limit=size).gc()
    assert [file.path for file in removed] == [paths[0]]
    assert [file.nbytes for file in PackedStore(tmp_path).list()] == [size]


def test_a_file_in_use_stays(models: list[Path], tmp_path: Path) -> None:
    """By this process or by another one, however old it is (K2)."""
    running = Running.open(models[0], INPUT, tmp_path)
    [mine] = packed_files.files(tmp_path)
    process = packed_files.child(folder=models[1], sizes=[2, 16], packed=tmp_path)
    assert packed_files.report(process)["outputs"] == expected(models[1])
    [other] = set(packed_files.files(tmp_path)) - {mine}
    for path in (mine, other):
        use(path, 1_000)
    store = PackedStore(tmp_path, limit=0)
    assert [file.in_use for file in store.list()] == [True, True]
    assert store.gc() == []
    packed_files.end(process)
    assert [file.path for file in store.gc()] == [other]
    del running
    assert [file.path for file in store.gc()] == [mine]
    assert [path.name for path in tmp_path.iterdir()] == ["building.lock"]


def test_a_working_copy_that_is_made_anew_again_and_again(models: list[Path], tmp_path: Path) -> None:
    """Old entries go when the limit needs it; the new ones are never the reason for the heap (K2)."""
    (tmp_path / "model.pte").write_bytes((models[0] / "model.pte").read_bytes())
    size = 0
    for number, model in enumerate(models):
        make_working_copy([model / "model.ptd"], tmp_path / "live.ptd")
        store = PackedStore(tmp_path / "packed", limit=size * 3 // 2 or 1 << 30)
        running = Running.open(tmp_path, INPUT, store, data="live.ptd", mode="shared")
        assert [one.hex() for one in running()] == expected(model)
        assert (store.stats.builds, store.stats.hits, store.stats.fallbacks) == (1, 1, 0)
        size = size or packed_files.only(tmp_path / "packed").stat().st_size
        del running
        (tmp_path / "live.ptd").rename(tmp_path / f"{number}.ptd")  # kept, so that the next one gets another inode
        for commits in tmp_path.glob("*.commits"):
            commits.unlink()
    assert packed_files.only(tmp_path / "packed").stat().st_size < size * 3 // 2


def test_what_gc_removes(model: Path, tmp_path: Path) -> None:
    """Damaged files, marks without a file, and leftovers; nothing that it does not know (K2)."""
    Running.open(model, INPUT, tmp_path)
    path = packed_files.only(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "gone.packed.used").write_text("")
    (tmp_path / f"{path.stem}x.packed").write_bytes(path.read_bytes()[:100])
    store = PackedStore(tmp_path)
    [removed] = store.gc()
    assert removed.path.name == f"{path.stem}x.packed" and removed.problem
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(
        [path.name, f"{path.name}.used", "building.lock", "notes.txt"]
    )
    assert PackedStore(tmp_path / "nowhere").gc() == [] == PackedStore(tmp_path / "nowhere").list()
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("digits", ["0" * 16, "f" * 16])
def test_gc_keeps_the_file_that_loads_use(digits: str, model: Path, tmp_path: Path) -> None:
    """Of several files for one purpose that is the newest (K2)."""
    store = PackedStore(tmp_path / "packed")
    running = Running.open(model, INPUT, store)
    old = packed_files.only(store.folder)
    new = old.with_name(old.name[: -len(digits) - len(".packed")] + digits + ".packed")
    shutil.copy(old, new)
    os.utime(old, (1, 1))
    del running
    assert [file.path for file in store.gc()] == [old]
    assert packed_files.files(store.folder) == [new]
