"""What stands behind what a pool reads: each digest, size and range by itself, as the others would find most damage, too."""

import hashlib
import itertools
import json
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.codec.blobs import CHUNK, encode
from blobstore.core.constants import HOLE_LIMIT
from blobstore.errors import IntegrityError, InvalidFileError, PoolError
from blobstore.pool import Pool
from blobstore.pool.bases import KeptBases
from blobstore.pool.contents import Blobs
from blobstore.pool.inputs import BucketFile, files_read_before
from blobstore.pool.packs import Job, Reader, Stored, pack_path, write_pack
from blobstore.pool.scan import scan
from blobstore.storage.objects import Objects
from tests.pool.models import described, tensors, write
from tests.pool.small_store import serving

PACK = b"\1" * 32


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def stored(data: bytes, **other: Any) -> Stored:
    """The row of a content that is whole at the beginning of a pack."""
    row = Stored(sha256(data), len(data), "", "", "raw", None, PACK, 0, len(data), 0)
    return row._replace(**other)


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    (tmp_path / "pool").mkdir()
    return Reader(Objects(tmp_path / "pool"))


def test_bytes_of_another_digest(reader: Reader) -> None:
    """What `Pool.open` gives is what was added, also where no file is restored whose digest would show it."""
    data = bytes(range(100))
    read = {(PACK, 0, 100): memoryview(data)}
    assert reader.read(stored(data), None, read) == data
    with pytest.raises(IntegrityError, match="are damaged"):
        reader.read(stored(data, digest=sha256(b"other")), None, read)


def test_a_small_pack_does_not_take_much_memory(reader: Reader) -> None:
    """Zeros take 1 of some 20,000 bytes; what claims more is refused before there is memory for it."""
    zeros = bytes(1 << 22)
    packed = b"".join(encode(memoryview(zeros), "planes:1"))
    read = {(PACK, 0, len(packed)): memoryview(packed)}
    row = stored(zeros, encoding="planes:1", length=len(packed))
    assert reader.read(row, None, read) == zeros
    with pytest.raises(IntegrityError, match="cannot hold a blob"):
        reader.read(row._replace(size=1 << 40), None, read)


def test_a_base_of_another_size(reader: Reader) -> None:
    """Of a recipe that narrows, chunk by chunk: what it makes has the size that the row says."""
    wide = np.arange(64, dtype="<f4").tobytes()
    base = stored(wide)
    read = {(PACK, 0, 256): memoryview(wide), (PACK, 256, 0): memoryview(b"")}
    narrow = np.frombuffer(wide, "<f4").astype("<f2").tobytes()
    row = stored(narrow, encoding="cast:half", base=base.digest, offset=256, length=0)
    chunks = reader.chunks(row, base, read, KeptBases())
    rooms = memoryview(bytearray(CHUNK)), memoryview(bytearray(CHUNK))
    assert chunks is not None and b"".join(bytes(chunk.make(*rooms)) for chunk in chunks) == narrow
    for size in (126, 130, 256, 0):
        with pytest.raises(IntegrityError, match="a base of another size"):
            reader.chunks(row._replace(size=size), base, read, KeptBases())


def version(pool: Pool, files: list[dict[str, Any]], parts: Sequence[tuple[str, int, int, bytes]]) -> None:
    """A version as whoever writes to the tables may make it."""
    rows = [("9" * 32, "x", "1", file, at, size, "", "", "", "", digest, 0) for file, at, size, digest in parts]
    pool.tables.append("parts", rows)
    pool.tables.append("events", [("9" * 32, "add", "x", "1", 0, json.dumps(files))])


@pytest.fixture
def two(tmp_path: Path) -> tuple[Pool, bytes, bytes]:
    """A pool with two contents of 5,000 bytes."""
    random = np.random.default_rng(0)
    one, other = random.bytes(5000), random.bytes(5000)
    (tmp_path / "one.bin").write_bytes(one)
    (tmp_path / "other.bin").write_bytes(other)
    pool = Pool(tmp_path / "pool", create=True)
    pool.add([tmp_path / "one.bin", tmp_path / "other.bin"], "two@1")
    return pool, one, other


def test_a_file_of_another_digest(two: tuple[Pool, bytes, bytes], tmp_path: Path) -> None:
    """Each of its parts is whole, and all fit: they are those of another file."""
    pool, one, other = two
    file = described("f", one + other)
    version(pool, [file], [("f", 0, 5000, sha256(other)), ("f", 5000, 5000, sha256(one))])
    with pytest.raises(IntegrityError, match="the parts in the pool give"):
        pool.get("x@1", tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(IntegrityError, match="the parts in the pool give"):
        b"".join(pool.cat("x@1", "f"))


@pytest.mark.parametrize(
    ("size", "starts"), [(9000, (0, 4000)), (10_000, (0, -1)), (12_000, (0, 7000 + HOLE_LIMIT)), (9999, (0, 5000))]
)
def test_parts_that_do_not_fit(
    two: tuple[Pool, bytes, bytes], tmp_path: Path, size: int, starts: tuple[int, int]
) -> None:
    """They overlap, leave a hole that is no padding, or stand out."""
    pool, one, other = two
    parts = [("f", starts[0], 5000, sha256(one)), ("f", starts[1], 5000, sha256(other))]
    version(pool, [described("f", one + other, size=size)], parts)
    with pytest.raises((InvalidFileError, PoolError), match="does not fit|wrong values") as caught:
        pool.get("x@1", tmp_path / "out")
    assert not isinstance(caught.value, IntegrityError)


def test_a_base_of_a_base(tmp_path: Path) -> None:
    """It may be a difference itself, but not to a further one: a chain could be as long as its writer likes, or a circle."""
    random = np.random.default_rng(0)
    contents = [random.bytes(5000) for _ in range(4)]
    with Pool(tmp_path / "pool", create=True) as pool:
        for number, data in enumerate(contents):
            (tmp_path / f"{number}.bin").write_bytes(data)
            pool.add(tmp_path / f"{number}.bin", f"m@{number}")
        names = [*Stored._fields, "key", "base_key", "signature"]
        columns = ", ".join(f'"{name}"' for name in names)
        rows = {row[0]: list(row) for row in pool.tables.query(f"SELECT {columns} FROM blobs")}  # noqa: S608
        whole = dict(rows)
        # each is a difference to the next one, and also whole; the row with the fewest bytes is taken
        more = []
        for data, base in itertools.pairwise(contents):
            near = b"".join(encode(memoryview(data), "near:u1:0", memoryview(base)))
            path = tmp_path / "pool" / pack_path(whole[sha256(data)][6])
            offset = path.stat().st_size
            path.write_bytes(path.read_bytes() + near)
            row = list(whole[sha256(data)])
            row[4], row[5], row[7], row[8] = "near:u1:0", sha256(base), offset, len(near)
            row[names.index("base_key")] = int.from_bytes(sha256(base)[:8], "little", signed=True)
            more.append(row)
        pool.tables.delete("blobs", "true")
        pool.tables.append("blobs", [tuple(row) for row in [*more, whole[sha256(contents[3])]]])
        pool.tables.fresh()
        with pytest.raises(PoolError, match="blobs are missing"):
            pool.get("m@0", tmp_path / "out")
        for number in (1, 2, 3):
            restored = pool.get(f"m@{number}", tmp_path / "out", force=True)
            assert restored[0].read_bytes() == contents[number]


def test_a_base_that_is_a_difference_to_a_difference(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows are found."""
    below = stored(b"y" * 100, base=sha256(b"another"), encoding="near:u1:0")
    base = stored(bytes(range(100)), base=below.digest, encoding="near:u1:0")
    row = stored(b"x" * 100, base=base.digest, encoding="near:u1:0")
    found = {one.digest: one for one in (row, base, below)}
    monkeypatch.setattr("blobstore.pool.contents.stored_rows", lambda *_, **__: found)
    blobs = Blobs(pool.objects, pool.tables, [row.digest])
    with pytest.raises(PoolError, match="is a difference to a difference"):
        blobs.read(row.digest)


def test_a_row_that_asks_for_more_than_its_object_has() -> None:
    """There is memory for what the store has, not for what a table says."""
    data = bytes(range(200)) * 50_000  # more than one request
    with serving() as store:
        store.objects["bucket/p"] = data
        objects = Objects("s3://bucket", store.options())
        for start, length in ((100, 9_000_000), (100, 1 << 50), (len(data), 10), (len(data) + 5, 1 << 50), (0, 0)):
            tracemalloc.start()
            found = objects.read("p", start, length)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert found is not None and bytes(found) == data[start : start + length]
            assert peak < 4 * len(data)  # the store is in this process, too
        assert objects.read("none", 0, 10) is objects.read("none", 0, 1 << 50) is None


def test_a_pack_that_is_shorter_than_its_row(reader: Reader) -> None:
    data = bytes(range(100))
    with pytest.raises(IntegrityError, match="expected 100 bytes at 0, found 90"):
        reader.stored(stored(data), memoryview(data)[:90])


@pytest.mark.parametrize(
    ("parts", "size", "whole"),
    [
        ([(0, 100), (100, 50)], 150, True),
        ([(0, 100), (160, 50)], 260, True),  # padding
        ([(0, 100)], 150 + HOLE_LIMIT, False),
        ([(100 + HOLE_LIMIT, 50)], 150 + HOLE_LIMIT, False),
        ([(0, 100), (50, 100)], 150, False),
        ([(0, 100), (100, 51)], 150, False),
        ([], 12, False),
        ([], 0, True),
    ],
)
def test_a_file_whose_parts_were_not_all_seen_is_read_again(
    pool: Pool, tmp_path: Path, parts: list[tuple[int, int]], size: int, whole: bool
) -> None:
    """Those of a version that appears while others look may be seen later than its event."""
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    pool.add(tmp_path / "a.bin", "a@1")
    digest = sha256(bytes(range(100)))
    file = described("f", size=size, url="s3://b/f", etag="e")
    version(pool, [file], [("f", at, nbytes, digest) for at, nbytes in parts])
    pool.tables.fresh()
    wanted = BucketFile(Objects("s3://b"), "f", "f", size, "e")
    assert [file.name for file in files_read_before(pool.tables, [wanted])] == (["f"] if whole else [])


def test_what_is_stored_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that is wrong, or memory that is damaged, ends an add."""
    path = write(tmp_path / "m.safetensors", tensors())
    (tmp_path / "pool").mkdir()
    jobs = list(map(Job, scan(str(path), "m.safetensors").parts))
    assert len(write_pack(str(tmp_path / "pool"), {}, jobs)) == len(jobs)
    packs = sys.modules["blobstore.pool.packs"]
    monkeypatch.setattr(
        packs, "encode", lambda data, encoding, base: encode(memoryview(bytes(len(data))), encoding, base)
    )
    with pytest.raises(Exception, match="changed while it was added"):
        write_pack(str(tmp_path / "pool"), {}, jobs)
