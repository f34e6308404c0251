"""What a packed store saves when an application starts again, measured in processes of their own.

As a program, `python starts.py PROGRAM DATA [PACKED]`, it is one such process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.core.errors import BlobStoreError, FileAccessError

__all__ = ["Start", "measure_starts"]


@dataclass(frozen=True)
class Start:
    """One start of an application.

    Attributes:
        seconds: the time of the load and the first call.
        anonymous: by how many bytes memory that is in no file grew; None if this system does not say.
        reasons: why weights were packed to the heap although there was a store.
    """

    seconds: float
    anonymous: int | None
    reasons: tuple[str, ...]


def measure_starts(program: Path, data: Path, packed: Path) -> tuple[Start, Start]:
    """Start a program without a store, and with one that an earlier start filled.

    Raises:
        BlobStoreError: a process failed, or the two computed different outputs.
    """
    plain, plain_outputs = _start(program, data)
    _start(program, data, packed)
    second, outputs = _start(program, data, packed)
    if outputs != plain_outputs:
        raise BlobStoreError(f"{program} computes other outputs with packed weights from {packed}")
    return plain, second


def _start(*paths: Path) -> tuple[Start, Any]:
    command = [sys.executable, __file__, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this module
    if done.returncode != 0:
        raise FileAccessError(paths[0], f"a process that loads it failed: {done.stderr[-1000:]}")
    seconds, anonymous, reasons, outputs = json.loads(done.stdout)
    return Start(seconds, anonymous, tuple(reasons)), outputs


def _anonymous() -> int | None:
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:")), None)


def main() -> None:
    """Load the program, run it on zeros, and print what that took, and a digest of the outputs."""
    import numpy as np

    from blobstore.core.memory.digest import sha256
    from blobstore.core.memory.dtypes import numpy_dtype
    from blobstore.runtime import BlobCache, PackedStore, Program

    program, data, *folder = map(Path, sys.argv[1:])
    store = PackedStore(folder[0]) if folder else None
    before, start = _anonymous(), time.perf_counter()
    method = Program(program, BlobCache(data, packed=store)).method()
    layouts = [value.layout for value in method.inputs if value.layout is not None]
    inputs = [np.zeros(layout.sizes, numpy_dtype(layout.scalar_type)) for layout in layouts]
    outputs = method.execute(*inputs)
    seconds, after = time.perf_counter() - start, _anonymous()
    grown = None if before is None or after is None else after - before
    digests = [sha256(np.ascontiguousarray(output).tobytes()) for output in outputs]
    reasons = list(store.stats.reasons) if store is not None else []
    sys.stdout.write(json.dumps([seconds, grown, reasons, digests]))


if __name__ == "__main__":
    main()
