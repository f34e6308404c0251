"""The native runtime against the stock one of ExecuTorch: loading, running, updating, sharing memory."""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import MIB, Row, mib, ratio_row, side_by_side, without_bar
from benchmarks.sums import write_sum, write_weights
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program

TITLE = "Native runtime"
_WIDTH = MIB  # elements: 4 MiB


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    yield from _load(folder)
    yield from _run(folder)
    yield from _update(folder)
    yield from _revert(folder)
    yield from _memory(folder)


def _stock(pte: Path, ptd: Path | None) -> Any:
    with quiet():
        from executorch.runtime import Runtime
    program = Runtime.get().load_program(str(pte), data_path=str(ptd) if ptd else None)
    return program, program.load_method("forward")


def _ours(pte: Path, ptd: Path | None) -> Any:
    return Program(pte, data=[ptd] if ptd else []).method()


def _load(folder: Path) -> Iterator[Row]:
    small, large = (write_sum(folder, count, 16) for count in (2_000, 20_000))
    ours, theirs = side_by_side(lambda: _ours(*small), lambda: _stock(*small))
    yield ratio_row(
        "load a program of 2,000 external constants, against load_program + load_method", ours, theirs, at_most=1
    )
    many, few = side_by_side(lambda: _ours(*large), lambda: [_ours(*small) for _ in range(10)])
    yield ratio_row("  20,000 constants, against ten times 2,000", many, few, at_most=1.5)


def _run(folder: Path) -> Iterator[Row]:
    small, wide = torch.randn(8, 32), torch.randn(64, 1024)
    large = write_sum(folder, 64, _WIDTH)
    for name, files, x, repeat, bar in (
        ("small", (_mlp(folder, small), None), small, 400, 1.02),
        ("large (256 MiB of weights)", large, torch.zeros(_WIDTH), 1, 1.02),
        ("computing (MLP 1024 wide)", (_mlp(folder, wide), None), wide, 1, None),
    ):
        method, (program, stock) = _ours(*files), _stock(*files)
        ours, theirs = side_by_side(
            functools.partial(_repeat, method, x, repeat),
            functools.partial(_repeat, stock.execute, [x], repeat),
            rounds=31,
        )
        del program
        work = f"run a {name} method, against the stock runtime"
        row = ratio_row(work, ours / repeat, theirs / repeat, at_most=bar or 1)
        # both run the same kernels, so if arithmetic dominates, the difference is noise of the machine
        yield row if bar else without_bar(row)


def _mlp(folder: Path, x: torch.Tensor) -> Path:
    width = x.shape[1]
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    path = folder / f"mlp{width}.pte"
    path.write_bytes(lower({"forward": (torch.nn.Sequential(*layers).eval(), (x,))}, partitioners=list).buffer)
    return path


def _repeat(call: Callable[[Any], object], argument: Any, times: int) -> None:
    for _ in range(times):
        call(argument)


def _median(work: Callable[[], object], before: Callable[[], object] = lambda: None, rounds: int = 31) -> float:
    seconds = []
    for _ in range(rounds + 1):
        before()
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _update(folder: Path) -> Iterator[Row]:
    pte, ptd = write_sum(folder, 64, _WIDTH)
    other = write_weights(folder / "other.ptd", 64, _WIDTH)
    cache = BlobCache(ptd)
    method = Program(pte, cache).method()
    method(np.zeros(_WIDTH, np.float32))
    new, target = np.ones(_WIDTH, np.float32), np.zeros(_WIDTH, np.float32)
    update = lambda: cache.update({"w.5": new})  # noqa: E731
    ours, theirs = side_by_side(lambda: [update() for _ in range(20)], lambda: _stock(pte, other), rounds=15)
    work = "update 4 MiB of 256 MiB, each of 20 in a row, against loading the program with a new .ptd"
    yield without_bar(ratio_row(work, ours / 20, theirs, at_least=1))
    single, theirs = side_by_side(update, lambda: _stock(pte, other), rounds=15)
    yield without_bar(ratio_row("  a single one, when a load has just swept the caches", single, theirs, at_least=1))
    memcpy = lambda: np.copyto(target, new)  # noqa: E731
    memcpy_time = _median(memcpy)
    yield ratio_row("  repeated, against a memcpy of 4 MiB", _median(update), memcpy_time, at_most=1.1)
    first = _median(update, before=lambda: (cache.revert(), cache.numpy("w.5").sum()))
    yield ratio_row("  the first time, which takes pages, against the memcpy", first, memcpy_time, at_most=8)


def _revert(folder: Path) -> Iterator[Row]:
    small = BlobCache(write_weights(folder / "revert-small.ptd", 8, _WIDTH))
    large = BlobCache(write_weights(folder / "revert-large.ptd", 256, _WIDTH))
    new = np.ones(_WIDTH, np.float32)
    times = []
    for cache in (small, large):
        for key in cache:
            cache.numpy(key)[::1024].sum()
        times.append(_median(cache.revert, before=lambda cache=cache: cache.update({"w.5": new})))
    yield ratio_row("revert 4 MiB in a cache of 1 GiB, against one of 32 MiB", times[1], times[0], at_most=1.5)


_CHILD = """
import gc, sys, re
import numpy as np
from blobstore.runtime import BlobCache, Program
def report():
    gc.collect()
    text = open("/proc/self/smaps_rollup").read()
    print(*(int(re.search(rf"^{name}:\\s+(\\d+) kB", text, re.M)[1]) for name in ("Rss", "Pss")), flush=True)
    sys.stdin.readline()
x = np.zeros(int(sys.argv[3]), np.float32)
report()
cache = BlobCache(sys.argv[2])
first = Program(sys.argv[1], cache).method()
first(x)
report()
second = Program(sys.argv[1], cache).method()
second(x)
report()
"""


def _memory(folder: Path) -> Iterator[Row]:
    pte, ptd = write_sum(folder, 256, _WIDTH)
    nbytes = 256 * 4 * MIB
    limit = nbytes // 50
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(pte), str(ptd), str(_WIDTH)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]

    def read(child: Any) -> tuple[int, int]:
        rss, pss = child.stdout.readline().split()
        return int(rss) << 10, int(pss) << 10

    def go(child: Any) -> None:
        child.stdin.write("\n")
        child.stdin.flush()

    def pss() -> int:
        total = 0
        for child in children:
            rollup = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
        return total

    first, second = children
    read(first), read(second)
    go(first)
    rss_one, _ = read(first)
    alone = pss()
    go(second)
    read(second)
    both = pss() - alone
    go(first)
    rss_two, _ = read(first)
    for child in children:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    for work, growth in (
        ("a second process on the same 1 GiB: growth of the PSS of both", both),
        ("a second program in one process: growth of RSS", rss_two - rss_one),
    ):
        figure = f"{growth / nbytes:.2%} of the weights ({mib(growth)})"
        yield Row(work, figure, "below 2 % of the weights", growth < limit)
