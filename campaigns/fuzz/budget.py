"""What a small file may cost: two seconds of processor time and 300 MB."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from types import TracebackType

SECONDS = 2.0
MEGABYTES = 300


class BudgetError(Exception):
    """A small file cost too much."""


class Budget:
    """A context manager that measures its block; `slower` multiplies the allowed seconds.

    Memory is the growth of the peak of the resident set. The system keeps one peak for the whole life of a process, so it
    is reset whenever it has risen.
    """

    def __init__(self, slower: float = 1) -> None:
        self._seconds = SECONDS * slower
        self._peak = _peak()

    def __enter__(self) -> Budget:
        self._start = time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds, peak = time.process_time() - self._start, _peak()
        grown = peak - self._peak
        if grown > 16:
            Path("/proc/self/clear_refs").write_text("5")
            self._peak = _peak()
        if kind is None and seconds > self._seconds:
            raise BudgetError(f"it took {seconds:.1f} s")
        if kind is None and grown > MEGABYTES:
            raise BudgetError(f"it took {grown:.0f} MB")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
