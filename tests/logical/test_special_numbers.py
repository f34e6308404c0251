"""Steps on numbers that are easy to get wrong, against numpy and torch, to the bit (U1, N1)."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from blobstore.core.memory import arrays
from blobstore.core.memory.layout import ScalarType
from blobstore.errors import BlobStoreError, LayoutError, UnsupportedDataError
from blobstore.logical import steps
from blobstore.logical.records import Operation, Record, Step

INT, CHAR, BYTE, SHORT = (int(ScalarType[name]) for name in ("INT", "CHAR", "BYTE", "SHORT"))
SPECIAL = np.array(
    [
        *(np.nan, np.inf, -np.inf, 0.0, -0.0, 0.5, 1.5, 2.5, -0.5),
        *(-1.5, -2.5, 7.5, -8.5, 8.5, 126.5, 127.5, -128.5, 255.5),
        *(1e-45, -1e-40, 2**23 + 1, 2**22 + 0.5, -(2**24), 2**31, -(2.0**31), 3e9, 1e30, -1e30, 3.4e38),
    ],
    np.float32,
)
NUMBERS = np.concatenate([SPECIAL, np.random.default_rng(0).normal(0, 60, 1001).astype(np.float32)])


def made(given: Sequence[npt.NDArray[Any]], nbytes: int, *done: Step, scales: Any = None) -> bytes:
    known = {} if scales is None else {"scales": scales}
    return bytes(steps.store(Record("k@1", nbytes, (), done), [arrays.plain(array) for array in given], known))


def shifted(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same numbers at an address that is not aligned."""
    memory = np.zeros(array.nbytes + 1, np.uint8)
    memory[1:] = array.reshape(-1).view(np.uint8)
    return memory[1:].view(array.dtype).reshape(array.shape)


def rounded(scaled: npt.NDArray[Any], zero: int, low: int, high: int, dtype: Any) -> npt.NDArray[Any]:
    """To the nearest, ties to even; then the zero point; then the limits; NaN is 0."""
    wide = np.rint(scaled).astype(np.float64) + zero
    return np.where(np.isnan(wide), 0, np.clip(wide, low, high)).astype(dtype)


@pytest.mark.parametrize("align", [lambda array: array, shifted])
@pytest.mark.parametrize(
    ("zero", "low", "high", "kind", "dtype"),
    [
        (0, -127, 127, CHAR, np.int8),
        (3, -128, 127, CHAR, np.int8),
        (128, 0, 255, BYTE, np.uint8),
        (0, -8, 7, CHAR, np.int8),
        (5, -32768, 32767, SHORT, np.int16),
    ],
)
def test_rounding(zero: int, low: int, high: int, kind: int, dtype: Any, align: Any) -> None:
    """Of every special number, in blocks and in what is left of them."""
    for count, scale in itertools.product((len(NUMBERS), 29, 1), (1.0, 0.37)):
        numbers = NUMBERS[:count]
        step = Step(Operation.QUANTIZE_TENSOR, (zero, low, high, kind), (scale,))
        with np.errstate(all="ignore"):
            expected = rounded(numbers * np.float32(1 / scale), zero, low, high, dtype)
        assert made([align(numbers)], expected.nbytes, step) == expected.tobytes()


def test_int32_is_limited_exactly() -> None:
    """The largest int32 is no float32; numbers that are not NaN never wrap around."""
    numbers = NUMBERS[~np.isnan(NUMBERS)]
    step = Step(Operation.QUANTIZE_TENSOR, (0, -(2**31), 2**31 - 1, INT), (1.0,))
    expected = np.clip(np.rint(numbers.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32)
    assert made([numbers], expected.nbytes, step) == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_channels(axis: int, dtype: Any) -> None:
    """In any dimension, from any floating-point type; a scale of 0 gives the limits, and 0 for 0."""
    with np.errstate(all="ignore"):
        array = NUMBERS[: 5 * 7 * 9].reshape(5, 7, 9).astype(dtype)
        scales = np.abs(np.random.default_rng(1).normal(0, 0.5, array.shape[axis])).astype(np.float32)
        scales[1] = 0
        shape = [1, 1, 1]
        shape[axis] = -1
        expected = rounded(array.astype(np.float32) * (np.float32(1) / scales).reshape(shape), 0, -127, 127, np.int8)
    step = Step(Operation.QUANTIZE_CHANNEL, (axis, -127, 127, CHAR), names=("scales",))
    assert made([array], expected.nbytes, step, scales=scales) == expected.tobytes()


@pytest.mark.parametrize("shape", [(6, 5, 3, 3), (3, 33, 1, 1), (1, 17, 2, 5), (4, 8, 3, 3)])
@pytest.mark.parametrize("groups", [0, 1])
def test_steps_that_run_together_give_what_they_give_alone(shape: tuple[int, ...], groups: int) -> None:
    """Quantizing, exchanging channels, moving them last, and packing (each with numpy)."""
    array = np.random.default_rng(2).normal(0, 4, shape).astype(np.float32)
    scales = np.abs(np.random.default_rng(3).normal(1, 0.1, shape[0])).astype(np.float32)
    done = [Step(Operation.QUANTIZE_CHANNEL, (0, -8, 7, CHAR), names=("scales",))]
    expected = rounded(array * (np.float32(1) / scales).reshape(-1, 1, 1, 1), 0, -8, 7, np.int8)
    if groups:
        done.append(Step(Operation.SWAP_IN_OUT, (1,)))
        expected = expected.swapaxes(0, 1)
    done.append(Step(Operation.CHANNELS_LAST))
    expected = np.ascontiguousarray(expected.transpose(0, 2, 3, 1))
    assert made([array], expected.nbytes, *done, scales=scales) == expected.tobytes()
    if shape[2:] == (1, 1):
        matrix = expected.reshape(expected.shape[0], -1)
        matrix = np.pad(matrix, ((0, 0), (0, matrix.shape[1] % 2))) + 8
        packed = (matrix[:, ::2] | matrix[:, 1::2] << 4).astype(np.uint8)
        assert made([array], packed.nbytes, *done, Step(Operation.PACK_INT4), scales=scales) == packed.tobytes()


def test_folding_keeps_every_bit() -> None:
    """With infinities, NaN and negative zeros; multiplied and moved in one pass or in two."""
    rng = np.random.default_rng(4)
    weight = np.resize(NUMBERS, (12, 5, 3, 3))
    variance, gamma = np.abs(rng.normal(1, 1, 12)).astype(np.float32), rng.normal(0, 1, 12).astype(np.float32)
    with np.errstate(all="ignore"):
        scale = gamma * (np.float32(1) / np.sqrt(variance + np.float32(1e-5)))
        expected = np.ascontiguousarray((weight * scale.reshape(-1, 1, 1, 1)).transpose(0, 2, 3, 1))
    done = Step(Operation.FOLD_CONV_WEIGHT, (0, 1), (1e-5,)), Step(Operation.CHANNELS_LAST)
    found = np.frombuffer(made([weight, variance, gamma], weight.nbytes, *done), np.float32).reshape(expected.shape)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert found[~np.isnan(found)].tobytes() == expected[~np.isnan(expected)].tobytes()


@pytest.mark.parametrize("kind", [ScalarType.BYTE, ScalarType.CHAR, ScalarType.INT, ScalarType.LONG, ScalarType.BOOL])
def test_casts_of_integers(kind: ScalarType) -> None:
    array = np.array([0, 1, 2, 100, 127]).astype(arrays.DTYPES[kind])
    for target in (ScalarType.FLOAT, ScalarType.DOUBLE, ScalarType.LONG, ScalarType.HALF):
        assert np.array_equal(steps.cast((array, kind), target)[0], array.astype(arrays.DTYPES[target]))


def test_empty_tensors() -> None:
    """Nothing comes of nothing, with every step."""
    none = np.zeros((0, 4), np.float32)
    scales = np.zeros(0, np.float32)
    for step in (
        Step(Operation.QUANTIZE_TENSOR, (0, -127, 127, CHAR), (1.0,)),
        Step(Operation.QUANTIZE_CHANNEL, (0, -127, 127, CHAR), names=("scales",)),
        Step(Operation.CAST, (int(ScalarType.BFLOAT16),)),
        Step(Operation.SWAP_IN_OUT, (1,)),
        Step(Operation.RESHAPE, (4, 0)),
    ):
        assert made([none], 0, step, scales=scales) == b""
    assert made([np.zeros((3, 0), np.int8)], 0, Step(Operation.PACK_INT4)) == b""


def test_records_that_say_too_little_are_errors() -> None:
    """A damaged record must not read beyond what it has (B5)."""
    tensor = np.ones((4, 4), np.float32)
    for step in (
        *(Step(operation) for operation in Operation if operation is not Operation.RESHAPE),
        Step(Operation.RESHAPE, (5,)),
        Step(Operation.RESHAPE, (-4, -4)),
        Step(Operation.CAST, (99,)),
        Step(Operation.QUANTIZE_CHANNEL, (2, -127, 127, CHAR), names=("scales",)),
        Step(Operation.QUANTIZE_CHANNEL, (0, -127, 127, int(ScalarType.HALF)), names=("scales",)),
        Step(Operation.QUANTIZE_GROUP, (0, -8, 7, CHAR), names=("scales",)),
        Step(Operation.QUANTIZE_GROUP, (3, -8, 7, CHAR), names=("scales",)),
        Step(Operation.SWAP_IN_OUT, (3,)),
        Step(Operation.FOLD_CONV_WEIGHT, (0, 1), (1e-5,)),
        Step(Operation.FOLD_CONV_BIAS, (1, 1, 1), (1e-5,)),
    ):
        with pytest.raises((LayoutError, UnsupportedDataError)):
            made([tensor, np.ones(3, np.float32)], 64, step, scales=np.ones(3, np.float32))
    with pytest.raises(BlobStoreError):
        made([], 0)
