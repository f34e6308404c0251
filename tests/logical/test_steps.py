"""Steps give the same numbers as torch and as the exporter's own code, to the bit (U1)."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from blobstore.core.memory import arrays
from blobstore.core.memory.layout import ScalarType
from blobstore.errors import LayoutError, UnsupportedDataError
from blobstore.logical import steps
from blobstore.logical.records import Operation, Record, Step

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
FLOAT, CHAR = int(ScalarType.FLOAT), int(ScalarType.CHAR)


def random(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def made(tensors: Sequence[Tensor], *done: Step, nbytes: int, scales: Tensor | None = None) -> bytes:
    """The blob that these steps make of these tensors."""
    record = Record("k@1", nbytes, (), done)
    known = {} if scales is None else {"scales": arrays.plain(scales)[0]}
    return steps.store(record, [arrays.plain(tensor) for tensor in tensors], known).tobytes()


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ------------------------------------------------------------------------------------------------------------- casts


def check_cast(tensor: Tensor, target: ScalarType, dtype: torch.dtype) -> None:
    """NaN stays NaN, with any bits; everything else is the same number."""
    expected = tensor.to(dtype)
    array, kind = steps.cast(arrays.plain(tensor), target)
    assert kind is target
    found = torch.from_numpy(array.copy())
    found = found.view(dtype) if dtype is torch.bfloat16 else found
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(found), nan)
    assert torch.equal(found.view(BITS[dtype])[~nan], expected.view(BITS[dtype])[~nan])


def floats_around_every_bfloat16() -> Tensor:
    """Every bfloat16 with numbers around the middle between it and the next: ties, carries into the exponent,
    denormals, overflow to infinity, infinities, NaN."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (high[:, None] | low).reshape(-1).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        (ScalarType.BFLOAT16, torch.bfloat16),
        (ScalarType.HALF, torch.float16),
        (ScalarType.FLOAT, torch.float32),
        (ScalarType.DOUBLE, torch.float64),
    ],
)
def test_casts_round_as_torch_does(target: ScalarType, dtype: torch.dtype) -> None:
    values = floats_around_every_bfloat16()
    doubles = torch.cat([values.double(), values.double() * (1 + 2**-30), torch.tensor([1e300, -1e300])])
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for tensor in (values, doubles, halves.view(torch.float16), halves.view(torch.bfloat16)):
        check_cast(tensor, target, dtype)


# ------------------------------------------------------------------------------------------------------- quantization


def test_quantizing_by_group() -> None:
    """The scales of groups are bfloat16; a group of zeros has the scale 0 and stays 0."""
    tensor = random(3, 8)
    tensor[1, 4:] = 0
    scales = (tensor.reshape(3, 2, 4).abs().amax(2) / 7).to(torch.bfloat16)
    wide = scales.float().repeat_interleave(4, 1)
    expected = torch.clamp(torch.round(torch.where(wide == 0, 0, tensor * (1 / wide))), -8, 7).to(torch.int8)
    step = Step(Operation.QUANTIZE_GROUP, (4, -8, 7, CHAR), names=("scales",))
    assert made([tensor], step, nbytes=24, scales=scales) == bytes_of(expected)


# ------------------------------------------------------------------------------------------------------------ layouts


@given(st.integers(1, 3), st.integers(1, 35), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_channels_last_of_any_shape(rows: int, channels: int, height: int, width: int, folds: bool) -> None:
    """Vectors of the processor take several channels and positions at a time; a fold is done in the same pass."""
    tensor = random(rows, channels, height, width)
    last = Step(Operation.CHANNELS_LAST)
    if folds:
        zero, variance, gamma = torch.zeros(rows), random(rows, seed=1).abs() + 0.1, random(rows, seed=2)
        expected, _ = fuse_conv_bn_weights(tensor, None, zero, variance, 1e-5, gamma, zero)
        fold = Step(Operation.FOLD_CONV_WEIGHT, (0, 1), (1e-5,))
        found = made([tensor, variance, gamma], fold, last, nbytes=tensor.nbytes)
    else:
        expected = tensor
        found = made([tensor], last, nbytes=tensor.nbytes)
    assert found == bytes_of(expected.detach().permute(0, 2, 3, 1))


def test_nothing_to_do_copies_nothing() -> None:
    """Without steps the blob is the memory of the tensor."""
    tensor = random(2, 3)
    array = steps.store(Record("k", 24, (), ()), [arrays.plain(tensor)])
    assert np.shares_memory(np.frombuffer(array, np.uint8), tensor.numpy())


def test_a_result_of_another_size_or_range_is_refused() -> None:
    with pytest.raises(LayoutError, match="'k@1': expected 20 bytes, its steps give 24"):
        made([random(2, 3)], nbytes=20)
    with pytest.raises(UnsupportedDataError, match="four bits must be in -8 … 7"):
        made([torch.full((2, 4), 8, dtype=torch.int8)], Step(Operation.PACK_INT4), nbytes=4)


# ------------------------------------------------------------------------------------------------ batch normalization


@pytest.mark.parametrize(("has_bias", "has_gamma", "has_beta"), list(product([0, 1], repeat=3)))
def test_folds_are_those_of_torch(has_bias: int, has_gamma: int, has_beta: int) -> None:
    """The oracle is torch.nn.utils.fusion, for convolutions, transposed ones, and linear layers."""
    gamma, beta, bias, mean = (random(4, seed=seed) for seed in range(1, 5))
    variance = random(4, seed=5).abs() + 0.1
    norm = (mean, variance, 1e-5, gamma if has_gamma else None, beta if has_beta else None)
    of_weight = [variance, *([gamma] if has_gamma else [])]
    parts = [p for p, given in ((bias, has_bias), (gamma, has_gamma), (beta, has_beta)) if given]
    flags = (has_bias, has_gamma, has_beta)
    for axis, shape in ((0, (4, 3, 2, 2)), (1, (3, 4, 2, 2)), (None, (4, 3))):
        weight = random(*shape, seed=6)
        if axis is None:
            expected = fuse_linear_bn_weights(weight, bias if has_bias else None, *norm[:3], *with_defaults(norm))
            kinds = (Operation.FOLD_LINEAR_WEIGHT, Operation.FOLD_LINEAR_BIAS)
        else:
            expected = fuse_conv_bn_weights(weight, bias if has_bias else None, *norm, transpose=axis == 1)
            kinds = (Operation.FOLD_CONV_WEIGHT, Operation.FOLD_CONV_BIAS)
        weight_step = Step(kinds[0], (axis or 0, has_gamma), (1e-5,))
        bias_step = Step(kinds[1], flags, (1e-5,))
        folded = made([weight, *of_weight], weight_step, nbytes=weight.nbytes)
        assert folded == bytes_of(expected[0].detach())
        assert made([mean, variance, *parts], bias_step, nbytes=16) == bytes_of(expected[1].detach())


def with_defaults(norm: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    mean, _, _, gamma, beta = norm
    return torch.ones_like(mean) if gamma is None else gamma, torch.zeros_like(mean) if beta is None else beta


def test_only_float32_is_folded() -> None:
    with pytest.raises(UnsupportedDataError, match="folded only in float32, found half"):
        made([random(2, 2).half(), random(2)], Step(Operation.FOLD_CONV_WEIGHT, (0, 0), (1e-5,)), nbytes=8)


# -------------------------------------------------------------------------------------------------- tensors as a whole


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite(dtype: torch.dtype) -> None:
    """Infinities and NaN are found in every floating-point type; the largest number is finite."""
    assert steps.check_finite(arrays.plain(torch.tensor([0.0, torch.finfo(dtype).max], dtype=dtype)))
    for value in ("inf", "-inf", "nan"):
        assert not steps.check_finite(arrays.plain(torch.tensor([0.0, float(value)], dtype=dtype)))
    assert steps.check_finite(arrays.plain(torch.tensor([1])))
