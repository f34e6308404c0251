"""`blobstore run`, and programs in a process without torch and executorch; the oracle is stock ExecuTorch."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blobstore.lowering import lower
from tests.cli.test_exit_codes import run
from tests.helpers import stock_programs
from tests.helpers.stock_programs import BLOCKED, Attention, attention_inputs, run_blocked

pytestmark = pytest.mark.long

pytest.importorskip("blobstore_runtime")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, stock_run: Any) -> tuple[Path, list[stock_programs.Case]]:
    folder = tmp_path_factory.mktemp("programs")
    return folder, stock_programs.write(folder, stock_run)


@pytest.mark.long
def test_without_torch_the_outputs_are_those_of_executorch(made: tuple[Path, list[stock_programs.Case]]) -> None:
    """To the bit, unless ExecuTorch uses torch's library for matrices."""
    folder, cases = made
    for case, outputs in zip(cases, run_blocked(folder, cases), strict=True):
        for found, expected in zip(outputs, case.outputs, strict=True):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), case.name
            if case.is_attention:
                kind, size = case.name.split("-")[1:]
                eager = Attention(kind).eager(*attention_inputs(int(size))).numpy()
                np.testing.assert_allclose(found, eager, rtol=1e-5, atol=2e-6, err_msg=case.name)
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6, err_msg=case.name)
            else:
                np.testing.assert_array_equal(found, expected, err_msg=case.name)


POSITIONS = """
import numpy as np
from blobstore.errors import ExecutionError
from blobstore.runtime import Program
given = np.load("inputs.npz").values()
print(Program("571.pte").method().execute(*given)[0].shape)
for position in sys.argv[1:]:
    try:
        Program(f"{position}.pte").method().execute(*given)
        print(position, "ran")
    except ExecutionError:
        pass
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["apart", "whole"])
def test_positions_that_no_cache_has(kind: str, tmp_path: Path) -> None:
    """A program is a file, and may name any."""
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401

    given, there = attention_inputs(4), struct.pack("<q", 571)
    program = bytes(lower(Attention(kind, start=571), given).buffer)
    assert program.count(there) >= 1
    wrong = [597, 600, 2**63 - 4, 2**63 - 1, -1, -(2**63)]
    for position in (571, *wrong):
        (tmp_path / f"{position}.pte").write_bytes(program.replace(there, struct.pack("<q", position)))
    np.savez(tmp_path / "inputs.npz", *(one.numpy() for one in given))
    command = [sys.executable, "-W", "error", "-c", BLOCKED + POSITIONS, *map(str, wrong)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "(1, 4, 4, 16)\n"), done.stderr


KERNELS = "import executorch.kernels.quantized; from executorch.extension.llm.custom_ops import custom_ops"
OURS = """
import numpy as np
from blobstore.runtime import Program
for name in ("attention-whole-40", "int8-static-leftovers"):
    given = np.load(f"{name}-forward.npz")
    np.savez(f"{name}.{sys.argv[1]}.npz", *Program(f"{name}.pte").method().execute(*given.values()))
"""


@pytest.mark.long
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_kernels_of_executorch_in_the_same_process(made: tuple[Path, list[stock_programs.Case]], order: str) -> None:
    """Nothing is registered twice, which would end the process; kernels that are there are used."""
    folder, cases = made
    code = [OURS, KERNELS, OURS] if order == "ours first" else [KERNELS, OURS]
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(["import sys", *code]), order[:4]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    for case in cases:
        path = folder / f"{case.name}.{order[:4]}.npz"
        if path.exists():
            np.testing.assert_array_equal(np.load(path)["arr_0"], case.outputs[0], err_msg=case.name)


@pytest.mark.long
def test_what_the_command_prints(made: tuple[Path, list[stock_programs.Case]], tmp_path: Path) -> None:
    folder, cases = made
    [case] = [one for one in cases if one.name == "xnnpack"]
    given = folder / "xnnpack-forward.npz"
    out = tmp_path / "out.npz"
    done = run("run", folder / "xnnpack.pte", given, "--repeat", "3", "-o", out, "--json", setup=BLOCKED)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    np.testing.assert_array_equal(np.load(out)["arr_0"], case.outputs[0])
    assert found["outputs"] == [
        {"dtype": "float32", "shape": [*case.outputs[0].shape], "values": case.outputs[0].ravel()[:8].tolist()}
    ]
    assert (found["method"], found["data"], found["backends"]) == ("forward", [], ["XnnpackBackend"])
    assert all(found["milliseconds"].values()) and found["memory"]["peak"] >= found["memory"]["resident"] > 0
    text = run("run", folder / "xnnpack.pte", given)
    assert text.returncode == 0 and "forward, on XnnpackBackend, with no data file" in text.stdout
    assert f"{case.outputs[0].ravel()[0]:.6g} " in text.stdout


def test_inputs_that_the_command_makes(tmp_path: Path) -> None:
    """By default of the largest shapes; a program finds the data file that was written with it."""
    from blobstore import save_programs
    from blobstore.lowering import lower

    module = torch.nn.Linear(4, 2).eval()
    save_programs({"fixed": lower(module, torch.ones(3, 4), tag="model")}, tmp_path)
    for arguments, shape in (((), [3, 4]), (("--shapes", "3x4"), [3, 4])):
        done = run("run", tmp_path / "fixed.pte", *arguments, "-o", tmp_path / "out.npz", "--json", setup=BLOCKED)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["inputs"][0]["shape"] == shape and found["data"] == [str(tmp_path / "model.ptd")]
        values = torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))
        np.testing.assert_allclose(
            np.load(tmp_path / "out.npz")["arr_0"], module(values).detach(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nothing.pte",), 3, "nothing.pte: No such file"),
        (("model.pte", "--shapes", "2x4,1"), 3, "--shapes has 2 shapes, the method takes 1 tensor"),
        (("model.pte", "--shapes", "2xn"), 2, "expected shapes such as 1x16,1x8"),
        (("model.pte", "--shapes=-1x16"), 2, "expected shapes such as 1x16,1x8"),
        (("model.pte", "--shapes", "99999999999x16"), 3, "takes at most float[3, 16], not 99999999999x16"),
        (("model.pte", "--shapes", "16"), 3, "takes at most float[3, 16], not 16"),
        (("model.pte", "-o", "model.pte"), 3, "model.pte: the output is one of the inputs"),
        (("model.pte", "-o", "other.pte"), 3, "other.pte: this is the name of a .pte program"),
        (("model.pte", "-o", "notes.txt"), 3, "notes.txt: this is a file of an unknown format"),
        (("model.pte", "model.pte"), 3, "model.pte: expected a .npz or a .npy"),
        (("model.pte", "--method", "backward"), 3, "no method 'backward'"),
        (("model.pte", "two.npz"), 3, "two.npz: the method takes 1 input (x: float[3, 16]), found 2"),
        (("model.pte", "two.npz", "--shapes", "1x16"), 2, "the inputs have their own shapes"),
    ],
)
def test_wrong_moves(
    arguments: tuple[str, ...], code: int, message: str, made: tuple[Path, list[stock_programs.Case]], tmp_path: Path
) -> None:
    (tmp_path / "model.pte").write_bytes((made[0] / "xnnpack.pte").read_bytes())
    np.savez(tmp_path / "two.npz", np.ones(1), np.ones(1))
    (tmp_path / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = run("run", *arguments, cwd=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert done.returncode == code and message in " ".join(done.stderr.split()), done.stderr
