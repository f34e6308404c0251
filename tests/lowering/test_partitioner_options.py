"""The options of `XnnpackPartitioner`, and the examples of the XNNPACK backend's pages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blobstore.lowering import BlobStorePartitioner
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program
from tests.lowering import nets
from tests.lowering.live import close, inputs, randomize, seeded, write
from tests.lowering.test_quantized import Folded, pt2e, put

with quiet():
    import executorch.kernels.quantized  # noqa: F401 - registers what is not delegated
    from executorch.backends.xnnpack.partition.config.xnnpack_config import ConfigPrecisionType
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.utils.configs import get_transform_passes
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

pytestmark = pytest.mark.long

FLOAT, STATIC, DYNAMIC = ConfigPrecisionType.FP32, ConfigPrecisionType.STATIC_QUANT, ConfigPrecisionType.DYNAMIC_QUANT
Options = list[dict[str, Any]]  # of several partitioners, one after the other

# A kind of model, the partitioners that lower it, and how many parts they delegate
CASES: dict[str, tuple[str, Options, int]] = {
    "float, one by one": ("float", [{"config_precisions": FLOAT, "per_op_mode": True}], 4),
    "static": ("static", [{"config_precisions": STATIC}], 2),
    "static, one by one": ("static", [{"config_precisions": [STATIC, FLOAT], "per_op_mode": True}], 8),
    "dynamic, one by one": ("dynamic", [{"config_precisions": [DYNAMIC], "per_op_mode": True}], 4),
    # as ExecuTorch lowers language models
    "dynamic, then the rest": ("dynamic", [{"config_precisions": DYNAMIC, "per_op_mode": True}, {}], 5),
}
TOLERANCE = {"float": 1e-5, "static": 0.0, "dynamic": 0.02}


def delegates(edge: Any) -> tuple[int, list[str]]:
    """How many parts of a lowered graph are delegated, and the operators that are not."""
    called = [node.target for node in edge.exported_program().graph.nodes if node.op == "call_function"]
    names = [getattr(target, "__name__", str(target)) for target in called]
    return names.count("executorch_call_delegate"), sorted(
        name for name in names if "delegate" not in name and name != "getitem"
    )


@pytest.mark.long
@pytest.mark.slow_for("static, one by one", "dynamic, then the rest")
@pytest.mark.parametrize("case", CASES)
def test_precisions_and_per_op_mode(case: str, tmp_path: Path) -> None:
    """The same parts are delegated as without the plug-in, and an update reaches all of them (L1, U1)."""
    kind, options, count = CASES[case]
    module, example = seeded(nets.Small), inputs(2, 3, 8, 8)
    model = module if kind == "float" else pt2e(module, example, is_per_channel=True, is_dynamic=kind == "dynamic")
    with quiet():
        exported = torch.export.export(model, example, strict=True)
        stock = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner(**one) for one in options])
        edge = to_edge_transform_and_lower(
            exported, partitioner=[BlobStorePartitioner(XnnpackPartitioner(**one), tag="model") for one in options]
        )
        assert delegates(edge) == delegates(stock)
        assert delegates(stock)[0] == count
        path = write(edge.to_executorch(), tmp_path)
    cache = BlobCache(tmp_path / "model.ptd")
    run = Program(path, cache).method()
    close(run(*example), model(*example), TOLERANCE[kind])
    before = run(*example)
    names = [name for name, _ in module.named_parameters() if name in cache.tensors]
    assert {"first.weight", "second.weight"} <= set(names)
    with torch.no_grad():
        for name in names:
            parameter = module.get_parameter(name)
            parameter.mul_(-0.7)
            if kind != "float":
                put(model, name, parameter)
    cache.update({name: module.get_parameter(name) for name in names})
    close(run(*example), model(*example), TOLERANCE[kind])
    assert not torch.equal(run(*example), before)


def lower_as_on_the_page(model: nn.Module, example: tuple[Tensor, ...], wrapped: Callable[[Any], Any]) -> Any:
    with quiet():
        return to_edge_transform_and_lower(
            torch.export.export(model, example),
            partitioner=[wrapped(XnnpackPartitioner())],
            transform_passes=get_transform_passes(),
        )


def run_stock(edge: Any, example: tuple[Tensor, ...]) -> Tensor:
    """What ExecuTorch's own runtime computes."""
    with quiet():
        data = edge.to_executorch().buffer  # as long as the program
        program = Runtime.get().load_program(data)
        return program.load_method("forward").execute(list(example))[0].clone()


@pytest.mark.long
def test_the_examples_of_the_backend_page(tmp_path: Path) -> None:
    """A convolutional model, delegated as without the plug-in, follows a fine-tune, also from a packed file (L1, U1, X1)."""
    model, example = seeded(Folded), inputs(2, 3, 8, 8)
    randomize(model, 5)
    stock = lower_as_on_the_page(model, example, lambda partitioner: partitioner)
    edge = lower_as_on_the_page(model, example, lambda partitioner: BlobStorePartitioner(partitioner, tag="model"))
    assert delegates(edge) == delegates(stock)
    path = write(edge.to_executorch(), tmp_path)
    caches = [BlobCache(tmp_path / "model.ptd", packed=store) for store in (None, tmp_path / "packed")]
    methods = [Program(path, cache).method() for cache in caches]
    before = run_stock(stock, example)
    for run in methods:
        close(run(*example), before)
    randomize(model, 6)
    after = run_stock(lower_as_on_the_page(model, example, lambda partitioner: partitioner), example)
    assert not torch.equal(after, before)
    for cache, run in zip(caches, methods, strict=True):
        cache.update_state_dict(model.state_dict())
        close(run(*example), after)
