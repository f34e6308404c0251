"""One build of the C++ library with all mutants in it, of which a variable of the environment chooses one."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from campaigns.mutants.copies import FOLDER, SWITCH, copy, environment, with_switches, write
from campaigns.mutants.guard import Guard

TREE = FOLDER / "native"
_BUILD = """
import sys
from tests.helpers import native_build
from tests.runtime import hooks
packages = hooks.build()
with native_build.folder("native-tests") as folder:
    for target in sys.argv[1:]:
        native_build.run("cmake", "--build", folder, "--target", target)
    print(packages)
    print(folder)
"""


@dataclass(frozen=True)
class Build:
    """The built library.

    Attributes:
        packages: the folder of its Python module.
        programs: how each of the C++ tests is called, and the folder with its input.
    """

    packages: Path
    programs: dict[str, tuple[list[str], Path]]


def build(guards: Iterable[tuple[int, Guard]], programs: list[str]) -> Build:
    """Build the Python module and some C++ tests, and make the input of these."""
    switch = FOLDER / "switch.h"
    write(switch, SWITCH.encode())
    copy(TREE, with_switches(guards))
    variables = {**os.environ, **environment(TREE, None, 0)}
    variables["CXXFLAGS"] = f"{os.environ.get('CXXFLAGS', '')} -include {switch}"
    command = [sys.executable, "-W", "ignore", "-c", _BUILD, *programs]
    done = subprocess.run(command, cwd=TREE, env=variables, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the mutants do not compile:\n{done.stdout}{done.stderr}")
    packages, folder = map(Path, done.stdout.split())
    if not programs:
        return Build(packages, {})
    ctest = shutil.which("ctest", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert ctest is not None
    listed = [ctest, "--test-dir", str(folder), "--show-only=json-v1"]
    found = json.loads(subprocess.run(listed, check=True, capture_output=True).stdout)
    tests = {test["name"]: test for test in found["tests"]}
    folders = [_folder(tests[name]) for name in programs]
    inputs = [*tests["inputs"]["command"][:5], *map(str, folders)]
    subprocess.run(inputs, cwd=TREE, env=variables, check=True, capture_output=True)
    return Build(packages, {name: (tests[name]["command"], _folder(tests[name])) for name in programs})


def _folder(test: dict) -> Path:
    [folder] = [entry["value"] for entry in test["properties"] if entry["name"] == "WORKING_DIRECTORY"]
    return Path(folder)
