"""A program as a data map: the contract, over files that ExecuTorch wrote."""

import pytest

from blobstore.core.formats.pte.data_map import open_pte
from blobstore.core.formats.pte.program import content_key
from blobstore.core.memory.layout import TensorLayout
from blobstore.errors import KeyConflictError
from blobstore.testing.contract import NamedDataMapContract
from tests.core.formats.pte import oracle


class TestContract(NamedDataMapContract):
    """Tensors are constants with names, opaque blobs are named data."""

    def plant(self, folder):
        tensors, constants, named = [], [], {}
        for key, blob in self.blobs.items():
            if blob.layout is None:
                named[key] = blob.data
                continue
            if blob.data not in constants:
                constants.append(blob.data)
            fields = {
                "scalar_type": oracle.ScalarType(int(blob.layout.scalar_type)),
                "dim_order": list(blob.layout.dim_order),
            }
            number = constants.index(blob.data) + 1
            tensors.append(oracle.tensor(number, list(blob.layout.sizes), name=key, **fields))
        path = folder / "model.pte"
        path.write_bytes(oracle.serialize(tensors, constants, None, named))
        return open_pte(path)


def test_tensors_without_names_have_content_keys(tmp_path):
    path = tmp_path / "model.pte"
    path.write_bytes(oracle.one_of_everything())
    with open_pte(path) as data_map:
        assert len(data_map) == 8
        expected = {
            "bias": bytes(range(100, 120)),
            "cache": bytes(range(50, 58)),
            "first": b"named data",
            "again": b"named data",
            "second": b"more named data",
        }
        assert {key: data_map.bytes(key) for key in data_map if not key.startswith("tensor.")} == expected
        for key in data_map:
            layout = data_map.get_tensor_layout(key)
            if key.startswith("tensor."):
                assert key == content_key(data_map.digest(key), layout)
                assert layout.nbytes == len(data_map.get_data(key))
            assert data_map.alignment(key) >= 16


def test_one_name_for_two_contents(tmp_path):
    """Equal ones are one blob."""
    path = tmp_path / "model.pte"
    values = [oracle.tensor(1, [2], name="w"), oracle.tensor(2, [2], name="w")]
    path.write_bytes(oracle.serialize(values, [b"a" * 8, b"b" * 8]))
    with pytest.raises(KeyConflictError, match=r"model\.pte: the key 'w' occurs twice"):
        list(open_pte(path))
    path.write_bytes(oracle.serialize(values, [b"a" * 8] * 2))
    data_map = open_pte(path)
    assert list(data_map) == ["w"]
    assert data_map.get_tensor_layout("w") == TensorLayout(6, (2,))
