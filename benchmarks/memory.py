"""Packed weights that are not in memory: the first answer of a cold start, and passes with less memory than weights.

At best the disk reads each page once, in order, while the processor computes. So both are compared with a process of the same
C++ program that reads the packed file in order and computes nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import Row, flush, mib, ratio_row, show, without_bar
from benchmarks.packed import Model, lower_ours, stack
from benchmarks.starting import Application
from tests.helpers import memory_limits

TITLE = "Weights that are not in memory"
_LAYERS = 64  # of 4 MiB
_BATCHES = 1, 64  # with the second one, computing takes about as long as reading
_TURNS = 15
_SHARE = 4  # the limit of memory is this part of the weights
_BAR = 1.1


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files, and on the disk that is measured."""
    for batch in _BATCHES:
        model = lower_ours(folder / str(batch), *stack(_LAYERS, batch=batch))
        model = replace(model, name=f"{_LAYERS} layers of 4 MiB, a batch of {batch}")
        model.ours(model.store)  # builds
        yield from _cold(model)
        yield from _limited(model)


def _application(model: Model) -> Application:
    return Application("ours", model.folder / "model.pte", model.data, model.store)


def _drop(*paths: Path) -> None:
    """Take files that no process maps out of the page cache."""
    flush()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ------------------------------------------------------------------------------------------------ cold starts


def _cold(model: Model) -> Iterator[Row]:
    """From opening the files to the first answer, with none of them in the page cache."""
    copy = shutil.copyfile(model.packed, model.folder / "copy")
    first, computing, read = [], [], []
    without, reading, both = [], [], []
    for _ in range(_TURNS):
        with _application(model) as ours:
            _drop_all(model)
            before = ours.read_from_disk()
            first.append(ours.load() + ours.run()[0])
            read.append(ours.read_from_disk() - before)
            computing.append(ours.run()[0])
            with _application(model) as other:
                _drop(copy)
                both.append(_at_once(ours.run, partial(other.read, copy)))
        with _application(model) as ours:
            _drop_all(model)
            without.append(ours.load(read_ahead=0) + ours.run()[0])
        with _application(model) as ours:
            _drop(model.packed)
            reading.append(ours.read(model.packed))
    least = max(median(reading), median(computing))
    row = ratio_row(
        f"{model.name}: the first answer of a cold start, against the longer of reading and computing",
        median(first),
        least,
        at_most=_BAR,
    )
    parts = f"reading takes {show(median(reading))}, computing {show(median(computing))}; read: {mib(median(read))}"
    yield replace(row, figure=f"{row.figure}; {parts}")
    yield without_bar(ratio_row("  with read_ahead=0, against the same", median(without), least, at_most=_BAR))
    yield without_bar(
        ratio_row(
            "  one process reads while another one computes, with all in memory, against the same",
            median(both),
            least,
            at_most=_BAR,
        )
    )


def _drop_all(model: Model) -> None:
    _drop(model.folder / "model.pte", *model.data, model.packed)


def _at_once(*work: Callable[[], object]) -> float:
    """The seconds until all is done."""
    with ThreadPoolExecutor(len(work)) as threads:
        start = time.perf_counter()
        for done in [threads.submit(one) for one in work]:
            done.result()
        return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ limits


def _limited(model: Model) -> Iterator[Row]:
    """Passes in the steady state, with memory for a part of the weights."""
    work = f"  a pass with memory for {100 // _SHARE} % of the weights, against reading the missing bytes in order"
    if not memory_limits.available():
        yield Row(work, "not measured: this process may not limit memory (cgroup)", f"at most {_BAR:g} x", True)
        return
    # a file for each, because what one process has in memory the others need not read
    files = [model.packed, model.folder / "read", model.folder / "touched"]
    for file in files[1:]:
        shutil.copyfile(model.packed, file)
    _drop(*files)
    with ExitStack() as living:
        processes = []
        for _ in files:
            group = living.enter_context(memory_limits.group(model.packed.stat().st_size // _SHARE))
            processes.append(living.enter_context(_application(model)))
            group.add(processes[-1].pid)
        ours, reader, toucher = processes
        ours.load()
        ways = lambda: ours.run()[0], lambda: reader.read(files[1]), lambda: toucher.touch(files[2])
        [(pass_, read), (reading, read_then), (touching, touched)] = _in_turns(processes, ways)
    row = ratio_row(work, pass_, reading, at_most=_BAR)
    yield replace(row, figure=f"{row.figure}; read: {mib(read)} against {mib(read_then)}")
    row = without_bar(
        ratio_row("  touching the pages of a map in order, against the same", touching, reading, at_most=_BAR)
    )
    yield replace(row, figure=f"{row.figure}; read: {mib(touched)}")


def _in_turns(processes: Sequence[Application], ways: Sequence[Callable[[], float]]) -> list[tuple[float, float]]:
    """The medians of the seconds that each way takes, and of the bytes that its process has the disk read for it."""
    found: list[list[tuple[float, int]]] = [[] for _ in ways]
    for turn in range(_TURNS + 1):
        for i in range(len(ways)):
            which = (turn + i) % len(ways)  # no way always goes first
            before = processes[which].read_from_disk()
            seconds = ways[which]()
            if turn:  # the first one is cold
                found[which].append((seconds, processes[which].read_from_disk() - before))
    return [(median(seconds for seconds, _ in one), median(nbytes for _, nbytes in one)) for one in found]
