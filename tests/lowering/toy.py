"""The backend of docs/backends.md, built from the page: its weight lies in its payload, and it reads it there."""

import ctypes
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from blobstore.lowering.export import quiet
from tests.docs.test_code import ROOT, blocks

__all__ = ["Scale", "toy"]


class Scale(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sizes, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@functools.cache
def toy() -> ModuleType:
    """The page's Python module; its C++ half is loaded, too."""
    page = blocks(ROOT / "docs" / "backends.md")
    with tempfile.TemporaryDirectory() as folder:
        for block in page:
            if block.title is not None:
                Path(folder, block.title).write_text(block.code, encoding="utf-8")
        (build,) = [block.code for block in page if block.language == "bash"]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        subprocess.run(["/bin/bash", "-ec", build], cwd=folder, check=True, env={**os.environ, "PATH": path})
        ctypes.CDLL(str(Path(folder, "libtoy_backend.so")))
        spec = importlib.util.spec_from_file_location("toy_backend", Path(folder, "toy_backend.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with quiet():
            spec.loader.exec_module(module)
    return module
