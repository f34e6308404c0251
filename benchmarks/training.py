"""Training on the device, against ExecuTorch's own training module and its way to update the weights of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, flush, mib, ratio_row, settle, show, side_by_side
from benchmarks.lowered import in_process, plugin, save, save_plain
from blobstore.adapters import AdapterTags
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.memory.digest import digest
from blobstore.core.memory.tensors import as_bytes
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import TrainingProgram

TITLE = "Training"
_WIDTH = 1024  # a layer has 4 MiB
_LAYERS = 16
_AGAINST = "against writing the .ptd, loading and running"


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    yield publish_all(folder, f"publish after all of {_LAYERS} XNNPACK layers changed and run, {_AGAINST}")
    yield from _steps(folder)
    yield from _delta(folder)
    yield from _without_gradients(folder)


class _Stack(nn.Module):
    """Linear layers; the loss is in the model."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def scores(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.scores(x), y)


class _Scores(nn.Module):
    """The same layers, under the same names, for inference."""

    def __init__(self, model: _Stack) -> None:
        super().__init__()
        self.layers = model.layers

    forward = _Stack.scores


class _LoRA(nn.Module):
    """Six layers of the width of MiniLM with adapters of rank 8."""

    def __init__(self, layers: int = 6, width: int = 384, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(layers)).requires_grad_(False)
        self.lora_a = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.lora_b = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for base, a, b in zip(self.base, self.lora_a, self.lora_b, strict=True):
            x = torch.tanh(base(x) + b(a(x)))
        return nn.functional.mse_loss(x, y)


def _joint(model: nn.Module, example: tuple[Tensor, ...], folder: Path, **config: Any) -> Path:
    with quiet():
        from executorch.exir import ExecutorchBackendConfig, to_edge
        from torch.export.experimental import _export_forward_backward

        joint = _export_forward_backward(torch.export.export(model, example, strict=True))
        return save(to_edge(joint).to_executorch(ExecutorchBackendConfig(**config)), folder)


def _stock_step(program: Any, optimizer: Any) -> None:
    """A step of an optimizer of torch's, or of ExecuTorch's own."""
    gradients = program.named_gradients()
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.step(gradients)
        return
    for name, parameter in program.named_parameters().items():
        parameter.grad = gradients[name]
    optimizer.step()


def _steps(folder: Path) -> Iterator[Row]:
    with quiet():
        from executorch.extension.training import _load_for_executorch_for_training as load
        from executorch.extension.training import get_sgd_optimizer
    kinds: dict[str, Callable[[Any], Any]] = {
        "torch's SGD with momentum": lambda named: torch.optim.SGD(named.values(), lr=0.01, momentum=0.9),
        "ExecuTorch's SGD": lambda named: get_sgd_optimizer(named, 0.01, 0.9, 0, 0, False),
    }
    for what, layers, width, calls in (("small", 2, 16, 300), ("middle-sized", 4, 256, 8)):
        batch = (torch.randn(4, width), torch.randn(4, width))
        path = _joint(_Stack(layers, width), batch, folder / what)
        for kind, make in kinds.items():
            with quiet():
                ours, theirs = TrainingProgram(path), load(str(path))
                theirs.forward_backward("forward", batch)
                optimizers = make(ours.named_parameters()), make(theirs.named_parameters())

            def step(
                ours: Any = ours, optimizer: Any = optimizers[0], batch: Any = batch, calls: int = calls
            ) -> object:
                return [ours.step(optimizer, *batch) for _ in range(calls)]

            def stock(
                theirs: Any = theirs, optimizer: Any = optimizers[1], batch: Any = batch, calls: int = calls
            ) -> object:
                for _ in range(calls):
                    theirs.forward_backward("forward", batch)
                    _stock_step(theirs, optimizer)
                return None

            times = side_by_side(step, stock, rounds=15)
            yield ratio_row(
                f"a step of a {what} model, {kind}, against ExecuTorch's training module", *times, at_most=1.02
            )


def publish_all(folder: Path, work: str, packed: Path | None = None) -> Row:
    """Publish all layers to a program on XNNPACK, whose packed weights may be in a store, and run it.

    The other way writes a data file with ExecuTorch, loads and runs the program.
    """
    model, x = _Stack(_LAYERS, _WIDTH), torch.randn(1, _WIDTH)
    training = TrainingProgram(_joint(model, (x, x), folder / "joint"))
    methods = {"forward": (_Scores(model).eval(), (x,))}
    path = save(lower(methods, partitioners=plugin), folder / "serve")
    cache = BlobCache(folder / "serve" / "model.ptd", packed=packed)
    method = Program(path, cache).method()
    method(x)
    plain = save_plain(*methods["forward"], folder / "plain")

    def change() -> None:
        with torch.no_grad(), training.locked():
            for tensor in training.named_parameters().values():
                tensor.mul_(0.999)
        settle()
        flush()

    def publish() -> object:
        training.publish(cache)
        return method(x)

    with open_ptd(plain.parent / "model.ptd") as file:  # the keys are hashes, so a tensor is found by its bytes
        trained = {digest(as_bytes(tensor)[0]): tensor for tensor in training.named_parameters().values()}
        tensors = {key: trained[digest(data)] for key, data in file.views()}
    times = side_by_side(publish, _Stock(plain, tensors, x), rounds=9, before=change)
    row = ratio_row(work, *times, at_least=5)
    alone, run = side_by_side(lambda: training.publish(cache), lambda: method(x), rounds=7)
    return replace(row, figure=f"{row.figure}; of ours {show(alone)} is the commit, {show(run)} a run")


class _Stock:
    """The way of ExecuTorch: its serializer, and a new load of the program while the old one serves."""

    def __init__(self, path: Path, tensors: dict[str, Tensor], x: Tensor) -> None:
        self.path, self.tensors, self.x = path, tensors, x
        self.turn = 0
        self.serving: Any = None

    def __call__(self) -> object:
        with quiet():
            from executorch.exir._serialize._named_data_store import NamedDataStore
            from executorch.exir._serialize.data_serializer import DataPayload
            from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
            from executorch.runtime import Runtime
        store = NamedDataStore()
        for key, tensor in self.tensors.items():
            store.add_named_data(key, tensor, alignment=16, external_tag="model")
        out = store.get_named_data_store_output()
        cord = FlatTensorSerializer().serialize(DataPayload(out.buffers, out.external_data["model"]))
        self.turn += 1
        data = self.path.parent / f"new-{self.turn % 2}.ptd"  # the old one is mapped
        with data.open("wb") as file:
            cord.write_to_file(file)
        program = Runtime.get().load_program(self.path, data_path=data)
        method = program.load_method("forward")
        result = method.execute([self.x])  # type: ignore[union-attr]
        self.serving = (program, method)
        return result


def _delta(folder: Path) -> Iterator[Row]:
    x = torch.randn(4, 384)
    path = _joint(
        _LoRA(),
        (x, x),
        folder / "lora",
        external_constants=lambda node: "adapter" if "lora" in node.name else "foundation",
    )
    foundation = folder / "lora" / "foundation.ptd"
    training = TrainingProgram(path, data=[foundation, folder / "lora" / "adapter.ptd"])
    optimizer = torch.optim.Adam(training.named_parameters().values())
    training.step(optimizer, x, x)
    changed = sum(tensor.nbytes for tensor in training.named_parameters().values())
    kept = sum(t.nbytes for entry in optimizer.state_dict()["state"].values() for t in entry.values())
    for what, size, of in (
        (
            "a checkpoint of a LoRA run on its foundation, against the bytes that changed",
            training.save(folder / "a", base=[foundation]),
            changed,
        ),
        ("  with the state of Adam", training.save(folder / "b", optimizer, base=[foundation]), changed + kept),
    ):
        yield Row(what, f"{size / of:.3f} x ({size:,} bytes)", "at most 1.05 x", size <= 1.05 * of)


class _Branch(nn.Module):
    """A frozen layer with an adapter of rank 8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False)
        self.lora_a = nn.Linear(width, 8, bias=False)
        self.lora_b = nn.Linear(8, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.lora_b(self.lora_a(x)))


_MEMORY = """
import json, sys, torch
from benchmarks.harness import peak_of
from blobstore.runtime import BlobCache, Program
from blobstore.training import MeZO
folder, width, trains = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "yes"
cache = BlobCache(folder + "/adapter.ptd", base=BlobCache(folder + "/foundation.ptd"))
x = torch.randn(1, width)
with peak_of("RssAnon") as peak:
    method = Program(folder + "/model.pte", cache).method()
    loss = lambda: method(x).square().mean()
    optimizer = MeZO(cache) if trains else None
    for _ in range(3):
        optimizer.step(loss) if trains else loss()
print(json.dumps(peak.growth))
"""


def _without_gradients(folder: Path) -> Iterator[Row]:
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig, quantize_

    for width, layers in ((2048, 16), (4096, 8)):
        torch.manual_seed(0)
        module = nn.Sequential(*(_Branch(width) for _ in range(layers))).eval()
        tags, x = AdapterTags(), torch.ones(1, width)
        with quiet():
            config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
            quantize_(module, config, lambda _, name: name.endswith("base"))
        manager = lower({"forward": (module, (x,))}, partitioners=lambda: plugin(tags), external_constants=tags)  # noqa: B023
        save(manager, folder / f"mezo{width}")
        serving, training = (
            median(in_process(_MEMORY, str(folder / f"mezo{width}"), str(width), trains) for _ in range(5))
            for trains in ("no", "yes")
        )
        yield Row(
            f"anonymous memory of MeZO, 4-bit layers of {width}x{width} with adapters of rank 8",
            f"{training / serving:.2f} x that of inference ({mib(training)} against {mib(serving)})",
            "at most 1.1 x",
            training <= 1.1 * serving,
        )
