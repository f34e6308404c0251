"""Whatever the store writes, ExecuTorch reads, in Python and in C++; whatever ExecuTorch writes is read here."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from executorch.exir._serialize._cord import Cord
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir._serialize.data_serializer import DataPayload
from executorch.exir.scalar_type import ScalarType as EtScalarType
from executorch.exir.tensor_layout import TensorLayout as EtLayout
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore import BlobStore, ScalarType, TensorLayout, open_ptd
from blobstore.testing import strategies

tags = strategies.tags.filter(lambda tag: tag != "adapter.ptd")  # it names one file with "adapter"
contents = st.dictionaries(
    strategies.keys, st.tuples(strategies.tensors(), strategies.alignments, tags), min_size=1, max_size=8
)


def with_cpp(reader, path, expected):
    """What the stock C++ map finds, as (data, layout) by key."""
    tensors = [key.encode().hex() for key, (_, layout) in expected.items() if layout is not None]
    done = subprocess.run([reader, path, *tensors], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        key, layout, data = line.split(" ")
        found[bytes.fromhex(key).decode()] = (bytes.fromhex(data), layout)
    return {key: value for key, value in found.items() if not key.startswith("metadata.blobstore.")}


def with_python(path):
    payload = FlatTensorSerializer().deserialize(Cord(path.read_bytes()))
    return {
        key: (bytes(payload.buffers[entry.buffer_index]), entry.tensor_layout)
        for key, entry in payload.named_data.items()
        if not key.startswith("metadata.blobstore.")
    }


def python_can_name(layout):
    """ExecuTorch's Python reader looks types up by name, and spells two of them otherwise than its schema."""
    return layout is None or layout.scalar_type.name in EtScalarType.__members__


def spelled(layout):
    if layout is None:
        return "-"
    parts = [[int(layout.scalar_type)], layout.sizes, layout.dim_order]
    return ",".join("x".join(map(str, part)) for part in parts)


@pytest.fixture(scope="module")
def reader(module_runner):
    return module_runner.executable.with_name("data_reader")


@settings(max_examples=60, deadline=None)
@given(contents)
def test_what_we_write(reader, contents):
    with tempfile.TemporaryDirectory() as name:
        store, files = BlobStore(), {}
        for key, ((data, layout), alignment, tag) in contents.items():
            store.add(key, data, layout=layout, alignment=alignment, tag=tag)
            files.setdefault(tag or "blobs", {})[key] = (data, layout)
        paths = store.write(name)
        assert paths.keys() == files.keys()
        for tag, path in paths.items():
            expected = {key: (data, spelled(layout)) for key, (data, layout) in files[tag].items()}
            assert with_cpp(reader, path, files[tag]) == expected
            if all(python_can_name(layout) for _, layout in files[tag].values()):
                found = {key: (data, spelled(layout)) for key, (data, layout) in with_python(path).items()}
                assert found == expected


@settings(max_examples=60, deadline=None)
@given(contents)
def test_what_executorch_writes(contents):
    store = NamedDataStore()
    for key, ((data, layout), alignment, _) in contents.items():
        theirs = layout and EtLayout(EtScalarType(int(layout.scalar_type)), list(layout.sizes), list(layout.dim_order))
        store.add_named_data(key, data, alignment, external_tag="x", tensor_layout=theirs)
    output = store.get_named_data_store_output()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "theirs.ptd")
        payload = DataPayload(output.buffers, output.external_data["x"])
        path.write_bytes(bytes(FlatTensorSerializer().serialize(payload)))
        with open_ptd(path) as data_map:
            found = {key: (bytes(data), data_map.get_tensor_layout(key)) for key, data in data_map.items()}
    assert found == {key: tensor for key, (tensor, _, _) in contents.items()}


def test_every_scalar_type(reader, tmp_path):
    store = BlobStore()
    for scalar_type in ScalarType:
        store.add(scalar_type.name, bytes(2 * scalar_type.itemsize), layout=TensorLayout(scalar_type, (2,)))
    store.write_ptd(tmp_path / "x.ptd")
    expected = {entry.key: (bytes(entry.data), entry.layout) for entry in store.entries()}
    found = with_cpp(reader, tmp_path / "x.ptd", expected)
    assert found == {key: (data, spelled(layout)) for key, (data, layout) in expected.items()}
