"""Updates of quantized models: float weights are quantized as lowering quantized the model's own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from blobstore.errors import UnsupportedDataError, UpdateError
from blobstore.lowering import lower, restore_names
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program
from tests.lowering import nets
from tests.lowering.live import Inputs, close, inputs, lower_exported, randomize, seeded, write

pytestmark = pytest.mark.long

with quiet():
    import executorch.kernels.quantized  # noqa: F401 - registers what is not delegated
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.observer import PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e


def pt2e(module: nn.Module, example: Inputs, *, names: bool = True, **config: bool) -> torch.fx.GraphModule:
    with quiet(), torch.no_grad():
        quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(**config))
        prepared = prepare_pt2e(torch.export.export(module, example, strict=True).module(), quantizer)
        prepared(*example)
        converted = convert_pt2e(prepared)
    if names:
        restore_names(converted, module)
    return converted


def put(quantized: torch.fx.GraphModule, name: str, value: Tensor) -> None:
    """Put a float weight into a converted module: channels get the scales that the quantizer's observer gives them, a
    whole tensor keeps its scale."""
    nodes = [node for node in quantized.graph.nodes if node.target == f"{name}__quantized"]
    with torch.no_grad():
        if nodes:
            quantized.get_buffer(f"{name}__quantized").copy_(quantizer_of(quantized, nodes[0], value)(value))
        else:
            quantized.get_parameter(name).copy_(value)


def quantizer_of(
    quantized: torch.fx.GraphModule, frozen: torch.fx.Node, value: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    """What quantizes weights as frozen ones were; channels first get the scales that the observer gives to `value`."""
    back = next(iter(frozen.users))
    scale, zero, *rest = (
        getattr(quantized, str(x.target)) if isinstance(x, torch.fx.Node) else x for x in back.args[1:]
    )
    ops = torch.ops.quantized_decomposed
    if "per_channel" not in str(back.target):
        return lambda given: ops.quantize_per_tensor(given, scale, zero, *rest)
    if value is not None:
        observer = PerChannelMinMaxObserver(rest[0], torch.int8, torch.per_channel_symmetric, False, -127, 127)
        observer.eps.fill_(2**-12)
        observer(value)
        scale.copy_(observer.calculate_qparams()[0])
    return lambda given: ops.quantize_per_channel(given, scale, zero, *rest)


def open_program(
    module: nn.Module, example: Inputs, directory: Path, *, strict: bool = True
) -> tuple[BlobCache, Callable[..., Tensor]]:
    with quiet():
        path = lower_exported(torch.export.export(module, example, strict=strict), directory)
    cache = BlobCache(directory / "model.ptd")
    method = Program(path, cache).method()
    return cache, lambda *values: method(*values)


@pytest.mark.long
def test_integers_and_scales_can_be_given(tmp_path: Path) -> None:
    """A weight as int8, with new scales (U1, X1)."""
    module, example = seeded(nets.Small), inputs(2, 3, 8, 8)
    eager = pt2e(module, example, is_per_channel=True)
    cache, run = open_program(eager, example, tmp_path)
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


@pytest.mark.long
def test_scales_and_zero_points_that_the_graph_keeps(tmp_path: Path) -> None:
    """Of layers that are not delegated, by the names that torch gave them (U1, X1)."""
    module, example = seeded(nets.Small), inputs(2, 3, 8, 8)
    eager = pt2e(module, example, is_per_channel=True)
    path = write(lower(eager, example, tag="model", partitioners=list), tmp_path)
    cache = BlobCache(tmp_path / "model.ptd")
    run = Program(path, cache).method()
    before = run(*example)
    close(before, eager(*example), 0)
    changes = {"_scale_2": torch.linspace(0.01, 0.03, 6), "_zero_point_2": torch.arange(-3, 3)}
    for name, value in changes.items():
        last = run(*example)
        eager.get_buffer(name).copy_(value)
        cache.update({name: value})
        close(run(*example), eager(*example), 0)
        assert not torch.equal(run(*example), last)
    cache.revert()
    assert torch.equal(run(*example), before)


@pytest.mark.long
def test_scales_of_a_tensor_are_in_the_payload(tmp_path: Path) -> None:
    """So they are refused by name (U1)."""
    module, example = seeded(nets.Small), inputs(2, 3, 8, 8)
    cache, _ = open_program(pt2e(module, example, is_per_channel=False), example, tmp_path)
    with pytest.raises(UpdateError, match=r"first\.weight\.scale.*inside the delegate's payload"):
        cache.update({"first.weight.scale": torch.ones(())})


def test_a_state_dict_without_the_buffers_that_the_model_does_not_save() -> None:
    """Quantizing makes them part of the state dict; then a strict update with the model's own would lack them (U1)."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 6)
            self.inner.register_buffer("mask", torch.linspace(0, 1, 6), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.inner.mask

    module, example = seeded(Masked), inputs(2, 8)
    converted = pt2e(module, example, names=False, is_per_channel=True)
    assert "inner.mask" in converted.state_dict()
    restore_names(converted, module)
    assert "inner.mask" not in converted.state_dict()
    assert "inner.weight" in converted.state_dict()


def test_equal_weights_get_the_names_of_their_layers() -> None:
    """Weights with the same integers are told apart by the layers that use them (U1)."""
    module = seeded(nets.Small)
    with torch.no_grad():
        module.second.weight.copy_(torch.eye(6))
        module.first.weight.copy_(torch.eye(6, 8))
        module.depthwise.weight.zero_()
    names = restore_names(pt2e(module, inputs(2, 3, 8, 8), names=False, is_per_channel=True), module)
    assert sorted(names) == ["conv.weight", "depthwise.weight", "first.weight", "second.weight"]


class Folded(nn.Module):
    """Layers that `prepare_pt2e` folds batch normalizations into, with and without optional parts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.plain = nn.Conv2d(8, 6, 1, bias=False)
        self.plain_norm = nn.BatchNorm2d(6, affine=False, eps=1e-3)
        self.line = nn.Linear(6, 5)
        self.line_norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.plain_norm(self.plain(x))).mean((2, 3))
        return self.last(torch.relu(self.line_norm(self.line(x))))

    def folded(self) -> dict[str, Tensor]:
        """The tensors that the quantized module has instead, by torch's own folding."""
        found = {}
        for layer, norm, fold in [
            ("conv", self.norm, fuse_conv_bn_weights),
            ("plain", self.plain_norm, fuse_conv_bn_weights),
            ("line", self.line_norm, fuse_linear_bn_weights),
        ]:
            module = self.get_submodule(layer)
            weight, bias = fold(
                module.weight, module.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
            )
            found[f"{layer}.weight"] = weight
            found[f"{layer}.bias" if module.bias is not None else f"{layer}.weight_bias"] = bias
        return found | {"last.weight": self.last.weight, "last.bias": self.last.bias}


FOLDED = {
    "static per channel": ({"is_per_channel": True}, 0.0),
    "static per tensor": ({"is_per_channel": False}, 0.0),
    "dynamic per channel": ({"is_per_channel": True, "is_dynamic": True}, 0.02),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", FOLDED)
def test_normalizations_that_quantizing_folded(kind: str, tmp_path: Path) -> None:
    """An update folds and quantizes the model's own float weights as lowering did (U1, X1)."""
    config, tolerance = FOLDED[kind]
    module, example = seeded(Folded), inputs(2, 3, 8, 8)
    assert isinstance(module, Folded)
    randomize(module, 5)
    eager = pt2e(module, example, **config)
    cache, run = open_program(eager, example, tmp_path)
    before = run(*example)
    cache.update_state_dict(module.state_dict())
    assert torch.equal(run(*example), before)
    assert not any(cache.tensors[name].refusal for name in module.state_dict() if "num_batches" not in name)
    for seed in (6, 7):
        state = randomize(module, seed)
        for name, value in module.folded().items():
            put(eager, name, value)
        cache.update_state_dict(
            state, strict=kind != "static per tensor"
        )  # its scales clip some numbers, as eager's do
        close(run(*example), eager(*example), tolerance)
        assert not torch.equal(run(*example), before)


@pytest.mark.long
@pytest.mark.parametrize("strict", [True, False])
def test_without_restored_names_nothing_that_can_be_folded_is_updated(strict: bool, tmp_path: Path) -> None:
    """A bias keeps its name when a normalization is folded into it, so the name proves nothing (U1)."""
    module, example = seeded(Folded), inputs(2, 3, 8, 8)
    eager = pt2e(module, example, names=False, is_per_channel=True)
    cache, run = open_program(eager, example, tmp_path, strict=strict)
    before = run(*example)
    with pytest.raises(UpdateError, match=r"'conv\.bias' cannot be updated: .*restore_names"):
        cache.update({"conv.bias": module.get_parameter("conv.bias")})
    with pytest.raises(UpdateError, match=r"'_frozen_param0' cannot be updated: its name was lost.*restore_names"):
        cache.update({"_frozen_param0": torch.ones(8, 3, 3, 3)})
    with pytest.raises(UpdateError, match="restore_names"):
        cache.update_state_dict(module.state_dict())
    assert torch.equal(run(*example), before)


@pytest.mark.long
def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    """Stored weights that do not follow from the model are refused; the rest can be updated (U1)."""
    module, example = seeded(Folded), inputs(2, 3, 8, 8)
    randomize(module, 5)
    eager = pt2e(module, example, names=False, is_per_channel=True)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state["conv.weight"][0, 0, 0, 0] += 1
    restore_names(eager, state)
    cache, run = open_program(eager, example, tmp_path)
    before = run(*example)
    with pytest.raises(UpdateError, match=r"'conv\.weight' cannot be updated: .*not the model's own"):
        cache.update({"conv.weight": state["conv.weight"]})
    with pytest.raises(UpdateError, match=r"'conv\.weight' cannot be updated"):
        cache.update_state_dict(state)
    cache.update_state_dict(state, strict=False)  # the others are what they were
    assert torch.equal(run(*example), before)
    module.get_parameter("last.bias").data.neg_()
    put(eager, "last.bias", module.get_parameter("last.bias"))
    cache.update({"last.bias": module.get_parameter("last.bias")})
    close(run(*example), eager(*example), 0)


@pytest.mark.long
def test_a_fold_that_could_be_of_two_normalizations_is_refused(tmp_path: Path) -> None:
    """Numbers that match by chance prove nothing; with other weights, only one of the folds would be right (U1)."""

    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)
            self.one, self.two = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.second(torch.relu(self.one(self.first(x)))))

    module, example = seeded(Twins), inputs(2, 3, 8, 8)
    eager = pt2e(module, example, is_per_channel=True)
    cache, run = open_program(eager, example, tmp_path)
    before = run(*example)
    for name in ("first.weight", "second.bias"):
        with pytest.raises(
            UpdateError, match=f"'{name}' cannot be updated: .*its numbers do not show which normalization"
        ):
            cache.update({name: module.get_parameter(name)})
    assert torch.equal(run(*example), before)


@pytest.mark.slow_for("model3", "model.pt")
@pytest.mark.parametrize("model", [None, 3, "model.pt", ["weight"]])
def test_names_are_restored_with_the_float_model_only(model: object) -> None:
    """Anything else is an error that says what is needed (U1)."""
    module = pt2e(seeded(nets.Small), inputs(2, 3, 8, 8), names=False, is_per_channel=True)
    with pytest.raises(UnsupportedDataError, match="needs the float model that was quantized"):
        restore_names(module, model)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedDataError, match="expected the module that convert_pt2e returned, found a Small"):
        restore_names(seeded(nets.Small), seeded(nets.Small))  # type: ignore[arg-type]
