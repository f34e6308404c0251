"""The compiler and the linker of the package ziglang, which has what other systems need."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.native_build import LIBRARY


def package(name: str) -> Path:
    """The folder of an installed package."""
    spec = importlib.util.find_spec(name)
    assert spec and spec.submodule_search_locations, f"{name} is not installed"
    return Path(next(iter(spec.submodule_search_locations)))


def flags(executorch: Path | None = None) -> list[str]:
    """How every source of the library is compiled; warnings are errors.

    Args:
        executorch: the folder that ExecuTorch's headers are in; by default that of the installed package.
    """
    executorch = executorch or package("executorch") / "include"
    return [
        *("-std=c++17", "-c", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"),
        *("-DC10_USING_CUSTOM_GENERATED_MACROS", "-DBLOBSTORE_ZSTD", "-DBLOBSTORE_ZSTD_BUNDLED"),
        *(f"-I{LIBRARY / 'include'}", f"-I{LIBRARY / 'src'}", f"-isystem{LIBRARY / 'third_party' / 'xxhash'}"),
        *(f"-isystem{LIBRARY / 'third_party' / 'zstd'}", f"-isystem{executorch}"),
        f"-isystem{executorch / 'executorch/runtime/core/portable_type/c10'}",
    ]


def run(*command: object) -> tuple[bool, str]:
    """Run one of zig's commands, such as `c++`. What it leaves beside its outputs is removed, so paths are absolute.

    Returns:
        Whether it succeeded, and what it said.
    """
    texts = [sys.executable, "-m", "ziglang", *(str(part) for part in command)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(texts, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stderr
