"""What a pool asks of a bucket, counted, and that the log's copies on this machine keep every promise of tables (P4, P5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deltalake
import numpy as np
import pytest
from safetensors.numpy import load_file

from blobstore.errors import PoolError
from blobstore.pool import Pool
from blobstore.storage.objects import Objects
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


def test_a_damaged_copy_of_an_entry(store: Store, tmp_path: Path) -> None:
    """It is fetched again."""
    add(store, tmp_path, 1)
    with opened(store, tmp_path) as pool:
        pool.versions()
    for copy in (tmp_path / "cache").iterdir():
        if copy.read_bytes().startswith(b"{"):
            copy.write_bytes(b"?" * copy.stat().st_size)
    with opened(store, tmp_path) as pool:
        assert [one.version for one in pool.versions()] == ["1"]


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
