"""Reading .safetensors files that the safetensors package wrote, and malformed ones (B5)."""

import contextlib
import json
import os
import struct
from collections.abc import Mapping

import pytest
import torch
from safetensors.torch import save, save_file

from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.tools.convert import convert
from blobstore.errors import BlobStoreError, InvalidFileError, UnsupportedDataError
from blobstore.testing import Blob, NamedDataMapContract

# The format has neither opaque blobs nor dim orders.
CONTIGUOUS: Mapping[str, Blob] = {
    k: b for k, b in NamedDataMapContract.blobs.items() if b.layout and b.layout.is_contiguous
}


def as_tensors(blobs: Mapping[str, Blob]) -> dict[str, torch.Tensor]:
    """The blobs that have layouts, as torch has them."""
    dtypes = {ScalarType.FLOAT: torch.float32, ScalarType.CHAR: torch.int8, ScalarType.BFLOAT16: torch.bfloat16}
    return {
        key: torch.frombuffer(bytearray(data), dtype=dtypes[layout.scalar_type]).as_strided(
            layout.sizes, layout.strides
        )
        for key, (data, layout) in blobs.items()
        if layout is not None
    }


class TestSafetensorsDataMap(NamedDataMapContract):
    blobs = CONTIGUOUS

    def plant(self, folder):
        save_file(as_tensors(self.blobs), folder / "x.safetensors")
        return SafetensorsDataMap(folder / "x.safetensors")


def test_metadata_dtypes_and_ranges(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"c": torch.zeros(2, dtype=torch.complex64), "f": torch.ones(3)}, path, metadata={"a": "b"})
    with SafetensorsDataMap(path) as data_map:
        assert data_map.metadata == {"a": "b"}
        assert data_map.dtypes == {"c": "C64", "f": "F32"}
        assert data_map.get_tensor_layout("c") == TensorLayout(ScalarType.COMPLEX64, (2,))
        assert data_map.get_tensor_layout("f") == TensorLayout(ScalarType.FLOAT, (3,))
        start, end = data_map.byte_range("f")
        assert path.read_bytes()[start:end] == torch.ones(3).numpy().tobytes()


def test_truncated_at_any_byte(tmp_path):
    whole = save({"w": torch.zeros(3), "v": torch.ones(2)})
    path = tmp_path / "cut.safetensors"
    for length in [*range(len(whole)), -1]:
        path.write_bytes(whole[:length] if length >= 0 else whole + b"x")
        with pytest.raises(InvalidFileError, match=r"cut\.safetensors"):
            SafetensorsDataMap(path)


def test_any_bit_flipped_is_our_error_or_harmless():
    whole = save({"w": torch.zeros(3), "v": torch.ones(2)})
    for at in range(len(whole)):
        for bit in range(8):
            flipped = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
            with contextlib.suppress(BlobStoreError):
                dict(SafetensorsDataMap("flip.safetensors", data=memoryview(flipped)).views())


def tensor(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("[]", "not a JSON object"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested|not JSON"),
        ('{"a":1,"a":2}', "'a' occurs twice"),
        ({"w": 1}, "lacks"),
        ({"w": {}}, "lacks"),
        ({"w": tensor(data_offsets=[0])}, "lacks"),
        ({"w": tensor(shape=2)}, "non-negative integers"),
        ({"w": tensor(shape=[-1])}, "non-negative integers"),
        ({"w": tensor(shape=[True, 2])}, "non-negative integers"),
        ({"w": tensor(shape=[2.0])}, "non-negative integers"),
        ({"w": tensor(data_offsets=[0, 2**64])}, "non-negative integers"),
        ({"w": tensor(dtype=3)}, "must have a str as dtype"),
        ({"w": tensor(data_offsets=[8, 0])}, "not within"),
        ({"w": tensor(data_offsets=[8, 16])}, "not within"),
        ({"w": tensor(shape=[3])}, "12 bytes, but has 8"),
        ({"w": tensor(shape=[2**40, 2**40])}, "bytes, but has 8"),
        ({"w": tensor(), "v": tensor()}, "overlap"),
        ({"w": tensor(shape=[1], data_offsets=[4, 8])}, "gap"),
        ({"w": tensor(shape=[1], data_offsets=[0, 4])}, "end at byte"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
        ({"__metadata__": 1}, "__metadata__"),
    ],
)
def test_bad_headers(tmp_path, header, reason):
    raw = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(8))
    with pytest.raises(InvalidFileError, match=rf"bad\.safetensors: .*({reason})"):
        SafetensorsDataMap(path)


def test_text_that_is_no_unicode(tmp_path):
    for header in (
        {"__metadata__": {"a": "\ud800"}},
        {"\udfff": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
    ):
        raw = json.dumps(header).encode()
        path = tmp_path / "x.safetensors"
        path.write_bytes(len(raw).to_bytes(8, "little") + raw)
        with pytest.raises(InvalidFileError, match=r"x\.safetensors: .* not valid Unicode"):
            SafetensorsDataMap(path)


def test_a_key_that_is_twice_among_very_many(tmp_path):
    """Time grows with the number of keys, not with its square."""
    raw = ("{" + ",".join(f'"{i}":1' for i in range(200_000)) + ',"199999":1}').encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(InvalidFileError, match="key '199999' occurs twice"):
        SafetensorsDataMap(path)


def test_a_size_that_a_ptd_cannot_have(tmp_path):
    """The file is valid, but cannot be converted."""
    size = 2**31
    raw = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + size)  # sparse: it takes no space on the disk
    with SafetensorsDataMap(path) as data_map:
        assert data_map.get_tensor_layout("w") is None
        assert len(data_map.get_data("w")) == size
    with pytest.raises(UnsupportedDataError, match="'w'.* size"):
        convert(path, tmp_path / "x.ptd")
    assert os.listdir(tmp_path) == ["x.safetensors"]
