"""The files that runtime_bindings/tests/tensors_test.cpp works on."""

from pathlib import Path

import numpy as np

from blobstore.core.memory.layout import ScalarType
from blobstore.core.store import BlobStore
from blobstore.logical.records import STATE, ModelTensor, Operation, Record, Records, Step, records_key

__all__ = ["write", "write_shapes"]


def write(path: Path) -> Path:
    """Write it."""
    weight = ModelTensor("weight", ScalarType.FLOAT, (2, 3), ("tied",))
    quantize = Step(Operation.QUANTIZE_CHANNEL, (0, -127, 127, int(ScalarType.CHAR)), names=("scales",))
    records = (
        Record("weight@0000000000000000", 24, (weight,), (Step(Operation.RESHAPE, (3, 2)),)),
        Record("weight@1111111111111111", 6, (weight,), (quantize,)),
        Record("", 0, (ModelTensor("state", ScalarType.FLOAT, (2,)),), refusal=STATE, auxiliary=True),
    )
    data = Records("XnnpackBackend", records, (ModelTensor("bias", ScalarType.FLOAT, (2,)),)).pack()
    store = BlobStore()
    store.add(records_key(data), data, alignment=16)
    store.add("weight@0000000000000000", bytes(24), alignment=16)
    store.add("weight@1111111111111111", bytes(6), alignment=16)
    store.add("scales", np.full(2, 0.5, np.float32).tobytes(), alignment=16)
    store.add("bias", np.zeros(2, np.float32))
    store.write_ptd(path)
    return path


def write_shapes(path: Path) -> Path:
    """A file with tensors of shapes that ExecuTorch has not."""
    deep = ModelTensor("deep", ScalarType.FLOAT, (1,) * 17)
    wide = ModelTensor("wide", ScalarType.FLOAT, (0, 1 << 16, 1 << 16))
    records = (
        Record("deep@2222222222222222", 4, (deep,), (Step(Operation.RESHAPE, (1,)),)),
        Record("wide@3333333333333333", 0, (wide,), (Step(Operation.RESHAPE, (0,)),)),
    )
    data = Records("XnnpackBackend", records).pack()
    store = BlobStore()
    store.add(records_key(data), data, alignment=16)
    for record in records:
        store.add(record.key, bytes(record.nbytes), alignment=16)
    store.write_ptd(path)
    return path
