"""The contract of `NamedDataMap`, as a test class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from blobstore.core.errors import ClosedError, KeyNotFoundError, LayoutError, MissingDependencyError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.memory.layout import ScalarType, TensorLayout

try:
    import pytest
except ImportError as error:
    raise MissingDependencyError("the contract of data maps needs pytest: pip install pytest") from error

__all__ = ["Blob", "NamedDataMapContract"]


class Blob(NamedTuple):
    """The expected contents of a key."""

    data: bytes
    layout: TensorLayout | None


class NamedDataMapContract:
    """Derive from this class and define `plant`; pytest then checks the whole contract.

    `plant` must put the blobs where the map finds them *without the code under test*, for example in a file that another
    library writes. A map that cannot hold some of the blobs overrides `blobs`.
    """

    blobs: Mapping[str, Blob] = {
        "linear.weight": Blob(bytes(range(48)), TensorLayout(ScalarType.FLOAT, (3, 4))),
        "conv.weight": Blob(bytes(range(24)), TensorLayout(ScalarType.CHAR, (1, 2, 3, 4), (0, 2, 3, 1))),
        "tied.weight": Blob(bytes(range(48)), TensorLayout(ScalarType.FLOAT, (3, 4))),
        "scale": Blob(b"\x00\x00\x80\x3f", TensorLayout(ScalarType.FLOAT, ())),
        "bf16": Blob(bytes(range(6)), TensorLayout(ScalarType.BFLOAT16, (3,))),
        "opaque": Blob(b"anything at all", None),
        "schlüssel/鍵 with blanks": Blob(b"\xff", None),
    }

    def plant(self, folder: Path) -> NamedDataMap:
        """Open a map over `self.blobs`, in files that are written to `folder`."""
        raise NotImplementedError

    @pytest.fixture
    def data_map(self, tmp_path: Path) -> NamedDataMap:
        return self.plant(tmp_path)

    def test_keys_are_listed_once_by_index_and_by_iteration(self, data_map: NamedDataMap) -> None:
        by_index = [data_map.get_key(i) for i in range(data_map.get_num_keys())]
        assert by_index == list(data_map)
        assert sorted(by_index) == sorted(self.blobs)
        assert len(data_map) == len(self.blobs)

    def test_key_index_out_of_range(self, data_map: NamedDataMap) -> None:
        for index in (-1, len(self.blobs), 2**32):
            with pytest.raises(KeyNotFoundError, match="out of range"):
                data_map.get_key(index)

    def test_data(self, data_map: NamedDataMap) -> None:
        for key, blob in self.blobs.items():
            view = data_map.get_data(key)
            assert (view.format, view.ndim, view.nbytes) == ("B", 1, len(blob.data))
            assert bytes(view) == data_map.bytes(key) == blob.data

    def test_tensor_layout(self, data_map: NamedDataMap) -> None:
        for key, blob in self.blobs.items():
            assert data_map.get_tensor_layout(key) == blob.layout

    def test_arrays_are_over_the_memory_of_the_map(self, data_map: NamedDataMap) -> None:
        for key, blob in self.blobs.items():
            array = data_map.numpy(key)
            assert array.shape == ((len(blob.data),) if blob.layout is None else blob.layout.sizes)
            assert array.nbytes == len(blob.data)
            inner_first = array if blob.layout is None else array.transpose(blob.layout.dim_order)
            assert inner_first.tobytes() == blob.data
            assert array.ctypes.data == np.frombuffer(data_map.get_data(key), np.uint8).ctypes.data
            assert array.flags.writeable is not data_map.get_data(key).readonly

    def test_repr_is_one_short_line(self, data_map: NamedDataMap) -> None:
        text = repr(data_map)
        assert f"{type(data_map).__name__} " in text and data_map.name[-20:] in text
        len(data_map)  # a program reads its keys when they are asked for
        assert f": {len(self.blobs)} keys, " in repr(data_map) and text.isprintable() and len(text) <= 120

    def test_load_data_into_writes_the_blob_and_nothing_else(self, data_map: NamedDataMap) -> None:
        for key, blob in self.blobs.items():
            for size in (None, len(blob.data)):
                buffer = bytearray(b"\xaa" * (len(blob.data) + 5))
                data_map.load_data_into(key, buffer, size)
                assert buffer == blob.data + b"\xaa" * 5

    def test_load_data_into_refuses_what_does_not_fit_and_writes_nothing(self, data_map: NamedDataMap) -> None:
        key, blob = next((key, blob) for key, blob in self.blobs.items() if len(blob.data) > 1)
        small = bytearray(len(blob.data) - 1)
        for buffer, size in (
            (small, None),
            (small, len(small)),
            (small, len(blob.data)),
            (bytearray(len(blob.data)), len(blob.data) + 1),
            (bytearray(len(blob.data)), -1),
            (bytes(len(blob.data)), None),
            (memoryview(bytearray(2 * len(blob.data)))[::2], None),
            (3, None),
        ):
            with pytest.raises(LayoutError, match=re.escape(key)):
                data_map.load_data_into(key, buffer, size)
        assert small == bytes(len(small))

    def test_unknown_key_is_named(self, data_map: NamedDataMap) -> None:
        for call in (
            data_map.get_data,
            data_map.get_tensor_layout,
            data_map.__getitem__,
            data_map.alignment,
            data_map.digest,
            data_map.numpy,
            lambda key: data_map.load_data_into(key, bytearray(1)),
        ):
            with pytest.raises(KeyNotFoundError, match="no such one"):
                call("no such one")
        assert "no such one" not in data_map
        assert data_map.get("no such one") is None

    def test_mapping(self, data_map: NamedDataMap) -> None:
        assert {key: bytes(data) for key, data in data_map.views()} == {k: b.data for k, b in self.blobs.items()}
        assert all(key in data_map for key in self.blobs)
        others: list[object] = [3, [], None]
        assert not any(other in data_map for other in others)

    def test_equal_bytes_have_equal_digests(self, data_map: NamedDataMap) -> None:
        for a in self.blobs:
            for b in self.blobs:
                same = self.blobs[a].data == self.blobs[b].data
                assert (data_map.digest(a) == data_map.digest(b)) is same

    def test_alignment_is_positive(self, data_map: NamedDataMap) -> None:
        assert all(data_map.alignment(key) >= 1 for key in data_map)

    def test_views_outlive_the_map_which_refuses_everything_once_closed(self, data_map: NamedDataMap) -> None:
        key, blob = next(iter(self.blobs.items()))
        with data_map:
            view = data_map.get_data(key)
        assert bytes(view) == blob.data
        for call in (data_map.get_data, data_map.get_tensor_layout, data_map.alignment, data_map.digest):
            with pytest.raises(ClosedError, match="closed"):
                call(key)
        for use in (
            data_map.get_num_keys,
            lambda: data_map.get_key(0),
            lambda: list(data_map),
            data_map.__enter__,
        ):
            with pytest.raises(ClosedError, match="closed"):
                use()
        data_map.close()
        assert "closed" in repr(data_map)
