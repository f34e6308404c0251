"""The cache, and ExecuTorch's interface to it, fulfil the same contract as every other data map (R3, R4)."""

import ctypes
import os
import weakref
from pathlib import Path

import numpy as np
import pytest

from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.errors import KeyNotFoundError, LayoutError
from blobstore.runtime import BlobCache, make_working_copy
from blobstore.testing import NamedDataMapContract
from tests.runtime.application import build

pytestmark = pytest.mark.long

OK, INVALID_ARGUMENT, INVALID_TYPE, NOT_FOUND = 0, 0x12, 0x13, 0x20


def plant_file(blobs, folder):
    """A file that ExecuTorch wrote."""
    from executorch.exir._serialize._named_data_store import NamedDataStore
    from executorch.exir._serialize.data_serializer import DataPayload
    from executorch.exir.scalar_type import ScalarType
    from executorch.exir.tensor_layout import TensorLayout
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    store = NamedDataStore()
    for key, blob in blobs.items():
        layout = blob.layout and TensorLayout(
            ScalarType(int(blob.layout.scalar_type)), list(blob.layout.sizes), list(blob.layout.dim_order)
        )
        store.add_named_data(key, blob.data, external_tag="x", tensor_layout=layout)
    output = store.get_named_data_store_output()
    path = folder / "planted.ptd"
    path.write_bytes(bytes(FlatTensorSerializer().serialize(DataPayload(output.buffers, output.external_data["x"]))))
    return path


class TestCache(NamedDataMapContract):
    def plant(self, folder):
        return BlobCache(plant_file(self.blobs, folder))


class TestCacheInMemory(NamedDataMapContract):
    def plant(self, folder):
        return BlobCache(plant_file(self.blobs, folder), "copy")


class TestSharedCache(NamedDataMapContract):
    def plant(self, folder):
        make_working_copy(plant_file(self.blobs, folder), folder / "copy.ptd")
        return BlobCache(folder / "copy.ptd", "shared")


class TestStackedCache(NamedDataMapContract):
    def plant(self, folder):
        return BlobCache(base=BlobCache(plant_file(self.blobs, folder)))


class Probe:
    """ExecuTorch's five virtual functions, called as ExecuTorch calls them (cpp/data_map_probe.cpp).

    Results are ExecuTorch's error number and a value.
    """

    def __init__(self, path):
        library = ctypes.CDLL(build(Path(__file__).parent / "cpp", "data_map_probe"))
        library.probe_open.restype = ctypes.c_void_p
        for name in ("probe_close", "probe_free"):
            getattr(library, name).argtypes = [ctypes.c_void_p]
        self._library = library
        self._map = ctypes.c_void_p(library.probe_open(os.fsencode(path)))
        weakref.finalize(self, library.probe_close, self._map)

    def get_num_keys(self):
        return self._library.probe_num_keys(self._map)

    def get_key(self, index):
        key = ctypes.c_char_p()
        error = self._library.probe_key(self._map, index, ctypes.byref(key))
        return error, key.value and key.value.decode()

    def get_tensor_layout(self, key):
        scalar_type, rank = ctypes.c_int(), ctypes.c_size_t()
        sizes, order = (ctypes.c_int32 * 64)(), (ctypes.c_uint8 * 64)()
        out = (ctypes.byref(scalar_type), ctypes.byref(rank), sizes, order)
        error = self._library.probe_layout(self._map, *self._key(key), *out)
        if error:
            return error, None
        dimensions = slice(rank.value)
        return OK, TensorLayout(ScalarType(scalar_type.value), tuple(sizes[dimensions]), tuple(order[dimensions]))

    def get_data(self, key):
        buffer, data, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        out = (ctypes.byref(buffer), ctypes.byref(data), ctypes.byref(size))
        if error := self._library.probe_data(self._map, *self._key(key), *out):
            return error, None
        view = (ctypes.c_char * size.value).from_address(data.value)
        weakref.finalize(view, self._library.probe_free, buffer)  # the buffer keeps the memory
        return OK, memoryview(view).cast("B").toreadonly()

    def load_data_into(self, key, buffer, size):
        return self._library.probe_load(self._map, *self._key(key), ctypes.c_void_p(buffer), ctypes.c_size_t(size))

    @staticmethod
    def _key(key):
        text = key.encode()
        return text, ctypes.c_size_t(len(text))


class NativeMap(NamedDataMap):
    """A data map in Python that asks ExecuTorch's interface."""

    def __init__(self, path):
        self.name = str(path)
        self.probe = Probe(path)

    def _key_list(self):
        return [self.probe.get_key(i)[1] for i in range(self.probe.get_num_keys())]

    def _read(self, read, key, *fine):
        if not isinstance(key, str):
            raise KeyError(key)
        error, value = read(key)
        if error == NOT_FOUND:
            raise KeyError(key)
        assert error in fine
        return value

    def _view(self, key):
        return self._read(self.probe.get_data, key, OK)

    def _layout(self, key):
        return self._read(self.probe.get_tensor_layout, key, OK, INVALID_TYPE)

    def load_data_into(self, key, buffer, size=None):
        data = self.get_data(key)
        try:
            view = memoryview(buffer)
            if view.readonly or not view.contiguous or len(view.cast("B")) < len(data):
                raise TypeError("not usable")
            target = (ctypes.c_char * view.nbytes).from_buffer(buffer)
        except TypeError:
            raise LayoutError(f"{key}: no buffer of this size") from None
        error = self.probe.load_data_into(key, ctypes.addressof(target), len(data) if size is None else size % 2**64)
        if error == INVALID_ARGUMENT:
            raise LayoutError(f"{key}: the wrong size")
        assert error == OK


class TestNativeDataMap(NamedDataMapContract):
    def plant(self, folder):
        return NativeMap(plant_file(self.blobs, folder))

    def test_errors_are_executorchs(self, data_map):
        """Error codes and untouched buffers, as the interface requires (R3)."""
        probe = data_map.probe
        assert probe.get_tensor_layout("opaque")[0] == INVALID_TYPE
        assert probe.get_tensor_layout("no such one")[0] == NOT_FOUND
        assert probe.get_data("no such one")[0] == NOT_FOUND
        buffer = np.full(100, 0xAA, np.uint8)
        assert probe.load_data_into("no such one", buffer.ctypes.data, 3) == NOT_FOUND
        for size in (0, 14, 16, 100):  # ExecuTorch's own map checks `size <= nbytes` and then writes nbytes
            assert probe.load_data_into("opaque", buffer.ctypes.data, size) == INVALID_ARGUMENT
        assert (buffer == 0xAA).all()
        assert probe.load_data_into("opaque", buffer.ctypes.data, 15) == OK
        assert bytes(buffer[:15]) == b"anything at all"
        assert (buffer[15:] == 0xAA).all()
        assert probe.get_key(probe.get_num_keys())[0] == INVALID_ARGUMENT


def test_no_two_keys_share_an_address(tmp_path, foundation):
    """XNNPACK identifies weights by address, and a write to one key must not reach another. An empty blob has one, too."""
    make_working_copy(foundation, tmp_path / "copy.ptd")
    for path, mode in ((foundation, "private"), (foundation, "copy"), (tmp_path / "copy.ptd", "shared")):
        cache = BlobCache(path, mode)
        addresses = [cache.numpy(key).__array_interface__["data"][0] for key in cache]
        assert len(set(addresses)) == len(addresses)


def test_conflicts_between_files(tmp_path):
    """A key in two files must be equal in both (R2, R5)."""
    from blobstore import save_file
    from blobstore.errors import KeyConflictError

    save_file({"a": np.arange(3.0), "b": np.arange(4.0)}, tmp_path / "one.ptd")
    save_file({"b": np.arange(4.0), "c": np.arange(5.0)}, tmp_path / "same.ptd")
    save_file({"b": np.arange(4.0) + 1}, tmp_path / "bytes.ptd")
    save_file({"b": np.arange(4.0).reshape(2, 2)}, tmp_path / "layout.ptd")
    cache = BlobCache([tmp_path / "one.ptd", tmp_path / "same.ptd"])
    assert list(cache) == ["a", "b", "c"]
    with pytest.raises(KeyConflictError, match=r"'b' has different bytes in .*one\.ptd and in .*bytes\.ptd"):
        BlobCache([tmp_path / "one.ptd", tmp_path / "bytes.ptd"])
    with pytest.raises(KeyConflictError, match=r"'b' is double\[4\] in .*one\.ptd but double\[2, 2\] in"):
        BlobCache([tmp_path / "one.ptd", tmp_path / "layout.ptd"])


def test_get_data_keeps_the_memory(tmp_path):
    """The data outlives the map and its cache."""
    from blobstore import save_file

    path = tmp_path / "a.ptd"
    save_file({"a": np.arange(3.0)}, path)
    data_map = NativeMap(path)
    data = data_map.get_data("a")
    del data_map
    assert np.frombuffer(data).tolist() == [0, 1, 2]
    with pytest.raises(KeyNotFoundError):
        BlobCache(path)["b"]
