"""Whoever may write to the tables of a pool makes errors of this library, and never other bytes (S1, S3)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from typer.testing import CliRunner

from blobstore.cli.app import app
from blobstore.errors import BlobStoreError, PoolError
from blobstore.pool import Pool
from blobstore.releases import sweep
from tests.pool.models import described, halves, tensors, tuned, write

TABLES = ("blobs", "parts", "events", "marks")
DEEP = "[" * 100_000
BYTES: list[Any] = [b"", b"\0" * 32, b"\1" * 31, b"\2" * 33, None, b"../../../../tmp/x", b"/" * 32, b"\xff" * 5000]
NUMBERS: list[Any] = [-1, 0, 1, 3, 63, 255, 2**31, 2**40, 2**53, 2**62, 2**63 - 1, -(2**63), None]
TEXTS: list[Any] = [
    *(None, "", "raw", "planes:1", "planes:4", "planes:8", "planes:3"),
    *("near:f2:2", "near:u1:4", "near:f4:0", "cast:half"),
    *("widen:half", "widen:half+cast:half", "cast:half+near:f2:0", "scale:1", "scale:0", "scale:99999999999999"),
    *("layout:64,64:1,0", "layout:999999999999999,999999999999999:1,0"),
    *("quant:absmax:64:int8", "float", "half", "char"),
    *("bits8", "complex64", "1,2,3", "64,64", "-1,-1", "9" * 30),
    *("9" * 6000, ",", "1,,2", "1,0", "1e3", "\0", "../../x"),
    *("/etc/x", "x\n\x1b[31m", "\u00e9" * 200, "a" * 70000, "[]", "{}", "[1]", DEEP, '{"a":' * 30_000),
    *("add", "drop", "abandon"),
    json.dumps([described("../e", size=1)]),
    json.dumps([described("e", size=-1)]),
    json.dumps([described("e", size=9007199254740993)]),
    json.dumps([described("e")] * 2),
    json.dumps([described("e"), described("e/f")]),
    json.dumps([described("e", sha256="\ud800")]),
    json.dumps([described("e", blake3="\ud800")]),
]
OTHER = {"VARCHAR": "7", "BIGINT": 7, "DOUBLE": 7.5, "BLOB": b"7", "BOOLEAN": True, "INTEGER": 7}


@dataclass
class Rows:
    """A file of a table: its rows, and its columns with their types."""

    file: Path
    rows: list[list[Any]]
    columns: list[tuple[str, str]]

    @classmethod
    def read(cls, file: Path) -> Rows:
        with duckdb.connect() as database:
            found = database.execute(f"SELECT * FROM read_parquet('{file}')")  # noqa: S608
            described = [(column[0], str(column[1])) for column in found.description or []]
            return cls(file, [list(row) for row in found.fetchall()], described)

    def write(self) -> None:
        with duckdb.connect() as database:
            database.execute("CREATE TABLE x (" + ", ".join(f'"{name}" {kind}' for name, kind in self.columns) + ")")
            if self.rows:
                values = ", ".join("?" * len(self.columns))
                database.executemany(f"INSERT INTO x VALUES ({values})", self.rows)  # noqa: S608
            database.execute(f"COPY x TO '{self.file}' (FORMAT parquet)")


def tables(pool: Path, table: str) -> list[Rows]:
    return [Rows.read(file) for file in sorted((pool / "tables" / table).glob("*.parquet"))]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool with contents that are whole, near, cast, quantized and in another order; one was dropped."""
    folder = tmp_path_factory.mktemp("hostile")
    base = tensors()
    weights = base["embed.weight"]
    scales = np.abs(weights).max(1, keepdims=True) / np.float32(127)
    models = {
        "wide": base,
        "tuned": tuned(base, 1),
        "half": halves(base),
        "int8": {"embed.weight": np.rint(weights / scales).astype(np.int8)},
        "turned": {"embed.weight": np.ascontiguousarray(weights.T)},
    }
    with Pool(folder / "pool", create=True) as pool:
        for name, model in models.items():
            pool.add(write(folder / name / "m.safetensors", model), f"{name}@1")
        pool.drop("turned@1")
        pool.gc(grace=0)
    return folder


def calls(clean: Path, place: Path, out: Path) -> list[Callable[[Pool], object]]:
    """All that is done with a pool."""

    def read(pool: Pool, name: str) -> None:
        for key, data in pool.open(f"{name}@1").views():
            pool.open(f"{name}@1").get_tensor_layout(key)
            assert len(data) >= 0

    def get(pool: Pool, name: str) -> None:
        [path] = pool.get(f"{name}@1", out / name, force=True)
        if path.name == "m.safetensors":
            assert path.read_bytes() == (clean / name / "m.safetensors").read_bytes()
        else:
            assert path.read_bytes() == b""  # an event that names other files, of which it also says the digest

    names = ("wide", "tuned", "half", "int8")
    new = write(out.parent / "new.safetensors", {"embed.weight": tensors(5)["embed.weight"]})
    return [
        *(lambda pool, name=name: read(pool, name) for name in names),
        *(lambda pool, name=name: get(pool, name) for name in names),
        lambda pool: [(version.files, version.size, repr(version)) for version in pool.versions()],
        lambda pool: (repr(pool.why("wide@1", "half@1")), repr(pool.stats())),
        lambda pool: pool.verify(),
        lambda pool: pool.add(new, "new@1"),
        lambda pool: pool.drop("half@1"),
        lambda pool: pool.gc(grace=0, keep=0),
        lambda _: sweep(place, keep=0),
        lambda pool: pool.tables.tidy(always=True),
    ]


@pytest.fixture
def place(clean: Path, tmp_path: Path) -> Path:
    """A copy of the pool, alone in a folder."""
    return shutil.copytree(clean / "pool", tmp_path / "x" / "pool")


def try_all(clean: Path, place: Path) -> None:
    outside = set(place.parent.parent.iterdir())
    try:
        pool = Pool(place)
    except BlobStoreError as error:
        assert str(error)
        return
    with pool:
        for call in calls(clean, place, place.parent / "out"):
            try:
                call(pool)
            except BlobStoreError as error:
                assert str(error)
    done = CliRunner().invoke(app, ["pool", "ls", str(place), "--json"])
    assert done.exit_code in {0, 3}, done.output
    assert set(place.parent.parent.iterdir()) == outside


@pytest.mark.long
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("events", "files", DEEP),
        ("events", "id", None),
        ("events", "kind", None),
        ("events", "name", None),
        ("events", "name", "../../x"),
        ("events", "time", None),
        ("events", "time", 2**62),
        ("events", "files", None),
        ("parts", "id", None),
        ("parts", "name", None),
        ("parts", "file", None),
        ("parts", "offset", None),
        ("parts", "offset", -1),
        ("parts", "size", None),
        ("parts", "tensor", None),
        ("parts", "shape", None),
        ("parts", "digest", None),
        ("parts", "begun", None),
        ("blobs", "digest", None),
        ("blobs", "pack", None),
        ("blobs", "pack", b"\xff" * 5000),
        ("blobs", "length", None),
        ("blobs", "check", None),
        ("blobs", "key", None),
        ("marks", "pack", None),
        ("marks", "time", None),
    ],
)
def test_a_value_that_cannot_be(clean: Path, place: Path, table: str, column: str, value: object) -> None:
    """In every row of a table."""
    for rows in tables(place, table):
        at = [name for name, _ in rows.columns].index(column)
        for row in rows.rows:
            row[at] = value
        rows.write()
    try_all(clean, place)


@pytest.mark.long
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("kind", ["VARCHAR", "DOUBLE", "BOOLEAN"])
def test_columns_of_other_types(clean: Path, place: Path, table: str, kind: str) -> None:
    for rows in tables(place, table):
        rows.columns = [(name, kind) for name, _ in rows.columns]
        rows.rows = [[OTHER[kind] for _ in row] for row in rows.rows]
        rows.write()
    try_all(clean, place)


@pytest.mark.parametrize("column", ["id", "kind"])
def test_a_row_of_nulls_does_not_hide_what_is_there(place: Path, column: str) -> None:
    """In SQL, nothing is certainly not among values of which one is unknown: a collection would free everything."""
    with Pool(place) as pool:
        before = pool.versions()
        row = {"id": "0" * 32, "kind": "drop", "name": "m", "version": "1", "time": 0, "files": "[]", column: None}
        pool.tables.append("events", [tuple(row.values())])
        pool.tables.append("marks", [(None, None, 0)])
    with Pool(place) as pool:
        assert pool.versions() == before
        pool.gc(grace=0, keep=0)
        assert pool.verify() == []


@pytest.mark.parametrize("path", ["*.parquet", "../x.parquet", "/x.parquet", "a'); select 1; --", "sub/x.parquet"])
def test_a_file_of_a_table_lies_beside_the_others(place: Path, path: str) -> None:
    """Its name comes from a log that anybody may have written who writes to the pool."""
    log = place / "tables" / "events" / "_delta_log"
    number = max(int(entry.stem) for entry in log.glob("*.json")) + 1
    added = {"path": path, "partitionValues": {}, "size": 1, "modificationTime": 1, "dataChange": True}
    (log / f"{number:020}.json").write_text(json.dumps({"add": added}) + "\n")
    with pytest.raises(PoolError), Pool(place) as pool:
        pool.versions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "") for text in ("", "{", '{"format": 7}', DEEP, "\0", "\ud800")),
        ("[]", "describes no pool"),
        ('{"format": "blobstore.pool.2"}', r"expected the format blobstore\.pool\.1, found 'blobstore\.pool\.2'"),
    ],
)
def test_a_description_that_is_none(place: Path, text: str, message: str) -> None:
    (place / "pool.json").write_text(text, errors="surrogatepass")
    for create in (False, True):
        with pytest.raises(BlobStoreError, match=rf"pool\.json.*{message}"):
            Pool(place, create=create)


@pytest.mark.parametrize("text", [DEEP, '{"unused": ' + DEEP, "{}", '{"unused": {"x": 1e400}}', '{"unused": [1]}'])
def test_a_list_of_what_is_unused_that_is_none(place: Path, text: str) -> None:
    (place / "releases.json").write_text(text)
    with pytest.raises(BlobStoreError, match=r"releases\.json"):
        sweep(place)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_any_values(clean: Path, place: Path, seed: int) -> None:
    """One or two at a time, sometimes with another type of column, or a row twice."""
    chance = random.Random(seed)  # noqa: S311
    known = [row[0] for rows in tables(place, "blobs") for row in rows.rows]
    for _ in range(chance.choice((1, 1, 2))):
        rows = chance.choice(tables(place, chance.choice(TABLES)) or tables(place, "blobs"))
        row, at = chance.choice(rows.rows), chance.randrange(len(rows.columns))
        name, kind = rows.columns[at]
        if chance.random() < 0.1:
            rows.columns[at] = (name, other := chance.choice(sorted(OTHER)))
            for one in rows.rows:
                one[at] = chance.choice([OTHER[other], None])
        else:
            row[at] = chance.choice([*BYTES, *known] if kind == "BLOB" else NUMBERS if kind == "BIGINT" else TEXTS)
        if chance.random() < 0.2:
            rows.rows.append(list(row))
        rows.write()
    try_all(clean, place)
