"""What a call costs in Java beyond the same call in C++: two processes that run one program in turns."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType

import torch

from benchmarks.harness import Row, show
from benchmarks.starting import Application
from blobstore.lowering.export import lower
from tests import native_build

TITLE = "Calls from Java"
_MOST = 5e-6  # seconds beyond C++


class _Add(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@cache
def _library() -> Path:
    """The folder with the library and the classes, built as for C++."""
    if reason := native_build.missing_java():
        raise SystemExit(reason)
    with native_build.folder("benchmarks") as directory:
        options = ("-DCMAKE_BUILD_TYPE=Release", "-DBLOBSTORE_JAVA=ON")
        native_build.build(Path(__file__).parent / "cpp", directory, *options)
        return directory / "_deps" / "blobstore_runtime-build" / "java"


class _Java:
    """The process of java/Calls.java. End it with `with`."""

    def __init__(self, results: str, program: Path) -> None:
        folder = _library()
        command = ["java", f"-Djava.library.path={folder}", "-cp", str(folder / "blobstore.jar")]
        command += [str(Path(__file__).parent / "java" / "Calls.java"), results, str(program)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._line() == "ready"

    def __enter__(self) -> _Java:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def run(self, times: int) -> float:
        """Call the method; the seconds of all calls together."""
        assert self._process.stdin
        self._process.stdin.write(f"run {times}\n")
        self._process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"{self._process.args!r} ended with {self._process.wait()}")
        return line.strip()


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    yield _beyond(folder, "4 bytes", 1, 20_000, "new", bar=True)
    yield _beyond(folder, "1 MiB", 1 << 18, 200, "given", bar=False)
    yield _beyond(folder, "1 MiB", 1 << 18, 200, "new", bar=False)


def _beyond(folder: Path, name: str, elements: int, times: int, results: str, *, bar: bool) -> Row:
    path = folder / f"add{elements}.pte"
    x = torch.ones(elements)
    path.write_bytes(lower({"forward": (_Add().eval(), (x, x))}, partitioners=list).buffer)
    java, cpp = _side_by_side(results, path, times)
    beyond = java - cpp
    text = f"{show(beyond) if beyond > 0 else 'nothing'} ({show(java)} against {show(cpp)})"
    work = f"a call with two inputs and a {results} result of {name}, beyond the same call in C++"
    return Row(work, text, f"at most {show(_MOST)}" if bar else "", not bar or beyond <= _MOST)


def _side_by_side(results: str, program: Path, times: int) -> tuple[float, float]:
    """The median seconds of a call in Java and in C++, measured in turns."""
    with _Java(results, program) as java, Application("ours", program) as cpp:
        cpp.load()
        java.run(10 * times)  # until the compiler of the JVM has seen it
        cpp.run(times)
        pairs = [(java.run(times), cpp.run(times)[0]) for _ in range(15)]
    return statistics.median(j for j, _ in pairs) / times, statistics.median(c for _, c in pairs) / times
