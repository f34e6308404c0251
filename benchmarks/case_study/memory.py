"""The memory of processes that load programs: with ExecuTorch alone, or with blobstore's runtime.

As a program, it is one such process: `python -m benchmarks.case_study.memory HOW DATA PACKED PROGRAM…`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.case_study.models import inputs_of

__all__ = ["grown"]

ROOT = Path(__file__).parents[2]


def grown(how: str, programs: Sequence[Path], data: Path, packed: Path, processes: int = 2) -> int:
    """By how many bytes the memory of some processes grows, all together, when each loads and runs some programs.

    It is the proportional set size: pages that processes share count once.

    Args:
        how: "stock", ExecuTorch's own runtime, or "blobstore".
        programs: of ExecuTorch alone, or slim ones on `data`.
        data: a file of shared weights.
        packed: the folder of a packed store.
        processes: how many run at a time.
    """
    command = [sys.executable, "-m", "benchmarks.case_study.memory", how, *map(str, (data, packed, *programs))]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            )
            for _ in range(processes)
        ]
        sizes: list[int] = []
        for _ in ("imported", "loaded"):
            for child in children:
                assert child.stdin and child.stdout
                if sizes:
                    child.stdin.write("\n")
                    child.stdin.flush()
                if not child.stdout.readline():
                    raise SystemExit(f"{command}: a process ended")
            sizes.append(sum(_pss(child.pid) for child in children))
        for child in children:
            child.communicate()
    return sizes[1] - sizes[0]


def _pss(process: int) -> int:
    text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) << 10


def main() -> None:
    """Import everything, wait, load and run the programs, wait."""
    how, data, packed, *programs = sys.argv[1], *map(Path, sys.argv[2:])
    kept: list[Any] = []
    if how == "stock":
        from executorch.runtime import Runtime

        runtime = Runtime.get()
        _wait("imported")
        for path in programs:
            program = runtime.load_program(path)
            method = program.load_method("forward")
            kept += [program, method, method.execute(inputs_of(path))]
    else:
        from blobstore.runtime import BlobCache, PackedStore, Program

        _wait("imported")
        cache = BlobCache(data, packed=PackedStore(packed))
        for path in programs:
            call = Program(path, cache).method("forward")
            kept += [call, call(*inputs_of(path))]
    _wait("loaded")


def _wait(what: str) -> None:
    print(what, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
