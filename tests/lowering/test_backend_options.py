"""Options that a C++ application passes to a delegate's backend."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.lowering import nets
from tests.lowering.live import close, lower_through, seeded
from tests.runtime.application import build


@pytest.fixture(scope="module")
def application() -> Path:
    return build(Path(__file__).parent / "cpp", "backend_options")


@pytest.mark.parametrize("given", ["load", "process"])
def test_a_file_for_packed_weights_never_gives_another_models_weights(
    application: Path, given: str, tmp_path: Path
) -> None:
    """Two launches with one path, and different weights under the same names: each computes with its own (U1, K2).

    The names of packed weights count what a process has seen, so a file of them is useless to the next launch. None
    is written, and the log says so.
    """
    x = torch.ones(2, 16)
    for seed in (0, 1):
        module = seeded(nets.MLP, seed)
        path = lower_through({"forward": (module, (x,))}, tmp_path / str(seed))
        command = [application, path, path.with_name("model.ptd"), packed := tmp_path / "packed.bin", given]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = torch.tensor([float(line) for line in done.stdout.split()])
        with torch.no_grad():
            close(found.reshape(2, -1), module(x))
        assert not packed.exists()
        if given == "load":
            assert "no effect of 'packed_cache_path'" in done.stderr
