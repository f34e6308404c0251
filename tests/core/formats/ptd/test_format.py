"""The bytes of a .ptd: golden files, also as independent code reads them (R3, R4)."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.schemas.flat_tensor.FlatTensor import FlatTensor

import blobstore
from blobstore import BlobStore, ScalarType, TensorLayout, open_ptd
from blobstore.core.formats.ptd.opaque import stand_ins
from blobstore.core.formats.ptd.table import encode_table
from blobstore.testing import strategies
from tests.helpers.schemas import SCHEMA, flatc

DATA = Path(__file__).parents[3] / "data"


def golden_store() -> BlobStore:
    store = BlobStore()
    weight = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    store.add("linear.weight", weight, alignment=16)
    store.add("tied.weight", weight, alignment=48)
    store.add("conv.weight", np.arange(6, dtype=np.int8).reshape(3, 2).T)
    store.add("half", np.array(1.5, np.float16))
    store.add("opaque", b"any bytes", alignment=256)
    store.add("empty", np.empty((0, 7), np.uint8))
    return store


def test_golden_bytes(tmp_path):
    golden_store().write_ptd(tmp_path / "now.ptd", metadata={"made by": "a test", "a": ""})
    assert (tmp_path / "now.ptd").read_bytes() == (DATA / "golden.ptd").read_bytes()


def test_a_file_without_opaque_bytes_has_no_list_of_them(tmp_path):
    """The list of opaque keys takes no byte where it would be empty (R4)."""
    store = BlobStore()
    for entry in golden_store().entries():
        if entry.layout is not None:
            store.add(entry.key, entry.data, alignment=entry.alignment, layout=entry.layout)
    store.write_ptd(tmp_path / "tensors.ptd", metadata={"made by": "a test", "a": ""})
    data = (tmp_path / "tensors.ptd").read_bytes()
    assert xxhash.xxh3_128_hexdigest(data) == "084a375a201ee07c7bda94d7665ee216"  # written without this list


def test_opaque_bytes_have_the_layout_of_bytes_as_long_as_a_size_can_count_them():
    """A layout of the store stays as it is, and opaque bytes get one (R4)."""
    tensor = TensorLayout(ScalarType.FLOAT, (2, 3))
    sizes = [24, 0, 2**31 - 1, 2**31, 9]
    layouts = stand_ins([tensor, None, None, None, None], sizes)
    assert layouts == [tensor, *(TensorLayout(ScalarType.BYTE, (n,), (0,)) for n in (0, 2**31 - 1)), None, layouts[4]]
    assert layouts[4] == TensorLayout(ScalarType.BYTE, (9,))


def test_bytes_that_are_opaque_beside_the_same_as_a_tensor(tmp_path):
    """What is opaque stays so, and a tensor of bytes stays a tensor (R4)."""
    store = BlobStore()
    store.add("tensor", np.arange(9, dtype=np.uint8))
    store.add("opaque", bytes(range(9)))
    store.write_ptd(tmp_path / "x.ptd")
    with open_ptd(tmp_path / "x.ptd", verify=True) as data_map:
        assert data_map.segment_of("tensor") == data_map.segment_of("opaque")
        assert data_map.get_tensor_layout("tensor") == TensorLayout(ScalarType.BYTE, (9,))
        assert data_map.get_tensor_layout("opaque") is None


def test_the_golden_file_is_read():
    """Keys, bytes, layouts, alignments, digests and metadata are those that it was written with (R3)."""
    with open_ptd(DATA / "golden.ptd", verify=True) as data_map:
        assert data_map.metadata == {"made by": "a test", "a": ""}
        expected = {entry.key: entry for entry in golden_store().entries()}
        assert list(data_map) == list(expected)
        assert len(data_map.extents) == 5
        for key, entry in expected.items():
            assert data_map.get_data(key) == entry.data
            assert data_map.get_tensor_layout(key) == entry.layout
            assert data_map.alignment(key) == entry.alignment
            assert data_map.digest(key) == entry.digest
            assert data_map.byte_range(key)[0] % entry.alignment == 0
        assert data_map.segment_of("linear.weight") == data_map.segment_of("tied.weight")


def test_flatc_decodes_the_golden_file(tmp_path):
    """The tables and the manifest, as the tool of the flatbuffers project reads them."""
    to_json = ("--json", "--strict-json", "--raw-binary", "--defaults-json", "-o", tmp_path, "-I", SCHEMA)
    flatc(*to_json, SCHEMA / "flat_tensor.fbs", "--", DATA / "golden.ptd")
    table = json.loads((tmp_path / "golden.json").read_text())
    assert table["version"] == 0
    named = {entry["key"]: entry for entry in table["named_data"]}
    assert list(named) == ["linear.weight", "tied.weight", "conv.weight", "half", "opaque", "empty"]
    assert named["conv.weight"]["tensor_layout"] == {"scalar_type": "CHAR", "sizes": [2, 3], "dim_order": [1, 0]}
    assert named["half"]["tensor_layout"] == {"scalar_type": "HALF", "sizes": [], "dim_order": []}
    assert named["linear.weight"]["segment_index"] == named["tied.weight"]["segment_index"]
    assert named["opaque"]["tensor_layout"] == {"scalar_type": "BYTE", "sizes": [9], "dim_order": [0]}
    assert [segment["size"] for segment in table["segments"]] == [96, 6, 2, 9, 0]

    data = (DATA / "golden.ptd").read_bytes()
    base, nbytes = struct.unpack_from("<2Q", data, 32)
    assert data[48:56] == data[-8:] == b"BLOBMAN1"
    length = int.from_bytes(data[-16:-8], "little")
    body = data[base + nbytes :][:length]
    assert data[base + nbytes + length : -16] == xxhash.xxh3_128_digest(body)
    (tmp_path / "body").write_bytes(body)
    flatc(*to_json, SCHEMA / "manifest.fbs", "--", tmp_path / "body")
    manifest = json.loads((tmp_path / "body.json").read_text())
    assert bytes(manifest["head"]["bytes"]) == xxhash.xxh3_128_digest(data[:base])
    assert [bytes(digest["bytes"]) for digest in manifest["segments"]] == [
        xxhash.xxh3_128_digest(data[base + segment["offset"] :][: segment["size"]]) for segment in table["segments"]
    ]
    assert manifest["alignments"] == [16, 48, 1, 1, 256, 1]
    assert manifest["opaque"] == [4]
    assert manifest["metadata"] == [{"key": "a", "value": ""}, {"key": "made by", "value": "a test"}]


@pytest.mark.long
@given(
    st.lists(st.tuples(strategies.keys, st.none() | strategies.layouts()), unique_by=lambda row: row[0], max_size=8),
    st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 2**63)), min_size=1, max_size=5),
    st.data(),
)
def test_table_as_the_generated_reader_sees_it(rows, segments, data):
    index = [data.draw(st.integers(0, len(segments) - 1)) for _ in rows]
    raw = encode_table(
        [key for key, _ in rows], index, [layout for _, layout in rows], *map(list, zip(*segments, strict=True))
    )
    assert raw[4:8] == b"FT01"
    table = FlatTensor.GetRootAs(raw)
    assert table.Version() == 0
    assert [(table.Segments(i).Offset(), table.Segments(i).Size()) for i in range(len(segments))] == segments
    assert table.NamedDataLength() == len(rows)
    for i, (key, layout) in enumerate(rows):
        entry = table.NamedData(i)
        assert entry.Key().decode() == key
        assert entry.SegmentIndex() == index[i]
        found = entry.TensorLayout()
        if layout is None:
            assert found is None
        else:
            assert found.ScalarType() == layout.scalar_type
            assert tuple(found.Sizes(d) for d in range(found.SizesLength())) == layout.sizes
            assert tuple(found.DimOrder(d) for d in range(found.DimOrderLength())) == layout.dim_order


def test_dim_order_is_executorch_s():
    from executorch.exir.tensor import dim_order_from_stride

    for shape in [(2, 3, 4, 5), (2, 3, 4, 1), (1, 3, 4, 5), (2, 3, 1, 1), (4, 5, 6)]:
        tensor = torch.zeros(shape)
        for memory_format in [torch.contiguous_format, torch.channels_last][: 2 if len(shape) == 4 else 1]:
            tensor = tensor.contiguous(memory_format=memory_format)
            store = BlobStore()
            store.add("x", tensor)
            (entry,) = store.entries()
            theirs = tuple(dim_order_from_stride(tensor.stride()))
            assert entry.layout.dim_order == theirs or tensor.is_contiguous()


@pytest.mark.slow
def test_file_above_4_gib(tmp_path, stock_run):
    """The sparse blob comes first, so that the other lies beyond what 32 bits can address."""
    big = tmp_path / "zeros"
    with big.open("wb") as file:
        file.truncate((4 << 30) + 12345)
    store = BlobStore()
    store.add("a", blobstore.FileSlice(big))
    store.add("b", b"beyond")
    store.write_ptd(tmp_path / "big.ptd")
    with open_ptd(tmp_path / "big.ptd", verify=True) as data_map:
        assert data_map.byte_range("b")[0] > 4 << 30
        assert data_map.get_data("b") == b"beyond"
        assert len(data_map.get_data("a")) == (4 << 30) + 12345
        assert [data_map.get_tensor_layout(key) for key in "ab"] == [None, None]
