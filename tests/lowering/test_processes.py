"""Delegates in several processes: on one working copy, and after a fork. A process that hangs is killed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from blobstore.runtime import BlobCache, Program, make_working_copy
from tests.lowering import nets
from tests.lowering.live import Live, close, inputs, seeded

pytestmark = pytest.mark.long

BEGIN = """
import os, sys, threading
import numpy as np
from blobstore.runtime import BlobCache, Program
from tests.helpers.waiting import until, until_blocked

pte, ptd, mode, inputs = sys.argv[1:]
x = np.load(inputs)
cache = BlobCache(ptd, mode)
program = Program(pte, cache)
method = program.method()
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Live:
    """Weights that are packed, and slopes that are read in place."""
    return Live.make(seeded(nets.PReLU), inputs(1, 3, 8, 8), tmp_path_factory.mktemp("live"))


def start(live: Live, script: str, data: Path, mode: str) -> subprocess.Popen[str]:
    inputs_file = data.parent / "inputs.npy"
    np.save(inputs_file, live.inputs[0].numpy())
    code = BEGIN + textwrap.dedent(script)
    command = [sys.executable, "-W", "ignore", "-c", code, live.program.path, data, mode, inputs_file]
    return subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def finish(process: subprocess.Popen[str]) -> None:
    try:
        _, stderr = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it hangs: {process.communicate()[1]}")
    assert process.returncode == 0, stderr


def test_two_processes_on_one_working_copy(live: Live, tmp_path: Path) -> None:
    """Each sees the commits of the other at its next call (B4)."""
    make_working_copy(live.cache.paths, data := tmp_path / "w.ptd")
    cache = BlobCache(data, "shared")
    method = Program(live.program.path, cache).method()
    module = seeded(nets.PReLU)
    script = """
    for line in sys.stdin:  # "run", or a factor for a weight and a slope
        if line != "run\\n":
            names = ["conv.weight", "slope.weight"]
            keys = [next(key for key in cache if key.startswith(name + "@")) for name in names]
            cache.update({key: (cache.numpy(key).view(np.float32) * np.float32(line)).tobytes() for key in keys})
        np.save(inputs, method(x))
        print("done", flush=True)
    """
    other = start(live, script, data, "shared")
    assert other.stdin
    assert other.stdout

    def ask(line: str) -> torch.Tensor:
        print(line, file=other.stdin, flush=True)
        assert other.stdout
        assert other.stdout.readline() == "done\n", other.stderr.read() if other.stderr else ""
        return torch.from_numpy(np.load(tmp_path / "inputs.npy"))

    try:
        close(ask("run"), module(*live.inputs))
        for factor in (-0.5, 3.0):
            with torch.no_grad():  # here, and the other sees it at its next call
                module.conv.weight.mul_(2)
                module.slope.weight.neg_()
            cache.update({"conv.weight": module.conv.weight, "slope.weight": module.slope.weight})
            close(ask("run"), module(*live.inputs))
            with torch.no_grad():  # and the other way round
                module.conv.weight.mul_(factor)
                module.slope.weight.mul_(factor)
            close(ask(str(factor)), module(*live.inputs))
            close(method(*live.inputs), module(*live.inputs))
    finally:
        other.kill()
        other.communicate()


@pytest.mark.parametrize("mode", ["private", "shared"])
def test_forked_children_run_and_update(live: Live, mode: str, tmp_path: Path) -> None:
    """Children of a process whose threads run delegates and commit can do both, too; nothing hangs (B4)."""
    make_working_copy(live.cache.paths, data := tmp_path / "w.ptd")
    script = """
    stop, started = threading.Event(), threading.Barrier(3)

    def serve():
        mine = program.load_method()
        started.wait()
        while not stop.is_set():
            mine(x)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait()
    key = next(key for key in cache if key.startswith("slope.weight@"))
    old = cache.numpy(key).view(np.float32).copy()
    before = method(x)
    children = []
    for n in range(8):
        pid = os.fork()  # while the others are running the delegate, and committing
        if pid == 0:
            code = 1
            try:
                assert mode == "shared" or np.array_equal(method(x), before)
                cache.update({key: (old + np.float32(n + 1)).tobytes()})
                after = method(x)
                again = Program(pte, cache).method()(x)  # shares what is packed
                assert mode == "shared" or np.array_equal(after, again)
                assert mode == "shared" or not np.array_equal(after, before)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
        cache.update({key: old.tobytes()})
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    stop.set()
    for thread in threads:
        thread.join()
    cache.update({key: old.tobytes()})
    assert codes == [0] * 8, codes
    assert np.array_equal(method(x), before)
    """
    finish(start(live, script, data, mode))
