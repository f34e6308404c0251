"""The C++ example, built like an application: with find_package, on the installed library (X2)."""

import re
import subprocess

import numpy as np
import pytest

from blobstore.runtime import BlobCache, Program
from tests import models
from tests.runtime.application import ROOT, build


@pytest.fixture(scope="module")
def example():
    return build(ROOT / "examples" / "cpp", "two_programs")


def test_two_programs_and_an_update(example, tmp_path):
    """It prints the same sums as Python computes, before and after the update (X2, U1)."""
    pte = models.mlp(external=True).write(tmp_path)
    ptd = tmp_path / "_default_external_constant.ptd"
    done = subprocess.run([example, pte, pte, ptd, "second.weight"], capture_output=True, text=True, check=True)
    found = [[float(n) for n in re.findall(r"-?\d+\.\d+", line)] for line in done.stdout.splitlines()]
    cache = BlobCache(ptd)
    method, x = Program(pte, cache).method(), np.ones((3, 16), np.float32)
    before = float(method(x)[0].sum())
    cache.update({"second.weight": np.zeros((16, 32), np.float32)})
    after = float(method(x)[0].sum())
    assert abs(before - after) > 1e-3
    np.testing.assert_allclose(found, [[before] * 2, [after] * 2], atol=1e-3)


def test_errors_are_printed(example, tmp_path):
    """An unknown key ends it with an error message."""
    pte = models.mlp(external=True).write(tmp_path)
    ptd = tmp_path / "_default_external_constant.ptd"
    done = subprocess.run([example, pte, pte, ptd, "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no key 'nothing'" in done.stderr
