"""Every data map keeps the contract (R3, R4, R5); ExecuTorch's own serializers plant the blobs."""

import pytest
import torch

from blobstore import BlobStore, MergedDataMap, PtdDataMap, open_ptd, save_file
from blobstore.errors import KeyConflictError
from blobstore.testing import Blob, NamedDataMapContract
from tests.core.formats.pte import oracle


def executorch_ptd(path, blobs):
    """Write a .ptd with ExecuTorch."""
    return oracle.write_ptd(path, [(key, *blob) for key, blob in blobs.items()])


class TestPtdDataMapOverExecuTorchsFile(NamedDataMapContract):
    def plant(self, folder):
        return PtdDataMap(executorch_ptd(folder / "theirs.ptd", self.blobs))


class TestPtdDataMapOverOurFile(NamedDataMapContract):
    """Not independent of the writer, but with a manifest; tests/core/formats/ptd checks the bytes."""

    def plant(self, folder):
        store = BlobStore()
        for key, blob in self.blobs.items():
            store.add(key, blob.data, layout=blob.layout, alignment=32)
        store.write_ptd(folder / "ours.ptd")
        return open_ptd(folder / "ours.ptd")


class TestMergedDataMap(NamedDataMapContract):
    def plant(self, folder):
        keys = list(self.blobs)
        parts = [keys[:3], keys[2:5], keys[5:]]  # one key is in two files, with equal bytes
        return MergedDataMap(
            [
                open_ptd(executorch_ptd(folder / f"{i}.ptd", {key: self.blobs[key] for key in part}))
                for i, part in enumerate(parts)
            ]
        )


def test_merged_map_of_nothing():
    assert list(MergedDataMap([])) == []


def test_merged_map_names_both_files(tmp_path):
    layout = NamedDataMapContract.blobs["linear.weight"].layout
    a = open_ptd(executorch_ptd(tmp_path / "a.ptd", {"k": Blob(bytes(48), layout), "only here": Blob(b"1", None)}))
    b = open_ptd(executorch_ptd(tmp_path / "b.ptd", {"k": Blob(bytes(47) + b"\1", layout)}))
    c = open_ptd(executorch_ptd(tmp_path / "c.ptd", {"k": Blob(bytes(48), None)}))
    with pytest.raises(KeyConflictError, match=r"'k' has different bytes in .*a\.ptd and in .*b\.ptd"):
        MergedDataMap([a, b])
    with pytest.raises(KeyConflictError, match=r"'k' is float\[3, 4\] in .*a\.ptd but None in .*c\.ptd"):
        MergedDataMap([a, c])
    merged = MergedDataMap([a])
    merged.close()
    assert a.bytes("only here") == b"1"


def test_torch_tensors_are_copies_of_read_only_memory(tmp_path):
    """Torch has no read-only tensors; writing to one changes neither the map nor the file."""
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    save_file({"image": image, "o": b"12", "bf16": torch.ones(2).bfloat16()}, tmp_path / "a.ptd")
    data_map = open_ptd(tmp_path / "a.ptd")
    found = data_map.torch("image")
    assert torch.equal(found, image) and found.stride() == image.stride()
    found += 1
    assert torch.equal(data_map.torch("image"), image)
    assert data_map.torch("o").tolist() == [49, 50]
    assert data_map.torch("bf16").dtype is torch.bfloat16
    private = PtdDataMap(tmp_path / "a.ptd", data=memoryview(bytearray((tmp_path / "a.ptd").read_bytes())))
    private.torch("image").zero_()  # memory that can be written to is shared
    assert not private.numpy("image").any()
