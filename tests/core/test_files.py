"""save_file and load_file."""

from pathlib import Path

import numpy as np
import pytest
import torch

import blobstore
from blobstore.errors import FileAccessError, UnsupportedDataError


def test_torch_round_trip(tmp_path):
    """Every tensor has its values, dtype and shape again (R4)."""
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
    """The same for numpy arrays (R4)."""
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
    """Writing to one changes neither the file nor another tensor (B5)."""
    path = tmp_path / "m.ptd"
    blobstore.save_file({"w": torch.zeros(4)}, path)
    before = path.read_bytes()
    weight = blobstore.load_file(path)["w"]
    weight += 1
    assert path.read_bytes() == before
    path.unlink()
    assert weight.tolist() == [1, 1, 1, 1]


def equal_norms(path):
    """Two new layer norms: ones and zeros, each stored once."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.LayerNorm(8))
    blobstore.save_file(model.state_dict(), path)
    with blobstore.open_ptd(path) as data_map:
        assert data_map.segment_of("0.weight") == data_map.segment_of("1.weight")
    return model


def trained(model):
    """The parameters after a few steps, in which the two norms get different gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(16.0).reshape(2, 8).sin()
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - x.cos()).pow(2).sum().backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_equal_tensors_train_apart(tmp_path):
    """Tensors that the file stores once are not tied when they are loaded (R1)."""
    path = tmp_path / "m.ptd"
    expected = trained(equal_norms(path))
    before = path.read_bytes()
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.LayerNorm(8))
    model.load_state_dict(blobstore.load_file(path), assign=True)
    found = trained(model)
    assert not torch.equal(expected["0.weight"], expected["1.weight"])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert path.read_bytes() == before


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_names_are_tied_where_that_is_asked_for(framework, tmp_path):
    """With `tied`, names of one blob share memory."""
    path = tmp_path / "m.ptd"
    blobstore.save_file({"a": np.ones(3), "b": np.ones(3), "c": np.ones(4)}, path)
    for tied in (False, True):
        loaded = blobstore.load_file(path, framework, tied=tied)
        loaded["a"][0] = 5
        assert loaded["b"].tolist() == [5 if tied else 1, 1, 1]
        assert loaded["c"].tolist() == [1, 1, 1, 1]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs the memory accounting of Linux")
def test_loading_reads_nothing_and_takes_no_memory(tmp_path):
    """Also for names that share a blob: only what is written to takes memory of the process (D1)."""

    def memory():
        rows = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
        return {name.rstrip(":"): int(kilobytes) for name, kilobytes, _ in rows}

    large = np.zeros(16 << 20, np.uint8)
    blobstore.save_file({**{str(i): large for i in range(50)}, "other": large[1:]}, tmp_path / "m.ptd")
    del large
    blobstore.load_file(tmp_path / "m.ptd", "np")  # whatever is imported is imported
    before = memory()
    loaded = blobstore.load_file(tmp_path / "m.ptd", "np")
    after = memory()
    assert after["Rss"] - before["Rss"] < 4096
    assert after["Anonymous"] - before["Anonymous"] < 4096
    loaded["7"][::4096] = 1
    assert memory()["Anonymous"] - after["Anonymous"] >= 16 << 10
    assert not loaded["8"].any()


def test_many_names_of_one_blob_take_no_file_descriptors(tmp_path):
    """One descriptor serves all maps of a file."""
    blobstore.save_file({str(i): np.ones(3) for i in range(3000)}, tmp_path / "m.ptd")
    loaded = blobstore.load_file(tmp_path / "m.ptd", "np")
    for i, array in enumerate(loaded.values()):
        np.add(array, i, out=array)
    assert [array[0] for array in loaded.values()] == [i + 1 for i in range(3000)]


def test_opaque_blobs_come_as_bytes(tmp_path):
    """Blobs without a layout are arrays of uint8 (R4)."""
    blobstore.save_file({"o": b"\1\2"}, tmp_path / "m.ptd")
    assert blobstore.load_file(tmp_path / "m.ptd")["o"].tolist() == [1, 2]
    assert blobstore.load_file(tmp_path / "m.ptd", framework="np")["o"].tolist() == [1, 2]


def test_what_a_framework_lacks(tmp_path):
    """A dtype that it lacks, or an unknown framework, is an error that says so."""
    store = blobstore.BlobStore()
    store.add("q", b"\1", layout=blobstore.TensorLayout(blobstore.ScalarType.QINT8, (1,)))
    store.write_ptd(tmp_path / "q.ptd")
    for framework in ("pt", "np", "tf"):
        with pytest.raises(UnsupportedDataError):
            blobstore.load_file(tmp_path / "q.ptd", framework=framework)
    with pytest.raises(FileAccessError):
        blobstore.load_file(tmp_path / "missing.ptd")


def test_exported_names():
    """`__all__` is sorted, and all its names exist."""
    assert blobstore.__all__ == sorted(blobstore.__all__)
    assert all(hasattr(blobstore, name) for name in blobstore.__all__)


@pytest.mark.long
def test_a_staged_file_knows_its_position_and_has_what_was_written(tmp_path):
    """Also when so much is written that the disk is put to work beside it."""
    from blobstore.core.disk.staging import Staging

    block = bytes(range(256)) * 4096 * 5
    with Staging() as staging, staging.open(tmp_path / "large") as file:
        for number in range(30):
            assert file.tell() == number * len(block)
            file.write(block)
        file.write(b"end")
    assert (tmp_path / "large").read_bytes() == block * 30 + b"end"
