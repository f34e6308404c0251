"""Updates of quantized models: the float weights are given, and quantized with the scales that were recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blobstore.demo.models import quiet
from blobstore.errors import UpdateError
from blobstore.lowering import restore_names
from blobstore.lowering.quantized import _quantize
from blobstore.runtime import BlobCache, Program
from tests.lowering import nets
from tests.lowering.live import Inputs, close, inputs, lower_exported, randomize, seeded

with quiet():
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import Granularity, PerAxis, PerGroup
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e


def pt2e(module: nn.Module, example: Inputs, *, names: bool = True, **config: bool) -> torch.fx.GraphModule:
    with quiet(), torch.no_grad():
        quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**config))
        prepared = prepare_pt2e(torch.export.export(module, example, strict=True).module(), quantizer)
        prepared(*example)
        converted = convert_pt2e(prepared)
    if names:
        restore_names(converted)
    return converted


def put(quantized: torch.fx.GraphModule, name: str, value: Tensor) -> None:
    """Put a float weight into a converted module, quantized as its own was."""
    nodes = [node for node in quantized.graph.nodes if node.target == f"{name}__quantized"]
    with torch.no_grad():
        if nodes:
            target = quantized.get_buffer(f"{name}__quantized")
            target.copy_(_quantize(quantized, next(iter(nodes[0].users)), value))
        else:
            quantized.get_parameter(name).copy_(value)


def open_program(exported: object, directory: Path) -> tuple[BlobCache, Callable[..., Tensor]]:
    path = lower_exported(exported, directory)
    cache = BlobCache(directory / "model.ptd")
    method = Program(path, cache).method()
    return cache, lambda *values: method(*values)[0]


KINDS = {
    "static per channel": ({"is_per_channel": True}, 0.0),
    "static per tensor": ({"is_per_channel": False}, 0.0),
    # the runtime computes the activations' scales in another order of operations than eager
    "dynamic per channel": ({"is_per_channel": True, "is_dynamic": True}, 0.02),
}


@pytest.mark.parametrize("kind", KINDS)
def test_int8(kind: str, tmp_path: Path) -> None:
    config, tolerance = KINDS[kind]
    module, example = seeded(nets.Small), inputs(2, 3, 8, 8)
    eager = pt2e(module, example, **config)
    with quiet():
        exported = torch.export.export(eager, example, strict=True)
    cache, run = open_program(exported, tmp_path)
    close(run(*example), eager(*example), tolerance)
    parameters = dict(module.named_parameters())
    # what is stored follows from the float weights
    for key, array in cache.tensors.resolve(parameters).items():
        assert array.tobytes() == bytes(cache.get_data(key)), key
    for factor in (0.9, -0.7, 1.1):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.mul_(factor)
                put(eager, name, parameter)
        cache.update(parameters)
        close(run(*example), eager(*example), tolerance)


def test_integers_and_scales_can_be_given(tmp_path: Path) -> None:
    module, example = seeded(nets.Small), inputs(2, 3, 8, 8)
    eager = pt2e(module, example, is_per_channel=True)
    with quiet():
        cache, run = open_program(torch.export.export(eager, example, strict=True), tmp_path)
    close(run(*example), eager(*example), 0)
    integers = eager.get_buffer("second.weight__quantized")
    integers.neg_()
    cache.update({"second.weight": integers})
    close(run(*example), eager(*example), 0)
    # a scale alone: the weight is packed with it, so both have to get a new version
    before = run(*example)
    scale = torch.from_numpy(cache.numpy(cache.tensors["first.weight.scale"].keys[0]).view("float32").copy())
    cache.update({"first.weight.scale": scale * 2})
    assert not torch.equal(run(*example), before)
    cache.update({"first.weight.scale": scale})
    assert torch.equal(run(*example), before)


def test_scales_of_a_tensor_are_in_the_payload(tmp_path: Path) -> None:
    module, example = seeded(nets.Small), inputs(2, 3, 8, 8)
    with quiet():
        cache, _ = open_program(
            torch.export.export(pt2e(module, example, is_per_channel=False), example, strict=True), tmp_path
        )
    with pytest.raises(UpdateError, match=r"first\.weight\.scale.*inside the delegate's payload"):
        cache.update({"first.weight.scale": torch.ones(())})


def test_weights_whose_names_were_not_restored_are_refused(tmp_path: Path) -> None:
    module, example = seeded(nets.Small), inputs(2, 3, 8, 8)
    with quiet():
        eager = pt2e(module, example, names=False, is_per_channel=True)
        cache, run = open_program(torch.export.export(eager, example, strict=True), tmp_path)
    close(run(*example), eager(*example), 0)
    with pytest.raises(UpdateError, match="restore_names"):
        cache.update({"_frozen_param0": torch.ones(8, 3, 3, 3)})


def test_equal_weights_get_the_names_of_their_layers() -> None:
    module = seeded(nets.Small)
    with torch.no_grad():
        module.second.weight.copy_(torch.eye(6))
        module.first.weight.copy_(torch.eye(6, 8))
        module.depthwise.weight.zero_()
    names = restore_names(pt2e(module, inputs(2, 3, 8, 8), names=False, is_per_channel=True))
    assert sorted(names) == ["conv.weight", "depthwise.weight", "first.weight", "second.weight"]


@pytest.mark.parametrize("granularity", [PerGroup(32), PerAxis(0)], ids=["groups", "rows"])
def test_four_bits(granularity: Granularity, tmp_path: Path) -> None:
    def quantized(seed: int) -> nn.Module:
        module = seeded(nets.Linears)
        randomize(module, seed)
        config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=granularity)
        with quiet():
            quantize_(module, config)
        return module

    example = inputs(3, 64)
    first = quantized(1)
    with quiet():
        cache, run = open_program(torch.export.export(first, example, strict=True), tmp_path)
    close(run(*example), first(*example).detach(), 0.02)
    for seed in (2, 3):
        second = quantized(seed)
        cache.update_state_dict(second.state_dict())
        close(run(*example), second(*example).detach(), 0.02)
        with quiet():
            other, again = open_program(torch.export.export(second, example, strict=True), tmp_path / str(seed))
        assert torch.equal(run(*example), again(*example))
        assert {key: bytes(cache.get_data(key)) for key in cache} == {key: bytes(other.get_data(key)) for key in other}
    # floats are quantized with the scales that are there
    cache.update({"first.weight": torch.zeros(32, 64)})
    with torch.no_grad():
        second.first.weight = nn.Parameter(torch.zeros(32, 64))
    close(run(*example), second(*example).detach(), 0.02)
