"""What must work in an environment that has nothing but the wheels; `dist.py` runs it there."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import blobstore

COMMAND = str(Path(sysconfig.get_path("scripts")) / "blobstore")


def pure() -> None:
    """Write, read and report."""
    weights = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.ones(4, np.float32)}
    blobstore.save_file(weights, "w.ptd")
    loaded = blobstore.load_file("w.ptd", framework="np")
    same(loaded["a.weight"], weights["a.weight"])
    blobstore.report(["w.ptd"])


def command_line() -> None:
    """Read and convert what `pure` wrote."""
    for arguments in (["--version"], ["inspect", "w.ptd"], ["verify", "w.ptd"], ["convert", "w.ptd", "w.safetensors"]):
        subprocess.run([COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
    blobstore.report(["w.ptd", "w.safetensors"])


def native() -> None:
    """Change weights in a cache, alone and in a working copy."""
    from blobstore.runtime import BlobCache, make_working_copy

    new = np.full((2, 3), 7, np.float32)
    with BlobCache("w.ptd") as cache:
        cache.update({"a.weight": new})
        same(cache.numpy("a.weight"), new)
        cache.save("delta.ptd", dirty_only=True)
    make_working_copy("w.ptd", "copy.ptd")
    with BlobCache("copy.ptd", "shared") as one, BlobCache("copy.ptd", "shared") as other:
        one.load("delta.ptd")
        same(other.numpy("a.weight"), new)


def programs() -> None:
    """Run the program of `lower.py` with ExecuTorch's kernels and XNNPACK, which come with the wheel."""
    from blobstore.runtime import BlobCache, Program

    if find_spec("executorch") is not None:
        sys.exit("executorch is installed, so this would not use what the wheel has")
    ones = np.ones((1, 8), np.float32)
    with BlobCache("model.ptd") as cache:
        forward = Program("model.pte", cache).method()
        same(forward(ones), np.full((1, 2), 5, np.float32))
        cache.update({"weight": np.zeros((2, 8), np.float32)})
        same(forward(ones), np.ones((1, 2), np.float32))


def same(found: object, expected: np.ndarray) -> None:
    if not np.array_equal(np.asarray(found), expected):
        sys.exit(f"expected {expected}, found {found}")


if __name__ == "__main__":
    pure()
    if "--emulated" not in sys.argv:  # the emulator does not start other programs
        command_line()
    packages = ["executorch-blobstore"]
    if "--native" in sys.argv:
        native()
        programs()
        packages.append("executorch-blobstore-runtime")
    sys.stdout.write(f"{sys.version.split()[0]}: {', '.join(f'{p} {metadata.version(p)}' for p in packages)}\n")
