"""Run clang-tidy over the C++ sources: `make tidy`. .clang-tidy says what it looks for."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.helpers import native_build
from tests.helpers.native_build import JAVA, LIBRARY, ROOT


def main() -> None:
    build, options = ROOT / "build" / "tidy", ("-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", "-DCMAKE_UNITY_BUILD=OFF")
    sources = dict.fromkeys([*(LIBRARY / "src").rglob("*.cpp"), *(LIBRARY / "tests").glob("*.cpp")], build)
    try:
        native_build.configure_tests(build, *options)
        if not native_build.missing_java():
            build = build.with_name("tidy-java")
            native_build.configure(JAVA, build, *options)
            sources |= dict.fromkeys((JAVA / "native").glob("*.cpp"), build)
    except AssertionError as error:
        sys.exit(str(error))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        findings = [text for text in pool.map(lambda path: tidy(path, sources[path]), sorted(sources)) if text]
    if findings:
        sys.exit("\n".join(findings))
    sys.stdout.write(f"clang-tidy: {len(sources)} files, no findings\n")


def tidy(source: Path, build: Path) -> str:
    """What clang-tidy says of a file; nothing if that is nothing."""
    command = [Path(sys.executable).with_name("clang-tidy"), "--quiet", "-p", build, source]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


if __name__ == "__main__":
    main()
