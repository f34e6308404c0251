"""Every data map keeps the contract (R3, R4, R5); ExecuTorch's own serializers plant the blobs."""

import pytest
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir._serialize.data_serializer import DataPayload
from executorch.exir.scalar_type import ScalarType as EtScalarType
from executorch.exir.tensor_layout import TensorLayout as EtLayout
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

from blobstore import BlobStore, MergedDataMap, PtdDataMap, open_ptd
from blobstore.errors import KeyConflictError
from blobstore.testing import Blob, NamedDataMapContract


def executorch_ptd(path, blobs):
    """Write a .ptd with ExecuTorch."""
    store = NamedDataStore()
    for key, (data, layout) in blobs.items():
        theirs = layout and EtLayout(EtScalarType(int(layout.scalar_type)), list(layout.sizes), list(layout.dim_order))
        store.add_named_data(key, data, external_tag="x", tensor_layout=theirs)
    output = store.get_named_data_store_output()
    path.write_bytes(bytes(FlatTensorSerializer().serialize(DataPayload(output.buffers, output.external_data["x"]))))
    return path


class TestPtdDataMapOverExecuTorchsFile(NamedDataMapContract):
    def plant(self, folder):
        return PtdDataMap(executorch_ptd(folder / "theirs.ptd", self.blobs))


class TestPtdDataMapOverOurFile(NamedDataMapContract):
    """Not independent of the writer, but with a manifest; tests/formats/ptd checks the bytes."""

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
    assert bytes(a["only here"]) == b"1"
