"""What each page of the documentation finds in its folder, and the names that its code uses without making them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from blobstore import dedup_programs, report, save_file
from blobstore.lowering.export import lower, quiet
from blobstore.reporting.json_output import to_json
from tests.helpers import models

__all__ = ["PAGES"]


def _checkpoint(path: Path, module: Any) -> None:
    from safetensors.torch import save_file

    save_file(module.state_dict(), path)


def _dedup(folder: Path, names: dict[str, Any]) -> None:
    """Two programs of one model, its checkpoint, a program of another one, and data files."""
    model = models.mlp()
    one, two = torch.arange(3000.0), torch.arange(3000.0) / 7
    for name, tensors in {
        "base": {"w": one, "v": two},
        "copy": {"w": one, "v": two},
        "renamed": {"x": one, "y": two},
    }.items():
        save_file(tensors, folder / f"{name}.ptd")
    for name in ("a", "b"):
        model.write(folder / "old", name)
    models.mlp(seed=1).write(folder / "more", "c")
    models.mlp(seed=2).write(folder / "more", "d")
    _checkpoint(folder / "model.safetensors", model.methods["forward"][0])


def _report(folder: Path, names: dict[str, Any]) -> None:
    """A program with the report on it, a checkpoint, and two fine-tunes."""
    from safetensors.torch import save_file as save_safetensors

    models.mlp().write(folder / "models", "a")
    (folder / "report.json").write_text(json.dumps(to_json(report(folder / "models"))))
    models.mlp().write(folder / "models", "b")
    one, two = torch.arange(3000.0), torch.arange(3000.0) / 7
    save_safetensors({"w": one, "v": two}, folder / "base.safetensors")
    save_safetensors({"w": one, "v": one / 3}, folder / "tuned-1.safetensors")
    save_file({"w": one, "v": two / 3}, folder / "tuned-2.ptd")


def _readme(folder: Path, names: dict[str, Any]) -> None:
    """What the demo leaves, in small, and a model for a pool."""
    _pool(folder, names)
    for length in (32, 128, 256):
        models.mlp().write(folder / "demo-output" / "before", f"minilm-{length}")


def _programs(*written: tuple[str, str], **options: Any) -> Callable[[Path, dict[str, Any]], None]:
    """The same program in folders under names."""

    def write(folder: Path, names: dict[str, Any]) -> None:
        for place, name in written:
            models.mlp(**options).write(folder / place, name)

    return write


def _pool(folder: Path, names: dict[str, Any]) -> None:
    """A model and a fine-tune of it."""
    from tests.pool.models import halves, tensors, tuned, write

    base = halves(tensors())
    write(folder / "base.safetensors", base)
    write(folder / "tuned.safetensors", tuned(base, 1))


def _fuse(folder: Path, names: dict[str, Any]) -> None:
    """Two programs with different weights, and one of them deduplicated."""
    for seed, name in enumerate(("base", "tuned")):
        models.mlp(seed=seed).write(folder, name)
    dedup_programs(folder / "base.pte", folder / "slim")


def _processes(folder: Path, names: dict[str, Any]) -> None:
    """A program through XNNPACK with its weights beside it, by the model's names."""
    _, _, manager = _live()
    _write(manager, folder)


def _runtime(folder: Path, names: dict[str, Any]) -> None:
    """A program through XNNPACK with its weights in two files of equal contents."""
    model, x, manager = _live()
    _write(manager, folder)
    shutil.copyfile(folder / "model.ptd", folder / "weights.ptd")
    names.update(x=x, model=model, new_weight=torch.ones(16, 16), **_imports())


def _packed(folder: Path, names: dict[str, Any]) -> None:
    """As for the runtime; and the same model through XNNPACK alone, with its weights inside."""
    _runtime(folder, names)
    stock = lower({"forward": (names["model"], (names["x"],))}, partitioners=lambda: [names["XnnpackPartitioner"]()])
    (folder / "old").mkdir()
    (folder / "old" / "model.pte").write_bytes(stock.buffer)


def _backends(folder: Path, names: dict[str, Any]) -> None:
    """A model and what is imported for it; the page begins in the middle."""
    from blobstore.lowering import lower
    from blobstore.runtime import BlobCache, Program

    names.update(_imports(), lower=lower, BlobCache=BlobCache, Program=Program)
    names.update(model=Live().eval(), prompt=(torch.ones(3, 16),), token=(torch.ones(1, 16),))


def _language_models(folder: Path, names: dict[str, Any]) -> None:
    """A tiny Llama, a fine-tune of it, two adapters of PEFT, and the configuration as the page prints it."""
    from tests.llm import llama

    model = llama.Llama()
    llama.write_model(folder / "model", model, {"base": model.checkpoint(0), "finetuned": model.checkpoint(1)})
    for seed, name in enumerate(("english", "german")):
        llama.write_peft(folder / "model" / name, model.adapter(seed))
    page = (Path(__file__).parents[2] / "docs" / "language-models.md").read_text(encoding="utf-8")
    configuration = page.split('```yaml title="export.yaml"\n')[1].split("```")[0]
    (folder / "export.yaml").write_text(configuration, encoding="utf-8")


def _lowering(folder: Path, names: dict[str, Any]) -> None:
    """Modules and what is imported for them; `converted` is quantized."""
    from torch import nn

    model, x, _ = _live()
    model.encoder, model.decoder = nn.Sequential(), nn.Sequential()
    for part in (model.encoder, model.decoder):
        part.add_module("layer", nn.Linear(16, 16))
    xnnpack = _imports()["XnnpackPartitioner"]

    def lower_one(module: Any, tag: str) -> Any:
        partitioner = _imports()["BlobStorePartitioner"](xnnpack(), tag=tag)
        return lower({"forward": (module, (x,))}, partitioners=lambda: [partitioner])

    with quiet():
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
        prepared = prepare_pt2e(torch.export.export(model, (x,), strict=True).module(), quantizer)
        prepared(x)
        names.update(
            convert_pt2e=convert_pt2e,
            decoder=model.decoder,
            encoder=model.encoder,
            example=(x,),
            example_inputs=(x,),
            export=lambda module, x: torch.export.export(module, (x,)),
            lower=lower_one,
            lower_to=lower_one,
            model=model,
            new_weight=torch.ones(16, 16),
            nn=nn,
            prepared=prepared,
            torch=torch,
            x=x,
            y=x,
            **_imports(),
        )


def _safetensors(folder: Path, names: dict[str, Any]) -> None:
    names["model"] = torch.nn.ModuleDict({"embed": torch.nn.Embedding(2000, 8)})


class Live(torch.nn.Module):
    """Layers with the names that the pages use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def _live() -> tuple[Any, Any, Any]:
    model, x = Live().eval(), torch.ones(1, 16)
    names = _imports()
    partitioners = [names["BlobStorePartitioner"](names["XnnpackPartitioner"](), tag="model")]
    manager = lower(
        {"forward": (model, (x,))}, partitioners=lambda: partitioners, external_constants=lambda node: "model"
    )
    return model, x, manager


def _imports() -> dict[str, Any]:
    """What the pages on live weights take as imported."""
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower
        from executorch.runtime import Runtime

        import blobstore
        from blobstore.lowering import BlobStorePartitioner
        from blobstore.lowering.inner import Lowered
        from blobstore.runtime import make_working_copy, serving
    return {
        "BlobStorePartitioner": BlobStorePartitioner,
        "ExecutorchBackendConfig": ExecutorchBackendConfig,
        "Lowered": Lowered,
        "Runtime": Runtime,
        "XnnpackPartitioner": XnnpackPartitioner,
        "blobstore": blobstore,
        "make_working_copy": make_working_copy,
        "save_programs": blobstore.save_programs,
        "serving": serving,
        "to_edge_transform_and_lower": to_edge_transform_and_lower,
    }


def _write(manager: Any, folder: Path) -> None:
    with (folder / "model.pte").open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(folder))


def _case_study(folder: Path, names: dict[str, Any]) -> None:
    """Two languages, and the same with another program for one of them."""
    for zoo, seed in (("zoo", 0), ("zoo2", 1)):
        for language in ("en-us", "en-gb"):
            models.mlp(seed=seed if language == "en-gb" else 0).write(folder / zoo / "speech" / language, "decoder")


PAGES: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "docs/backends.md": _backends,
    "README.md": _readme,
    "docs/index.md": _programs((".", "short"), (".", "long")),
    "docs/case-study.md": _case_study,
    "docs/howto/ci.md": _programs(("build", "a"), ("build", "b")),
    "docs/howto/fuse.md": _fuse,
    "docs/howto/dedup.md": _dedup,
    "docs/howto/lowering.md": _lowering,
    "docs/howto/packed.md": _packed,
    "docs/howto/processes.md": _processes,
    "docs/howto/run-without-torch.md": _programs((".", "model"), delegated=True),
    "docs/language-models.md": _language_models,
    "docs/pool.md": _pool,
    "docs/report.md": _report,
    "docs/runtime.md": _runtime,
    "docs/safetensors.md": _safetensors,
}
