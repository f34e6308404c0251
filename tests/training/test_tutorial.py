"""The code of docs/training.md and of the README's section runs, and prints what they show (T1, T2, U2, D2)."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def run(text: str, namespace: dict[str, Any]) -> int:
    """Run the blocks in order and return their number. A following block without a language is the expected output."""
    blocks = list(BLOCK.finditer(text))
    for match in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match[1], f"block: {match[1].splitlines()[0]}", "exec"), namespace)  # noqa: S102
        if match[2] is not None:
            assert printed.getvalue() == match[2], match[1]
    return len(blocks)


def test_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/training.md, from top to bottom."""
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("tutorial")
    monkeypatch.setitem(sys.modules, "tutorial", module)  # torch.export looks the module up there
    text = (ROOT / "docs" / "training.md").read_text()
    assert run(text, vars(module)) == text.count("```python")


PRELUDE = """
import blobstore, torch
from torch import nn
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from blobstore.lowering.export import lower
from blobstore.lowering import BlobStorePartitioner

class Module(nn.Linear):
    def forward(self, x, labels):
        return nn.functional.cross_entropy(super().forward(x), labels)

module, x, labels = Module(3, 2), torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
serving = nn.Linear(3, 2)
serving.load_state_dict(module.state_dict())
serve = lower({"forward": (serving, (x,))}, partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner())])
batches = [(x, labels)] * 3
"""


def test_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The section on training, with what its code assumes."""
    from blobstore.lowering.export import quiet
    from blobstore.runtime import Program

    monkeypatch.chdir(tmp_path)
    section = (ROOT / "README.md").read_text().split("## Train on the device\n")[1].split("\n## ")[0]
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)
    names = vars(module)
    with quiet():
        exec(PRELUDE, names)  # noqa: S102
        assert run(section, names) == 1
    expected = names["training"].named_parameters()
    x = names["x"]
    found = Program("out/serve.pte", names["cache"]).method()(x)[0]
    assert found.allclose(x @ expected["weight"].T + expected["bias"], atol=1e-5)
    assert not found.allclose(names["serving"](x), atol=1e-5)
