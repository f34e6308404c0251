"""Options that a C++ application passes to a delegate's backend."""

import subprocess
from pathlib import Path

import pytest
import torch

from blobstore import dedup_programs
from blobstore.lowering.export import lower
from blobstore.runtime import BlobCache, Program
from tests.lowering import nets
from tests.lowering.live import close, lower_through, seeded, write
from tests.runtime.application import build

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def application() -> Path:
    return build(Path(__file__).parent / "cpp", "backend_options")


def run(application: Path, *arguments: object) -> tuple[torch.Tensor, str]:
    """The outputs that the application prints, one row for each, and its log."""
    command = [str(part) for part in (application, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.tensor([float(line) for line in done.stdout.split()]), done.stderr


@pytest.mark.parametrize("given", ["load", "process"])
def test_a_file_for_packed_weights_never_gives_another_models_weights(
    application: Path, given: str, tmp_path: Path
) -> None:
    """Two launches with one path, and different weights under the same names: each computes with its own (U1, K2).

    Weights are named by their contents in the path of a load. A path for the whole process has no effect.
    """
    x, packed = torch.ones(2, 16), tmp_path / "packed.bin"
    for seed in (0, 1):
        module = seeded(nets.MLP, seed)
        path = lower_through({"forward": (module, (x,))}, tmp_path / str(seed))
        found, _ = run(application, path, path.with_name("model.ptd"), packed, given)
        with torch.no_grad():
            close(found.reshape(2, -1), module(x))
        assert packed.exists() == (given == "load")


def test_a_file_of_a_packed_store_is_one_for_stock_executorch(application: Path, tmp_path: Path) -> None:
    """ExecuTorch loads it by its own option, for delegates of both kinds, and packs nothing (K1)."""
    x, module = torch.ones(2, 16), seeded(nets.MLP)
    ours = lower_through({"forward": (module, (x,))}, tmp_path / "ours")
    stock = write(lower(module, (x,), external_constants=lambda node: "model"), tmp_path / "stock")
    dedup_programs([stock.parent], tmp_path / "slim")
    for path, data in (
        (ours, ours.with_name("model.ptd")),
        (tmp_path / "slim" / "model.pte", tmp_path / "slim" / "shared.ptd"),
    ):
        folder = path.parent / "packed"
        expected = Program(path, BlobCache(data, packed=folder)).method()(x).flatten()
        [packed] = folder.glob("*.packed")
        content = packed.read_bytes()
        found, log = run(application, path, data, packed, "load")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
        assert "Loaded packed weight cache" in log and "(3 entries)" in log
        assert "new regions" not in log
        assert packed.read_bytes() == content
