"""The C++ examples, built like applications: with find_package, on the installed library (X2, N1)."""

import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from blobstore.lowering.export import lower
from blobstore.runtime import BlobCache, Program
from tests.helpers import models, native_build
from tests.lowering.live import write
from tests.runtime.application import ROOT, build, build_java

pytestmark = pytest.mark.long

SOURCE = ROOT / "examples" / "cpp"


@pytest.fixture(scope="module")
def examples():
    """The folder with the programs."""
    return build(SOURCE, "two_programs").parent


def run(*command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def test_two_programs_and_an_update(examples, tmp_path):
    """It prints the same sums as Python computes, before and after the update (X2, U1)."""
    pte = models.mlp(external=True).write(tmp_path)
    ptd = tmp_path / "_default_external_constant.ptd"
    done = run(examples / "two_programs", pte, pte, ptd, "second.weight")
    found = [[float(n) for n in re.findall(r"-?\d+\.\d+", line)] for line in done.stdout.splitlines()]
    cache = BlobCache(ptd)
    method, x = Program(pte, cache).method(), np.ones((3, 16), np.float32)
    before = float(method(x).sum())
    cache.update({"second.weight": np.zeros((16, 32), np.float32)})
    after = float(method(x).sum())
    assert abs(before - after) > 1e-3
    np.testing.assert_allclose(found, [[before] * 2, [after] * 2], atol=1e-3)


def test_errors_are_printed(examples, tmp_path):
    """An unknown key ends it with an error message."""
    pte = models.mlp(external=True).write(tmp_path)
    ptd = tmp_path / "_default_external_constant.ptd"
    done = run(examples / "two_programs", pte, pte, ptd, "nothing")
    assert done.returncode == 1 and "no key 'nothing'" in done.stderr


def test_from_module_to_a_cache(examples, tmp_path):
    """Both applications of docs/cpp.md compute what eager PyTorch does; the second changes a weight (N1, U1)."""
    torch.manual_seed(0)
    model, point = nn.Linear(2, 3).eval(), torch.tensor([[0.5, -0.5]])
    files = {}
    for name, options in {"stock": {"partitioners": list}, "live": {}}.items():
        pte = write(lower(model, point, tag="model", **options), tmp_path / name)
        files[name] = (pte, pte.with_name("model.ptd"))
    module = run(examples / "with_module", *files["stock"])
    cache = run(examples / "with_cache", *files["live"], "bias")
    found = [float(line) for line in (module.stdout + cache.stdout).split()]
    with torch.no_grad():
        before, bias = float(model(point)[0, 0]), float(model.bias[0])
    assert abs(bias) > 1e-3
    assert found == pytest.approx([before, before, before - bias], abs=1e-5), cache.stderr


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """What `device.cpp` and `Device.java` ship."""
    path = tmp_path_factory.mktemp("device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["prepare.py", str(path)])
        runpy.run_path(str(SOURCE / "prepare.py"), run_name="__main__")
    return path


def check_life(done, device, trained):
    """What it prints is right, it changed no file, and the one that it wrote has the adapter only."""
    assert done.returncode == 0, done.stderr
    scores = {line[:38].strip(): int(line.split()[-3]) for line in done.stdout.splitlines()}
    assert scores["adapter left.ptd"] > 900
    assert scores["head.bias changed"] < 600
    assert scores["adapter up.ptd"] > 900
    assert scores["published"] > 900 > scores["trained, not published"]
    assert scores[f"started again from {trained}"] == scores["published"] > scores["reverted"]
    assert (device / trained).stat().st_size < 1.5 * (device / "adapter.ptd").stat().st_size


def contents(device):
    return {path.name: path.read_bytes() for path in device.iterdir() if not path.name.startswith("trained")}


def test_the_life_of_a_device(examples, device):
    """Adapters, an update by name, training, publishing, saving and a new start, without Python (N1, D2, T2)."""
    shipped = contents(device)
    check_life(run(examples / "device", device), device, "trained.ptd")
    assert contents(device) == shipped


@pytest.mark.long
def test_the_life_of_a_device_in_java(device):
    """The same in Java, compiled as it is started."""
    command = native_build.java(build_java())
    shipped = contents(device)
    done = run(*command, ROOT / "examples" / "java" / "Device.java", device)
    check_life(done, device, "trained-java.ptd")
    assert contents(device) == shipped
