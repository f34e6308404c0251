"""The programs that the C++ tests in runtime_bindings/tests run."""

from pathlib import Path

import torch
from torch import nn

from blobstore import save_programs
from blobstore.lowering import lower, restore_names
from blobstore.lowering.export import quiet
from tests.helpers import models

__all__ = ["write", "write_increment", "write_quantized"]


class Increment(nn.Module):
    """Changes its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


class Absolute(nn.Module):
    """Keeps the order of dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs()


def write(folder: Path) -> None:
    """Write planned.pte, unplanned.pte, text.pte, channels_last.pte, and the files of examples/xor.py."""
    from examples import xor  # takes seconds

    folder.mkdir(exist_ok=True)
    for name, planned in (("planned", True), ("unplanned", False)):
        write_increment(folder / f"{name}.pte", planned=planned)
    write_text(folder / "text.pte")
    x = torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last)
    models._lowered({"forward": (Absolute(), (x,))}, partitioners=models.portable).write(folder, "channels_last")
    xor.export(folder)
    write_packed(folder)


def write_increment(path: Path, *, planned: bool) -> None:
    """A program that adds 1 to its input, with or without memory planned for that."""
    with quiet():
        from executorch.exir import ExecutorchBackendConfig, to_edge
        from executorch.exir.passes import MemoryPlanningPass

        exported = torch.export.export(Increment(), (torch.ones(4),), strict=True)
        config = ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass(alloc_graph_input=planned))
        path.write_bytes(to_edge(exported).to_executorch(config).buffer)


def write_packed(folder: Path) -> None:
    """packed.pte and packed.ptd: three linear layers in a delegate of XNNPACK."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 301), nn.ReLU(), nn.Linear(301, 20)).eval()
    save_programs({"packed": lower(module, (torch.ones(1, 300),), tag="packed")}, folder)


def write_quantized(folder: Path) -> None:
    """NAME.pte, NAME.ptd and NAME.out for each way of packing a linear layer: what torch computes, as float32."""
    with quiet():
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
        from torchao.quantization.granularity import PerAxis, PerGroup
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    folder.mkdir(exist_ok=True)
    x = (torch.arange(128) % 13 / 8 - 0.75).reshape(2, 64)
    for name in ("float32", "int8", "static", "int4", "int4_groups"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40)).eval()
        with quiet(), torch.no_grad():
            if name in {"int8", "static"}:
                config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=name == "int8")
                prepared = prepare_pt2e(
                    torch.export.export(module, (x,), strict=True).module(), XNNPACKQuantizer().set_global(config)
                )
                prepared(x)
                converted = convert_pt2e(prepared)
                restore_names(converted, module)
                module = converted
            elif name != "float32":
                grain = PerAxis(0) if name == "int4" else PerGroup(32)
                quantize_(module, Int8DynamicActivationIntxWeightConfig(torch.int4, weight_granularity=grain))
            (folder / f"{name}.out").write_bytes(module(x).numpy().tobytes())
        save_programs({name: lower(module, (x,), tag=name)}, folder)


def write_text(path: Path) -> None:
    """A program that returns constants."""
    with quiet():
        from executorch.exir import to_edge
    manager = to_edge(
        {"unused": torch.export.export(Absolute(), (torch.ones(1),), strict=True)},
        constant_methods={"forward": ["a text", 7, 0.5]},
    ).to_executorch()
    path.write_bytes(manager.buffer)
