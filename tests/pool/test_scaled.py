"""Weights into which a batch normalization was folded follow from the checkpoint, to the bit (P1, P2)."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.fusion import fuse_conv_bn_weights

from blobstore.core.codec.elements import cast
from blobstore.errors import IntegrityError
from blobstore.pool import Pool
from blobstore.pool.derived import derive, made_size
from blobstore.pool.scaled import factors_size, find_factors, scale
from tests.pool.models import write
from tests.pool.rows import change_rows
from tests.pool.test_layouts import bytes_of, follows, moved, normal, opaque, stored

Array = npt.NDArray[Any]


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 1 << 32))
def test_factors_are_found_again(rows: int, group: int, seed: int) -> None:
    """Whatever they are, the result is the same to the bit; oracle: products of numpy, one by one."""
    random = np.random.default_rng(seed)
    weights = random.standard_normal((rows, group)).astype(np.float32)
    factors = (random.standard_normal(rows) * 10.0 ** random.integers(-3, 3, rows)).astype(np.float32)
    weights[random.random(weights.shape) < 0.1] = 0
    factors[random.random(rows) < 0.1] = 0
    products = np.array([[w * f for w in row] for row, f in zip(weights, factors, strict=True)], np.float32)
    assert bytes(scale(bytes_of(weights), bytes_of(factors))) == products.tobytes()
    found = find_factors(bytes_of(products), bytes_of(weights), group)
    if np.array_equal(products, weights):
        assert found is None
        return
    assert found is not None
    np.testing.assert_array_equal(
        np.frombuffer(scale(bytes_of(weights), memoryview(found[0])), "<f4"), products.ravel()
    )


def test_factors_of_what_follows_nearly() -> None:
    weights = normal(0, (64, 90))
    factors = np.linspace(-2, 3, 64, dtype=np.float32)[:, None]
    found = find_factors(bytes_of(moved(weights * factors)), bytes_of(weights), 90)
    assert found is not None and found[1] > 0.99999
    np.testing.assert_allclose(np.frombuffer(found[0], "<f4"), factors[:, 0], rtol=1e-5)
    for other in (weights, moved(weights), normal(1, (64, 90))):  # nothing to gain
        assert find_factors(bytes_of(other), bytes_of(weights), 90) is None


def test_factors_that_are_as_many_as_weights_are_no_gain(tmp_path: Path) -> None:
    """A base with one dimension, or with none that is known, has a group for each weight."""
    random = np.random.default_rng(0)
    weights = random.standard_normal(1 << 16).astype(np.float32)
    wanted = (weights * random.uniform(0.5, 2, 1 << 16).astype(np.float32)).tobytes()
    with Pool(tmp_path / "alone", create=True) as alone, Pool(tmp_path / "pool", create=True) as pool:
        alone.add(opaque(tmp_path / "p.ptd", {"w": wanted}), "m@1")
        pool.add(write(tmp_path / "w.safetensors", {"w": weights}), "m@0")
        pool.add(opaque(tmp_path / "p.ptd", {"w": wanted}), "m@1")
        assert stored(pool, wanted)[1] <= stored(alone, wanted)[1]
        assert pool.verify() == []


def test_what_is_not_a_number_has_the_same_bits_everywhere() -> None:
    """Processors differ in them; these are the ones that the pool defines."""
    special = np.array([0x7F800001, 0xFFC00000, 0x7FBFE123, 0x7F800000, 0xFF800000], "<u4")
    halves = np.frombuffer(cast(bytes_of(special), "half"), "<u2")
    assert [hex(half) for half in halves] == ["0x7c01", "0xfe00", "0x7dff", "0x7c00", "0xfc00"]
    infinite = np.array([[np.inf, -np.inf, 1, np.nan]], "<f4")
    made = np.frombuffer(scale(bytes_of(infinite), bytes_of(np.zeros(1, "<f4"))), "<u4")
    assert [hex(one) for one in made] == ["0x7fc00000", "0x7fc00000", "0x0", "0x7fc00000"]


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf"), 1e-45, 1e30])
def test_factors_of_any_value(special: float) -> None:
    weights = normal(0, (16, 90))
    weights[3, 5], weights[7] = special, special
    with np.errstate(all="ignore"):
        products = weights * np.float32(2.5)
    found = find_factors(bytes_of(products), bytes_of(weights), 90)
    assert found is not None
    np.testing.assert_array_equal(
        np.frombuffer(scale(bytes_of(weights), memoryview(found[0])), "<f4"), products.ravel()
    )


@pytest.mark.parametrize(("data", "base", "group"), [(0, 0, 1), (8, 4, 1), (8, 8, 3), (6, 6, 1)])
def test_sizes_that_do_not_fit_have_no_factors(data: int, base: int, group: int) -> None:
    assert find_factors(memoryview(bytes(data)), memoryview(bytes(base)), group) is None


def test_factors_that_do_not_fit() -> None:
    """Sizes are known before memory is taken."""
    assert (
        factors_size(48, "scale:3") == 16 and factors_size(48, "scale:5") is None and factors_size(0, "scale:1") is None
    )
    assert made_size(48, ("scale:3", "layout:4,3:1,0")) == (48, 16)
    assert made_size(24, ("widen:half", "scale:999999999999")) is None
    base = memoryview(bytes(48))
    assert derive(base, ("scale:3",), 48, memoryview(bytes(16))) == base
    for factors in (b"", bytes(12), bytes(20)):
        assert derive(base, ("scale:3",), 48, memoryview(factors)) is None


# ------------------------------------------------------------------------------------------------- in a pool


def folded(weight: Array, channels: int, *, transposed: bool = False) -> Array:
    """By torch, with a normalization as training leaves it: a few weights are negative, and some nearly 0."""
    generator = torch.Generator().manual_seed(3)
    gamma = torch.randn(channels, generator=generator) * 0.5 + 0.8
    gamma[::9] *= 1e-3
    mean, bias = torch.randn(2, channels, generator=generator)
    variance = torch.rand(channels, generator=generator) * 3 + 0.01
    made, _ = fuse_conv_bn_weights(
        torch.from_numpy(weight), None, mean, variance, 1e-5, gamma, bias, transpose=transposed
    )
    return made.detach().numpy()


def forms() -> dict[str, tuple[Array, Array, int]]:
    """A weight of a checkpoint, what a program has, and the channels of that."""
    conv, deep, up = normal(0, (64, 48, 3, 3)), normal(1, (256, 1, 5, 5)), normal(2, (48, 64, 3, 3))
    return {
        "as it is": (conv, folded(conv, 64), 64),
        "channels last": (conv, folded(conv, 64).transpose(0, 2, 3, 1), 64),
        "depthwise": (deep, folded(deep, 256).transpose(2, 3, 1, 0), 256),
        "transposed": (up, folded(up, 64, transposed=True).transpose(1, 2, 3, 0), 64),
    }


@pytest.mark.long
@pytest.mark.parametrize("form", forms())
def test_folded_weights_take_a_factor_for_each_channel(tmp_path: Path, form: str) -> None:
    weight, made, channels = forms()[form]
    assert "scale:" in follows(tmp_path, {"w": weight}, np.ascontiguousarray(made).tobytes(), 4 * channels)


def test_folded_weights_of_a_fine_tune(pool: Pool, tmp_path: Path) -> None:
    weight = normal(0, (64, 48, 3, 3))
    content = np.ascontiguousarray(folded(moved(weight), 64).transpose(0, 2, 3, 1)).tobytes()
    pool.add(write(tmp_path / "checkpoint.safetensors", {"w": weight}), "checkpoint@1")
    pool.add(opaque(tmp_path / "program.ptd", {"constant": content}), "program@1")
    encoding, length, _ = stored(pool, content)
    assert encoding.startswith("scale:432+layout:64,48,9:0,2,1+near:f4:") and length < len(content) / 3
    assert pool.verify() == []


def test_factors_that_are_gone_are_one_error(pool: Pool, tmp_path: Path) -> None:
    weight = normal(0, (64, 48, 3, 3))
    content = folded(weight, 64).tobytes()
    pool.add(write(tmp_path / "checkpoint.safetensors", {"w": weight}), "checkpoint@1")
    pool.add(opaque(tmp_path / "program.ptd", {"constant": content}), "program@1")
    length = 4 * 64
    for values, message in (
        ({"length": 0}, "a base of another size"),
        ({"length": length - 4}, "a base of another size"),
        ({"length": length, "offset": 64}, "are damaged"),  # other factors
    ):
        change_rows(pool, "encoding LIKE 'scale%'", lambda row, values=values: values)
        with pytest.raises(IntegrityError, match=message):
            pool.get("program@1", tmp_path / "out")
