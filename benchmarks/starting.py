"""Starts of an application, each in a process of its own: a C++ program that loads a method and runs it.

Both sides are the same program, `cpp/start.cpp`, so neither pays for Python, and no process remembers an earlier load.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tests.helpers import native_build

if TYPE_CHECKING:
    from typing_extensions import Self


@cache
def _executable() -> Path:
    if reason := native_build.missing():
        raise SystemExit(reason)
    with native_build.folder("benchmarks") as directory:
        native_build.build(Path(__file__).parent / "cpp", directory, "-DCMAKE_BUILD_TYPE=Release")
        return directory / "start"


class Process:
    """A process that says when it is ready, and then answers each order with a line. End it with `with`.

    Args:
        command: that starts it.
    """

    def __init__(self, *command: object) -> None:
        self._process = subprocess.Popen(  # ExecuTorch's log is of no interest
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._line() == "ready"

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def ask(self, order: str) -> str:
        """The answer to an order."""
        assert self._process.stdin
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._line()

    def _line(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self._process.args!r} ended with {self._process.wait()}")
        return line.strip()


class Application(Process):
    """The process of cpp/start.cpp.

    Args:
        how: "stock", ExecuTorch's `Module`, or "ours", a program on a cache.
        program, data: the files.
        packed: for "stock" the file of ExecuTorch's own `packed_cache_path`, for "ours" the folder of a packed store.
    """

    def __init__(self, how: str, program: Path, data: Sequence[Path] = (), packed: Path | None = None) -> None:
        super().__init__(_executable(), how, packed or "-", program, *data)

    def load(self, read_ahead: int | None = None) -> float:
        """Load the method; the seconds that it took.

        Args:
            read_ahead: how many bytes of packed weights to read ahead; None for the default.
        """
        return float(self.ask("load" if read_ahead is None else f"load {read_ahead}"))

    def run(self, times: int = 1) -> tuple[float, str]:
        """Call the method; the seconds of all calls together, and a digest of the outputs of the last one."""
        seconds, digest = self.ask(f"run {times}").split()
        return float(seconds), digest

    def write(self, source: Path, target: Path) -> float:
        """Write the bytes of a file to another one and sync it; the seconds."""
        return float(self.ask(f"write {source} {target}"))

    def read(self, path: Path) -> float:
        """Read the bytes of a file in order; the seconds."""
        return float(self.ask(f"read {path}"))

    def touch(self, path: Path) -> float:
        """Map a file and read a byte of each cache line in order; the seconds."""
        return float(self.ask(f"touch {path}"))

    def read_from_disk(self) -> int:
        """What this process has had the disk read so far, in bytes."""
        text = Path(f"/proc/{self.pid}/io").read_text(encoding="ascii")
        return int(dict(line.split(": ") for line in text.splitlines())["read_bytes"])

    def anonymous(self) -> int:
        """Memory that is in no file, in bytes."""
        return self._memory("status", "RssAnon")

    def pss(self) -> int:
        """All memory, that of shared pages divided by the processes which share them, in bytes."""
        return self._memory("smaps_rollup", "Pss")

    def pss_of(self, path: Path) -> int:
        """The same, of a mapped file alone and of what was changed in its maps."""
        found, inside = 0, False
        for line in Path(f"/proc/{self.pid}/smaps").read_text(encoding="utf-8").splitlines():
            if not line.split(" ", 1)[0].endswith(":"):  # the head of a map
                inside = line.endswith(str(path))
            elif inside and line.startswith("Pss:"):
                found += int(line.split()[1]) << 10
        return found

    def _memory(self, file: str, field: str) -> int:
        text = Path(f"/proc/{self.pid}/{file}").read_text(encoding="ascii")
        found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
        assert found, field
        return int(found[1]) << 10


@dataclass(frozen=True)
class Start:
    """What one start took, in seconds and bytes."""

    load: float
    run: float
    anonymous: int
    outputs: str


def start(how: str, program: Path, data: Sequence[Path] = (), packed: Path | None = None) -> Start:
    """Start an application, load and run its method once, and end it."""
    with Application(how, program, data, packed) as application:
        before = application.anonymous()
        load = application.load()
        run, outputs = application.run()
        return Start(load, run, application.anonymous() - before, outputs)


def in_turns(
    ways: Sequence[Callable[[], Start]], rounds: int, before: Callable[[], object] = lambda: None
) -> list[Start]:
    """Start each way in turns, and take the medians. The first turn is not counted.

    Raises:
        AssertionError: two starts computed different outputs.
    """
    found: list[list[Start]] = [[] for _ in ways]
    for turn in range(rounds + 1):
        for i in range(len(ways)):
            which = (turn + i) % len(ways)  # no way always goes first
            before()
            found[which].append(ways[which]())
    found = [starts[1:] for starts in found]
    [outputs] = {one.outputs for starts in found for one in starts}
    return [
        Start(
            median(s.load for s in starts),
            median(s.run for s in starts),
            int(median(s.anonymous for s in starts)),
            outputs,
        )
        for starts in found
    ]
