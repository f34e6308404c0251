"""The campaign of failing system calls finds the defects that it is for."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.long


def crash(act):
    """Run the campaign on a scenario whose code writes the file `out/state`."""
    script = f"""
import sys
from pathlib import Path
from campaigns.crash import __main__ as campaign, scenarios

def prepare(folder):
    (folder / "out" / "state").write_text("old")

def act(folder):
    path = folder / "out" / "state"
{textwrap.indent(act, "    ")}

scenarios.SCENARIOS = (scenarios.Scenario("tried", prepare, act),)
sys.argv = ["crash"]
campaign.main()
"""
    # the campaign starts itself again with its library preloaded; the first call only builds the library
    build = "from campaigns.crash.__main__ import _build, LIBRARY; _build(); print(LIBRARY)"
    library = subprocess.run([sys.executable, "-c", build], check=True, capture_output=True, text=True).stdout.strip()
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "LD_PRELOAD": library},
    )
    assert process.returncode in (0, 1), process.stderr
    return process.returncode, process.stdout


IN_PLACE = 'path.write_text("new")'
LITTER = """
from blobstore.errors import FileAccessError
temporary = path.with_suffix(".tmp")
try:
    temporary.write_text("new")
    temporary.rename(path)
except OSError as error:
    raise FileAccessError(path, error) from None
"""
STAGED = """
from blobstore.core.disk.staging import Staging
with Staging() as staging, staging.open(path) as file:
    file.write(b"new")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("act", "litter"), [(IN_PLACE, ""), (LITTER, '"out/state.tmp"')], ids=["in place", "litter"])
def test_what_is_neither_old_nor_new_and_litter_are_found(act, litter):
    """After a kill, and after an error."""
    code, output = crash(act)
    assert code == 1
    assert "kill at call" in output and "EIO at call" in output and litter in output


@pytest.mark.slow
def test_a_staged_file_is_not_found():
    code, output = crash(STAGED)
    assert code == 0, output
