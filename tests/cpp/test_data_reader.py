"""ExecuTorch reads everything that the store writes, in Python and in C++, and the store reads what ExecuTorch writes."""

import importlib.resources
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from executorch.exir._serialize._cord import Cord
from executorch.exir.scalar_type import ScalarType as EtScalarType
from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blobstore import BlobStore, MergedDataMap, ScalarType, TensorLayout, dedup_programs, open_ptd, save_file
from blobstore.adapters import bind_adapter, save_adapter
from blobstore.testing import strategies
from tests.core.formats.ptd.test_bad_files import foreign  # noqa: F401 - a fixture
from tests.core.formats.pte.oracle import write_ptd

tags = strategies.tags.filter(lambda tag: tag != "adapter.ptd")  # it names one file with "adapter"
contents = st.dictionaries(
    strategies.keys, st.tuples(strategies.tensors(), strategies.alignments, tags), min_size=1, max_size=8
)


def with_cpp(reader, path):
    """The contents according to the stock C++ map: (key, (data, layout)) in the order of its indices."""
    done = subprocess.run([reader, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    lines = [line.split(" ") for line in done.stdout.splitlines()]
    return [(bytes.fromhex(key).decode(), (bytes.fromhex(data), layout)) for key, layout, data in lines]


def with_python(path):
    payload = FlatTensorSerializer().deserialize(Cord(path.read_bytes()))
    return {
        key: (bytes(payload.buffers[entry.buffer_index]), entry.tensor_layout)
        for key, entry in payload.named_data.items()
    }


SCHEMA = importlib.resources.files("executorch.extension.flat_tensor.serialize").joinpath("scalar_type.fbs").read_text()
READABLE = set(re.findall(r"^  (\w+) = \d+,$", SCHEMA, re.MULTILINE)) & EtScalarType.__members__.keys()
"""ExecuTorch's Python reader looks up types by the names of its schema: complex ones have none there, and two names of
its enum are spelled differently."""


def python_can_read(layout):
    return layout is None or layout.scalar_type.name in READABLE


def python_can_write(layout):
    """ExecuTorch's enum has no numbers for the packed bits."""
    return layout is None or int(layout.scalar_type) in set(EtScalarType)


def spelled(layout, data):
    """As the stock C++ map has it: opaque bytes are a tensor of bytes there."""
    if layout is None:
        return f"0,{len(data)},0"
    parts = [[int(layout.scalar_type)], layout.sizes, layout.dim_order]
    return ",".join("x".join(map(str, part)) for part in parts)


@pytest.fixture(scope="module")
def reader(module_runner):
    return module_runner.executable.with_name("data_reader")


@pytest.mark.long
@settings(max_examples=60)
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
            expected = {key: (data, spelled(layout, data)) for key, (data, layout) in files[tag].items()}
            assert with_cpp(reader, path) == list(expected.items())
            if all(python_can_read(layout) for _, layout in files[tag].values()):
                found = {key: (data, spelled(layout, data)) for key, (data, layout) in with_python(path).items()}
                assert found == expected


@pytest.mark.long
@settings(max_examples=60)
@given(contents)
def test_what_executorch_writes(contents):
    contents = {key: one for key, one in contents.items() if python_can_write(one[0][1])}
    assume(contents)
    with tempfile.TemporaryDirectory() as name:
        entries = [(key, *tensor, alignment) for key, (tensor, alignment, _) in contents.items()]
        with open_ptd(write_ptd(Path(name, "theirs.ptd"), entries)) as data_map:
            found = {key: (bytes(data), data_map.get_tensor_layout(key)) for key, data in data_map.views()}
    assert found == {key: tensor for key, (tensor, _, _) in contents.items()}


def test_opaque_bytes_beside_tensors(reader, foreign, tmp_path):  # noqa: F811 - the fixture
    """The stock map answers for every key, whichever of our writers made the file, and the bytes stay opaque for us
    (R3, R4). It ends the process at a key without a layout, such as those of a file that has no list of opaque keys."""
    pytest.importorskip("blobstore_runtime")
    from blobstore.runtime import BlobCache, make_working_copy

    store = BlobStore()
    store.add("weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    store.add("packed", b"any bytes", alignment=256)
    store.add("again", b"any bytes")
    store.add("none", b"")
    store.write_ptd(tmp_path / "store.ptd")
    (tmp_path / "theirs").mkdir()
    theirs = tmp_path / "theirs/of-executorch.ptd"  # where opaque bytes have no layout
    theirs.write_bytes(foreign)
    with open_ptd(theirs) as data_map:
        again = BlobStore()
        again.merge(data_map)
        again.write_ptd(tmp_path / "rewritten.ptd")
    BlobCache(tmp_path / "store.ptd").save(tmp_path / "saved.ptd")
    make_working_copy(tmp_path / "store.ptd", tmp_path / "copy.ptd")
    BlobCache(theirs).save(tmp_path / "resaved.ptd")
    for path in sorted(tmp_path.glob("*.ptd")):
        with open_ptd(path, verify=True) as data_map:
            layouts = {key: data_map.get_tensor_layout(key) for key in data_map}
            assert layouts == {key: BlobCache(path).get_tensor_layout(key) for key in data_map}
            assert None in layouts.values()
            expected = [(key, (data_map.bytes(key), spelled(layouts[key], data_map.get_data(key)))) for key in data_map]
        assert with_cpp(reader, path) == expected


def test_a_file_of_tensors_is_nothing_but_its_tensors(reader, tmp_path):
    """The stock map has the user's keys only, with their layouts, in the order in which they were added, by which
    ExecuTorch's runners bind inputs. This is also true of a file that was rewritten (R3)."""
    tensors = {f"{name}.lora_{half}": np.full((2, 3), i, np.float32) for i, name in enumerate("zab") for half in "ba"}
    tensors["tied"] = tensors["z.lora_b"]
    save_file(tensors, tmp_path / "x.ptd", metadata={"a": "b"})
    store = BlobStore()
    store.merge(open_ptd(tmp_path / "x.ptd"))
    store.write_ptd(tmp_path / "again.ptd")
    save_file({}, tmp_path / "empty.ptd")
    for path in (tmp_path / "x.ptd", tmp_path / "again.ptd"):
        found = with_cpp(reader, path)
        assert found == [(key, (array.tobytes(), "6,2x3,0x1")) for key, array in tensors.items()]
        assert list(with_python(path)) == list(tensors)
    assert with_cpp(reader, tmp_path / "empty.ptd") == []
    assert with_python(tmp_path / "empty.ptd") == {}


def test_rewrites_keep_the_order_of_the_file_that_they_come_from(reader, tmp_path):
    pytest.importorskip("blobstore_runtime")
    from blobstore.runtime import BlobCache, make_working_copy

    floats = TensorLayout(ScalarType.FLOAT, (4,))
    theirs = [(key, np.full(4, i, np.float32).tobytes(), floats) for i, key in enumerate("zamb")]
    write_ptd(tmp_path / "theirs.ptd", theirs)
    save_file({key: np.full(4, i, np.float32) for i, key in enumerate("yxc")}, tmp_path / "ours.ptd")

    files = [tmp_path / "theirs.ptd", tmp_path / "ours.ptd"]
    cache = BlobCache(files)
    cache.save(tmp_path / "saved.ptd")
    cache.update({key: np.ones(4, np.float32) for key in "czx"})
    cache.save(tmp_path / "delta.ptd", dirty_only=True)
    make_working_copy(files, tmp_path / "copy.ptd")
    dedup_programs(files, tmp_path, data_name="dedup")
    adapter = {f"{name}.lora_{half}": np.ones((2, 2), np.float32) for name in "za" for half in "ba"}
    options = {"foundation": tmp_path / "ours.ptd", "scale": 1.0}
    save_adapter(tmp_path / "adapter.ptd", adapter, **options)
    bind_adapter(tmp_path / "adapter.ptd", tmp_path / "bound.ptd", **options)
    orders = {"saved": "zambyxc", "delta": "zxc", "copy": "zambyxc", "dedup": "zambyxc"}
    for name, keys in {**orders, "adapter": adapter, "bound": adapter}.items():
        found = [key for key, _ in with_cpp(reader, tmp_path / f"{name}.ptd")]
        assert found == list(open_ptd(tmp_path / f"{name}.ptd")) == list(keys)
    assert list(cache) == list(MergedDataMap([open_ptd(path) for path in files])) == list("zambyxc")
