"""Any version of any model goes in and comes out to the bit, and each content is stored once (P1, P2)."""

import hashlib
import json
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import blobstore
from blobstore.errors import ClosedError, DataChangedError, FileAccessError, IntegrityError, OutputPathError, PoolError
from blobstore.pool import Pool
from blobstore.pool.bases import KeptBases
from blobstore.pool.packs import pack_path
from tests.helpers import models
from tests.pool.models import contents, described, halves, tensors, tuned, write
from tests.pool.places import Place
from tests.pool.rows import change_rows


@pytest.fixture
def pool(where: Place) -> Pool:
    return where.open(create=True)


@pytest.mark.way
def test_files_of_all_kinds_come_back(pool: Pool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write(model / "a" / "model.safetensors", tensors())
    blobstore.save_file(tensors(1), model / "model.ptd")
    (model / "config.json").write_text('{"layers": 1}')
    (model / "empty.txt").touch()
    (model / "zeros.bin").write_bytes(bytes(3 << 20))
    (model / "large.bin").write_bytes(os.urandom(9 << 20))
    write(model / "large.safetensors", {"large": np.random.default_rng(0).standard_normal((3, 1 << 18), np.float32)})
    (model / "cut.safetensors").write_bytes((model / "a" / "model.safetensors").read_bytes()[:-100])
    (model / "cut.ptd").write_bytes((model / "model.ptd").read_bytes()[:-1])
    pool.add(model, "team/model@1")
    paths = pool.get("team/model@1", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(model)
    assert sorted(path.relative_to(tmp_path / "out").as_posix() for path in paths) == sorted(contents(model))
    for name in contents(model):
        pieces = list(pool.cat("team/model@1", name))  # which may be kept
        assert b"".join(pieces) == (model / name).read_bytes()
    assert pool.verify() == []


@pytest.mark.long
def test_programs_come_back(pool: Pool, tmp_path: Path) -> None:
    """With their weights in other files, and by themselves."""
    for name, lowered in (("portable", models.conv(delegated=False)), ("delegated", models.decoder())):
        program = lowered.write(tmp_path, name)
        pool.add(program, f"{name}@1")
        (path,) = pool.get(f"{name}@1", tmp_path / "out")
        assert path.read_bytes() == program.read_bytes()


def test_equal_contents_are_stored_once_under_any_name(pool: Pool, where: Place, tmp_path: Path) -> None:
    model = tensors()
    first = pool.add(write(tmp_path / "a.safetensors", model), "one@1")
    before = where.stored_bytes()
    renamed = {f"encoder.{name}": values for name, values in model.items()}
    second = pool.add(write(tmp_path / "b.safetensors", renamed), "other/thing@1")
    assert first.new_bytes > sum(values.nbytes for values in model.values())
    assert second.new == 1  # the header
    assert where.stored_bytes() - before < 1000
    opened = pool.open("other/thing@1")
    assert set(opened) == set(renamed)
    for name, values in renamed.items():
        np.testing.assert_array_equal(opened.numpy(name), values)


@pytest.mark.long
def test_a_fine_tune_takes_what_it_changed(pool: Pool, where: Place, tmp_path: Path) -> None:
    """Against the nearest blob of any name, one step deep."""
    base = halves(tensors())
    pool.add(write(tmp_path / "other.safetensors", halves(tensors(9))), "unrelated@1")
    pool.add(write(tmp_path / "base.safetensors", base), "base@1")
    before = where.stored_bytes()
    for number in range(1, 5):
        renamed = {f"x.{name}": values for name, values in tuned(base, number).items()}
        added = pool.add(write(tmp_path / f"{number}.safetensors", renamed), f"tuned/{number}@1")
        assert added.stored_bytes < 0.12 * added.bytes
    assert where.stored_bytes() - before < 0.5 * 4 * added.bytes
    encodings = pool.stats().encodings
    assert any(encoding.startswith("near:f2") for encoding in encodings)
    for number in range(1, 5):
        (path,) = pool.get(f"tuned/{number}@1", tmp_path / "out")
        assert path.read_bytes() == (tmp_path / f"{number}.safetensors").read_bytes()
    shared = pool.why("base@1", "tuned/2@1")
    assert shared.near > 0.8 * shared.second
    assert pool.why("unrelated@1", "tuned/2@1").near == 0


@pytest.mark.long
@pytest.mark.parametrize(("executor", "ahead"), [("threads:1", 0), ("threads:2", 20_000_000)])
def test_reading_takes_the_memory_of_some_chunks(executor: str, ahead: int, tmp_path: Path) -> None:
    """Of a tensor that is many of them: whole, as a difference, and in a narrower type. Threads hold some more."""
    large = {"large": np.random.default_rng(0).standard_normal((3, 1 << 20), np.float32)}
    versions = {"0": large, "1": tuned(large, 1), "2": halves(large)}
    with Pool(tmp_path / "pool", create=True) as pool:
        for version, model in versions.items():
            pool.add(write(tmp_path / version / "model.safetensors", model), f"model@{version}")
        pool.get("model@0", tmp_path / "warm")
        pool._bases = KeptBases(budget=0)
        for version in versions:
            added = (tmp_path / version / "model.safetensors").read_bytes()
            tracemalloc.start()
            pool.get(f"model@{version}", tmp_path / "out", force=True, executor=executor)
            assert pool.verify(f"model@{version}") == []
            assert hashlib.sha256(added).digest() == _digest(pool.cat(f"model@{version}", "model.safetensors"))
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < large["large"].nbytes // 2 + ahead
            assert (tmp_path / "out" / "model.safetensors").read_bytes() == added


def _digest(pieces: Iterator[memoryview]) -> bytes:
    hasher = hashlib.sha256()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrower_type_takes_nothing(pool: Pool, tmp_path: Path, dtype: str) -> None:
    import ml_dtypes
    import torch

    model = {name: torch.from_numpy(values) for name, values in tensors().items()}
    model["layer.weight"][0, :4] = torch.tensor([float("inf"), -0.0, 1e-42, 65519.0])
    narrow = {n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in model.items()}
    blobstore.save_file(model, tmp_path / "wide.ptd")
    blobstore.save_file(narrow, tmp_path / "narrow.ptd")
    pool.add(tmp_path / "wide.ptd", "m@32")
    added = pool.add(tmp_path / "narrow.ptd", "m@16")
    assert added.stored_bytes < 1500  # header, manifest, and a bias that is too small
    opened = pool.open("m@16")
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    np.testing.assert_array_equal(
        opened.numpy("layer.weight").view(np.uint16), model["layer.weight"].numpy().astype(kind).view(np.uint16)
    )
    (path,) = pool.get("m@16", tmp_path / "out")
    assert path.read_bytes() == (tmp_path / "narrow.ptd").read_bytes()


def test_a_version_does_not_change(pool: Pool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", tensors())
    pool.add(path, "m@1")
    with pytest.raises(PoolError, match=r"m@1 is in the pool already"):
        pool.add(path, "m@1")
    pool.drop("m@1")
    with pytest.raises(PoolError, match="there is no m in the pool"):
        pool.open("m@1")
    with pytest.raises(PoolError, match="there is no m in the pool"):
        pool.drop("m@1")
    pool.add(path, "m@1")
    assert [(one.name, one.version) for one in pool.versions()] == [("m", "1")]
    with pytest.raises(PoolError, match=r"there is no m@2 in the pool; of m there are 1"):
        pool.get("m@2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "reference", ["", "m", "@1", "m@", "m@1@2", "../m@1", "m//n@1", "m@a/b", "m@1\n", "é@1", f"{'m' * 101}@1"]
)
def test_references_that_name_no_version(pool: Pool, tmp_path: Path, reference: str) -> None:
    path = write(tmp_path / "a.safetensors", tensors())
    for call in (lambda: pool.add(path, reference), lambda: pool.open(reference), lambda: pool.drop(reference)):
        with pytest.raises(PoolError, match="expected NAME@VERSION"):
            call()


def test_inputs_that_cannot_be_a_version(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="no such file"):
        pool.add(tmp_path / "missing", "m@1")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(PoolError, match="there are no files"):
        pool.add(tmp_path / "nothing", "m@1")
    for folder in ("a", "b"):
        write(tmp_path / folder / "x.safetensors", tensors())
    with pytest.raises(PoolError, match=r"called x\.safetensors, too"):
        pool.add([tmp_path / "a" / "x.safetensors", tmp_path / "b" / "x.safetensors"], "m@1")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a\nb").write_text("x")
    with pytest.raises(PoolError, match="cannot be the name"):
        pool.add(tmp_path / "odd", "m@1")
    assert pool.versions() == []


def test_where_there_is_no_pool(where: Place, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="there is no pool here"):
        where.open()
    assert where.paths() == []
    with pytest.raises(PoolError, match="there is no pool here"):
        Pool(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(PoolError, match="there is no pool here"):
        Pool(tmp_path)
    with pytest.raises(PoolError, match="no URL of a pool"):
        Pool("gopher://bucket/x")


@pytest.mark.parametrize("name", ["two words", "a#b", "é", "it's", "{x}", "x,y;z"])
def test_folders_of_any_usual_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "a.safetensors", tensors())
    with Pool(tmp_path / name / "pool", create=True) as pool:
        pool.add(path, "m@1")
    with Pool(tmp_path / name / "pool") as pool:
        pool.drop("m@1")
        pool.gc(grace=0, keep=0)
        pool.add(path, "m@1")
        assert pool.verify() == []
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["a.safetensors", name])


@pytest.mark.parametrize("name", ["50%20", "a*", "b?", "[1]", "x\\y", "x^2", "a|b", "\x1b[31m", "new\nline"])
def test_folders_that_the_engines_would_miss_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PoolError, match="the path of a pool cannot have"):
        Pool(tmp_path / name, create=True)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pool_says_so(pool: Pool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", tensors())
    pool.close()
    for call in (pool.versions, pool.stats, lambda: pool.add(path, "m@1"), lambda: pool.open("m@1"), pool.gc):
        with pytest.raises(ClosedError, match="this pool is closed"):
            call()


def test_a_foreign_table_is_refused(where: Place) -> None:
    from arro3.core import Array, DataType, Field, Schema, Table
    from deltalake import write_deltalake

    where.open(create=True)
    where.remove("tables/blobs")
    foreign = Table.from_arrays([Array([1], DataType.int64())], schema=Schema([Field("x", DataType.int64())]))
    write_deltalake(f"{where.url}/tables/blobs", foreign, storage_options=where.options)
    with pytest.raises(PoolError, match="table of something else, with x"):
        where.open().stats()
    where.remove("tables/blobs")
    with pytest.raises(PoolError, match="the table is missing"):
        where.open().stats()


def test_existing_files_are_replaced_only_by_their_kind(pool: Pool, tmp_path: Path) -> None:
    pool.add(write(tmp_path / "a.safetensors", tensors()), "m@1")
    (tmp_path / "out").mkdir()
    blobstore.save_file(tensors(), tmp_path / "out" / "b.ptd")
    (tmp_path / "out" / "b.ptd").rename(tmp_path / "out" / "a.safetensors")
    before = (tmp_path / "out" / "a.safetensors").read_bytes()
    with pytest.raises(OutputPathError, match="use force"):
        pool.get("m@1", tmp_path / "out")
    assert (tmp_path / "out" / "a.safetensors").read_bytes() == before
    pool.get("m@1", tmp_path / "out", force=True)
    pool.get("m@1", tmp_path / "out")  # a second time
    assert contents(tmp_path / "out")["a.safetensors"] == (tmp_path / "a.safetensors").read_bytes()


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "remove"])
def test_damaged_packs_are_errors(pool: Pool, where: Place, tmp_path: Path, damage: str) -> None:
    """Never other bytes: not in a data map, not in a file, not for a later version (S1)."""
    model = tensors()
    pool.add(write(tmp_path / "a.safetensors", model), "a@1")
    pool.add(write(tmp_path / "b.safetensors", tensors(5)), "b@1")
    one, other = where.packs()
    first, second = where.read(one), where.read(other)
    if damage == "flip":
        for pack, data in ((one, bytearray(first)), (other, bytearray(second))):
            for at in range(100, len(data), 50):
                data[at] ^= 0xFF
            where.write(pack, bytes(data))
    elif damage == "cut":
        where.write(one, first[:200])
        where.write(other, second[:200])
    elif damage == "swap":
        where.write(one, second)
        where.write(other, first)
    else:
        where.remove("packs")
    fresh = where.open()
    problems = dict(fresh.verify())
    assert set(problems) == {"a@1", "b@1"}
    assert dict(fresh.verify(executor="threads:2")) == problems
    assert "packs/" in problems["a@1"]
    with pytest.raises((IntegrityError, PoolError), match="packs/"):
        fresh.get("a@1", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*"))
    with pytest.raises((IntegrityError, PoolError), match="packs/"):
        fresh.open("a@1").numpy("embed.weight")


@pytest.mark.parametrize("damaged", ["base", "head of base", "difference"])
def test_what_is_damaged_is_named(pool: Pool, where: Place, tmp_path: Path, damaged: str) -> None:
    """By the digest of the file that is restored, damage is seen; which blob of which pack it is in is found then (S1)."""
    random = np.random.default_rng(7)
    model = {"w": random.standard_normal((400, 50)).astype(np.float32)}
    pool.add(write(tmp_path / "a.safetensors", model), "a@1")
    model["w"][::3] += np.float32(1e-6)
    pool.add(write(tmp_path / "b.safetensors", model), "b@1")
    rows = {row[0]: row for row in pool.tables.query('SELECT digest, base, pack, "offset", length FROM blobs')}
    [near] = [row for row in rows.values() if row[1] is not None]
    base = rows[near[1]]
    digest, _, pack, offset, length = near if damaged == "difference" else base
    path = f"packs/{pack.hex()[:2]}/{pack.hex()}"
    data = bytearray(where.read(path))
    # behind the heads of the chunk and of its first stream, or in the former
    for at in range(offset + 9, offset + length, 500) if damaged != "head of base" else (offset,):
        data[at] ^= 1
    where.write(path, bytes(data))
    fresh = where.open()
    with pytest.raises(IntegrityError, match=f"{path} at byte {offset}: .*{digest.hex()}") as caught:
        fresh.get("b@1", tmp_path / "out")
    assert str(caught.value).count("packs/") == 1
    assert not list((tmp_path / "out").glob("*"))
    with pytest.raises(IntegrityError, match=digest.hex()):
        fresh.open("b@1").numpy("w")
    if damaged == "difference":
        assert fresh.get("a@1", tmp_path / "out")


def test_nothing_is_stored_against_a_damaged_base(pool: Pool, where: Place, tmp_path: Path) -> None:
    """Else, a later repair of the base would damage what was stored against it (S1)."""
    model = {"w": np.random.default_rng(7).standard_normal((400, 50)).astype(np.float32)}
    pool.add(write(tmp_path / "a.safetensors", model), "a@1")
    [(pack, offset)] = pool.tables.query("SELECT pack, \"offset\" FROM blobs WHERE dtype = 'float'")
    path = f"packs/{pack.hex()[:2]}/{pack.hex()}"
    good = where.read(path)
    bad = bytearray(good)
    bad[offset + 100] ^= 1  # of the first plane, which is stored as it is
    where.write(path, bytes(bad))
    model["w"][::3] += np.float32(1e-6)
    tuned = write(tmp_path / "b.safetensors", model)
    with where.open() as other:
        other.add(tuned, "b@1")
    where.write(path, good)
    [restored] = where.open().get("b@1", tmp_path / "out")
    assert restored.read_bytes() == tuned.read_bytes()


def test_a_file_that_changes_while_it_is_added_is_refused(tmp_path: Path) -> None:
    """Between two readings: what was hashed is not what is there any more (S1)."""
    pool = Pool(tmp_path / "pool", create=True)
    path = write(tmp_path / "a.safetensors", tensors())

    class Meddling(ThreadPoolExecutor):
        def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Any:
            if function.__name__ == "write_pack":
                data = bytearray(path.read_bytes())
                data[-5] ^= 1
                with path.open("r+b") as file:  # in place, as who keeps it mapped may see it
                    file.write(data)
            return super().submit(function, *arguments, **named)

    with Meddling(1) as executor, pytest.raises(DataChangedError, match="a.safetensors"):
        pool.add(path, "a@1", executor=executor)
    assert pool.versions() == []


def test_files_that_lead_out_of_the_folder_are_refused(pool: Pool, where: Place, tmp_path: Path) -> None:
    """Whoever may write to a pool may not write anywhere else (S3)."""
    from blobstore.pool.tables import EVENTS

    pool.tables.append(EVENTS, [("1" * 32, "add", "m", "1", 0, json.dumps([described("../stolen")]))])
    with pytest.raises(PoolError, match="leads out of its folder"):
        where.open().get("m@1", tmp_path / "out")
    assert not (tmp_path / "stolen").exists()


def test_any_engine_reads_the_tables(pool: Pool, where: Place, tmp_path: Path) -> None:
    from deltalake import DeltaTable, QueryBuilder

    path = write(tmp_path / "a.safetensors", tensors())
    pool.add(path, "m@1")
    rows = (
        QueryBuilder()
        .register("parts", DeltaTable(f"{where.url}/tables/parts", storage_options=where.options))
        .execute("select tensor, dtype, shape, digest from parts where tensor <> '' order by tensor")
        .read_all()
    )
    listed = {name.as_py(): bytes(digest.as_py()) for name, digest in zip(rows["tensor"], rows["digest"], strict=True)}
    assert listed == {name: hashlib.sha256(values.tobytes()).digest() for name, values in tensors().items()}


def test_looking_at_a_version_reads_no_blob(pool: Pool, where: Place, tmp_path: Path) -> None:
    """Its keys, layouts and sizes are in the tables."""
    pool.add(write(tmp_path / "a.safetensors", tensors()), "m@1")
    where.remove("packs")
    opened = pool.open("m@1")
    assert f"{len(tensors())} keys" in repr(opened)
    assert "embed.weight" in opened._repr_html_()
    with pytest.raises(PoolError, match="the pack is missing"):
        opened.numpy("embed.weight")


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["ptd", "pt"])
@settings(max_examples=15)
@given(data=st.data())
def test_what_a_tensor_is_does_not_come_from_another_one(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, data: st.DataObject
) -> None:
    """Of tensors that are the same bytes, each has its own type and shape; of those that share some bytes, each is itself, or
    has no name. Files are the same to the byte whatever the names are."""
    import torch

    folder = tmp_path_factory.mktemp("shared")
    base = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, -0.0, 1.0, float("nan")]), min_size=12, max_size=12)))
    views = st.one_of(
        st.sampled_from([(12,), (3, 4), (2, 3, 2), (1, 12)]).map(base.reshape),
        st.sampled_from([(3, 4), (6, 2)]).map(lambda shape: base.reshape(shape).t()),
        st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ends: base[min(ends) : max(ends)]),
        st.just(base.clone().view(torch.int32) if suffix == "ptd" else base),
    )
    names = st.text(max_size=3) if suffix == "pt" else st.sampled_from("abc")
    given_tensors = data.draw(st.dictionaries(names.filter(bool), views, min_size=1, max_size=4))
    path = folder / f"given.{suffix}"
    torch.save(given_tensors, path) if suffix == "pt" else blobstore.save_file(given_tensors, path)
    with Pool(folder / "pool", create=True) as pool:
        pool.add(path, "m@1")
        assert pool.get("m@1", folder / "out")[0].read_bytes() == path.read_bytes()
        opened = pool.open("m@1")
        for name in opened:
            expected = given_tensors[name]
            found = opened.torch(name)
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert bytes(found.contiguous().view(torch.uint8).numpy()) == bytes(
                expected.contiguous().view(torch.uint8).numpy()
            )
        if suffix == "ptd":
            assert {name for name, one in given_tensors.items() if one.numel()} == set(opened)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    """A pickle can have half of a surrogate pair; its tensor comes back with the file, without that name."""
    import torch

    torch.save({"\ud800": torch.ones(3), "e\u0301": torch.ones(2), "\u00e9": torch.zeros(2)}, tmp_path / "odd.pt")
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(tmp_path / "odd.pt", "m@1")
        assert sorted(pool.open("m@1")) == ["e\u0301", "\u00e9"]
        assert pool.get("m@1", tmp_path / "out")[0].read_bytes() == (tmp_path / "odd.pt").read_bytes()


def test_what_is_verified_is_read_each_time(tmp_path: Path) -> None:
    """Also a base that earlier calls of the same pool left decoded."""
    weights = {"w": np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)}
    with Pool(tmp_path / "pool", create=True) as pool:
        for number in range(4):
            pool.add(write(tmp_path / "m.safetensors", weights), f"m@{number}")
            weights = tuned(weights, number)
        assert pool.verify() == [] == pool.verify()
        pool.drop("m@0")
        [(pack, offset)] = pool.tables.query(
            "SELECT pack, \"offset\" FROM blobs WHERE base IS NULL AND dtype = 'float'"
        )
        place = tmp_path / "pool" / pack_path(pack)
        damaged = bytearray(place.read_bytes())
        damaged[offset + 100] ^= 1
        place.write_bytes(damaged)
        assert len(pool.verify()) == 3


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
def test_numbers_of_a_gguf_in_either_order_of_bytes(tmp_path: Path, order: str) -> None:
    """By name, they are the numbers of the file; in the other order, there are only its bytes."""
    gguf = pytest.importorskip("gguf")
    model = {
        "f32": np.arange(12, dtype=np.float32).reshape(3, 4),
        "f16": np.arange(4096, dtype=np.float16).reshape(64, 64),
        "f64": np.arange(6, dtype=np.float64),
        "i8": np.arange(8, dtype=np.int8),
        "i16": np.arange(8, dtype=np.int16),
        "i32": np.arange(8, dtype=np.int32),
        "i64": np.arange(8, dtype=np.int64),
    }
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian[order])
    for name, values in model.items():
        writer.add_tensor(name, values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(write(tmp_path / "m.safetensors", model), "plain@1")
        pool.add(path, "m@1")
        opened = pool.open("m@1")
        assert set(opened) == set(model)
        for name, values in model.items():
            found = opened.numpy(name)
            if order == "LITTLE" or values.itemsize == 1:
                np.testing.assert_array_equal(found, values)
                assert found.dtype == values.dtype
            else:
                assert opened.get_tensor_layout(name) is None
                assert found.tobytes() == values.astype(values.dtype.newbyteorder(">")).tobytes()
        [restored] = pool.get("m@1", tmp_path / "out")
        assert restored.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("size", -1, "wrong values"),
        ("size", None, "wrong values"),
        ("size", 1 << 60, "1152921504606846976"),
        ("offset", -64, "wrong values"),
        ("length", -1, "wrong values"),
        ("encoding", None, "wrong values"),
        ("encoding", "planes:4+planes:4", "does not know"),
        ("pack", None, "wrong values"),
    ],
)
def test_rows_of_blobs_that_cannot_be(tmp_path: Path, column: str, value: object, message: str) -> None:
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(write(tmp_path / "a.safetensors", {"w": np.zeros((64, 64), np.float32)}), "a@1")
        change_rows(pool, "true", lambda row: {column: value})
        with pytest.raises((PoolError, IntegrityError), match=message):
            pool.get("a@1", tmp_path / "out")
        [(reference, reason)] = pool.verify()
        assert reference == "a@1" and message in reason
