"""`.safetensors` to `.ptd` and back without loss; the safetensors package is the oracle (R4)."""

import json
import sys
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import blobstore
from blobstore.core.tools.convert import convert
from blobstore.errors import OutputPathError, UnsupportedDataError


def test_there_and_back(tmp_path):
    """Names, their order, dtypes, shapes, bytes and metadata are kept."""
    tensors = {
        "f": torch.randn(3, 4),
        "bf": torch.randn(5).bfloat16(),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
        "u16": torch.tensor([1, 2], dtype=torch.uint16),
        "empty": torch.empty(0, 2),
        "scalar": torch.tensor(True),
        "Ünï": torch.tensor([1]),
    }
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    convert(tmp_path / "a.safetensors", tmp_path / "a.ptd")
    loaded = blobstore.load_file(tmp_path / "a.ptd")
    convert(tmp_path / "a.ptd", tmp_path / "b.safetensors")
    back = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert list(blobstore.open_ptd(tmp_path / "a.ptd")) == list(_header(tmp_path / "a.safetensors"))
    assert list(_header(tmp_path / "b.safetensors")) == list(_header(tmp_path / "a.safetensors"))
    for key, tensor in tensors.items():
        for other in (loaded[key], back[key]):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert bytes(other.reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_order_of_keys_is_kept(tmp_path):
    """Of a .ptd in any order, in both directions, although the safetensors package orders by element size."""
    arrays = {
        "z": np.ones(1, np.int8),
        "a": np.ones(2, np.float64),
        "m": np.ones(3, np.int8),
        "b": np.ones(4, np.int64),
    }
    blobstore.save_file(arrays, tmp_path / "a.ptd")
    convert(tmp_path / "a.ptd", tmp_path / "a.safetensors")
    assert list(_header(tmp_path / "a.safetensors")) == list(arrays)
    read = safetensors.numpy.load_file(tmp_path / "a.safetensors")
    assert {key: (array.dtype, array.tolist()) for key, array in read.items()} == {
        key: (array.dtype, array.tolist()) for key, array in arrays.items()
    }
    convert(tmp_path / "a.safetensors", tmp_path / "b.ptd")
    assert (tmp_path / "b.ptd").read_bytes() == (tmp_path / "a.ptd").read_bytes()


def _header(path):
    """The header of a .safetensors without metadata, in its order."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    return header


def test_other_dim_orders_and_opaque_blobs_are_kept(tmp_path):
    """Opaque blobs become tensors of bytes, and opaque again."""
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    blobstore.save_file({"image": image, "opaque": b"abc", "bytes": np.arange(3, dtype=np.uint8)}, tmp_path / "c.ptd")
    convert(tmp_path / "c.ptd", tmp_path / "c.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "c.safetensors")["image"], image)
    convert(tmp_path / "c.safetensors", tmp_path / "d.ptd")
    with blobstore.open_ptd(tmp_path / "d.ptd") as data_map:
        assert data_map.get_tensor_layout("opaque") is None
        assert data_map.get_tensor_layout("bytes") is not None
        assert data_map.metadata == {}


def test_bfloat16_with_another_dim_order_needs_no_ml_dtypes(tmp_path, monkeypatch):
    """Elements are moved as integers of their size."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    weight = torch.randn(3, 5).bfloat16().t()
    blobstore.save_file({"w": weight}, tmp_path / "a.ptd")
    convert(tmp_path / "a.ptd", tmp_path / "a.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "a.safetensors")["w"], weight)


def test_one_tensor_is_copied_at_a_time(tmp_path):
    """Tensors with another dim order are made contiguous one by one, as they are written."""
    tensors = {str(i): np.full((1000, 1000), i, np.float32).T for i in range(20)}
    blobstore.save_file(tensors, tmp_path / "a.ptd")
    tracemalloc.start()
    try:
        convert(tmp_path / "a.ptd", tmp_path / "a.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 12_000_000
    finally:
        tracemalloc.stop()


def test_odd_metadata_and_keys(tmp_path):
    """Metadata of another application under our name is ignored; the reserved key is refused."""
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", {"blobstore.opaque": "[" * 100_000})
    convert(tmp_path / "a.safetensors", tmp_path / "a.ptd")
    assert blobstore.load_file(tmp_path / "a.ptd")["w"].tolist() == [1, 1]
    blobstore.save_file({"__metadata__": torch.ones(2)}, tmp_path / "b.ptd")
    with pytest.raises(UnsupportedDataError, match="__metadata__"):
        convert(tmp_path / "b.ptd", tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("name", ["out.bin", "out.pt", "out.ptd.tmp", "out.json"])
def test_a_name_of_no_known_format(tmp_path, name):
    """The ending says what a file is, so it must be right; a name without one is the user's choice."""
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "a.ptd")
    for source, ending in (("a.safetensors", "ptd"), ("a.ptd", "safetensors")):
        for force in (False, True):
            expected = rf"expected a name that ends in \.{ending}|this is the name of a checkpoint of torch\.save"
            with pytest.raises(OutputPathError, match=rf"{name}: ({expected})"):
                convert(tmp_path / source, tmp_path / name, force=force)
    assert not (tmp_path / name).exists()
    convert(tmp_path / "a.ptd", tmp_path / "out")
