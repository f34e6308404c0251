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
