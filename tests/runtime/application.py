"""Builds C++ applications as a user would: with find_package, on the installed library."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(source: Path, name: str) -> Path:
    """Build the application in a folder, and the library that it links.

    Returns:
        The executable `name`.
    """
    spec = importlib.util.find_spec("executorch")
    assert spec and spec.submodule_search_locations
    package = Path(next(iter(spec.submodule_search_locations)), "share", "cmake")
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    # one folder for each environment: CMake remembers where it found executorch
    directory = ROOT / "build" / f"applications-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]}"
    directory.mkdir(parents=True, exist_ok=True)

    def run(*command: object) -> None:
        done = subprocess.run([str(part) for part in command], env=tools, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    shared = ("-G", "Ninja", f"-Dexecutorch_DIR={package}")
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at a time wait for each other here
        run("cmake", "-S", ROOT / "runtime_bindings", "-B", directory / "library", *shared)
        run("cmake", "--build", directory / "library")
        run("cmake", "--install", directory / "library", "--prefix", directory / "prefix")
        prefix = f"-DCMAKE_PREFIX_PATH={directory / 'prefix'}"
        run("cmake", "-S", source, "-B", directory / name, *shared, prefix)
        run("cmake", "--build", directory / name)
    return directory / name / name
