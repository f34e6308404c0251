"""The dedup report against hashing the same files with xxh3-128, on 4 GB in the page cache.

The files hold every class of waste, in far larger shares than real ones: an eighth of all bytes each is equal,
transposed, nearly equal, the same in another type, or the payload of a delegate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash
from safetensors.numpy import save_file as save_safetensors

import blobstore
from benchmarks.harness import Row, memory_row, ratio_row, side_by_side
from tests.reporting.planted import Payload

TITLE = "Report on 4 GB in the page cache"

TENSORS = 64
SHAPE = (2048, 1024)
ROUNDS = 5
MEMORY = 300 << 20


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything."""
    files = _write(folder)
    for path in files:
        path.read_bytes()
    tool, hash_all = _baseline(files)

    def report(**options: object) -> blobstore.reporting.Report:  # type: ignore[name-defined]
        return blobstore.report(files, **options)  # type: ignore[arg-type]

    ours, theirs = side_by_side(lambda: report(exact_only=True), hash_all, rounds=ROUNDS)
    yield ratio_row(f"exact duplicates, against {tool}", ours, theirs, at_most=1.5)
    ours, theirs = side_by_side(report, hash_all, rounds=ROUNDS)
    yield ratio_row(f"all findings, against {tool}", ours, theirs, at_most=6)

    command = [sys.executable, "-m", "blobstore", "report", "--no-cache", "--json", *map(str, files)]
    _, peak = _run(command)
    yield memory_row("all findings, anonymous memory of the process at its peak", peak, MEMORY)

    caches = iter(folder / f"cache-{i}.sqlite" for i in range(10**6))
    warm = next(caches)
    report(cache=warm)
    second, first = side_by_side(lambda: report(cache=warm), lambda: report(cache=next(caches)), rounds=ROUNDS)
    figure = f"{second / first:.1%} of it ({second * 1e3:.1f} ms against {first * 1e3:.0f} ms)"
    yield Row("second run with the fingerprint cache, against the first", figure, "at most 5 %", second <= 0.05 * first)
    for path in files:
        path.unlink()
    yield from _many_keys(folder)


def _many_keys(folder: Path) -> Iterator[Row]:
    """Four times as many keys take four times as long, in each format; the rest of the bar is for noise."""
    small, large = ({f"k{i:06}": np.full(16, i, np.float32) for i in range(count)} for count in (10_000, 40_000))
    for suffix, save in (("ptd", blobstore.save_file), ("safetensors", save_safetensors)):
        few, many = folder / f"few.{suffix}", folder / f"many.{suffix}"
        save(small, few)
        save(large, many)
        times = side_by_side(lambda: blobstore.report([many]), lambda: blobstore.report([few]), clock=time.process_time)  # noqa: B023
        yield ratio_row(f"a .{suffix} of 40,000 keys against one of 10,000, CPU time", *times, at_most=5)


def _write(folder: Path) -> list[Path]:
    """Eight files of 512 MiB."""
    random = np.random.default_rng(0)

    def weights() -> dict[str, np.ndarray]:
        return {f"layers.{i}.weight": random.standard_normal(SHAPE, np.float32) for i in range(TENSORS)}

    def save(name: str, tensors: dict[str, np.ndarray]) -> None:
        blobstore.save_file(tensors, folder / name)

    base = weights()
    save_safetensors(base, folder / "base.safetensors")
    save("copy.ptd", base)
    save("transposed.ptd", {key: np.ascontiguousarray(value.T) for key, value in base.items()})
    payload = b"".join(
        value.tobytes() if i % 4 == 0 else random.bytes(value.nbytes) for i, value in enumerate(base.values())
    )
    del base
    Payload([payload]).write(folder / "backend.pte")
    del payload
    other = weights()
    save("other.ptd", other)
    for value in other.values():
        value.reshape(-1)[::97] += 1
    save("tuned.ptd", other)
    del other
    half = {key: value.astype(np.float16) for key, value in weights().items()}
    save("wide.ptd", {key: value.astype(np.float32) for key, value in half.items()})
    zeros = {f"zeros.{i}": np.zeros((SHAPE[0] // 2, SHAPE[1] + i), np.float32) for i in range(TENSORS)}
    save("half.ptd", {**half, **zeros})
    return sorted(path for path in folder.iterdir() if path.suffix in {".ptd", ".pte", ".safetensors"})


def _baseline(files: list[Path]) -> tuple[str, object]:
    tool = shutil.which("xxhsum")
    if tool:
        return "xxhsum -H2", lambda: subprocess.run([tool, "-H2", *files], check=True, stdout=subprocess.DEVNULL)

    def hash_all() -> None:
        for path in files:
            hasher = xxhash.xxh3_128()
            with path.open("rb", buffering=0) as file:
                buffer = bytearray(1 << 16)  # like xxhsum
                while n := file.readinto(buffer):
                    hasher.update(memoryview(buffer)[:n])
            hasher.hexdigest()

    return "xxh3-128 of the raw files", hash_all


def _run(command: list[str]) -> tuple[float, int]:
    """Processor seconds of a command, and the peak of its anonymous memory in bytes."""
    before, peak = os.times(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            except OSError:
                break
            sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")]
            peak = max(peak, *sizes) if sizes else peak
            time.sleep(0.002)
    after = os.times()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return after.children_user + after.children_system - before.children_user - before.children_system, peak
