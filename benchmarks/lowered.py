"""Models lowered for measuring, and processes to measure them in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blobstore.lowering.export import lower, quiet


def plugin(tag: Any = "model") -> list[Any]:
    """Partitioners for `lower`: XNNPACK through this library, with the weights in the files of a tag."""
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        from blobstore.lowering import BlobStorePartitioner
    return [BlobStorePartitioner(XnnpackPartitioner(), tag=tag)]


def save(manager: Any, folder: Path) -> Path:
    """Write `model.pte` and its data files; the path of the program."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.pte").open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(folder))
    return folder / "model.pte"


def save_plain(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> Path:
    """Like `save`, for ExecuTorch alone: XNNPACK's weights in `model.ptd`, with hashes as keys."""
    tagged = torch.export.export(module, inputs, strict=True).module()
    with quiet():
        from executorch.exir.passes.external_constants_pass import delegate_external_constants_pass_unlifted

        delegate_external_constants_pass_unlifted(module=tagged, gen_tag_fn=lambda _: "model")
    return save(lower({"forward": (tagged, inputs)}), folder)


def in_process(script: str, *arguments: str) -> Any:
    """Run a script in a process of its own, and return the JSON in its last line."""
    command = [sys.executable, "-c", script, *arguments]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])
