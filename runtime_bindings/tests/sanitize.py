"""Build the C++ tests with sanitizers and run them, and compare the definitions of all files: `make sanitize`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests import native_build

SANITIZERS = {
    "address,undefined": {"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    # a forked child renews mutexes that threads of its parent hold
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:die_after_fork=0:report_destroy_locked=0"},
}


def main() -> None:
    if reason := native_build.missing():
        sys.exit(reason)
    check_definitions()
    for name, options in SANITIZERS.items():
        # -O2 would take twice as long to compile
        folder = make(name.replace(",", "-"), "all", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DBLOBSTORE_SANITIZE={name}")
        if not native_build.ctest(folder, options):
            sys.exit(f"{name}: see above")
        sys.stdout.write(f"{name}: no findings\n")


def check_definitions() -> None:
    """Link all of the library with GCC's link-time optimization, which refuses two different definitions of one name."""
    make("one-definition", "cache_test", "-DCMAKE_BUILD_TYPE=Debug", "-DBLOBSTORE_ODR=ON", "-DCMAKE_UNITY_BUILD=OFF")
    sys.stdout.write("definitions: no findings\n")


def make(name: str, target: str, *options: str) -> Path:
    """Build a target of the C++ tests with these options of CMake; the folder of the build."""
    folder = native_build.ROOT / "build" / f"sanitize-{name}"
    try:
        native_build.build_tests(folder, *options, targets=(target,))
    except AssertionError as error:
        sys.exit(str(error))
    return folder


if __name__ == "__main__":
    main()
