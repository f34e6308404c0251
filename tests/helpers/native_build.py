"""Builds C++ of this project with CMake, on the executorch that is installed."""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "runtime_bindings"
JAVA = ROOT / "java"

# cmake and ninja come from the environment that runs this, also when it was not activated
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
ENVIRONMENT = {**os.environ, "PATH": _PATH}


ALONE = "the delegate alone"
SMALLEST = "the smallest application"
MOST_BYTES = {"x86_64, GCC": 940_000, "aarch64, Clang": 800_000, ALONE: 900_000, SMALLEST: 570_000}
"""Of the shared libraries, and of an application, as `MinSizeRel`, stripped; docs/platforms.md has what they have."""


def missing() -> str | None:
    """Why nothing can be built here; None if it can."""
    if importlib.util.find_spec("executorch") is None:
        return "building C++ needs executorch"
    compiler = os.environ.get("CXX", "c++").split()[0]
    lost = [name for name in ("cmake", "ninja", compiler) if shutil.which(name, path=_PATH) is None]
    return f"building C++ needs {', '.join(lost)}" if lost else None


def need(*, java: bool = False) -> None:
    """Skip the test that calls this if nothing can be built here."""
    import pytest

    if reason := missing_java() if java else missing():
        pytest.skip(reason)


def missing_java() -> str | None:
    """Why the face for Java cannot be built and run here; None if it can."""
    lost = [name for name in ("java", "javac") if shutil.which(name, path=_PATH) is None]
    return missing() or (f"Java needs {', '.join(lost)}" if lost else None)


@contextmanager
def folder(name: str) -> Iterator[Path]:
    """A folder below build/ for this environment alone, because CMake remembers where it found executorch.

    Two test runs at a time wait for each other here.
    """
    directory = ROOT / "build" / f"{name}-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]}"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


def run(*command: object) -> None:
    """Run a command.

    Raises:
        AssertionError: It failed; the message has its output.
    """
    texts = [str(part) for part in command]
    done = subprocess.run(texts, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(texts)}\n{done.stdout}{done.stderr}"


def configure(source: Path, directory: Path, *options: str) -> None:
    """Configure a project."""
    spec = importlib.util.find_spec("executorch")
    assert spec and spec.submodule_search_locations
    package = Path(next(iter(spec.submodule_search_locations)), "share", "cmake")
    run("cmake", "-S", source, "-B", directory, "-G", "Ninja", f"-Dexecutorch_DIR={package}", *options)


def build(source: Path, directory: Path, *options: str, target: str = "all") -> None:
    """Configure and build a project; this takes a moment if nothing changed."""
    configure(source, directory, *options)
    run("cmake", "--build", directory, "--target", target)


def configure_tests(directory: Path, *options: str) -> None:
    """Configure a build of the C++ tests; warnings are errors. Without further options, on the static library only.

    Sources are compiled several at a time, which takes half as long.
    """
    common = ("-DBLOBSTORE_TESTS=ON", "-DBLOBSTORE_WERROR=ON", "-DBLOBSTORE_SHARED=OFF", "-DCMAKE_UNITY_BUILD=ON")
    configure(LIBRARY, directory, *common, f"-DPython_EXECUTABLE={sys.executable}", *options)


def build_tests(directory: Path, *options: str, targets: Sequence[str] = ("all",)) -> None:
    """Configure and build the C++ tests."""
    configure_tests(directory, *options)
    run("cmake", "--build", directory, "--target", *targets)


def build_with_hooks(directory: Path, *targets: str) -> None:
    """Configure and build the C++ tests and the Python module together, with hooks for tests, on one library.

    Compiling the library is most of what tests of C++ take, so it is not optimized much.
    """
    command = [sys.executable, "-m", "nanobind", "--cmake_dir"]
    nanobind = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    options = ("-DBLOBSTORE_PYTHON=ON", "-DBLOBSTORE_INSTALL=ON", "-DBLOBSTORE_TEST_HOOKS=ON")
    build_tests(
        directory, *options, f"-Dnanobind_DIR={nanobind}", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", targets=targets or ("all",)
    )


def java(folder: Path, *options: str, jars: Sequence[str] = ("blobstore.jar",)) -> list[str]:
    """The command that starts Java with the library.

    Args:
        folder: where that and the jars were built.
        options: of the JVM.
        jars: in the folder.
    """
    return ["java", *options, f"-Djava.library.path={folder}", "-cp", ":".join(str(folder / jar) for jar in jars)]


def stripped(path: Path, folder: Path, strip: str = "strip") -> Path:
    """A copy of a library or an application without what only debuggers read.

    Args:
        path: of the file.
        folder: another one, for the copy.
        strip: the command, of the tools that built it.
    """
    copy = folder / path.name
    run(strip, "-o", copy, path)
    return copy


def ctest(directory: Path, options: dict[str, str] | None = None) -> bool:
    """Run the C++ tests of a build, and print what they print if they fail; whether all passed."""
    command = ["ctest", "--test-dir", directory, "--output-on-failure", "--no-tests=error", "--parallel", "2"]
    return subprocess.run(command, env={**ENVIRONMENT, **(options or {})}, check=False).returncode == 0
