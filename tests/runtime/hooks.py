"""The native module of a test build, in which a test can kill the process at certain points.

Neither the wheel nor the installed library has such hooks. A test starts a process with this build in front of the
installed one.
"""

import os
import shutil
from pathlib import Path

from tests.helpers import native_build
from tests.helpers.native_build import LIBRARY


def build() -> Path:
    """Build the package `blobstore_runtime` and the C++ library with hooks, and install both.

    Returns:
        The folder that the package is in, for PYTHONPATH; it is the prefix of the library, too.
    """
    with native_build.folder("native-tests") as directory:
        native_build.build_with_hooks(directory, "_native", "_codec")
        packages = directory / "packages"
        native_build.run("cmake", "--install", directory, "--prefix", packages)
        shutil.copy(LIBRARY / "python" / "blobstore_runtime" / "__init__.py", packages / "blobstore_runtime")
        return packages


def built(*targets: str) -> Path:
    """Build targets of the C++ tests for a test; the folder of the build."""
    native_build.need()
    with native_build.folder("native-tests") as directory:
        for target in targets:
            native_build.build_with_hooks(directory, target)
        return directory


def environment(packages: Path) -> dict[str, str]:
    """The environment of a process that imports the package from there."""
    paths = [str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
