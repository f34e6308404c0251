"""Listing files: what is in them, without reading it twice or running it (R3, R4)."""

import numpy as np
import safetensors.numpy

from blobstore import BlobStore
from blobstore.core.memory.digest import digest
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.tools.inspection import inspect_file


def test_a_data_file_lists_keys_layouts_alignments_digests_and_sharing(tmp_path):
    """In the order of the file, with its metadata."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    store = BlobStore()
    store.add("w", array, alignment=64)
    store.add("tied", array)
    store.add("opaque", b"bytes")
    store.write_ptd(tmp_path / "x.ptd", metadata={"step": "1"})
    info = inspect_file(tmp_path / "x.ptd")
    assert (info.format, info.size) == ("ptd", (tmp_path / "x.ptd").stat().st_size)
    assert (info.has_digests, info.metadata) == (True, {"step": "1"})
    layout, address = TensorLayout(ScalarType.FLOAT, (2, 3)), digest(array.tobytes()).xxh3_128.hex()
    assert [(b.key, b.kind, b.layout, b.nbytes, b.shared) for b in info.blobs] == [
        ("w", "tensor", layout, 24, ""), ("tied", "tensor", layout, 24, "w"), ("opaque", "blob", None, 5, ""),
    ]  # fmt: skip
    assert (info.blobs[0].alignment, info.blobs[0].digest) == (64, address)
    assert info.parameters == {"float": 12}


def test_a_checkpoint_lists_its_tensors(tmp_path):
    """It records no alignments."""
    safetensors.numpy.save_file({"w": np.ones(2, np.float16)}, tmp_path / "x.safetensors", {"format": "pt"})
    info = inspect_file(tmp_path / "x.safetensors")
    assert (info.format, info.metadata, info.has_digests) == ("safetensors", {"format": "pt"}, None)
    assert [(b.key, str(b.layout), b.alignment) for b in info.blobs] == [("w", "half[2]", 1)]


def test_a_program_lists_methods_delegates_and_kinds_of_blobs(lowered, tmp_path):
    """Each method that a delegate has is named with its backend."""
    info = inspect_file(lowered.mlp(delegated=True).write(tmp_path, "m"))
    assert (info.format, info.methods) == ("pte", ("forward",))
    (delegate,) = info.delegates
    assert (delegate.method, delegate.index, delegate.backend) == ("forward", 0, "XnnpackBackend")
    assert 0 < delegate.payload_bytes < info.size and info.flatbuffer_bytes is not None
    assert {blob.kind for blob in info.blobs} == {"constant", "named data"}
    external = inspect_file(lowered.mlp(external=True).write(tmp_path, "e"))
    assert sum(one.kind == "external" for one in external.externals) == 5
    taken = {one.key: one for one in external.externals if one.kind == "external"}
    assert str(taken["first.bias"].layout).startswith("float[") and len(taken) == 5
    assert all(one.layout is not None and one.nbytes == one.layout.nbytes for one in taken.values())
    assert {one.taken_by for one in taken.values()} == {("forward",)}
