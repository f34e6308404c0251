"""What a pool asks of a bucket, counted, and that the log's copies on this machine keep every promise of tables (P4, P5)."""

import contextlib
import errno
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import numpy as np
import pytest
from safetensors.numpy import load_file

from blobstore.errors import BlobStoreError, PoolError, TransferError
from blobstore.pool import Pool, log
from blobstore.pool.cache import FileCache
from blobstore.storage.objects import Objects
from tests.helpers.between import between
from tests.pool.models import write
from tests.pool.small_store import Store, serving

URL = "s3://bucket/some/pool"
TABLES = ("events", "parts", "blobs", "marks")


@pytest.fixture
def store() -> Iterator[Store]:
    with serving() as one:
        yield one


def opened(store: Store, folder: Path, cache: str = "cache") -> Pool:
    return Pool(URL, create=True, cache=folder / cache, **store.options())


def tuned(number: int) -> dict[str, np.ndarray]:
    """One of ten models of 160 KB, of which half of the values move a little each time."""
    rng = np.random.default_rng(number % 10)
    moved = np.random.default_rng(number)
    return {
        f"layers.{i}.weight": (
            rng.standard_normal((64, 32)).astype(np.float16).view(np.uint16) + moved.integers(0, 2, (64, 32), np.uint16)
        ).view(np.float16)
        for i in range(40)
    }


def add(store: Store, folder: Path, number: int, cache: str = "cache") -> None:
    path = write(folder / f"{number}.safetensors", tuned(number))
    with opened(store, folder, cache) as pool:
        pool.add(path, f"m{number % 10}@{number}", executor="threads:1")


def requests(store: Store, work: Callable[[], object]) -> int:
    """How many requests some work takes."""
    store.log.clear()
    work()
    return len(store.log)


@pytest.mark.long
def test_requests_do_not_grow_with_versions(store: Store, tmp_path: Path) -> None:
    """Also when small files of the tables are made one, and at checkpoints."""

    def listed() -> None:
        with opened(store, tmp_path) as pool:
            assert len(pool.versions()) == number

    def one_tensor() -> None:
        with opened(store, tmp_path) as pool:
            found = pool.open(f"m{number % 10}@{number}")["layers.3.weight"]
            assert np.asarray(found).tobytes() == tuned(number)["layers.3.weight"].tobytes()

    opened(store, tmp_path).close()
    taken: dict[int, int] = {}
    for number in range(1, 50):
        taken[number] = requests(store, lambda number=number: add(store, tmp_path, number))  # type: ignore[misc]
        if number in {1, 24, 49}:
            assert requests(store, listed) <= 5
            one_tensor()
            assert requests(store, one_tensor) <= 12
    assert max(taken.values()) <= 40, taken


@pytest.mark.long
def test_other_engines_read_the_tables(store: Store, tmp_path: Path) -> None:
    """They have as many rows as the pool sees, with checkpoints, after small files were made one, and after a collection."""
    for number in range(20):
        add(store, tmp_path, number)
    with opened(store, tmp_path) as pool:
        pool.drop("m1@1")
        pool.gc(grace=0, keep=0)
    add(store, tmp_path, 21)
    with opened(store, tmp_path) as pool:
        for table in TABLES:
            theirs = deltalake.DeltaTable(f"{URL}/tables/{table}", storage_options=store.options())
            engine = deltalake.QueryBuilder().register("rows", theirs)
            counted = engine.execute("SELECT count(*) AS n FROM rows").read_all()["n"].to_pylist()
            assert pool.tables.query(f"SELECT count(*) FROM {table}") == [tuple(counted)]  # noqa: S608
        assert any(name.endswith(".checkpoint.parquet") for name in store.objects)
        assert pool.verify() == []
        got = pool.get("m2@12", tmp_path / "got")
    assert {key: value.tobytes() for key, value in load_file(got[0]).items()} == {
        key: value.tobytes() for key, value in tuned(12).items()
    }


@pytest.mark.long
def test_many_writers_with_and_without_a_cache_of_their_own(store: Store, tmp_path: Path) -> None:
    """Each version is there, once, also while files of the tables are made one."""
    opened(store, tmp_path).close()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: add(store, tmp_path, number, f"cache{number % 2}"), range(32)))
    with opened(store, tmp_path, "another") as pool:
        assert sorted(one.version for one in pool.versions()) == sorted(map(str, range(32)))
        twice = pool.tables.query('SELECT id, file, "offset", digest FROM parts GROUP BY ALL HAVING count(*) > 1')
        assert twice == []
        assert pool.verify() == []


def test_one_of_several_adds_a_version(store: Store, tmp_path: Path) -> None:
    """Though none of them looked again before its commit."""
    path = write(tmp_path / "a.safetensors", tuned(1))
    opened(store, tmp_path).close()

    def one(number: int) -> str:
        with opened(store, tmp_path, f"cache{number}") as pool:
            try:
                pool.add(path, "m@1", executor="threads:1")
            except PoolError as error:
                return str(error)
            return "added"

    with ThreadPoolExecutor(3) as threads:
        ends = Counter("added" if end == "added" else "there" for end in threads.map(one, range(3)))
    assert ends == {"added": 1, "there": 2}


def test_another_pool_at_the_same_place(store: Store, tmp_path: Path) -> None:
    """Copies of the entries of the first one do not mean anything for it."""
    add(store, tmp_path, 1)
    store.objects.clear()
    add(store, tmp_path, 2)
    with opened(store, tmp_path) as pool:
        assert [one.version for one in pool.versions()] == ["2"]
        assert pool.verify() == []


def test_copies_of_tables(store: Store, tmp_path: Path) -> None:
    """A second process reads no file of a table again; damaged and removed copies are replaced."""
    add(store, tmp_path, 1)
    with opened(store, tmp_path) as pool:
        assert pool.verify() == []
    store.log.clear()
    with opened(store, tmp_path) as pool:
        assert pool.verify() == []
    assert not any(name.endswith(".parquet") for _, name in store.log)
    for damage in (lambda copy: copy.unlink(), lambda copy: copy.write_bytes(bytes(copy.stat().st_size))):
        with opened(store, tmp_path) as pool:
            assert pool.verify() == []
            for copy in list((tmp_path / "cache").iterdir()):
                damage(copy)
            assert [one.version for one in pool.versions()] == ["1"]
        with opened(store, tmp_path) as pool:
            assert pool.verify() == []


def test_only_damaged_copies_are_made_anew(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes may be reading the rest. What cannot be read is damaged, too."""
    add(store, tmp_path, 1)
    with opened(store, tmp_path) as pool:
        assert pool.verify() == []
        tables = [copy for copy in (tmp_path / "cache").iterdir() if copy.read_bytes().startswith(b"PAR1")]
        [events] = [copy for copy in tables if "kind" in duckdb.read_parquet(str(copy)).columns]
        unreadable = next(copy for copy in tables if copy != events)
        before = {copy: copy.stat().st_ino for copy in tables}
        events.write_bytes(bytes(events.stat().st_size))
        real = Path.read_bytes

        def read_bytes(path: Path) -> bytes:
            if path == unreadable and path.stat().st_ino == before[path]:
                raise OSError(errno.EIO, "Input/output error", str(path))
            return real(path)

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        assert [one.version for one in pool.versions()] == ["1"]
    made = {copy for copy in tables if copy.stat().st_ino != before[copy]}
    assert len(tables) > 2 and made == {events, unreadable}


def test_damaged_files_of_tables_are_one_error(store: Store, tmp_path: Path) -> None:
    add(store, tmp_path, 1)
    for name, content in list(store.objects.items()):
        if name.endswith(".parquet"):
            store.objects[name] = bytes(len(content))
    with pytest.raises(PoolError, match="it is damaged") as caught, opened(store, tmp_path, "other") as pool:
        pool.versions()
    assert "\n" not in str(caught.value)


def test_a_commit_whose_answer_was_lost_is_there_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store says then that there is an entry, which is this one."""
    real = Objects.makes

    def lost(objects: Objects, path: str, content: bytes, **options: str) -> str | None:
        made = real(objects, path, content, **options)
        return None if "_delta_log" in path else made

    monkeypatch.setattr(Objects, "makes", lost)
    add(store, tmp_path, 1)
    with opened(store, tmp_path) as pool:
        assert pool.tables.query("SELECT count(*) FROM events") == [(1,)]


def add_small(store: Store, folder: Path, number: int, cache: str = "cache") -> None:
    with (folder / "small.bin").open("wb") as file:
        file.write(number.to_bytes(8, "little"))
    with opened(store, folder, cache) as pool:
        pool.add(folder / "small.bin", f"small@{number}", executor="threads:1")


def fail(error: Exception) -> None:
    raise error


REQUESTS = (Objects, "get"), (Objects, "list")
LOCAL = (
    *((Path, "write_bytes"), (shutil, "copyfile"), (FileCache, "_write"), (Path, "replace")),
    *((deltalake.DeltaTable, "update_incremental"), (deltalake.DeltaTable, "create_checkpoint")),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("targets", "error", "behind"),
    [(REQUESTS, TransferError("refused"), 3), (LOCAL, OSError(28, "full"), 1)],
    ids=["requests", "local"],
)
def test_a_look_that_failed_hides_nothing_from_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: Any, error: Exception, behind: int
) -> None:
    """Whatever fails of it, of few commits that are followed, and of many after which a checkpoint is nearer."""
    monkeypatch.setattr(log, "_EACH", 1)
    added = 0
    for at in itertools.count():
        with opened(store, tmp_path, "one") as pool:
            pool.versions()
            for _ in range(behind):
                added += 1
                add_small(store, tmp_path, added, "other")
            with between(targets, at, lambda: fail(error)) as calls, contextlib.suppress(BlobStoreError):
                assert len(pool.versions()) == added
            assert len(pool.versions()) == added
        if len(calls) <= at:
            break


@pytest.mark.long
def test_adding_says_whether_the_version_is_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if this machine has no room for a copy of what was just made."""
    monkeypatch.setattr(log, "_EACH", 2)
    opened(store, tmp_path).close()
    for at in itertools.count():
        with between(LOCAL, at, lambda: fail(OSError(28, "full"))) as calls:
            try:
                add_small(store, tmp_path, at)
            except BlobStoreError as error:
                is_there, is_known = False, "not known" not in str(error)
            else:
                is_there = is_known = True
        with opened(store, tmp_path, "other") as pool:
            found = any(one.version == str(at) for one in pool.versions())
            assert found == is_there or not is_known, (at, calls)
        if len(calls) <= at:
            assert is_there
            break


def test_another_pool_at_the_same_place_while_one_is_open(store: Store, tmp_path: Path) -> None:
    """Nothing is read from what was there, and nothing is written as if it were still there."""
    add(store, tmp_path, 1)
    for others in (1, 2):
        with opened(store, tmp_path) as pool:
            assert len(pool.versions()) == 1
            store.objects.clear()
            for number in range(others):
                add(store, tmp_path, 2 + number, "other")
            there = dict(store.objects)
            for work in (pool.versions, pool.gc, lambda: pool.drop("m1@1"), lambda: add_to(pool, tmp_path)):
                with pytest.raises(PoolError, match="another table by now"):
                    work()
            assert store.objects == there
        store.objects.clear()
        add(store, tmp_path, 1)


def add_to(pool: Pool, folder: Path) -> None:
    pool.add(write(folder / "again.safetensors", tuned(7)), "again@1")


def lose_rows(cache: Path, folder: Path) -> int:
    """Let copies of files of tables lose their rows and keep their bytes, as a damaged disk may; how many did."""
    lost = 0
    for copy in cache.iterdir():
        content = copy.read_bytes()
        if not content.startswith(b"PAR1") or "add" in (rows := duckdb.read_parquet(str(copy))).columns:
            continue
        rows.filter("false").write_parquet(str(folder / "empty.parquet"), compression="zstd")
        empty = (folder / "empty.parquet").read_bytes()
        if len(empty) <= len(content):
            copy.write_bytes(empty[:4] + bytes(len(content) - len(empty)) + empty[4:])
            lost += 1
    return lost


@pytest.mark.long
def test_damaged_copies_lose_nothing(store: Store, tmp_path: Path) -> None:
    """Neither do collections free what their rows would name, nor are they what files of tables are made one of."""
    opened(store, tmp_path).close()
    for number in range(16):
        add_small(store, tmp_path, number)
    before = dict(store.objects)
    for work in (lambda pool: [pool.gc(grace=0, keep=0) for _ in "12"], lambda pool: add_to(pool, tmp_path)):
        store.objects.clear()
        store.objects.update(before)
        with opened(store, tmp_path) as pool:
            assert pool.verify() == []
        assert lose_rows(tmp_path / "cache", tmp_path) > 16
        with opened(store, tmp_path) as pool:
            work(pool)
        with opened(store, tmp_path, "sound") as pool:
            assert {str(number) for number in range(16)} <= {one.version for one in pool.versions()}
            assert pool.verify() == []
