"""Measuring two ways to do the same work side by side."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROUNDS = 7
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        work: what was done.
        figure: what was measured, for people.
        bar: what it must be, for people.
        met: whether it is.
    """

    work: str
    figure: str
    bar: str
    met: bool


def side_by_side(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    rounds: int = ROUNDS,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """The median seconds of both. They are called in turns, so that disturbances affect both alike; the first turn of each
    is not counted.

    Args:
        ours, theirs: the work.
        rounds: how often each is measured.
        before: called before every turn, and not measured.
        clock: `time.thread_time` where all is done by this thread: short work may run between two turns of other
            processes, and long work waits for them.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for which in (turn % 2, 1 - turn % 2):  # neither always goes first
            before()
            gc.collect()
            start = clock()
            result = (ours, theirs)[which]()
            elapsed = clock() - start
            del result
            if turn:
                seconds[which].append(elapsed)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def copy_synced(source: Path, target: Path) -> None:
    """Copy a file by `cp`, and wait until it is on the disk."""
    subprocess.run(["cp", source, target], check=True)  # noqa: S607
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def ratio_row(
    work: str, ours: float, theirs: float, *, at_most: float | None = None, at_least: float | None = None
) -> Row:
    """A row for two times: `at_most` bounds ours/theirs, `at_least` bounds theirs/ours."""
    if at_most is not None:
        ratio, bar, met = ours / theirs, f"at most {at_most:g} x", ours <= at_most * theirs
        text = f"{ratio:.2f} x its time"
    else:
        ratio, bar, met = theirs / ours, f"at least {at_least:g} x as fast", theirs >= (at_least or 0) * ours
        text = f"{ratio:.1f} x as fast"
    return Row(work, f"{text} ({show(ours)} against {show(theirs)})", bar, met)


def without_bar(row: Row) -> Row:
    """The same figure, which nothing is asked of."""
    return Row(row.work, row.figure, "", True)


def memory_row(work: str, nbytes: int, limit: int) -> Row:
    """A row for a growth of memory."""
    return Row(work, mib(nbytes), f"below {limit >> 20} MiB", nbytes < limit)


def mib(nbytes: float, digits: int = 1) -> str:
    """Bytes in MiB."""
    return f"{nbytes / MIB:.{digits}f} MiB"


def show(seconds: float) -> str:
    """Seconds with three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def status(*fields: str) -> int:
    """The sum of fields of /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[field].split()[0]) * 1024 for field in fields)


class Peak:
    """The largest growth of memory, in bytes."""

    growth = 0


@contextmanager
def peak_of(*fields: str) -> Iterator[Peak]:
    """Sample fields of /proc/self/status while the block runs: VmRSS is all memory, RssAnon the part without a file."""
    gc.collect()
    start, peak, done = status(*fields), Peak(), threading.Event()

    def sample() -> None:
        while not done.is_set():
            peak.growth = max(peak.growth, status(*fields) - start)
            done.wait(0.002)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        peak.growth = max(peak.growth, status(*fields) - start)
        done.set()
        thread.join()


def in_own_process(work: Callable[..., T], *arguments: object) -> T:
    """What a function returns, which a fresh process runs: it has no objects and no memory of what was measured before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def settle() -> None:
    """Return free memory to the system, which malloc does late, so that no side pays for, or profits from, what the other
    side left."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def flush() -> None:
    """Write out what earlier turns left, so that the next turn does not pay for it."""
    os.sync()
