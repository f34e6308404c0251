"""Packages of native programs that the zipfile and safetensors packages wrote, and hostile ones (B5, S3)."""

import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save
from safetensors.torch import save as save_torch

import blobstore
from blobstore.core.formats.opening import open_any
from blobstore.core.formats.ptn import PtnDataMap
from blobstore.core.tools.inspection import inspect_file
from blobstore.errors import BlobStoreError, InvalidFileError, UnsupportedDataError
from blobstore.pool import Pool
from blobstore.testing import NamedDataMapContract
from tests.core.formats.test_safetensors import CONTIGUOUS, as_tensors
from tests.pool.models import halves, tensors, tuned

Members = Mapping[str, bytes | tuple[bytes, int]]


def package(members: Members) -> bytes:
    """A zip; a member with a number is compressed in that way."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            data, how = content if isinstance(content, tuple) else (content, zipfile.ZIP_STORED)
            file.writestr(zipfile.ZipInfo(name), data, how)
    return buffer.getvalue()


class TestPtnDataMap(NamedDataMapContract):
    blobs = CONTIGUOUS

    def plant(self, folder: Path) -> PtnDataMap:
        values = as_tensors(self.blobs)
        del values["tied.weight"]  # it is an alias
        aliases = json.dumps({"tied.weight": "linear.weight"}).encode()
        members = {"program.bin": b"code", "weights.safetensors": save_torch(values), "aliases.json": aliases}
        (folder / "x.ptn").write_bytes(package(members))
        return PtnDataMap(folder / "x.ptn")


def test_where_tensors_lie(tmp_path: Path) -> None:
    path = tmp_path / "x.ptn"
    values = {"a": np.arange(6, dtype="f4"), "b": np.arange(3, dtype="i1")}
    path.write_bytes(package({"p": b"xyz", "w.safetensors": save(values)}))
    with open_any(path) as opened:
        assert isinstance(opened, PtnDataMap)
        for key, value in values.items():
            start, stop = opened.byte_range(key)
            assert path.read_bytes()[start:stop] == value.tobytes()
        assert opened.dtype("a") == "F32"
        listed = inspect_file(path)
        assert (listed.format, [blob.key for blob in listed.blobs]) == ("ptn", ["a", "b"])
        assert [(member.name, member.is_stored) for member in opened.members] == [("p", True), ("w.safetensors", True)]


def test_tensors_of_one_name_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "x.ptn"
    ones, twos = {"w": np.ones(2, "f4"), "x": np.ones(1, "f4")}, {"w": np.full(2, 2, "f4")}
    path.write_bytes(package({"a.safetensors": save(ones), "b.safetensors": save(twos)}))
    with open_any(path) as opened:
        assert set(opened) == {"a.safetensors:w", "b.safetensors:w", "x"}
        assert opened.numpy("b.safetensors:w").tolist() == [2, 2]


@pytest.mark.parametrize("aliases", [b"[]", b'{"x": 1}', b'{"x": "none"}', b'{"w": "w"}', b'{"x": {"w": "w"}}'])
def test_aliases_that_say_nothing_are_left_out(tmp_path: Path, aliases: bytes) -> None:
    path = tmp_path / "x.ptn"
    path.write_bytes(package({"w.safetensors": save({"w": np.ones(2, "f4")}), "aliases.json": aliases}))
    assert list(open_any(path)) == ["w"]


def test_other_zips_are_no_packages(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(package({"w.safetensors": save({"w": np.ones(2, "f4")})}))
    with pytest.raises(UnsupportedDataError, match="unknown format"):
        open_any(path)
    (problem,) = blobstore.report([path]).problems
    assert "neither .pte, .ptd, .ptn, .safetensors, .gguf nor a file of torch.save" in problem.reason


def test_a_package_in_a_pool_comes_back_and_shares_its_tensors(tmp_path: Path) -> None:
    base = halves(tensors())
    blobstore.save_file(base, tmp_path / "base.ptd")
    members: Members = {
        "program.so": (b"native code " * 500, zipfile.ZIP_DEFLATED),
        "weights.safetensors": save(tuned(base, 1, 0.02)),
        "other.safetensors": (save({"x": np.zeros(4000, "f4")}), zipfile.ZIP_DEFLATED),
        "aliases.json": json.dumps({"tied": "layer.weight"}).encode(),
    }
    path = tmp_path / "x.ptn"
    path.write_bytes(package(members))
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(tmp_path / "base.ptd", "m@base")
        added = pool.add(path, "m@package")
        assert added.stored_bytes < added.bytes / 3
        opened = pool.open("m@package")
        assert {"layer.weight", "tied", "embed.weight", "program.so"} <= set(opened)
        np.testing.assert_array_equal(opened.numpy("tied"), tuned(base, 1, 0.02)["layer.weight"])
        for _ in range(2):  # the second time, the file is replaced by its like
            (written,) = pool.get("m@package", tmp_path / "out")
            assert written.read_bytes() == path.read_bytes()


def test_the_report_finds_copies(tmp_path: Path) -> None:
    weight = {"w": np.random.default_rng(0).standard_normal(4000).astype("f4")}
    (tmp_path / "x.ptn").write_bytes(package({"w.safetensors": save(weight), "program": bytes(range(256))}))
    (tmp_path / "y.safetensors").write_bytes(save(weight))
    report = blobstore.report([tmp_path])
    assert {Path(file.path).name: file.format for file in report.files} == {
        "x.ptn": "ptn",
        "y.safetensors": "safetensors",
    }
    assert [finding.saves for finding in report.findings] == [16_000]


def hostile(change: str) -> bytes:
    """A package in which something is not as it seems."""
    data = bytearray(package({"a.safetensors": save({"w": np.ones(50, "f4")}), "b.bin": bytes(300)}))
    first, second = (data.index(b"PK\1\2"), data.rindex(b"PK\1\2"))
    if change == "overlap":  # both entries of the directory lead to the first member
        struct.pack_into("<I", data, second + 42, struct.unpack_from("<I", data, first + 42)[0])
        data[second + 20 : second + 28] = data[first + 20 : first + 28]
    elif change == "quoted":  # the second member begins within the first
        struct.pack_into("<I", data, second + 42, 10)
    elif change == "long":
        struct.pack_into("<II", data, second + 20, 1 << 20, 1 << 20)
    elif change == "sizes":
        struct.pack_into("<I", data, second + 24, 1 << 30)
    elif change == "beyond":
        struct.pack_into("<I", data, second + 42, len(data) + 100)
    elif change == "method":
        struct.pack_into("<H", data, second + 10, 8)
    elif change == "tensors":
        at = data.index(b"F32")
        data[at : at + 3] = b"F64"
    elif change == "cut":
        del data[-40:]
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("overlap", "overlap"),
        ("quoted", "not what the directory says"),
        ("long", "not what the directory says"),
        ("sizes", "is stored in 300 bytes, and has 1073741824"),
        ("beyond", "not within the file|well-formed"),
        ("method", "not what the directory says"),
        ("tensors", r"x\.ptn: a\.safetensors"),
        ("cut", "not a well-formed zip"),
    ],
)
def test_hostile_packages_are_refused_and_kept_as_they_are(tmp_path: Path, change: str, reason: str) -> None:
    path = tmp_path / "x.ptn"
    path.write_bytes(hostile(change))
    with pytest.raises(InvalidFileError, match=reason):
        open_any(path)
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(path, "m@1")
        assert b"".join(map(bytes, pool.cat("m@1", "x.ptn"))) == path.read_bytes()


def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    """Nothing is decompressed; nor do names lead anywhere."""
    path = tmp_path / "x.ptn"
    bomb = (bytes(1 << 26), zipfile.ZIP_DEFLATED)
    path.write_bytes(package({"../../w.safetensors": bomb, "aliases.json": bomb, "/etc/passwd": b"x" * 5000}))
    tracemalloc.start()
    with open_any(path) as opened:
        assert list(opened) == []
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()
    with Pool(tmp_path / "pool", create=True) as pool:
        pool.add(path, "m@1")
        (written,) = pool.get("m@1", tmp_path / "out")
        assert written.read_bytes() == path.read_bytes()


CHANGES = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8)


def check_damaged(reader: Any, whole: bytes, changes: list[tuple[int, int]]) -> None:
    """A file with other bytes at these places is refused, or has each blob where it says."""
    data = bytearray(whole)
    for at, value in changes:
        data[at % len(data)] = value
    try:
        opened = reader("damaged", data=memoryview(bytes(data)))
        for key in opened:
            start, stop = opened.byte_range(key)
            assert bytes(data[start:stop]) == opened.bytes(key)
    except BlobStoreError:
        pass


@given(CHANGES)
def test_any_damage_is_an_error_or_a_package(changes: list[tuple[int, int]]) -> None:
    whole = package({"w.safetensors": save({"w": np.ones(3, "f4")}), "aliases.json": b'{"x": "w"}'})
    check_damaged(PtnDataMap, whole, changes)
