"""A pool in a folder: others may write to it, too, its disk may be full, and it may lie among what is added."""

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from blobstore.errors import BlobStoreError, FileAccessError, OutputPathError, PoolError
from blobstore.pool import Pool
from blobstore.storage.objects import Objects
from tests.pool.models import Tensors, contents, described, tensors, write

OLD = 1_000_000_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pools; the packs and tables of `private` are old enough to be collected, if nothing needs them."""
    folder = tmp_path_factory.mktemp("pools")
    for seed, place, name in ((0, "private", "secret"), (10, "shared", "open")):
        with Pool(folder / place, create=True) as pool:
            for number in range(3):
                pool.add(write(folder / "m.safetensors", tensors(seed + number)), f"{name}@{number}")
    for path in (folder / "private").rglob("*"):
        os.utime(path, (OLD, OLD))
    return folder


@pytest.fixture
def private(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "private", tmp_path / "private"))


@pytest.fixture
def shared(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "shared", tmp_path / "shared"))


def replace(path: Path, target: Path) -> None:
    """A link in the place of a folder or of a file."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(target)


def each_folder_of_packs(shared: Path, private: Path) -> None:
    for number in range(256):
        replace(shared / "packs" / f"{number:02x}", private / "packs" / f"{number:02x}")


def each_pack(shared: Path, private: Path) -> None:
    for pack in [path for path in (private / "packs").rglob("*") if path.is_file()]:
        place = shared / "packs" / pack.parent.name / pack.name
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(pack)


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "each pack": each_pack,
    "each folder of packs": each_folder_of_packs,
    **{
        place: lambda shared, private, place=place: replace(shared / place, private / place)  # type: ignore[misc]
        for place in (
            "packs",
            "tables",
            *(f"tables/{table}" for table in ("blobs", "parts", "events", "marks")),
            *(f"tables/{table}/_delta_log" for table in ("blobs", "parts", "events", "marks")),
        )
    },
}


@pytest.mark.parametrize("link", LINKS)
def test_links_lead_nowhere(shared: Path, private: Path, tmp_path: Path, link: str) -> None:
    """Whoever may write to a pool cannot lead others to what they alone may read, change or remove (S3)."""
    before = contents(private)
    LINKS[link](shared, private)
    new = write(tmp_path / "new.safetensors", tensors(20))
    calls: list[Callable[[Pool], object]] = [
        lambda pool: pool.add(new, "new@1"),
        lambda pool: pool.drop("open@0"),
        lambda pool: pool.gc(grace=0, keep=0),
        lambda pool: pool.gc(grace=0, keep=0),
        lambda pool: pool.tables.tidy(always=True),
        lambda pool: pool.objects.put("packs/00/" + "0" * 64, b"put"),
    ]
    for call in calls:
        with contextlib.suppress(BlobStoreError), Pool(shared) as pool:
            call(pool)
    assert contents(private) == before
    with contextlib.suppress(BlobStoreError), Pool(shared) as pool:
        assert {version.name for version in pool.versions()} <= {"open", "new"}  # nothing was read either
        assert b"".join(map(bytes, pool.cat("open@2", "m.safetensors"))) != b""


def test_a_link_is_an_error_that_names_it(shared: Path, private: Path) -> None:
    replace(shared / "packs", private / "packs")
    with Pool(shared) as pool:
        for call in (lambda: pool.gc(grace=0, keep=0), lambda: pool.get("open@0", shared.parent / "out")):
            with pytest.raises(FileAccessError, match=r"shared/packs: this is a link") as caught:
                call()
            assert caught.value.errno == errno.ELOOP


def test_a_link_in_the_place_of_a_new_pack_is_not_written_through(shared: Path, tmp_path: Path) -> None:
    victim = tmp_path / "thesis.txt"
    victim.write_text("mine")
    spool = Objects.spool

    @contextlib.contextmanager
    def meddled(self: Objects, path: str, prefix: str = ".new-") -> Iterator[Path]:
        with spool(self, path, prefix) as spooled:
            if path.startswith("packs"):
                replace(spooled, victim)
            yield spooled

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Objects, "spool", meddled)
        with Pool(shared) as pool, pytest.raises(FileAccessError):
            pool.add(write(tmp_path / "new.safetensors", tensors(20)), "new@1", executor="threads:1")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["../x", "..", "/x", "packs/../../x"])
def test_objects_lie_below_the_pool(shared: Path, tmp_path: Path, name: str) -> None:
    """Names of versions, which are parts of paths, come from tables."""
    objects = Objects(shared)
    before = contents(tmp_path)
    for call in (
        lambda: objects.put(name, b"x"),
        lambda: objects.delete(name),
        lambda: objects.list(name),
        lambda: objects.get(name),
        lambda: objects.read(name, 0, 1),
    ):
        with pytest.raises(BlobStoreError):
            call()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077, 0o027])
def test_files_get_the_umask_which_no_thread_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    before = os.umask(umask)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", lambda _: pytest.fail("the umask is one of the whole process"))
            with Pool(tmp_path / "pool", create=True) as pool:
                pool.add(write(tmp_path / "m.safetensors", tensors()), "m@1", executor="threads:2")
    finally:
        os.umask(before)
    for path in (tmp_path / "pool").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~umask, path


@contextlib.contextmanager
def disk(pool: Path, nbytes: int) -> Iterator[None]:
    """A disk of some bytes, for everything but the logs of the tables."""
    put, place = Objects.put, Objects.place

    def check(path: str, more: int) -> None:
        if more + sum(len(data) for data in contents(pool).values()) > nbytes:
            raise FileAccessError(pool / path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def limited_put(self: Objects, path: str, content: bytes | Path, **options: str) -> None:
        check(path, len(content) if isinstance(content, bytes) else content.stat().st_size)
        put(self, path, content, **options)

    def limited_place(self: Objects, spooled: Path, path: str) -> None:
        check(path, 0)
        place(self, spooled, path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Objects, "put", limited_put)
        patched.setattr(Objects, "place", limited_place)
        yield


@pytest.mark.long
def test_a_full_disk_is_freed_by_dropping(tmp_path: Path) -> None:
    """By `drop` and `gc`, which write, too; what is added leaves the room that they need."""
    random = np.random.default_rng(0)
    place = tmp_path / "pool"
    with Pool(place, create=True) as pool:
        for number in range(3):
            model: Tensors = {"w": random.standard_normal((256, 1024), np.float32)}
            pool.add(write(tmp_path / f"{number}.safetensors", model), f"m@{number}")
        full = sum(map(len, contents(place).values()))
        with disk(place, full):
            for number in range(5):  # something else has taken the last byte
                with pytest.raises(FileAccessError, match="the disk is full|No space left"):
                    pool.add(write(tmp_path / "more.safetensors", {"w": np.full(1 << 18, number)}), f"more@{number}")
            for number in range(2):
                pool.drop(f"m@{number}")
            with pytest.raises(FileAccessError, match="the disk is full|No space left"):
                pool.add(write(tmp_path / "small.safetensors", {"w": np.zeros(9)}), "small@1")
            collected = pool.gc(grace=0, keep=0)
            assert collected.freed > 1 << 20
            pool.add(tmp_path / "small.safetensors", "small@1")
        assert pool.verify() == []
        assert [version.version for version in pool.versions() if version.name == "m"] == ["2"]


@pytest.mark.long
def test_a_pack_that_cannot_be_copied_to_a_full_disk_waits(tmp_path: Path) -> None:
    """Others that nothing needs are freed; nothing is lost."""
    random = np.random.default_rng(0)
    place = tmp_path / "pool"
    small: Tensors = {"w": random.standard_normal((512, 1024), np.float32)}
    large: Tensors = {"w": random.standard_normal((1536, 1024), np.float32)}
    write(tmp_path / "both" / "small.safetensors", small)
    write(tmp_path / "both" / "large.safetensors", large)
    with Pool(place, create=True) as pool:
        pool.add(tmp_path / "both", "both@1")
        pool.add(tmp_path / "both" / "small.safetensors", "small@1")
        other: Tensors = {"w": random.standard_normal((256, 1024), np.float32)}
        pool.add(write(tmp_path / "other.safetensors", other), "other@1")
        packs = len(list((place / "packs").rglob("*")))
        with disk(place, sum(map(len, contents(place).values()))):
            pool.drop("both@1")
            pool.drop("other@1")
            assert pool.gc(grace=0, keep=0).freed > 1 << 19
        assert len(list((place / "packs").rglob("*"))) < packs
        assert pool.verify() == []
        assert pool.gc(grace=0, keep=0).packs + pool.gc(grace=0, keep=0).packs > 0
        assert pool.verify() == []


def test_a_version_that_does_not_fit_is_not_begun(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are compared with free space first, as those of releases are."""
    with Pool(shared) as pool:
        room = SimpleNamespace(f_bavail=10, f_frsize=512, f_blocks=1000)
        with monkeypatch.context() as patched:
            patched.setattr(os, "statvfs", lambda _: room)
            with pytest.raises(FileAccessError, match=r"the version needs \d+ bytes.* and 5120 are available") as error:
                pool.get("open@1", tmp_path / "a" / "b")
        assert error.value.path == tmp_path / "a" / "b" / "m.safetensors"
        assert error.value.errno == errno.ENOSPC
        pool.tables.append("events", [("1" * 32, "add", "huge", "1", 0, json.dumps([described("f", size=1 << 60)]))])
        with pytest.raises(FileAccessError, match="the version needs 1152921504606846976 bytes"):
            pool.get("huge@1", tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


SPELLINGS: dict[str, Callable[[Path], tuple[Path, Path]]] = {
    "as it is": lambda folder: (folder / "pool", folder),
    "through a link": lambda folder: (folder / "pool", folder.parent / "link"),
    "a pool through a link": lambda folder: (folder.parent / "link" / "pool", folder),
    "a pool by a link beside it": lambda folder: (folder / "alias", folder),
    "relative": lambda _: (Path("pool"), Path(".")),  # noqa: PTH201
    "around": lambda folder: (folder / "pool" / ".." / "pool", folder / "sub" / ".."),
}


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_a_pool_is_not_added_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelled: str) -> None:
    folder = tmp_path / "models"
    write(folder / "sub" / "m.safetensors", tensors())
    (folder / "pool").mkdir()
    (folder / "alias").symlink_to("pool")
    (folder / "inside.json").symlink_to("pool/pool.json")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    place, given = SPELLINGS[spelled](folder)
    with Pool(place, create=True) as pool:
        for version in range(3):
            added = pool.add(given, f"m@{version}")
            assert [file.name for file in added.version.files] == ["sub/m.safetensors"]
        for path in (place, folder / "pool", folder / "pool" / "packs", folder / "pool.json", folder / "inside.json"):
            if path.exists():
                with pytest.raises(PoolError, match="this is in the pool"):
                    pool.add(path, "other@1")


def test_no_version_is_written_into_the_pool(shared: Path, tmp_path: Path) -> None:
    """Its files could take the places of those of the pool."""
    folder = tmp_path / "model"
    write(folder / "m.safetensors", tensors())
    (folder / "pool.json").write_text("{}")
    (folder / "shared").mkdir()
    (folder / "shared" / "pool.json").write_text("{}")
    (tmp_path / "link").symlink_to(shared)
    with Pool(shared) as pool:
        pool.add(folder, "m@1")
        before = contents(shared)
        for target in (shared, shared / "packs", tmp_path / "link", tmp_path):
            with pytest.raises(OutputPathError, match="this is in the pool"):
                pool.get("m@1", target)
        assert contents(shared) == before
        pool.get("m@1", tmp_path / "out")
        assert contents(tmp_path / "out") == contents(folder)


@pytest.mark.skipif(os.name == "nt", reason="no file of Windows has such a name")
def test_names_that_only_windows_forbids(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder / "a\\b.safetensors", tensors())
    for name in ("tag:latest", "what?", "dot.", " space ", '<"|*>'):
        (folder / name).write_text(name)
    pool.add(folder, "m@1")
    pool.get("m@1", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)
    np.testing.assert_array_equal(
        pool.open("m@1").numpy("layer.bias"), load_file(folder / "a\\b.safetensors")["layer.bias"]
    )


def test_a_folder_for_temporary_files_with_a_quote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "it's"))
    (tmp_path / "it's").mkdir()
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(write(tmp_path / "m.safetensors", tensors()), "m@1")
        assert pool.verify() == []


@pytest.mark.parametrize(
    "path", [lambda folder: folder / "dangling", lambda folder: folder / ("x" * 5000), lambda folder: folder]
)
def test_inputs_that_cannot_be_read(tmp_path: Path, path: Callable[[Path], Path]) -> None:
    """One error of this library, whatever the system says."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "dangling").symlink_to("nowhere")
    with Pool(tmp_path / "pool", create=True) as pool, pytest.raises(FileAccessError, match="dangling|xxx"):
        pool.add(path(tmp_path / "in"), "m@1")


def test_reading_writes_nothing(shared: Path, tmp_path: Path) -> None:
    """Who may only read a pool can read all of it."""
    before = contents(shared)
    with Pool(shared) as pool:
        assert len(pool.versions()) == 3
        assert pool.verify() == []
        assert pool.stats().versions == 3
        pool.why("open@0", "open@1")
        pool.get("open@1", tmp_path / "out")
        assert b"".join(pool.cat("open@1", "m.safetensors")) == (tmp_path / "out" / "m.safetensors").read_bytes()
        assert list(pool.open("open@1").views())
    assert contents(shared) == before


@pytest.mark.long
def test_more_files_than_may_be_open(tmp_path: Path) -> None:
    """They are added and come back, those of before replaced, with fewer descriptors than there are files."""
    for number in range(300):
        folder = tmp_path / "files" / str(number % 20)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.txt").write_text(str(number))
    code = (
        "import resource, sys; from blobstore.pool import Pool\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "with Pool(sys.argv[1] + '/pool', create=True) as pool:\n"
        "    pool.add(sys.argv[1] + '/files', 'm@1')\n"
        "    for _ in range(2):\n"
        "        pool.get('m@1', sys.argv[1] + '/out')\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "files")
