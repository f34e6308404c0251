"""What must work in an environment that has nothing but the wheels; `dist.py` runs it there."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import blobstore

COMMAND = str(Path(sysconfig.get_path("scripts")) / "blobstore")
MOST = 50_000_000
"""Bytes of the command line and the native runtime with all that they need beside numpy."""


def pure() -> None:
    """Write, read and report."""
    weights = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.ones(4, np.float32)}
    blobstore.save_file(weights, "w.ptd")
    loaded = blobstore.load_file("w.ptd", framework="np")
    same(loaded["a.weight"], weights["a.weight"])
    blobstore.report(["w.ptd"])


def readme(page: Path, *, native: bool) -> None:
    """Run what README.md begins with; the first block needs no native package."""
    section = page.read_text(encoding="utf-8").partition("## Try it\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    if len(blocks) != 2:
        sys.exit(f"{page}: expected two blocks of code to try, found {len(blocks)}")
    names: dict[str, object] = {}
    for block in blocks[: 2 if native else 1]:
        exec(block, names)  # noqa: S102


def size() -> None:
    """All of it is as small as README.md says."""
    packages = Path(sysconfig.get_path("purelib"))
    not_ours = ("numpy", "pip", "setuptools", "pkg_resources", "_distutils_hack")
    counted = [path for path in packages.iterdir() if not path.name.startswith(not_ours)]
    files = [file for path in counted for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    if (nbytes := sum(file.stat().st_size for file in files)) > MOST:
        sys.exit(f"beside numpy it takes {nbytes / 1e6:.0f} MB; README.md says less")


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
    with BlobCache("linear.ptd") as cache:
        forward = Program("linear.pte", cache).method()
        same(forward(ones), np.full((1, 2), 5, np.float32))
        cache.update({"weight": np.zeros((2, 8), np.float32)})
        same(forward(ones), np.ones((1, 2), np.float32))


def same(found: object, expected: np.ndarray) -> None:
    if not np.array_equal(np.asarray(found), expected):
        sys.exit(f"expected {expected}, found {found}")


if __name__ == "__main__":
    pure()
    readme(Path(sys.argv[1]), native="--native" in sys.argv)
    if "--emulated" not in sys.argv:  # the emulator does not start other programs
        command_line()
        size()
    packages = ["executorch-blobstore"]
    if "--native" in sys.argv:
        native()
        programs()
        packages.append("executorch-blobstore-runtime")
    sys.stdout.write(f"{sys.version.split()[0]}: {', '.join(f'{p} {metadata.version(p)}' for p in packages)}\n")
