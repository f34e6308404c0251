"""Go through all system calls of all scenarios: `make crash`.

Each run is a forked process that works on a fresh copy of the old state. A preloaded library (faults.cpp) counts the
system calls on files in the scenario's folder, and makes the chosen one fail, or kills the process there. Then another
process looks at the result. After an error it must be the old state, after success the new one, after a kill one of the
two. An error behind the last rename, such as in syncing the folder, leaves the new state. Errors must be those of the
library, only a kill may leave temporary files, and the same work, done again, must give the new state.
"""

import argparse
import ctypes
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from campaigns.children import in_child, say

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build" / "crash" / "faults.so"
PATIENCE = 60  # seconds for one run; more is a hang
PREPARATION = 600  # ... for lowering the programs of a scenario

_FAIL, _KILL, _SHORT, _FULL = range(4)
FAULTS = {
    "EIO": (_FAIL, errno.EIO),
    "EINTR": (_FAIL, errno.EINTR),
    "ENOSPC": (_FULL, errno.ENOSPC),  # from this call on, as on a full disk
    "short": (_SHORT, 0),
    "kill": (_KILL, 0),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--call", type=int, default=0, help="only the system call of this number")
    parser.add_argument("--fault", choices=[*FAULTS, "point"], help="only this fault")
    parser.add_argument("--keep", type=Path, help="keep the folder of the first finding here")
    options = parser.parse_args()
    if os.environ.get("LD_PRELOAD") != str(LIBRARY):
        from tests.runtime import hooks

        _build()
        # commits are killed at points between two system calls, which only a test build of the runtime has
        os.environ.update(hooks.environment(hooks.build()), LD_PRELOAD=str(LIBRARY))
        os.execv(sys.executable, [sys.executable, "-m", "campaigns.crash", *sys.argv[1:]])  # noqa: S606
    from campaigns.crash.scenarios import SCENARIOS

    gc.freeze()  # less to copy at each fork
    start = time.monotonic()
    chosen = [scenario for scenario in SCENARIOS if options.only in scenario.name]
    if not chosen:
        parser.error(f"no scenario has {options.only!r} in its name")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        rows = list(threads.map(lambda scenario: _in_process(scenario, options), chosen))
    say("")
    for row in rows:
        say(_line(row))
    runs, findings = (sum(row[what] for row in rows) for what in ("runs", "findings"))
    say(f"{runs} runs in {time.monotonic() - start:.0f} s, {findings} findings")
    sys.exit(1 if findings else 0)


def _in_process(scenario: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Run one scenario in a process of its own, in parallel to others, and return its result."""

    def run() -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="crash-") as folder:
            return _Campaign(scenario, Path(folder), options).run()

    result = in_child(run, patience=3600)
    if "value" not in result:
        raise SystemExit(f"{scenario.name}: {result.get('trace') or result}")
    return result["value"]


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['name']:28} {row['calls']:4} calls {row['runs']:5} runs: {row['old']:4} old, {row['new']:4} new, "
        f"{row['late']:3} new with an error, {row['mixed']:3} between renames; {row['left']} temporary files after a kill; "
        f"{row['findings']} findings"
    )


def _build() -> None:
    source = Path(__file__).with_name("faults.cpp")
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > source.stat().st_mtime:
        return
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    compiler = (os.environ.get("CXX") or (sysconfig.get_config_var("CXX") or "c++").split()[0]).split()
    if shutil.which(compiler[0]) is None:
        compiler = ["c++"]
    command = [*compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", LIBRARY, source, "-ldl"]
    subprocess.run([str(part) for part in command], check=True)


class _Campaign:
    """One scenario with all its faults."""

    def __init__(self, scenario: Any, folder: Path, options: argparse.Namespace) -> None:
        self.scenario, self.options = scenario, options
        self.template, self.place = folder / "template", folder / "place"
        counts = dict.fromkeys(("calls", "runs", "old", "new", "late", "mixed", "left", "findings"), 0)
        self.row: dict[str, Any] = {"name": scenario.name, **counts}

    def run(self) -> dict[str, Any]:
        for name in ("in", "out"):
            (self.template / name).mkdir(parents=True)
        _must(in_child(lambda: self.scenario.prepare(self.template), PREPARATION))
        names = self._reset()
        self.old = self._look()
        self._reset()
        done = self._act(None)
        _must(done)
        self.calls = done["calls"]
        self.row["calls"] = len(self.calls)
        self.renamed = max(
            (number for number, name in enumerate(self.calls, 1) if name.startswith("rename")), default=1 << 30
        )
        self.new = self._look()
        if self.old == self.new and self.scenario.look.__name__ == "files":
            raise RuntimeError(f"{self.scenario.name}: old and new are the same, so nothing would be tested")
        self.names = names | self._names()
        for call, name in enumerate(self.calls, 1):
            for fault, how in FAULTS.items():
                if self.options.call in (0, call) and self.options.fault in (None, fault) and _applies(fault, name):
                    self._one(f"{fault} at call {call}, {name}", fault, (*how, call))
        for point in range(1, self.scenario.points + 1):
            if self.options.fault in (None, "point") and self.options.call == 0:
                self._one(f"kill at point {point}", "kill", None, point)
        return self.row

    def _one(self, what: str, fault: str, armed: tuple[int, int, int] | None, point: int = 0) -> None:
        before = self._reset()
        result = self._act(armed, point)
        self.row["runs"] += 1
        try:
            killed = result.get("signal") == signal.SIGKILL
            if killed != (fault == "kill"):
                raise FindingError(f"ended with {result}")
            if "error" in result and not result["ours"]:
                raise FindingError(f"raised {result['error']}")
            left = self._names() - self.names
            state, usable, again = self._look_and_repeat()
            self._judge(armed[2] if armed else 0, killed, result, state, usable)
            if killed:
                self.row["left"] = max(self.row["left"], len(left))
            elif left and not what.endswith(("unlink", "unlinkat")):
                raise FindingError(f"left {sorted(left)} after {result}")
            if again != self.new:
                raise FindingError(f"done again, it gave {_short(again)}")
            more = self._names() - self.names - left - before
            if more:
                raise FindingError(f"done again, it left {sorted(more)}")
        except FindingError as finding:
            line = f"{self.scenario.name}: {what}: {finding}"
            self.row["findings"] += 1
            say("FINDING " + line)
            if self.options.keep and not self.options.keep.exists():
                shutil.copytree(self.place, self.options.keep, symlinks=True)

    def _judge(self, call: int, killed: bool, result: dict[str, Any], state: Any, unusable: str) -> None:
        if state == self.new and (killed or "error" not in result or self.old == self.new):
            self.row["new"] += 1
        elif state == self.old and (killed or "error" in result):
            self.row["old"] += 1
        elif state == self.new and call > self.renamed:
            self.row["late"] += 1  # all files are in place, but the disk may not have them, which is an error too
        elif killed and self.scenario.usable is not None:
            if unusable:
                raise FindingError(f"the files are unusable: {unusable}")
            self.row["mixed"] += 1
        else:
            raise FindingError(f"{result.get('error') or result} left {_short(state)}, old is {_short(self.old)}")

    def _reset(self) -> set[str]:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self.template, self.place, symlinks=True)
        # a shared cache knows its working copy by the inode
        for path in self.place.rglob("*.commits"):
            _rebind(path)
        return self._names()

    def _names(self) -> set[str]:
        # files of packed weights have random names
        paths = [path for path in self.place.rglob("*") if ".packed" not in path.suffixes]
        return {str(path.relative_to(self.place)) for path in paths}

    def _look(self) -> Any:
        result = in_child(lambda: self.scenario.look(self.place), PATIENCE)
        _must(result)
        return result["value"]

    def _look_and_repeat(self) -> tuple[Any, str, Any]:
        """The state that another process sees, why it is unusable (if it is), and the state after the same work again."""

        from blobstore.core.disk.recovery import recover

        def look() -> Any:
            state = self.scenario.look(self.place)
            unusable = ""
            if self.scenario.usable is not None and state not in (self.old, self.new):
                try:
                    self.scenario.usable(self.place)
                    recover(self.place / "out")
                    if self.scenario.look(self.place) not in (self.old, self.new):
                        raise FindingError("neither old nor new after recovery")
                except Exception as error:
                    unusable = f"{type(error).__name__}: {error}"
            self.scenario.act(self.place)
            return state, unusable, self.scenario.look(self.place)

        result = in_child(look, PATIENCE)
        if "value" not in result:
            raise FindingError(f"the result cannot be read, or not be replaced: {result}")
        state, unusable, again = result["value"]
        return state, unusable, again

    def _act(self, armed: tuple[int, int, int] | None, point: int = 0) -> dict[str, Any]:
        faults = ctypes.CDLL(None)
        faults.faults_name.restype = ctypes.c_char_p

        def act() -> list[str]:
            if point:
                from blobstore_runtime import _native  # a test build

                _native.crash_at(point)
            faults.faults_watch(os.fsencode(f"{self.place}/"))
            action, number, call = armed or (_FAIL, 0, 0)
            faults.faults_arm(call, action, number)
            try:
                self.scenario.act(self.place)
            finally:
                count = faults.faults_disarm()
            return [faults.faults_name(i).decode() for i in range(1, count + 1)]

        result = in_child(act, PATIENCE)
        if "value" in result:
            result["calls"] = result.pop("value")
        return result


class FindingError(Exception):
    """Something that must not happen."""


def _applies(fault: str, name: str) -> bool:
    if fault == "short":
        return name in {"read", "write", "pread", "pread64", "pwrite", "pwrite64"}
    # a signal does not interrupt these, because the file system does not block in them
    return fault != "EINTR" or not name.startswith(
        ("fstat", "stat", "lstat", "unlink", "rename", "link", "mmap", "close")
    )


def _rebind(path: Path) -> None:
    """Update the inode in the commits file of a copied working copy, by which it recognizes the copy."""
    status = path.with_suffix("").stat()
    with path.open("r+b") as file:
        file.seek(24)  # behind the magic and the id
        file.write(status.st_ino.to_bytes(8, "little"))


def _short(state: Any) -> str:
    text = json.dumps(state)
    return text if len(text) < 400 else text[:400] + " ..."


def _must(result: dict[str, Any]) -> None:
    if "error" in result or "signal" in result:
        raise FindingError(f"the work fails without a fault: {result}")


if __name__ == "__main__":
    main()
