"""Build the C++ tests for the platforms of the library and run them where that is possible.

    python -m runtime_bindings.tests.platforms here     this machine: other sizes of pages, the code for systems that are
                                                        not Linux, and names that are defined twice
    python -m runtime_bindings.tests.platforms aarch64  Linux on aarch64, with a cross compiler and qemu
    python -m runtime_bindings.tests.platforms compile [BIONIC]
                                                        other systems: their compilers take all sources, and those that
                                                        the library is not for are refused by one line; Android, too, if
                                                        the folder with its headers is named

docs/install.md says what that covers.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from runtime_bindings.tests import android, zig
from tests.helpers import machines, native_build
from tests.helpers.native_build import LIBRARY, MOST_BYTES, ROOT

# What zig calls a target, and the name for people
COMPILED = {
    "aarch64-macos": "macOS on Apple silicon",
    "x86_64-macos": "macOS on Intel",
    "aarch64-linux-musl": "Linux on aarch64 with musl",
}
REFUSED = {
    "x86_64-windows-gnu": "blobstore_runtime does not run on Windows",
    "arm-linux-gnueabihf": "blobstore_runtime needs a 64-bit system",
    "x86-linux-gnu": "blobstore_runtime needs a 64-bit system",
}


def here() -> None:
    """Run the tests here, and once more as on systems that are not Linux; and link all of the library with GCC's link-time
    optimization, which refuses two different definitions of one name."""
    with native_build.folder("native-tests") as folder:  # some were built there by tests/runtime/test_native_api.py
        test(folder, build=native_build.build_with_hooks)
    debug = "-DCMAKE_BUILD_TYPE=Debug"
    test(ROOT / "build" / "native-posix", debug, "-DBLOBSTORE_POSIX_ONLY=ON")
    linked = partial(native_build.build_tests, targets=("cache_test",))
    built(ROOT / "build" / "one-definition", linked, debug, "-DBLOBSTORE_ODR=ON", "-DCMAKE_UNITY_BUILD=OFF")
    say("definitions: no findings")


def aarch64() -> None:
    """Run the tests under qemu, on the libraries of ExecuTorch's wheel for aarch64, as GCC and as Clang compile them."""
    executorch = machines.executorch("aarch64", "3.11")
    options = (f"-Dexecutorch_DIR={executorch / 'share' / 'cmake'}", "-DCMAKE_BUILD_TYPE=MinSizeRel")
    for compiler in ("", "-clang"):
        test(
            ROOT / "build" / f"native-aarch64{compiler}",
            f"-DCMAKE_TOOLCHAIN_FILE={LIBRARY / 'cmake' / f'aarch64-linux-gnu{compiler}.cmake'}",
            *options,
            f"-DBLOBSTORE_SHARED={'ON' if compiler else 'OFF'}",  # one compiler's shared library is measured below
        )
    library = ROOT / "build" / "native-aarch64-clang" / "libblobstore_runtime.so"
    with tempfile.TemporaryDirectory() as folder:
        size = native_build.stripped(library, Path(folder), "aarch64-linux-gnu-strip").stat().st_size
    most = MOST_BYTES["aarch64, Clang"]
    say(f"the shared library has {size:,} bytes; at most {most:,} are expected")
    if size > most:
        sys.exit(1)


def test(
    folder: Path,
    *options: str,
    build: Callable[..., None] = native_build.build_tests,
    environment: dict[str, str] | None = None,
) -> None:
    """Build the tests in a folder and run them; ends the process if that fails."""
    built(folder, build, *options)
    if not native_build.ctest(folder, environment):
        sys.exit(f"{folder.name}: see above")


def built(folder: Path, build: Callable[..., None], *options: str) -> None:
    if reason := native_build.missing():
        sys.exit(reason)
    try:
        build(folder, *options)
    except AssertionError as error:
        sys.exit(str(error))


def compile_all(bionic: str = "") -> None:
    """Compile every source for each system, and see the refusals.

    Args:
        bionic: the folder with Android's headers, see `android.py`; if it is empty, Android is left out.
    """
    if bionic:
        compile_for_android(Path(bionic))
    sources = sorted((LIBRARY / "src").rglob("*.cpp"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for target, name in COMPILED.items():
            failed = [
                text for text in pool.map(lambda source, target=target: compile_one(source, target), sources) if text
            ]
            if failed:
                sys.exit(f"{name}:\n{failed[0]}")
            say(f"{name} ({target}): {len(sources)} files compiled")
    for target, line in REFUSED.items():
        text = compile_one(LIBRARY / "src" / "os" / "file.cpp", target)
        errors = [said for said in text.splitlines() if "error:" in said]
        if not errors or line not in errors[0]:
            sys.exit(f"{target} is not refused by one line:\n{text}")
        say(f"{target}: refused: {line}")


def compile_for_android(bionic: Path) -> None:
    """Compile and link the library and its face for Java, and put it into an archive for applications."""
    folder = ROOT / "build" / "android"
    library = android.build(bionic, folder)
    say(f"Android (API {android.API}, {android.ABI}): {library} linked, {library.stat().st_size:,} bytes")
    archive = folder / "blobstore.aar"
    native_build.run(sys.executable, ROOT / "packaging" / "aar.py", "--out", archive, library)
    say(f"Android: {archive} assembled")


def compile_one(source: Path, target: str) -> str:
    """Compile a file and keep nothing; what the compiler says if that fails."""
    compiled, said = zig.run("c++", "-target", target, *zig.flags(), "-O0", source)
    return "" if compiled else said


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"here": here, "aarch64": aarch64, "compile": compile_all}[sys.argv[1]](*sys.argv[2:])
