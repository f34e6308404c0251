"""Builds C++ applications as a user would: with find_package, on the installed library, which is built for its size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import native_build
from tests.native_build import LIBRARY, ROOT

__all__ = ["ROOT", "build", "install_library"]


def install_library() -> Path:
    """Build the library and install it; its prefix."""
    with native_build.folder("applications") as directory:
        return _install(directory)


def build(source: Path, name: str) -> Path:
    """Build the application in a folder, and the library that it links.

    Returns:
        The target `name`.
    """
    if reason := native_build.missing():
        pytest.skip(reason)
    with native_build.folder("applications") as directory:
        prefix = _install(directory)
        native_build.build(source, directory / name, f"-DCMAKE_PREFIX_PATH={prefix}")
        return directory / name / name


def _install(directory: Path) -> Path:
    native_build.build(LIBRARY, directory / "library", "-DCMAKE_BUILD_TYPE=MinSizeRel")
    native_build.run("cmake", "--install", directory / "library", "--prefix", directory / "prefix")
    return directory / "prefix"
