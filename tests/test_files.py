"""save_file and load_file."""

import numpy as np
import pytest
import torch

import blobstore
from blobstore.errors import FileAccessError, UnsupportedDataError


def test_torch_round_trip(tmp_path):
    tensors = {
        "weight": torch.randn(3, 4),
        "bf16": torch.randn(5).bfloat16(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False]),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    blobstore.save_file(tensors, tmp_path / "m.ptd", metadata={"format": "pt"})
    loaded = blobstore.load_file(tmp_path / "m.ptd")
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (loaded[key].dtype, loaded[key].shape) == (tensor.dtype, tensor.shape)
        assert loaded[key].stride() == tensor.stride() or tensor.numel() == 0
        assert bytes(loaded[key].reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))
    with blobstore.open_ptd(tmp_path / "m.ptd") as data_map:
        assert data_map.metadata == {"format": "pt"}


def test_numpy_round_trip(tmp_path):
    arrays = {
        "a": np.arange(6.0).reshape(2, 3),
        "f": np.asfortranarray(np.eye(3, dtype=np.int8)),
        "s": np.float32(2),
    }
    blobstore.save_file(arrays, tmp_path / "m.ptd")
    loaded = blobstore.load_file(tmp_path / "m.ptd", framework="np")
    for key, array in arrays.items():
        np.testing.assert_array_equal(loaded[key], array, strict=True)
    assert loaded["f"].flags.f_contiguous


def test_loaded_tensors_are_private_and_outlive_the_file(tmp_path):
    path = tmp_path / "m.ptd"
    blobstore.save_file({"w": torch.zeros(4)}, path)
    before = path.read_bytes()
    weight = blobstore.load_file(path)["w"]
    weight += 1
    assert path.read_bytes() == before
    path.unlink()
    assert weight.tolist() == [1, 1, 1, 1]


def test_opaque_blobs_come_as_bytes(tmp_path):
    blobstore.save_file({"o": b"\1\2"}, tmp_path / "m.ptd")
    assert blobstore.load_file(tmp_path / "m.ptd")["o"].tolist() == [1, 2]
    assert blobstore.load_file(tmp_path / "m.ptd", framework="np")["o"].tolist() == [1, 2]


def test_what_a_framework_lacks(tmp_path):
    store = blobstore.BlobStore()
    store.add("q", b"\1", layout=blobstore.TensorLayout(blobstore.ScalarType.QINT8, (1,)))
    store.write_ptd(tmp_path / "q.ptd")
    for framework in ("pt", "np", "tf"):
        with pytest.raises(UnsupportedDataError):
            blobstore.load_file(tmp_path / "q.ptd", framework=framework)
    with pytest.raises(FileAccessError):
        blobstore.load_file(tmp_path / "missing.ptd")


def test_exported_names():
    assert blobstore.__all__ == sorted(blobstore.__all__)
    assert all(hasattr(blobstore, name) for name in blobstore.__all__)


def test_a_staged_file_knows_its_position_and_has_what_was_written(tmp_path):
    """Also when so much is written that the disk is put to work beside it."""
    from blobstore.staging import Staging

    block = bytes(range(256)) * 4096 * 5
    with Staging() as staging, staging.open(tmp_path / "large") as file:
        for number in range(30):
            assert file.tell() == number * len(block)
            file.write(block)
        file.write(b"end")
    assert (tmp_path / "large").read_bytes() == block * 30 + b"end"
