"""Build the C++ tests with sanitizers and run them: `make sanitize`."""

from __future__ import annotations

import sys

from tests.helpers import native_build

SANITIZERS = {
    "address,undefined": {"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    # a forked child renews mutexes that threads of its parent hold
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:die_after_fork=0:report_destroy_locked=0"},
}


def main() -> None:
    if reason := native_build.missing():
        sys.exit(reason)
    for name, options in SANITIZERS.items():
        # -O2 would take twice as long to compile
        folder = native_build.ROOT / "build" / f"sanitize-{name.replace(',', '-')}"
        try:
            native_build.build_tests(folder, "-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DBLOBSTORE_SANITIZE={name}")
        except AssertionError as error:
            sys.exit(str(error))
        if not native_build.ctest(folder, options):
            sys.exit(f"{name}: see above")
        sys.stdout.write(f"{name}: no findings\n")


if __name__ == "__main__":
    main()
