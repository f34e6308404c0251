"""Quantized weights follow from the weights that are stored, to the bit, whoever quantized them (P1, P2)."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from blobstore.errors import IntegrityError
from blobstore.pool import Pool
from blobstore.pool.quantized import find_rule, quantize, quantized_size
from tests.pool.places import Place
from tests.pool.rows import change_rows

_ROWS, _COLUMNS = 96, 256


def weights(seed: int = 0) -> torch.Tensor:
    """A weight whose rows have scales of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(_ROWS, _COLUMNS, generator=generator) * torch.rand(_ROWS, 1, generator=generator)


def symmetric(weight: torch.Tensor, group: int, levels: float, least: int, most: int) -> torch.Tensor:
    """As torch and torchao: a scale from the greatest magnitude of a group, and its reciprocal."""
    groups = weight.reshape(-1, group)
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-12) / levels
    return torch.clamp(torch.round(groups * (1 / scale)), least, most).to(torch.int8).reshape(weight.shape)


def affine(weight: torch.Tensor, group: int, least: int, most: int) -> torch.Tensor:
    """With a zero point."""
    groups = weight.reshape(-1, group)
    low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
    scale = (high - low) / (most - least)
    zero = torch.clamp(least - torch.round(low / scale), least, most)
    return torch.clamp(torch.round(groups / scale) + zero, least, most).to(torch.int8).reshape(weight.shape)


def nibbles(numbers: torch.Tensor, *, first_low: bool, offset: int) -> torch.Tensor:
    """Two in a byte."""
    halves = (numbers.int() + offset) & 15
    first, second = halves[:, 0::2], halves[:, 1::2]
    return (first | second << 4 if first_low else first << 4 | second).to(torch.uint8)


FORMS = {
    "int8, all": symmetric(weights(), _ROWS * _COLUMNS, 127, -127, 127),
    "int8, rows": symmetric(weights(), _COLUMNS, 127.5, -128, 127),
    "uint8, rows": (affine(weights(), _COLUMNS, -128, 127).int() + 128).to(torch.uint8),
    "int8 with zero points": affine(weights(), _COLUMNS, -128, 127),
    **{f"4 bits, {group}": symmetric(weights(), group, 7.5, -8, 7) for group in (32, 64, 128, 256)},
    "4 bits, -7 to 7": symmetric(weights(), 32, 7, -7, 7),
    "4 bits with zero points": affine(weights(), 32, -8, 7),
    **{
        f"nibbles, first {'low' if low else 'high'}, {offset}": nibbles(
            symmetric(weights(), 32, 7.5, -8, 7), first_low=low, offset=offset
        )
        for low in (True, False)
        for offset in (0, 8)
    },
}


def add(pool: Pool, path: Path, version: str, tensors: dict[str, torch.Tensor]) -> int:
    """Bytes that a version takes beyond the head of its file."""
    save_file(tensors, path)
    added = pool.add(path, f"m@{version}")
    return added.stored_bytes - (added.new_bytes - sum(t.nbytes for t in tensors.values()))


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_take_nearly_nothing(pool: Pool, tmp_path: Path, form: str) -> None:
    """And come back, also through the base that they are quantized from."""
    add(pool, tmp_path / "other.safetensors", "other", {"weight": weights(5)})
    add(pool, tmp_path / "wide.safetensors", "wide", {"weight": weights()})
    taken = add(pool, tmp_path / "quantized.safetensors", "quantized", {"renamed": FORMS[form]})
    assert taken < FORMS[form].nbytes / 25
    (path,) = pool.get("m@quantized", tmp_path / "out")
    assert path.read_bytes() == (tmp_path / "quantized.safetensors").read_bytes()
    np.testing.assert_array_equal(pool.open("m@quantized").numpy("renamed"), FORMS[form].numpy())
    pool.drop("m@wide")
    pool.drop("m@other")
    pool.gc(grace=0, keep=0)
    assert pool.verify() == []


@pytest.mark.long
def test_weights_of_torchao(where: Place, tmp_path: Path) -> None:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, Int8WeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    configurations = {
        "int8": Int8WeightOnlyConfig(version=2),
        "8da4w": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
        "8da4w in groups of 128": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(128)),
    }
    with where.open(create=True) as pool:
        add(pool, tmp_path / "wide.safetensors", "wide", {"weight": weights()})
        for number, configuration in enumerate(configurations.values()):
            layer = torch.nn.Sequential(torch.nn.Linear(_COLUMNS, _ROWS, bias=False))
            layer[0].weight = torch.nn.Parameter(weights())
            quantize_(layer, configuration)
            data = layer[0].weight.qdata.contiguous()
            assert add(pool, tmp_path / "q.safetensors", str(number), {"weight": data}) < data.nbytes / 20
        assert pool.verify() == []


def test_what_is_not_quantized_from_a_stored_weight_is_stored_as_it_is(pool: Pool, tmp_path: Path) -> None:
    add(pool, tmp_path / "wide.safetensors", "wide", {"weight": weights()})
    other = symmetric(weights(3), 32, 7.5, -8, 7)
    assert add(pool, tmp_path / "q.safetensors", "q", {"weight": other}) > other.nbytes / 3
    assert not any(encoding.startswith("quant") for encoding in pool.stats().encodings)


def test_another_rounding_costs_only_what_it_changes(pool: Pool, tmp_path: Path) -> None:
    """As quantizers that move some weights, to make up for others."""
    moved = symmetric(weights(), _COLUMNS, 127, -127, 127)
    chosen = torch.rand(moved.shape, generator=torch.Generator().manual_seed(1)) < 0.1
    moved = torch.where(chosen, moved.clamp(max=126) + 1, moved)
    add(pool, tmp_path / "wide.safetensors", "wide", {"weight": weights()})
    assert add(pool, tmp_path / "q.safetensors", "q", {"weight": moved}) < moved.nbytes / 6
    assert pool.verify() == []


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf"), 0.0, 1e-45, -3e38])
def test_weights_of_any_value(pool: Pool, tmp_path: Path, special: float) -> None:
    weight = weights()
    weight[3, 5], weight[7] = special, special
    numbers = symmetric(torch.nan_to_num(weight, 0, 0, 0), _COLUMNS, 127, -127, 127)
    add(pool, tmp_path / "wide.safetensors", "wide", {"weight": weight})
    add(pool, tmp_path / "q.safetensors", "q", {"weight": numbers})
    assert pool.verify() == []


RULES = ["127", "127.5", "127e", "127.5e", "128/127", "255", "7", "7.5", "8/7", "15"]


@given(st.binary(max_size=4096), st.sampled_from(RULES), st.data())
def test_any_bytes_are_weights_or_none(base: bytes, rule: str, draw: st.DataObject) -> None:
    """Never an error: bases and recipes may be anybody's."""
    form = draw.draw(st.sampled_from("nolhLH"))
    group = draw.draw(st.integers(1, 2000))
    recipe = f"quant:{rule}:{group}:{form}"
    size = quantized_size(len(base), recipe)
    fits = len(base) % 4 == 0 and len(base) // 4 % group == 0 and (form in "no" or len(base) % 8 == 0)
    assert size == (len(base) // (4 if form in "no" else 8) if fits else None)
    if size is not None:
        assert len(quantize(memoryview(base), recipe)) == size


def reference(row: npt.NDArray[np.float32], rule: str) -> list[int]:
    """The numbers of one group in the words of the module, element by element."""
    low, high = (-8, 7) if rule in {"7.5", "15", "8/7"} else (-7, 7) if rule == "7" else (-128, 127)
    if rule in {"127", "127e"}:
        low = -127
    f = np.float32
    zero = f(0)
    if rule in {"255", "15"}:
        least, greatest = min(f(0), *row), max(f(0), *row)
        step = f(f(greatest - least) / f(rule))
        zero = f(min(max(low - np.rint(f(least / step)), low), high))
    elif "/" in rule:
        step = max(f(-min(row) / f(-low)), f(max(row) / f(high)))
    else:
        step = f(max(abs(x) for x in row) / f(rule.strip("e")))
    if rule.endswith("e"):
        step = max(step, f(2**-12))
    return [int(min(max(f(np.rint(f(x / step)) + zero), low), high)) for x in row]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("group", "scale"), [(32, 1), (96, 1e-3), pytest.param(1 << 19, 1, marks=pytest.mark.long)])
def test_recipes_do_what_they_say(rule: str, group: int, scale: float) -> None:
    """Also over the edges of the pieces in which the work is done."""
    random = np.random.default_rng(1)
    base = random.standard_normal(2 * max(group, 480), np.float32) * np.float32(scale)
    made = quantize(memoryview(base).cast("B"), f"quant:{rule}:{group}:n")
    numbers = np.frombuffer(made, np.int8)
    assert numbers[:group].tolist() == reference(base[:group], rule)


def test_small_and_odd_weights_have_no_recipe() -> None:
    for data, base, shape in (
        (b"", b"", "0"),
        (b"\1", bytes(4), "1"),
        (bytes(7), bytes(12), "3"),
        (bytes(7), bytes(29), "7"),
    ):
        assert find_rule(memoryview(data), memoryview(base), shape)[0] is None


def test_a_recipe_that_does_not_fit_its_base_is_an_error(pool: Pool, tmp_path: Path) -> None:
    add(pool, tmp_path / "wide.safetensors", "wide", {"weight": weights()})
    add(pool, tmp_path / "q.safetensors", "q", {"weight": FORMS["int8, rows"]})
    change_rows(pool, "encoding LIKE 'quant%'", lambda row: {"encoding": "quant:127:1000:n"})
    with pytest.raises(IntegrityError, match="a base of another size"):
        pool.get("m@q", tmp_path / "out")
