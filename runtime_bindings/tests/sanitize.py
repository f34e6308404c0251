"""Build the C++ tests with sanitizers and run them: `make sanitize`."""

from __future__ import annotations

from runtime_bindings.tests.platforms import say, test
from tests.helpers.native_build import ROOT

SANITIZERS = {
    "address,undefined": {"ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    # a forked child renews mutexes that threads of its parent hold
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:die_after_fork=0:report_destroy_locked=0"},
}
OPTIMIZED = "-DCMAKE_CXX_FLAGS_RELEASE=-O1"  # -O2 would take twice as long to compile

if __name__ == "__main__":
    for name, options in SANITIZERS.items():
        folder = ROOT / "build" / f"sanitize-{name.replace(',', '-')}"
        test(folder, OPTIMIZED, f"-DBLOBSTORE_SANITIZE={name}", environment=options)
        say(f"{name}: no findings")
