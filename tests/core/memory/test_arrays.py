"""Weights as arrays with a scalar type: nothing is lost on the way, and nothing is copied without need (S1)."""

import ml_dtypes
import numpy as np
import pytest
import torch

from blobstore.core.memory.arrays import DTYPES, KINDS, plain, raw, same_tensors, tensor_of
from blobstore.core.memory.layout import ScalarType
from blobstore.errors import UnsupportedDataError


@pytest.mark.parametrize("kind", DTYPES, ids=lambda kind: kind.name)
def test_a_tensor_of_every_type_comes_back(kind: ScalarType) -> None:
    """Its bits are those of torch."""
    bits = torch.arange(64, dtype=torch.uint8) if kind is not ScalarType.BOOL else torch.arange(64).to(torch.uint8) % 2
    dtype = {
        ScalarType.BFLOAT16: torch.bfloat16, ScalarType.HALF: torch.float16, ScalarType.BOOL: torch.bool
    }.get(kind) or getattr(torch, DTYPES[kind].name)  # fmt: skip
    tensor = bits.view(dtype).reshape(2, -1)
    array, found = plain(tensor)
    assert found is kind and array.shape == tuple(tensor.shape)
    assert bytes(raw(array)) == bytes(bits.numpy())
    back = tensor_of((array, found))
    assert same_tensors(plain(back), (array, found))
    if kind is ScalarType.BFLOAT16:
        assert torch.equal(back, tensor)


def test_contiguous_memory_is_not_copied() -> None:
    tensor, array = torch.zeros(3, 4), np.zeros((3, 4), np.float32)
    assert plain(tensor)[0].ctypes.data == tensor.data_ptr()
    assert plain(array)[0] is array
    assert plain(tensor.T)[0].flags.c_contiguous and plain(array.T)[0].shape == (4, 3)


def test_equal_means_type_shape_and_bits() -> None:
    """Zeros of both signs differ; a NaN is equal to itself."""
    zero, nan = np.zeros(2, np.float32), np.full(2, np.nan, np.float32)
    assert same_tensors(plain(nan), plain(nan.copy()))
    assert not same_tensors(plain(zero), plain(-zero))
    assert not same_tensors(plain(zero), plain(zero.reshape(1, 2)))
    assert not same_tensors(plain(zero), plain(zero.view(np.int32)))


def test_bfloat16_of_numpy_is_that_of_torch() -> None:
    array, kind = plain(np.array([1.5, -2], ml_dtypes.bfloat16))
    expected = torch.tensor([1.5, -2], dtype=torch.bfloat16)
    assert kind is ScalarType.BFLOAT16 and same_tensors((array, kind), plain(expected))
    assert kind not in KINDS.values()


@pytest.mark.parametrize("value", [1.0, [1.0], np.array(["a"]), np.zeros(2, np.complex64)])
def test_what_is_no_tensor_of_weights_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedDataError):
        plain(value)
