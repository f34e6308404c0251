"""Each kind of operator that takes packed weights, alone and beside those that XNNPACK packs at every load (K2, K3)."""

import subprocess
import sys

import pytest

from tests.helpers.native_build import ROOT

pytestmark = pytest.mark.long

PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_follows_in_every_order(part: int) -> None:
    """Loaded before and after a change, private and shared: outputs are the module's, and no process dies of it."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.packed_operators", str(part), str(PARTS)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["done"]), done.stdout[-500:] + done.stderr[-2000:]
