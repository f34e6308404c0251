"""Builds C++ applications and the face for Java as a user would: with find_package, on an installed library."""

from pathlib import Path

from tests.helpers import native_build
from tests.helpers.native_build import JAVA, LIBRARY, ROOT
from tests.runtime import hooks

__all__ = ["ROOT", "build", "build_java", "install_library"]


def install_library() -> Path:
    """Build the library in both forms for its size, as a user does, and install it; its prefix."""
    with native_build.folder("library") as directory:
        native_build.build(LIBRARY, directory / "library", "-DCMAKE_BUILD_TYPE=MinSizeRel")
        native_build.run("cmake", "--install", directory / "library", "--prefix", directory / "prefix")
        return directory / "prefix"


def build(source: Path, name: str) -> Path:
    """Build the application in a folder, on the library of the test build, which other tests need as well.

    Returns:
        The target `name`.
    """
    native_build.need()
    prefix = hooks.build()
    with native_build.folder("applications") as directory:
        native_build.build(source, directory / name, f"-DCMAKE_PREFIX_PATH={prefix}")
        return directory / name / name


def build_java() -> Path:
    """Build the library for Java, the classes and their tests on the library of the test build; warnings are errors.

    Returns:
        The folder that they are in, for `native_build.java`.
    """
    native_build.need(java=True)
    prefix = hooks.build()
    with native_build.folder("java") as directory:
        options = (f"-DCMAKE_PREFIX_PATH={prefix}", "-DBLOBSTORE_JAVA_TESTS=ON")
        checked = ("-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O1")
        native_build.build(JAVA, directory, *options, *checked)
        return directory
