"""Packages for other machines than this one, from PyPI."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXECUTORCH = "executorch==1.5.1"


def executorch(machine: str, version: str) -> Path:
    """The folder of ExecuTorch's package for a machine such as "aarch64" and a Python such as "3.11"."""
    return packages(machine, version, EXECUTORCH) / "executorch"


def packages(machine: str, version: str, *requirements: str) -> Path:
    """Unpack wheels without what they depend on; the folder, which is kept in build/."""
    names = "-".join(requirement.replace("==", "-") for requirement in requirements)
    folder = ROOT / "build" / "machines" / f"{machine}-{version}-{names}"
    done = folder / ".done"
    if done.exists():
        return folder
    wheels = folder.with_suffix(".wheels")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary=:all:", "--python-version", version, "--platform", f"manylinux_2_28_{machine}"),
            *("--platform", f"manylinux_2_17_{machine}", "--platform", f"manylinux2014_{machine}"),
            *("--dest", str(wheels), *requirements),
        ],
        check=True,
    )
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(folder)
    done.touch()
    return folder
