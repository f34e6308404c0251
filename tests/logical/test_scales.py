"""Scales of an update, with records that were made by hand, compared with numpy (X4, X5)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.memory.layout import ScalarType
from blobstore.errors import UpdateError
from blobstore.logical.records import ModelTensor, Operation, Record, Records, Step
from blobstore.runtime import BlobCache
from tests.logical.test_updates import cached

ROWS, COLUMNS, ACTIVATIONS = 3, 4, 0.25


def source(name: str, *sizes: int) -> ModelTensor:
    return ModelTensor(name, ScalarType.FLOAT, sizes)


def channels(scales: str, low: int, high: int, kind: ScalarType) -> Step:
    return Step(Operation.QUANTIZE_CHANNEL, (0, low, high, int(kind)), names=(scales,))


def layer(product_of: str = "ws", *more: Record) -> Records:
    """A weight of int8 with a bias of int32, each with scales of its own."""
    return Records(
        "XnnpackBackend",
        (
            Record("ws", 4 * ROWS, (source("w.scale", ROWS),), auxiliary=True),
            Record("bs", 4 * ROWS, (source("b.scale", ROWS),), (), 0, "", True, product_of, ACTIVATIONS),
            Record("w@1", ROWS * COLUMNS, (source("w", ROWS, COLUMNS),), (channels("ws", -127, 127, ScalarType.CHAR),)),
            Record("b@1", 4 * ROWS, (source("b", ROWS),), (channels("bs", -(2**31), 2**31 - 1, ScalarType.INT),)),
            *more,
        ),
    )


WEIGHT = np.array([[1, -0.5, 0.25, 0], [0.1, 0.2, 0.3, -0.4], [3, 2, 1, 0]], np.float32)
BIAS = np.array([1, -2, 3], np.float32)


def quantized(weight: Any, bias: Any) -> dict[str, Any]:
    """What numpy makes of a weight and a bias."""
    scales = np.abs(weight).max(1) / np.float32(127)
    products = scales * np.float32(ACTIVATIONS)
    return {
        "ws": scales,
        "bs": products,
        "w@1": np.rint(weight * (1 / scales)[:, None]).clip(-127, 127).astype(np.int8),
        "b@1": np.rint(bias * (1 / products)).astype(np.int32),
    }


def stored(cache: BlobCache) -> dict[str, bytes]:
    return {key: bytes(cache.get_data(key)) for key in ("ws", "bs", "w@1", "b@1")}


def as_bytes(blobs: dict[str, Any]) -> dict[str, bytes]:
    return {key: array.tobytes() for key, array in blobs.items()}


def opened(folder: Path, records: Records) -> BlobCache:
    return cached(folder, records, **as_bytes(quantized(WEIGHT, BIAS)))


def test_the_keys_of_a_tensor_are_those_that_its_update_changes(tmp_path: Path) -> None:
    """So reverting them leaves no scale of the update beside the integers of the file (X4)."""
    cache = opened(tmp_path, layer())
    cache.update({"w": WEIGHT * np.float32(1.7)})
    assert set(cache.tensors["w"].keys) == set(cache.dirty) == {"w@1", "ws", "bs", "b@1"}
    assert cache.tensors["w"].keys[0] == "w@1"
    cache.revert(cache.tensors["w"].keys)
    assert cache.dirty == ()
    assert stored(cache) == as_bytes(quantized(WEIGHT, BIAS))
    cache.update({"b": BIAS + 1})
    assert cache.tensors["b"].keys == cache.dirty == ("b@1",)


def test_scales_follow_from_the_numbers(tmp_path: Path) -> None:
    """Those of the bias from its weight's; its integers also where it is not given."""
    cache = opened(tmp_path, layer())
    assert [one.rescaled for one in cache.update({"w": WEIGHT, "b": BIAS}).quantized] == [0, 0]
    assert stored(cache) == as_bytes(quantized(WEIGHT, BIAS))
    other, bias = WEIGHT * np.float32(1.7), BIAS + 1
    updated = cache.update({"b": bias, "w": other})
    assert stored(cache) == as_bytes(quantized(other, bias))
    assert [(one.name, one.numbers, one.clipped, one.rescaled) for one in updated.quantized] == [
        ("w", 12, 0, 3),
        ("b", 3, 0, 3),
    ]
    cache.revert()
    cache.update({"w": other})
    found, expected = stored(cache), quantized(other, BIAS)
    assert found["w@1"] == expected["w@1"].tobytes()
    assert np.abs(np.frombuffer(found["b@1"], np.int32) - expected["b@1"]).max() <= 1  # rounded twice
    grown = WEIGHT.copy()
    grown[1] *= 2
    cache.revert()
    assert [one.rescaled for one in cache.update({"w": grown}).quantized] == [1, 1]


@pytest.mark.parametrize("product_of", ["", "another"])
def test_scales_stay_where_a_bias_cannot_follow(product_of: str, tmp_path: Path) -> None:
    """In files whose records do not say how; then numbers are clipped, and counted."""
    cache = opened(tmp_path, layer(product_of))
    before = stored(cache)
    updated = cache.update({"w": WEIGHT * 2})
    scales = quantized(WEIGHT, BIAS)["ws"]
    steps = np.abs(WEIGHT * 2 * (1 / scales)[:, None])
    assert [(one.name, one.clipped) for one in updated.quantized] == [("w", int((steps > 127.6).sum()))]
    assert {key: data for key, data in stored(cache).items() if key != "w@1"} == {
        key: data for key, data in before.items() if key != "w@1"
    }
    with pytest.raises(UpdateError, match=r"\d of 12 numbers of 'w' would be clipped"):
        cache.update_state_dict({"w": WEIGHT * 3, "b": BIAS})


def test_scales_of_several_tensors_stay(tmp_path: Path) -> None:
    """Unless all of them are given."""
    step = channels("ws", -127, 127, ScalarType.CHAR)
    cache = opened(tmp_path, layer("ws", Record("v@1", ROWS * COLUMNS, (source("v", ROWS, COLUMNS),), (step,))))
    before = stored(cache)
    assert cache.update({"w": WEIGHT * 2}).clipped > 0
    assert stored(cache)["ws"] == before["ws"]


def test_numbers_that_have_no_scale(tmp_path: Path) -> None:
    """Infinities and NaN leave the scale of their channel as it is, and count as clipped; zeros get the least scale that
    the quantizer for XNNPACK gives."""
    cache = opened(tmp_path, layer())
    weight = WEIGHT.copy()
    weight[0, 0], weight[1, 0], weight[2] = np.inf, np.nan, 0
    updated = cache.update({"w": weight})
    expected = quantized(WEIGHT, BIAS)["ws"]
    expected[2] = 2**-12
    assert stored(cache)["ws"] == expected.tobytes()
    assert updated.clipped == 2


def groups(low: int = -8, high: int = 7) -> Records:
    steps = (
        Step(Operation.QUANTIZE_GROUP, (4, low, high, int(ScalarType.CHAR)), names=("gs",)),
        Step(Operation.PACK_INT4),
    )
    cast = (Step(Operation.CAST, ints=(int(ScalarType.BFLOAT16),)),)
    return Records(
        "XnnpackBackend",
        (
            Record("gs", 2 * 2 * 4, (source("g.scale", 2, 4),), cast, auxiliary=True),
            Record("g@1", 16, (source("g", 2, 16),), steps),
        ),
    )


def bfloat16(numbers: Any) -> Any:
    """Rounded to the nearest, ties to even."""
    bits = np.asarray(numbers, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def packed(integers: Any) -> bytes:
    shifted = (integers.astype(np.int64) + 8).astype(np.uint8)
    return (shifted[:, ::2] | shifted[:, 1::2] << 4).tobytes()


@pytest.mark.parametrize("by_search", [False, True])
def test_groups_keep_what_follows_from_a_scale_that_is_rounded_to_theirs(by_search: bool, tmp_path: Path) -> None:
    """Scales of float32 are stored as bfloat16, and may be others than those of the largest numbers."""
    weight = np.random.default_rng(3).normal(size=(2, 16)).astype(np.float32)
    grouped = weight.reshape(2, 4, 4)
    scales = np.abs(grouped).max(2) / np.float32(7.5)
    if by_search:
        scales *= np.float32(0.83)
    integers = np.rint(grouped * (1 / scales)[:, :, None]).clip(-8, 7).reshape(2, 16)
    cache = cached(tmp_path, groups(), **{"gs": bfloat16(scales).tobytes(), "g@1": packed(integers)})
    updated = cache.update_state_dict({"g": weight})
    assert bytes(cache.get_data("g@1")) == packed(integers)
    assert bytes(cache.get_data("gs")) == bfloat16(scales).tobytes()
    assert (updated.quantized[0].rescaled, updated.clipped) == (0, 0)
    other = weight * np.float32(1.3)
    grouped = other.reshape(2, 4, 4)
    scales = np.abs(grouped).max(2) / np.float32(7.5)
    cache.update({"g": other})
    assert bytes(cache.get_data("gs")) == bfloat16(scales).tobytes()
    integers = np.rint(grouped * (1 / scales)[:, :, None]).clip(-8, 7).reshape(2, 16)
    assert bytes(cache.get_data("g@1")) == packed(integers)
