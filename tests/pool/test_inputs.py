"""Versions of objects in a bucket: only what no version has read before is fetched (P1, P3)."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.errors import DataChangedError, PoolError, TransferError
from blobstore.pool import Pool
from blobstore.pool.inputs import bucket_files, fetched
from tests.pool import places
from tests.pool.gateway import Gateway
from tests.pool.models import contents, described, tensors, tuned, write
from tests.pool.places import Place
from tests.pool.proxy import Proxy

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(gateway: Gateway, tmp_path: Path) -> Place:
    """Where models lie, `base` and `other`, as their teams keep them."""
    hub = places.bucket(gateway, tmp_path / "cache")
    for number, name in enumerate(("base/model.safetensors", "base/parts/head.safetensors", "other.safetensors")):
        hub.write(name, write(tmp_path / "models" / name, tensors(number)).read_bytes())
    hub.write("base/empty.txt", b"")
    return hub


@pytest.fixture
def pool(hub: Place, proxy: Proxy, tmp_path: Path) -> Iterator[Pool]:
    """A pool in a folder, with the options of the hub."""
    with Pool(tmp_path / "pool", create=True, **{**hub.options, "aws_endpoint": proxy.url}) as made:
        yield made


def read(proxy: Proxy) -> list[str]:
    """The objects whose bytes a client got."""
    return sorted({one.path.split("/pool/")[1] for one in proxy.log if one.method == "GET" and "/pool/" in one.path})


BASE = ["base/empty.txt", "base/model.safetensors", "base/parts/head.safetensors"]


def test_only_new_objects_are_read(pool: Pool, hub: Place, proxy: Proxy, tmp_path: Path) -> None:
    proxy.begin()
    first = pool.add(f"{hub.url}/base", "m@1")
    assert read(proxy) == BASE
    assert first.version.size == first.bytes == sum(len(hub.read(path)) for path in BASE)

    proxy.begin()
    again = pool.add(f"{hub.url}/base", "m@2")
    assert read(proxy) == []
    assert (again.new, again.version.files) == (0, first.version.files)

    changed = write(tmp_path / "changed.safetensors", tuned(tensors(1), 1)).read_bytes()
    hub.write("base/parts/head.safetensors", changed)
    proxy.begin()
    third = pool.add(f"{hub.url}/base", "n@1")
    assert read(proxy) == ["base/parts/head.safetensors"]
    sha256 = {file.name: file.sha256 for file in third.version.files}
    assert sha256["parts/head.safetensors"] == hashlib.sha256(changed).hexdigest()

    pool.drop("m@1")
    proxy.begin()
    pool.get("m@2", tmp_path / "out")
    pool.get("n@1", tmp_path / "new")
    assert proxy.log == []
    assert contents(tmp_path / "out") == {
        path.removeprefix("base/"): (tmp_path / "models" / path).read_bytes() for path in BASE[1:]
    } | {"empty.txt": b""}
    assert contents(tmp_path / "new") == contents(tmp_path / "out") | {"parts/head.safetensors": changed}
    assert pool.open("n@1")["parts/head.safetensors:layer.bias"].shape == (96,)
    assert pool.verify() == []


def test_what_was_collected_is_read_again(pool: Pool, hub: Place, proxy: Proxy, tmp_path: Path) -> None:
    pool.add(f"{hub.url}/base", "m@1")
    pool.drop("m@1")
    proxy.begin()
    pool.add(f"{hub.url}/base", "m@2")
    assert read(proxy) == BASE  # no version that is there has read it
    pool.drop("m@2")
    pool.gc(grace=0, keep=0)
    pool.add(f"{hub.url}/base", "m@3")
    pool.get("m@3", tmp_path / "out")
    assert pool.verify() == []


def test_wrong_inputs(pool: Pool, hub: Place, proxy: Proxy, tmp_path: Path) -> None:
    twin = write(tmp_path / "other.safetensors", tensors(7))
    pool.add(twin, "there@1")
    for given, reference, message in (
        (f"{hub.url}/nothing", "m@1", "there is no such object"),
        (f"{hub.url}/base/", "there@1", "in the pool already"),
        ([twin, f"{hub.url}/other.safetensors"], "m@1", "is called other.safetensors in the version, too"),
        ("s3://", "m@1", "no URL of a pool"),
        ("ftp://example.org/a", "m@1", "no URL of a pool"),
    ):
        proxy.begin()
        with pytest.raises(PoolError, match=message):
            pool.add(given, reference)
        assert read(proxy) == []
    with pytest.raises(TransferError, match="there is no such bucket"):
        pool.add("s3://no-such-bucket/base", "m@1")
    assert [str(version.name) for version in pool.versions()] == ["there"]


def test_an_object_that_is_replaced_meanwhile(hub: Place) -> None:
    [file] = bucket_files(f"{hub.url}/other.safetensors", hub.options)
    hub.write("other.safetensors", b"new")
    with pytest.raises(DataChangedError, match=r"other\.safetensors: the object was replaced"), fetched([file], None):
        pass
    with pytest.raises(DataChangedError, match="expected"), fetched([replace(file, etag=None)], None):
        pass
    hub.remove("other.safetensors")
    with pytest.raises(DataChangedError, match="the object was replaced"), fetched([file], None):
        pass


def test_objects_beside_files(pool: Pool, hub: Place, tmp_path: Path) -> None:
    """Also one that is given twice."""
    local = write(tmp_path / "local.safetensors", tensors(5))
    added = pool.add([local, f"{hub.url}/other.safetensors", f"{hub.url}/other.safetensors", hub.url], "m@1")
    assert sorted(name for name, _, _ in added.version.files) == [*BASE, "local.safetensors", "other.safetensors"]
    pool.get("m@1", tmp_path / "out")
    assert (tmp_path / "out" / "other.safetensors").read_bytes() == hub.read("other.safetensors")


@pytest.mark.parametrize("size", [70_000, 12])
def test_a_version_whose_parts_were_not_seen_yet_is_not_taken_over(
    pool: Pool, hub: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Another add may appear between a look at the parts and one at the events."""
    hub.write("one.bin", bytes(range(256)) * 1000 if size > 256 else b"twelve bytes")
    fresh, done = pool.tables.fresh, []

    def late(*tables: str) -> None:
        fresh(*(tables or ("blobs", "parts")))
        if not done and not tables:
            done.append(True)
            with Pool(pool.url, **pool.objects.options) as other:
                other.add(f"{hub.url}/one.bin", "other@1")
        if not tables:
            fresh("events", "marks")

    monkeypatch.setattr(pool.tables, "fresh", late)
    pool.add(f"{hub.url}/one.bin", "m@1")
    monkeypatch.undo()
    assert done
    pool.get("m@1", tmp_path / "out")
    assert (tmp_path / "out" / "one.bin").read_bytes() == hub.read("one.bin")


@pytest.mark.parametrize(
    "files",
    [
        'no JSON, with an "etag"',
        '{"etag": 1}',
        json.dumps([described("x", url=[1], etag="e")]),
        json.dumps([described("x", size=5.0, url="u", etag="e")]),
        json.dumps([described("x", sha256="0", url="u", etag="e")]),
        json.dumps([described("x", blake3="0", url="u", etag="e")]),
        '[{"size": 5, "url": "u", "etag": "e"}]',
    ],
)
def test_events_that_describe_no_files(pool: Pool, hub: Place, files: str) -> None:
    pool.tables.append("events", [("0" * 32, "add", "wrong", "1", 0, files)])
    with pytest.raises(PoolError, match="an event of the pool"):
        pool.add(f"{hub.url}/base", "m@1")
