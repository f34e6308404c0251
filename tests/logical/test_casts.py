"""Casts of weights round as torch does, to the bit."""

import numpy as np
import pytest
import torch

from blobstore.logical import steps
from blobstore.memory.layout import ScalarType

BITS = {ScalarType.FLOAT: torch.int32, ScalarType.HALF: torch.int16, ScalarType.BFLOAT16: torch.int16}


def check(tensor, target, dtype):
    """NaN stays NaN, whatever its bits; everything else is the same number."""
    expected = tensor.to(dtype)
    array, kind = steps.cast(steps.plain(tensor), target)
    assert kind is target
    found = torch.from_numpy(np.array(array)).view(dtype) if dtype is torch.bfloat16 else torch.from_numpy(array)
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(found), nan)
    assert torch.equal(found.view(BITS[target])[~nan], expected.view(BITS[target])[~nan])


def floats():
    """Every bfloat16 with what lies around the middle between it and the next: ties, carries into the exponent,
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
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_casts_round_as_torch_does(target, dtype):
    values = floats()
    doubles = torch.cat([values.double(), values.double() * (1 + 2**-30), torch.tensor([1e300, -1e300])])
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for tensor in (values, doubles, halves.view(torch.float16), halves.view(torch.bfloat16)):
        check(tensor, target, dtype)
