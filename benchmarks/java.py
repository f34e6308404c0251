"""What a call costs in Java beyond the same call in C++: two processes that run one program in turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from benchmarks.harness import Row, show
from benchmarks.starting import Application, Process
from blobstore.lowering.export import lower
from tests.helpers import native_build

TITLE = "Calls from Java"
_MOST = 5e-6  # seconds beyond C++


class _Add(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@cache
def _library() -> Path:
    """The folder with the library and the classes, built as the library for C++ is."""
    if reason := native_build.missing_java():
        raise SystemExit(reason)
    with native_build.folder("benchmarks-java") as directory:
        native_build.build(native_build.JAVA, directory, "-DCMAKE_BUILD_TYPE=Release")
        return directory


class _Java(Process):
    """The process of java/Calls.java."""

    def __init__(self, results: str, program: Path) -> None:
        source = Path(__file__).parent / "java" / "Calls.java"
        super().__init__(*native_build.java(_library()), source, results, program)

    def run(self, times: int) -> float:
        """Call the method; the seconds of all calls together."""
        return float(self.ask(f"run {times}"))


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
