"""What a store has to keep is tried before a pool is made or changed; a store that breaks it is refused by name (P6)."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.errors import BlobStoreError, DataChangedError, FileAccessError, PoolError, TransferError
from blobstore.pool import Pool
from blobstore.storage.objects import Objects
from tests.pool.models import tensors, write
from tests.pool.small_store import Store, serving

URL = "s3://bucket/some/pool"


def opened(store: Store, folder: Path, *, create: bool = False) -> Pool:
    return Pool(URL, create=create, cache=folder / "cache", **store.options())


@pytest.mark.parametrize(
    ("broken", "said"), [("conditions", "412 or 409"), ("ranges", "bytes 3 to 7"), ("lists", "list")]
)
def test_no_pool_is_made_in_a_store_that_breaks_a_promise(tmp_path: Path, broken: str, said: str) -> None:
    """And nothing is left there."""
    with serving(broken) as store:
        with pytest.raises(PoolError, match=said) as raised:
            opened(store, tmp_path, create=True)
        assert URL in str(raised.value) and "expected" in str(raised.value) and "found" in str(raised.value)
        assert store.objects == {}


CHANGES: dict[str, Callable[[Pool, Path], object]] = {
    "add": lambda pool, path: pool.add(path, "m@2"),
    "drop": lambda pool, path: pool.drop("m@1"),
    "gc": lambda pool, path: pool.gc(grace=0, keep=0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_pool_is_not_changed_through_a_store_that_ignores_conditions(tmp_path: Path, change: str) -> None:
    """Such as a proxy in front of the one where it was made. Reading goes on."""
    path, other = write(tmp_path / "a.safetensors", tensors()), write(tmp_path / "b.safetensors", tensors(1))
    with serving() as store:
        with opened(store, tmp_path, create=True) as pool:
            pool.add(path, "m@1")
            pool.add(path, "unused@1")
            pool.drop("unused@1")
            pool.tables.append("marks", [(None, b"p", 0)])  # so that a collection has something to do
            pool.tables.append("parts", [("i", "n", "v", "", 0, 0, "", "", "", "", b"d", 0)])
        store.broken.add("conditions")
        before = dict(store.objects)
        with opened(store, tmp_path) as pool:
            with pytest.raises(PoolError, match=f"{URL}/pool.json.*412 or 409"):
                CHANGES[change](pool, other)
            assert store.objects == before
            (got,) = pool.get("m@1", tmp_path / "out")
            assert got.read_bytes() == path.read_bytes()


def test_a_store_is_tried_once(tmp_path: Path) -> None:
    """By whoever changes something, at the first change."""
    paths = [write(tmp_path / f"{seed}.safetensors", tensors(seed)) for seed in range(2)]
    with serving() as store:
        opened(store, tmp_path, create=True).close()
        before = set(store.objects)
        store.log.clear()
        with opened(store, tmp_path) as pool:
            assert pool.versions() == []
            tried = ("PUT", "bucket/some/pool/pool.json")
            assert store.log.count(tried) == 0
            for number, path in enumerate(paths):
                pool.add(path, f"m@{number}")
            assert store.log.count(tried) == 1
        assert {name.split("/")[3] for name in set(store.objects) - before} == {"packs", "tables"}


def test_who_may_only_read_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", tensors())
    with serving() as store:
        with opened(store, tmp_path, create=True) as pool:
            pool.add(path, "m@1")
        store.broken.add("writes")
        with opened(store, tmp_path) as pool:
            assert pool.verify() == []
            with pytest.raises(BlobStoreError, match="403"):
                pool.drop("m@1")


def test_two_make_a_pool_at_once(tmp_path: Path) -> None:
    with serving() as store, ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda number: opened(store, tmp_path / str(number), create=True), range(2)))
        for pool in made:
            assert pool.verify() == []
            pool.close()


def test_a_folder_where_links_replace_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", lambda source, target: None)
    with pytest.raises(PoolError, match=f"{tmp_path}/pool/packs.*expected that a conditional write"):
        Pool(tmp_path / "pool", create=True)
    assert [path for path in (tmp_path / "pool").rglob("*") if path.is_file()] == []


def test_a_folder_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.safetensors", tensors())
    Pool(tmp_path / "pool", create=True).close()

    def refused(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with Pool(tmp_path / "pool") as pool, pytest.raises(FileAccessError, match=r"pool\.json.*hard links"):
        pool.add(path, "m@1")


def test_a_store_that_refuses_its_own_tag_is_named(tmp_path: Path) -> None:
    """And is not taken for one whose object was replaced."""
    with serving("tags") as store:
        store.objects["bucket/a"] = b"a"
        bucket = Objects("s3://bucket", store.options())
        (entry,) = bucket.list("")
        with pytest.raises(TransferError, match="s3://bucket/a: the store refuses its own ETag"):
            list(bucket.stream(entry.path, entry.etag))
        store.broken.clear()
        assert list(bucket.stream(entry.path, entry.etag)) == [b"a"]
        store.objects["bucket/a"] = b"b"
        with pytest.raises(DataChangedError, match="replaced"):
            list(bucket.stream(entry.path, entry.etag))
