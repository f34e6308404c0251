"""Updates of quantized models: their own weights change no bit; others are quantized as torch and torchao quantize them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blobstore.errors import UpdateError
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program
from tests.lowering import nets
from tests.lowering.live import Inputs, close, inputs, plugin, randomize, seeded, write
from tests.lowering.test_quantized import Folded, pt2e, put

pytestmark = pytest.mark.long

with quiet():
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.relu(self.shared(x)))


class Tied(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 6, 3, stride=2)
        self.line = nn.Conv1d(6, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(torch.relu(self.up(x)).flatten(2))


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def zero_channel(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        module.get_parameter("first.weight")[1] = 0
    return module


def tiny(module: nn.Module) -> nn.Module:
    """Some channels get the least scale that the quantizer gives."""
    with torch.no_grad():
        module.get_parameter("first.weight")[:3] *= 1e-3
    return module


def torchao(module: nn.Module, bits: torch.dtype, granularity: Any, **config: Any) -> nn.Module:
    quantized = copy.deepcopy(module)
    config = {"weight_dtype": bits, "weight_granularity": granularity, **config}
    with quiet():
        quantize_(quantized, Int8DynamicActivationIntxWeightConfig(**config))
    return quantized


STATIC = {"is_per_channel": True}
DYNAMIC = {"is_per_channel": True, "is_dynamic": True}
IMAGE, ROWS = inputs(2, 3, 8, 8), inputs(3, 64)
WORDS = (torch.arange(5)[None],)


@dataclass(frozen=True)
class Form:
    """A quantized form: the float model, what quantizes it, and an example input."""

    make: Callable[[], nn.Module]
    quantize: Callable[[nn.Module, Inputs], nn.Module]
    example: Inputs


def by_pt2e(**config: bool) -> Callable[[nn.Module, Inputs], nn.Module]:
    return lambda module, example: pt2e(module, example, **config)


def by_torchao(bits: torch.dtype, granularity: Any, **config: Any) -> Callable[[nn.Module, Inputs], nn.Module]:
    return lambda module, example: torchao(module, bits, granularity, **config)


FORMS = {
    "static per channel": Form(lambda: seeded(nets.Small), by_pt2e(**STATIC), IMAGE),
    "static per tensor": Form(lambda: seeded(nets.Small), by_pt2e(is_per_channel=False), IMAGE),
    "dynamic per channel": Form(lambda: seeded(nets.Small), by_pt2e(**DYNAMIC), IMAGE),
    "static, folded": Form(lambda: seeded(Folded), by_pt2e(**STATIC), IMAGE),
    "dynamic, folded": Form(lambda: seeded(Folded), by_pt2e(**DYNAMIC), IMAGE),
    "static, transposed": Form(lambda: seeded(Transposed), by_pt2e(**STATIC), inputs(1, 4, 3, 3)),
    "dynamic, twice": Form(lambda: seeded(Twice), by_pt2e(**DYNAMIC), inputs(2, 8)),
    "dynamic, tied": Form(lambda: seeded(Tied), by_pt2e(**DYNAMIC), WORDS),
    "static, a channel of zeros": Form(lambda: zero_channel(seeded(nets.Small)), by_pt2e(**STATIC), IMAGE),
    "static, tiny channels": Form(lambda: tiny(seeded(nets.Small)), by_pt2e(**STATIC), IMAGE),
    "dynamic, a channel of zeros": Form(lambda: zero_channel(seeded(nets.Small)), by_pt2e(**DYNAMIC), IMAGE),
    "4 bits, groups of 32": Form(lambda: seeded(nets.Linears), by_torchao(torch.int4, PerGroup(32)), ROWS),
    "4 bits, groups of 64": Form(lambda: seeded(square), by_torchao(torch.int4, PerGroup(64)), ROWS),
    "4 bits, rows": Form(lambda: seeded(nets.Linears), by_torchao(torch.int4, PerAxis(0)), ROWS),
    "4 bits, a row of zeros": Form(
        lambda: zero_channel(seeded(nets.Linears)), by_torchao(torch.int4, PerGroup(32)), ROWS
    ),
    "4 bits, scales by search": Form(
        lambda: seeded(nets.Linears),
        by_torchao(torch.int4, PerGroup(32), intx_choose_qparams_algorithm="hqq_scale_only"),
        ROWS,
    ),
    "4 bits, tied": Form(lambda: seeded(Tied), by_torchao(torch.int4, PerGroup(32)), WORDS),
    "8 bits, rows": Form(lambda: seeded(nets.Linears), by_torchao(torch.int8, PerAxis(0)), ROWS),
    "float16": Form(lambda: seeded(nets.Linears).half(), lambda module, _: module, (ROWS[0].half(),)),
    "bfloat16": Form(lambda: seeded(nets.Linears).bfloat16(), lambda module, _: module, (ROWS[0].bfloat16(),)),
}


def lower_whole(module: nn.Module, example: Inputs, folder: Path) -> None:
    """Lower a module with all its tensors in the data file."""
    with quiet():
        exported = torch.export.export(module, example, strict=True)
        edge = to_edge_transform_and_lower(exported, partitioner=plugin()())
        write(edge.to_executorch(ExecutorchBackendConfig(external_constants=lambda node: "model")), folder)


Lowered = Callable[[str], tuple[Path, nn.Module, nn.Module]]


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """Lowers a form once: the folder, the float model, and the quantized one."""
    known: dict[str, tuple[Path, nn.Module, nn.Module]] = {}

    def lower(name: str) -> tuple[Path, nn.Module, nn.Module]:
        if name not in known:
            form, folder = FORMS[name], tmp_path_factory.mktemp("form")
            module = form.make()
            quantized = form.quantize(module, form.example)
            lower_whole(quantized, form.example, folder)
            known[name] = folder, module, quantized
        return known[name]

    return lower


def opened(folder: Path) -> tuple[BlobCache, Callable[..., Tensor]]:
    cache = BlobCache(folder / "model.ptd")
    return cache, Program(folder / "model.pte", cache).method()


def contents(cache: BlobCache) -> dict[str, bytes]:
    return {key: bytes(cache.get_data(key)) for key in cache}


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
def test_their_own_weights_change_no_bit(name: str, lowered: Lowered) -> None:
    """In any form that is lowered, given as floats, and strictly; nothing is clipped (X5, X4)."""
    folder, module, _ = lowered(name)
    cache, run = opened(folder)
    before, found = contents(cache), run(*FORMS[name].example)
    updated = cache.update_state_dict(module.state_dict())
    assert contents(cache) == before
    assert [(one.name, one.clipped, one.rescaled) for one in updated.quantized if one.clipped or one.rescaled] == []
    assert torch.equal(run(*FORMS[name].example), found)
    # also after other weights, unless the scales were chosen otherwise than from the largest numbers
    if "search" not in name:
        other = copy.deepcopy(module)
        randomize(other, 3)
        cache.update_state_dict(other.state_dict(), strict=False)
        assert contents(cache) != before
        cache.update_state_dict(module.state_dict())
        assert contents(cache) == before


TORCHAO = [name for name, form in FORMS.items() if "bits" in name and "search" not in name]


@pytest.mark.long
@pytest.mark.parametrize("name", TORCHAO)
def test_other_weights_are_stored_as_torchao_quantizes_them(name: str, lowered: Lowered, tmp_path: Path) -> None:
    """To the bit: the blobs are those of the other model, quantized and lowered anew (X4, U1)."""
    folder, module, _ = lowered(name)
    cache, run = opened(folder)
    for turn, change in enumerate([lambda x: x.mul_(1.2), lambda x: x.mul_(0.1), lambda x: x.add_(0.01)]):
        other = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in other.parameters():
                change(parameter)
        eager = FORMS[name].quantize(other, FORMS[name].example)
        updated = cache.update_state_dict(other.state_dict())
        assert updated == cache.generation
        assert updated.clipped == 0
        close(run(*FORMS[name].example), eager(*FORMS[name].example), 0.02)
        lower_whole(eager, FORMS[name].example, tmp_path / str(turn))
        assert contents(cache) == contents(BlobCache(tmp_path / str(turn) / "model.ptd"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["static per channel", "dynamic per channel", "static, transposed"])
def test_channels_that_grew_get_other_scales(name: str, lowered: Lowered) -> None:
    """As the quantizer's observer gives them; with static activations, the bias follows (X4)."""
    folder, module, quantized = lowered(name)
    cache, run = opened(folder)
    eager, example = copy.deepcopy(quantized), FORMS[name].example
    assert isinstance(eager, torch.fx.GraphModule)
    other = copy.deepcopy(module)
    for factor in (1.2, 0.05, -3.0):
        with torch.no_grad():
            for parameter_name, parameter in other.named_parameters():
                parameter.copy_(module.get_parameter(parameter_name) * factor)
                put(eager, parameter_name, parameter)
        updated = cache.update_state_dict(other.state_dict())
        assert updated.clipped == 0
        assert all(one.rescaled for one in updated.quantized if one.name.endswith("weight"))
        # static: one quantization step, because XNNPACK's int8 mean rounds ties differently
        close(run(*example), eager(*example), 0.02 if "dynamic" in name else 0.004)


def test_a_bias_follows_the_scales_of_its_weight(lowered: Lowered) -> None:
    """Its integers count steps of the weight's scales, also where only the weight, or its scales, are given (X4)."""
    folder, module, quantized = lowered("static per channel")
    cache, run = opened(folder)
    eager = copy.deepcopy(quantized)
    assert isinstance(eager, torch.fx.GraphModule)
    weight = module.get_parameter("first.weight") * 2.5
    put(eager, "first.weight", weight)
    updated = cache.update({"first.weight": weight})
    assert [(one.name, one.rescaled) for one in updated.quantized] == [("first.weight", 6), ("first.bias", 6)]
    close(run(*IMAGE), eager(*IMAGE), 0)
    cache.revert()
    scale = torch.from_numpy(cache.numpy(cache.tensors["first.weight.scale"].keys[0]).view("float32") * 2.5)
    updated = cache.update({"first.weight.scale": scale})
    assert [one.name for one in updated.quantized] == ["first.bias"]
    close(run(*IMAGE), eager(*IMAGE), 0)


@pytest.mark.long
def test_scales_in_the_program_clip_what_a_strict_update_refuses(lowered: Lowered) -> None:
    """The result counts what was clipped, for each tensor (X4)."""
    folder, module, _ = lowered("static per tensor")
    cache, run = opened(folder)
    before, found = contents(cache), run(*IMAGE)
    state = module.state_dict() | {"second.weight": module.get_parameter("second.weight").detach() * 1.2}
    with pytest.raises(UpdateError, match=r"\d of 36 numbers of 'second\.weight' would be clipped.*without strict"):
        cache.update_state_dict(state)
    assert contents(cache) == before
    assert torch.equal(run(*IMAGE), found)
    largest = module.get_parameter("second.weight").abs().max()
    steps = state["second.weight"] / (largest / 127)
    expected = int((steps.abs() > 127.5001).sum())
    assert expected > 0
    updated = cache.update_state_dict(state, strict=False)
    assert {one.name: one.clipped for one in updated.quantized if one.clipped} == {"second.weight": expected}
    assert (updated, updated.clipped) == (cache.generation, expected)


def test_only_numbers_that_are_given_count(lowered: Lowered) -> None:
    """Integers keep the scales that are stored, and floats get those that come with them (X4)."""
    folder, module, quantized = lowered("dynamic per channel")
    cache, _ = opened(folder)
    scales = cache.tensors["first.weight.scale"].keys[0]
    before = bytes(cache.get_data(scales))
    integers = quantized.get_buffer("first.weight__quantized")
    assert cache.update({"first.weight": integers}).quantized == ()
    assert bytes(cache.get_data(scales)) == before
    scale = torch.from_numpy(cache.numpy(scales).view("float32") / 2)
    given = {"first.weight.scale": scale, "first.weight": module.get_parameter("first.weight")}
    quantize, zeros = torch.ops.quantized_decomposed.quantize_per_channel, torch.zeros(6, dtype=torch.int64)
    stored = quantize(given["first.weight"], scale, zeros, 0, -127, 127, torch.int8).numpy().tobytes()
    for names in (given, reversed(given)):  # in any order
        cache.revert()
        updated = cache.update({name: given[name] for name in names})
        ((name, clipped, rescaled),) = ((one.name, one.clipped, one.rescaled) for one in updated.quantized)
        steps = given["first.weight"] / scale[:, None]
        assert (name, clipped, rescaled) == ("first.weight", int((steps.abs() > 127.5001).sum()), 0)
        assert clipped > 0
        assert bytes(cache.get_data(cache.tensors["first.weight"].keys[0])) == stored
