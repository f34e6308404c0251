"""Copies of the project in which sources are changed; the checkout itself never is."""

import compileall
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from py_compile import PycInvalidationMode

from campaigns.mutants import places
from campaigns.mutants.guard import Guard
from campaigns.mutants.places import StaleGuardError, span

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutants"

SWITCH = """\
// Which of the mutants in these sources is alive: 0 for none.
#pragma once
#ifdef __cplusplus
#include <cstdlib>
inline bool blobstore_mutant(int number) {
  static const int alive = [] {
    const char* text = std::getenv("BLOBSTORE_MUTANT");
    return text != nullptr ? std::atoi(text) : 0;
  }();
  return alive == number;
}
#endif
"""


def sources() -> list[str]:
    """The files of the project, also those that are not committed yet."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True).stdout.decode().split("\0")
    return sorted(name for name in set(names) if name and (ROOT / name).is_file())


def copy(target: Path, changed: Mapping[str, str]) -> None:
    """Bring a copy of the project up to date: the files of the checkout, or the given ones instead.

    A file that is already as it should be keeps its time, so that only what changed is compiled again.
    """
    wanted = sources()
    known = set(wanted)
    for name in wanted:
        data = changed[name].encode() if name in changed else (ROOT / name).read_bytes()
        write(target / name, data)
        (target / name).chmod((ROOT / name).stat().st_mode)
    for folder in {Path(name).parts[0] for name in wanted}:
        for path in (target / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and str(path.relative_to(target)) not in known:
                path.unlink()
    # by the contents of the sources, because two mutants of one second may have one size
    compileall.compile_dir(target / "blobstore", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def write(path: Path, data: bytes) -> None:
    """Write a file, unless it has these contents."""
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def check(guard: Guard) -> None:
    """See that a guard is in its source, and that its tests exist.

    Raises:
        StaleGuardError: it is not there, or more than once; or a test of it does not exist.
    """
    mutated(guard) if not guard.native else span(_source(guard.file), guard)
    for test in guard.tests:
        path, _, function = test.partition("::") if is_pytest(test) else (f"runtime_bindings/tests/{test}.cpp", "", "")
        if not (ROOT / path).exists() or function not in _source(path):
            raise StaleGuardError(f"there is no test {test}")


def is_pytest(test: str) -> bool:
    """Whether a test is one of pytest, and not a program."""
    return test.startswith("tests/")


def mutated(guard: Guard) -> str:
    """The source of a guard in Python, without it."""
    return places.mutated(_source(guard.file), guard)


def with_switches(guards: Iterable[tuple[int, Guard]]) -> dict[str, str]:
    """The C++ sources in which each guard can be switched off when the program starts, by its number.

    Raises:
        StaleGuardError: two guards overlap.
    """
    spans: dict[str, list[tuple[int, int, int, Guard]]] = {}
    for number, guard in guards:
        spans.setdefault(guard.file, []).append((*span(_source(guard.file), guard), number, guard))
    changed = {}
    for file, found in spans.items():
        text = _source(file)
        end = len(text)
        for start, stop, number, guard in sorted(found, key=lambda entry: entry[0], reverse=True):
            if stop > end:
                raise StaleGuardError(f"{guard.name}: overlaps another guard in {file}")
            if guard.text.rstrip().endswith((";", "}")):
                switch = f"if (blobstore_mutant({number})) {{ {guard.mutant} }} else {{ {text[start:stop]} }}"
            else:
                switch = f"(blobstore_mutant({number}) ? ({guard.mutant}) : ({text[start:stop]}))"
            text = text[:start] + switch + text[stop:]
            end = start
        changed[file] = text
    return changed


def _source(file: str) -> str:
    try:
        return (ROOT / file).read_text(encoding="utf-8")
    except OSError:
        raise StaleGuardError(f"{file} does not exist") from None


def environment(tree: Path, packages: Path | None, number: int) -> dict[str, str]:
    """The variables of a process that uses a copy of the project; `packages` has a native module to use."""
    paths = [str(packages)] if packages else []
    return {
        "PYTHONPATH": os.pathsep.join([*paths, str(tree)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "BLOBSTORE_MUTANT": str(number),
    }
