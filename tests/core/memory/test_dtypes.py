"""Names of scalar types elsewhere (R4); torch, numpy, ml_dtypes and safetensors are the oracles."""

import sys

import numpy as np
import pytest
import safetensors.numpy
import torch

from blobstore.core.memory import dtypes
from blobstore.core.memory.layout import ScalarType
from blobstore.errors import MissingDependencyError, UnsupportedDataError

NAMED = [kind for kind in ScalarType if not kind.name.startswith("Q")]


@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.name)
def test_a_scalar_type_and_its_torch_dtype_are_one(kind):
    """There and back, with the same element size."""
    dtype = dtypes.torch_dtype(kind)
    assert dtypes.scalar_type_named(dtype) is kind
    assert dtype.itemsize == kind.itemsize


@pytest.mark.parametrize("kind", NAMED, ids=lambda kind: kind.name)
def test_a_scalar_type_and_its_numpy_dtype_are_one(kind):
    """With ml_dtypes for the types that numpy itself lacks; bits and complex numbers of halves exist in torch alone."""
    if kind is ScalarType.COMPLEX32 or kind.name.startswith("BITS"):
        with pytest.raises(UnsupportedDataError, match=kind.name):
            dtypes.numpy_dtype(kind)
        return
    dtype = dtypes.numpy_dtype(kind)
    assert dtypes.scalar_type_named(dtype.name) is kind
    assert dtype.itemsize == dtypes.unsigned_dtype(kind).itemsize == kind.itemsize
    assert dtypes.native_dtype(kind) in (None, dtype)


def test_a_type_of_ml_dtypes_needs_that_package(monkeypatch):
    """The error names the package."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(MissingDependencyError, match="pip install ml_dtypes"):
        dtypes.numpy_dtype(ScalarType.BFLOAT16)
    assert dtypes.native_dtype(ScalarType.BFLOAT16) is None
    assert dtypes.numpy_dtype(ScalarType.FLOAT) == np.dtype(np.float32)


def test_types_that_only_executorch_has_are_refused():
    """The quantized dtypes of torch also hold scales, so they are not these types."""
    for kind in set(ScalarType) - set(NAMED):
        with pytest.raises(UnsupportedDataError, match=kind.name):
            dtypes.torch_dtype(kind)
        with pytest.raises(UnsupportedDataError, match=kind.name):
            dtypes.numpy_dtype(kind)
    assert dtypes.scalar_type_named(torch.float8_e8m0fnu) is dtypes.scalar_type_named("no such") is None
    assert dtypes.scalar_type_named(torch.qint8) is None


def test_the_names_of_safetensors_are_those_that_the_package_writes(tmp_path):
    """For every type that numpy and safetensors both have."""
    for name, kind in dtypes.SAFETENSORS.items():
        dtype = dtypes.native_dtype(kind)
        if dtype is not None:
            safetensors.numpy.save_file({"x": np.zeros(1, dtype)}, tmp_path / "x")
            assert f'"dtype":"{name}"'.encode() in (tmp_path / "x").read_bytes()


def test_floats_are_the_floating_point_types_of_torch_above_one_byte():
    """Updates and adapters compute with all of them."""
    assert {kind for kind in NAMED if dtypes.torch_dtype(kind).is_floating_point and kind.itemsize > 1} == dtypes.FLOATS
