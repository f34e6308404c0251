"""Regenerate blobstore/core/_generated from the schemas in this folder: `make schema`.

The compiler is the `flatc` in the executorch wheel, so that every developer generates with the same version.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SCHEMA = Path(__file__).resolve().parent
TARGET = SCHEMA.parent / "blobstore" / "core" / "_generated"
SOURCES = ("scalar_type.fbs", "flat_tensor.fbs", "manifest.fbs", "record.fbs", "payload.fbs")
_PACKAGE = '"""Made by `make schema`; do not edit."""\n'


def flatc() -> Path:
    """The flatc of the installed executorch, found without importing it."""
    spec = importlib.util.find_spec("executorch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(folder) / "data" / "bin" / "flatc"
        if candidate.exists():
            return candidate
    sys.exit("schema/generate.py needs the flatc of the executorch package: pip install 'executorch==1.5.*'")


def generate(target: Path) -> None:
    """Write the generated package into `target`, a folder that does not exist yet."""
    with tempfile.TemporaryDirectory() as folder:
        command = [flatc(), "--python", "-o", folder, "-I", SCHEMA, *(SCHEMA / s for s in SOURCES)]
        subprocess.run([str(part) for part in command], check=True)  # noqa: S603 - our own schemas
        shutil.copytree(Path(folder) / "blobstore" / "core" / "_generated", target)
    for package in (target, *(p for p in target.iterdir() if p.is_dir())):
        (package / "__init__.py").write_text(_PACKAGE)


def main() -> None:
    """Regenerate the committed code from the schemas."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    shutil.rmtree(TARGET, ignore_errors=True)
    generate(TARGET)


if __name__ == "__main__":
    main()
