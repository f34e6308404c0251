"""Take guards out one by one; the tests that are named for each must fail: `make mutants`.

A guard in Python is taken out of a copy of the project. Those in C++ are all compiled into one library, in which a
variable of the environment takes one out. Each mutant runs in a process that is forked from this one, which has imported
torch and ExecuTorch but nothing of the project. First the same tests run without a mutant. A finding is a mutant that
survives, a guard that is no longer in the source, or a test that does not run.
"""

import argparse
import ctypes
import gc
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from campaigns.children import say
from campaigns.mutants import native
from campaigns.mutants.copies import FOLDER, ROOT, check, copy, environment, is_pytest, mutated, write
from campaigns.mutants.guard import Guard
from campaigns.mutants.native_guards import GUARDS as NATIVE
from campaigns.mutants.places import StaleGuardError
from campaigns.mutants.python_guards import GUARDS as PYTHON

PATIENCE = 300  # seconds for the tests of one mutant; a hang is a failure, too
WITHOUT = 3600  # ... for tests without a mutant
HEAVY = (
    *("torch", "torch.export", "executorch.exir", "executorch.backends.xnnpack.partition.xnnpack_partitioner"),
    *("executorch.runtime", "numpy", "urllib3", "msgspec", "zstandard"),
    *("cryptography.hazmat.primitives.serialization", "typer", "rich.console"),
)
_DIE_WITH_PARENT = 1
_PASSED, _FAILED = 0, 1  # what pytest ends with; anything else means that tests did not run


@dataclass
class Run:
    """One mutant in a process, or the tests without one."""

    name: str
    tree: Path
    variables: dict[str, str]
    packages: Path | None
    programs: list[tuple[list[str], Path]]
    ids: list[str]
    log: Path
    patience: float = PATIENCE
    stop_early: bool = True
    result: int = 0  # negative: the signal that ended it
    seconds: float = 0.0

    def __call__(self) -> int:
        """In the forked process."""
        for command, folder in self.programs:
            with tempfile.TemporaryDirectory() as place:
                work = Path(place, "work")
                shutil.copytree(folder, work)
                done = subprocess.run(command, cwd=work, check=False)
            if done.returncode != 0:
                return _FAILED
        if not self.ids:
            return _PASSED
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "--no-header", *(["-x"] if self.stop_early else [])]
        with tempfile.TemporaryDirectory(prefix="mutants-") as place:  # not where other runs clean up
            return int(pytest.main([*options, f"--basetemp={place}/run", *self.ids]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="guards whose name or file contains this")
    parser.add_argument(
        "--changed", nargs="?", const="HEAD", help="guards in files that differ from a commit, or whose tests do"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests without a mutant first")
    options = parser.parse_args()
    start = time.monotonic()
    numbered = [(number, guard) for number, guard in enumerate((*PYTHON, *NATIVE), 1)]
    sound = _sound(numbered)
    findings = len(numbered) - len(sound)
    chosen = _chosen(sound, options.only, options.changed)
    if not chosen:
        say(f"no guard to try, {findings} findings")
        sys.exit(1 if findings else 0)
    build = _build([entry for entry in sound if entry[1].native], chosen)
    logs = _prepare(options.jobs)
    say(f"{len(chosen)} mutants; ready after {time.monotonic() - start:.0f} s")
    if not options.no_baseline:
        findings += _baseline([guard for _, guard in chosen], build, logs, options.jobs)
    survived = 0
    trees: SimpleQueue[Path] = SimpleQueue()
    for worker in range(options.jobs):
        trees.put(_tree(worker))

    def tried(entry: tuple[int, Guard]) -> tuple[Guard, Run]:
        number, guard = entry
        tree = native.TREE if guard.native else trees.get()
        if not guard.native:
            write(tree / guard.file, mutated(guard).encode())
        run = _run(guard.name, list(guard.tests), tree, number, build if guard.native else None, logs / f"{number}.log")
        _in_process(run)
        if not guard.native:
            write(tree / guard.file, (ROOT / guard.file).read_bytes())
            trees.put(tree)
        return guard, run

    with ThreadPoolExecutor(options.jobs) as threads:
        for guard, run in threads.map(tried, sorted(chosen, key=lambda entry: len(entry[1].tests), reverse=True)):
            if run.result == _PASSED:
                survived += 1
                say(f"FINDING survived {guard.name}: {guard.file}")
            elif run.result != _FAILED and run.result >= 0:
                findings += 1
                say(f"FINDING {guard.name}: the tests did not run, see {run.log}")
            else:
                say(f"killed   {guard.name} ({run.seconds:.0f} s)")
    findings += survived
    say(f"{len(chosen)} mutants in {time.monotonic() - start:.0f} s: {survived} survived; {findings} findings")
    sys.exit(1 if findings else 0)


def _prepare(jobs: int) -> Path:
    """Import what all runs need, copy the sources for each worker, and return the folder of the logs."""
    for name in HEAVY:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    gc.freeze()  # less to copy at each fork
    logs = FOLDER / "logs"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    for worker in range(jobs):
        copy(_tree(worker), {})
    return logs


def _sound(numbered: list[tuple[int, Guard]]) -> list[tuple[int, Guard]]:
    """The guards that are where the list says; the others are findings."""
    sound = []
    for number, guard in numbered:
        try:
            check(guard)
            sound.append((number, guard))
        except StaleGuardError as error:
            say(f"FINDING {guard.name}: {error}")
    return sound


def _chosen(sound: list[tuple[int, Guard]], only: str, changed: str | None) -> list[tuple[int, Guard]]:
    chosen = [(n, g) for n, g in sound if only in g.name or only in g.file]
    if changed:
        files = _changed(changed)
        chosen = [(n, g) for n, g in chosen if files & {g.file, *(test.partition("::")[0] for test in g.tests)}]
    return chosen


def _build(guards: list[tuple[int, Guard]], chosen: list[tuple[int, Guard]]) -> native.Build | None:
    tests = {test for _, guard in chosen if guard.native for test in guard.tests}
    if not tests:
        return None
    say("building the C++ library with all its mutants ...")
    return native.build(guards, sorted(test for test in tests if not is_pytest(test)))


def _changed(commit: str) -> set[str]:
    command = ["git", "-C", str(ROOT), "diff", "--name-only", commit]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def _tree(worker: int) -> Path:
    return FOLDER / f"python-{worker}"


def _run(name: str, tests: list[str], tree: Path, number: int, build: native.Build | None, log: Path) -> Run:
    packages = build.packages if build else None
    programs = [] if build is None else [build.programs[test] for test in tests if not is_pytest(test)]
    variables = environment(tree, packages, number)
    return Run(name, tree, variables, packages, programs, [test for test in tests if is_pytest(test)], log)


def _baseline(guards: list[Guard], build: native.Build | None, logs: Path, jobs: int) -> int:
    """Run all tests without a mutant, those of each language at once; the number of findings."""
    runs = []
    for native_ones in (False, True):
        tests = sorted({test for guard in guards if guard.native == native_ones for test in guard.tests})
        for share in range(jobs):
            if tests[share::jobs]:
                name = f"{'C++' if native_ones else 'Python'}, {share + 1} of {jobs}"
                tree = native.TREE if native_ones else _tree(share)
                log = logs / f"without, {name}.log"
                run = _run(name, tests[share::jobs], tree, 0, build if native_ones else None, log)
                run.patience, run.stop_early = WITHOUT, False
                runs.append(run)
    with ThreadPoolExecutor(jobs) as threads:
        list(threads.map(_in_process, runs))
    for run in runs:
        finding = "" if run.result == _PASSED else "FINDING "
        say(f"{finding}without a mutant, {run.name}: ended with {run.result} after {run.seconds:.0f} s, {run.log}")
    return sum(run.result != _PASSED for run in runs)


def _in_process(run: Run) -> None:
    """Run in a forked process, which is killed when patience ends."""
    began = time.monotonic()
    child = _fork(run)
    alarm = threading.Timer(run.patience, os.killpg, (child, signal.SIGKILL))
    alarm.start()
    _, status = os.waitpid(child, 0)
    alarm.cancel()
    run.result, run.seconds = os.waitstatus_to_exitcode(status), time.monotonic() - began


def _fork(run: Run) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    os.setsid()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    code = 70
    try:
        with run.log.open("w") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(run.tree)
        os.environ.update(run.variables)
        for name in [name for name in sys.modules if name.partition(".")[0] == "campaigns"]:
            del sys.modules[name]
        here = {"", str(ROOT)}
        front = [str(path) for path in (run.packages, run.tree) if path]
        sys.path[:] = front + [path for path in sys.path if path not in here]
        code = run()
    except BaseException as error:  # the parent judges by the code
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
