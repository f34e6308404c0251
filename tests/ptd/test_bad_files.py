"""Whatever a file holds: one of our errors that names it, or the right bytes; quickly and with little memory."""

import json
import os
import resource
import struct
import subprocess
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore import BlobStore, open_ptd
from blobstore.errors import BlobStoreError, FileAccessError, IntegrityError, InvalidFileError
from schema import generate
from tests.ptd.test_format import SCHEMA, golden_store

HEADER = struct.Struct("<4sIQQQQ")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "good.ptd"
    golden_store().write_ptd(path, metadata={"a": "b"})
    return path.read_bytes()


@pytest.fixture(scope="module")
def foreign():
    """A file without a manifest, as ExecuTorch writes it."""
    import torch
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir._serialize.data_serializer import DataPayload
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    store = NamedDataStore()
    store.add_named_data("weight", torch.arange(6.0).reshape(2, 3), external_tag="x")
    store.add_named_data("opaque", b"some bytes", external_tag="x")
    output = store.get_named_data_store_output()
    return bytes(FlatTensorSerializer().serialize(DataPayload(output.buffers, output.external_data["x"])))


def read(path):
    """Open, verify, and look at everything."""
    with open_ptd(path, verify=True) as data_map:
        return {key: (bytes(data_map[key]), data_map.get_tensor_layout(key)) for key in data_map}


def test_truncated_at_any_byte(tmp_path, good, foreign):
    path = tmp_path / "cut.ptd"
    for whole in (good, foreign):
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            with pytest.raises(InvalidFileError, match=r"cut\.ptd: .+"):
                read(path)


def test_any_bit_flipped(tmp_path, good):
    path = tmp_path / "flip.ptd"
    path.write_bytes(good)
    with path.open("r+b") as file:
        for at in range(len(good)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([good[at] ^ 1 << bit]), at)
                with pytest.raises(InvalidFileError, match=r"flip\.ptd: .+"):
                    read(path)
            os.pwrite(file.fileno(), good[at : at + 1], at)
    assert read(path)


def test_any_bit_flipped_without_a_manifest(tmp_path, foreign):
    """Nothing can tell that the bytes of a blob are damaged here; but nothing worse may happen."""
    path = tmp_path / "flip.ptd"
    path.write_bytes(foreign)
    with path.open("r+b") as file:
        for at in range(len(foreign)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([foreign[at] ^ 1 << bit]), at)
                try:
                    read(path)
                except InvalidFileError as error:
                    assert "flip.ptd" in str(error)
            os.pwrite(file.fileno(), foreign[at : at + 1], at)


@settings(max_examples=400)
@given(at=st.integers(0, 10**6), value=st.integers(0, 2**32 - 1) | st.integers(0, 200), which=st.booleans())
def test_any_word_replaced(tmp_path_factory, good, foreign, at, value, which):
    data = bytearray(good if which else foreign)
    at = at % (len(data) // 4) * 4
    data[at : at + 4] = value.to_bytes(4, "little")
    path = tmp_path_factory.mktemp("word") / "word.ptd"
    path.write_bytes(data)
    try:
        contents = read(path)
    except InvalidFileError:
        return
    if which:
        assert contents and bytes(data) == good


def test_appended_bytes(tmp_path, good, foreign):
    path = tmp_path / "more.ptd"
    path.write_bytes(good + b"x")
    with pytest.raises(IntegrityError, match="bytes"):
        open_ptd(path)
    path.write_bytes(foreign + b"x")  # stock readers ignore it, and nothing says that it does not belong there
    assert set(read(path)) == {"weight", "opaque"}


# Files that are well-formed flatbuffers with impossible contents; flatc makes them, not the code under test.

SEGMENTS = [{"offset": 0, "size": 24}, {"offset": 128, "size": 10}]
LAYOUT = {"scalar_type": "FLOAT", "sizes": [2, 3], "dim_order": [0, 1]}
ENTRY = {"key": "weight", "segment_index": 0, "tensor_layout": LAYOUT}


def build(folder, table, *, header=None, patch=None):
    """A .ptd with this table of contents and 138 bytes of segments."""
    (folder / "table.json").write_text(json.dumps(table))
    command = [
        generate.flatc(),
        "--binary",
        "-o",
        folder,
        "-I",
        SCHEMA,
        SCHEMA / "flat_tensor.fbs",
        folder / "table.json",
    ]
    subprocess.run([str(part) for part in command], check=True)
    flatbuffer = (folder / "table.ptd").read_bytes()
    base = -(-(len(flatbuffer) + 48) // 128) * 128
    fields = {
        "magic": b"FH01",
        "length": 40,
        "offset": 48,
        "size": len(flatbuffer),
        "base": base,
        "data": 138,
    }
    fields.update(header or {})
    root = struct.unpack("<I", flatbuffer[:4])[0] + 48
    data = struct.pack("<I", root) + flatbuffer[4:8] + HEADER.pack(*fields.values()).ljust(48, b"\0") + flatbuffer[8:]
    data = data.ljust(base, b"\0") + bytes(138)
    for old, new in (patch or {}).items():
        assert data.count(old) == 1
        data = data.replace(old, new)
    path = folder / "made.ptd"
    path.write_bytes(data)
    return path


def table(*, version=0, segments=SEGMENTS, entries=(ENTRY,)):
    return {"version": version, "segments": segments, "named_data": list(entries)}


def with_layout(**changes):
    return table(entries=[{**ENTRY, "tensor_layout": {**LAYOUT, **changes}}])


def test_the_builder_builds_good_files(tmp_path):
    assert list(read(build(tmp_path, table()))) == ["weight"]
    assert read(build(tmp_path, table(entries=[]))) == {}


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (table(version=1), "version 0, found 1"),
        (table(segments=[{"offset": 0, "size": 139}]), "not within"),
        (table(segments=[{"offset": 139, "size": 0}]), "not within"),
        (table(segments=[{"offset": 2**64 - 8, "size": 24}]), "not within"),
        (table(segments=[{"offset": 8, "size": 2**64 - 1}]), "not within"),
        (table(segments=[{"offset": 2**63, "size": 2**63}]), "not within"),
        (table(segments=[{"offset": 0, "size": 24}, {"offset": 23, "size": 1}]), "overlap"),
        (table(segments=[{"offset": 20, "size": 24}, {"offset": 0, "size": 24}]), "overlap"),
        (table(segments=[]), "'weight' is in segment 0, there are 0"),
        (table(entries=[{**ENTRY, "segment_index": 2}]), "'weight' is in segment 2, there are 2"),
        (table(entries=[{**ENTRY, "segment_index": 2**32 - 1}]), "there are 2"),
        (table(entries=[ENTRY, ENTRY]), "'weight' is there twice"),
        (table(entries=[{"segment_index": 0}]), "no key"),
        (with_layout(sizes=[2, 4]), "'weight' is float.* of 32 bytes, but its segment has 24"),
        (with_layout(sizes=[2, 2]), "16 bytes"),
        (with_layout(scalar_type="DOUBLE"), "48 bytes"),
        (with_layout(scalar_type=10), "unknown scalar type 10"),
        (with_layout(scalar_type=-1), "unknown scalar type -1"),
        (with_layout(sizes=[-2, -3]), "size -2"),
        (with_layout(sizes=[2**31 - 1] * 6, dim_order=list(range(6))), "overflows"),
        (with_layout(sizes=[2**16] * 4 + [0], dim_order=list(range(5))), "0 bytes"),
        (with_layout(sizes=[6]), "1 sizes and a dim_order of 2"),
        (with_layout(dim_order=[0, 0]), "not a permutation"),
        (with_layout(dim_order=[0, 2]), "not a permutation"),
        (with_layout(sizes=[1] * 65, dim_order=list(range(65))), "at most 64"),
        ({"version": 0, "named_data": []}, "missing"),
        ({"version": 0, "segments": []}, "missing"),
        ({}, "missing"),
    ],
)
def test_impossible_contents(tmp_path, contents, reason):
    with pytest.raises(InvalidFileError, match=rf"made\.ptd: .*{reason}"):
        open_ptd(build(tmp_path, contents))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"FH02"}, "FH02"),
        ({"length": 39}, "length 39"),
        ({"offset": 0}, "between"),
        ({"offset": 2**64 - 1}, "between"),
        ({"size": 2**64 - 48}, "between"),
        ({"size": 10**6}, "between"),
        ({"base": 2**64 - 1}, "truncated"),
        ({"base": 0}, "between"),
        ({"data": 139}, "truncated"),
        ({"data": 2**64 - 1}, "truncated"),
        ({"size": 8}, "flatbuffer"),
    ],
)
def test_impossible_headers(tmp_path, changes, reason):
    with pytest.raises(InvalidFileError, match=reason):
        open_ptd(build(tmp_path, table(), header=changes))


def test_longer_header_of_a_later_version(tmp_path):
    assert list(read(build(tmp_path, table(), header={"length": 48}))) == ["weight"]


def test_wrong_identifier(tmp_path):
    with pytest.raises(InvalidFileError, match="FT02"):
        open_ptd(build(tmp_path, table(), patch={b"FT01": b"FT02"}))


def test_invalid_utf_8(tmp_path):
    with pytest.raises(InvalidFileError, match="not valid UTF-8"):
        open_ptd(build(tmp_path, table(), patch={b"weight\0": b"wei\xffht\0"}))


def test_huge_counts_cost_nothing(tmp_path):
    """A vector that claims four billion elements in a file of 500 bytes."""
    good = build(tmp_path, table()).read_bytes()
    tracemalloc.start()
    try:
        for at in range(56, len(good) - 138, 4):
            for count in (2**32 - 1, 2**31, 2**30, 10**8):
                data = bytearray(good)
                data[at : at + 4] = count.to_bytes(4, "little")
                (tmp_path / "huge.ptd").write_bytes(data)
                try:
                    read(tmp_path / "huge.ptd")
                except InvalidFileError:
                    pass
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_not_a_file(tmp_path):
    with pytest.raises(FileAccessError, match="directory"):
        open_ptd(tmp_path)
    with pytest.raises(FileAccessError, match="No such file"):
        open_ptd(tmp_path / "missing.ptd")
    (tmp_path / "empty.ptd").touch()
    with pytest.raises(InvalidFileError, match=r"empty\.ptd: the file is empty"):
        open_ptd(tmp_path / "empty.ptd")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileAccessError, match="not a regular file"):
        open_ptd(tmp_path / "fifo")


def test_no_permission(tmp_path, monkeypatch):
    path = build(tmp_path, table())
    refuse = PermissionError(13, "Permission denied")
    monkeypatch.setattr(os, "open", lambda *args, **kwargs: (_ for _ in ()).throw(refuse))
    with pytest.raises(FileAccessError, match=r"made\.ptd: Permission denied") as caught:
        open_ptd(path)
    assert caught.value.errno == 13


def test_disk_full_leaves_the_old_file(tmp_path):
    path = tmp_path / "full.ptd"
    path.write_bytes(b"what was there before")
    store = BlobStore()
    store.add("big", np.zeros(1 << 20, np.uint8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        with pytest.raises(FileAccessError, match=r"full\.ptd: "):
            store.write_ptd(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"what was there before"
    assert os.listdir(tmp_path) == ["full.ptd"]


def test_every_error_is_ours_and_a_standard_one():
    assert issubclass(InvalidFileError, BlobStoreError) and issubclass(InvalidFileError, ValueError)
    assert issubclass(FileAccessError, OSError)


def test_damage_to_a_blob_is_found_by_verify_and_names_the_key(tmp_path, good):
    path = tmp_path / "hurt.ptd"
    path.write_bytes(good)
    with open_ptd(path) as data_map:
        start, _ = data_map.byte_range("linear.weight")
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\x77", start)
    with open_ptd(path) as data_map, pytest.raises(IntegrityError, match="'linear.weight', 'tied.weight'"):
        data_map.verify()
    with pytest.raises(IntegrityError):
        open_ptd(path, verify=True)


def test_verify_says_when_there_is_nothing_to_verify(tmp_path, foreign):
    path = tmp_path / "foreign.ptd"
    path.write_bytes(foreign)
    with open_ptd(path) as data_map:
        assert data_map.verify() is False
        assert not data_map.has_digests
