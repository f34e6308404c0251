"""Files exchanged with other versions of ExecuTorch, each version in an environment of its own.

An environment has only that executorch, and takes everything else, in particular torch, from the environment of the
project, so nothing else is downloaded. If its runtime was linked to another torch, it cannot be loaded; this is reported,
and the version still writes programs and reads data files.
"""

import hashlib
import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import blobstore
from blobstore import BlobStore, open_ptd
from blobstore.runtime import Program
from campaigns import network

VERSIONS = ("1.2.0", "1.3.1", "1.4.1", "1.5.0", "1.5.1")
ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "conformance"
VALUE = 3  # of the weights


def run(say: Callable[[str], None], versions: tuple[str, ...]) -> int:
    """Try all versions and return the number of findings."""
    findings = 0
    for version in versions:
        try:
            python = _environment(version)
        except subprocess.CalledProcessError as error:
            say(f"executorch {version}: SKIPPED, it cannot be installed: {error.stderr.strip()[-200:]}")
            continue
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            for name, check in (("its files here", _take), ("our files there", _give)):
                try:
                    say(f"executorch {version}, {name}: {check(python, Path(folder))}")
                except Exception as error:
                    detail = getattr(error, "stderr", "") or ""
                    say(f"FINDING executorch {version}, {name}: {type(error).__name__}: {error} {detail[-800:]}")
                    findings += 1
    return findings


def _environment(version: str) -> Path:
    """The interpreter of an environment with this version, which the first call creates."""
    folder = BUILD / version
    python = folder / "bin" / "python"
    mark = folder / "complete"
    if not mark.exists():
        _call(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
        site = _call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _call(*pip, "--target", site, f"executorch=={version}")
        Path(site, "zz-outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        mark.touch()
    return python


def _call(*command: Any) -> str:
    parts = [str(part) for part in command]
    return subprocess.run(parts, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def _take(python: Path, folder: Path) -> str:
    """Let the version write files; read, deduplicate and run them here."""
    theirs = folder / "theirs"
    theirs.mkdir()
    _call(python, "-W", "ignore", "-m", "campaigns.conformance.foreign", "write", theirs)
    expected = {float(network.expected(VALUE))}
    data = [path for path in theirs.glob("*.ptd") if path.name != "opaque.ptd"]
    for path in sorted(theirs.glob("*.pte")):
        _same(path.name, set(_outputs(path, data)), expected)
    with open_ptd(theirs / "opaque.ptd") as opaque:
        _same("keys", {key: bytes(blob) for key, blob in opaque.items()}, dict.fromkeys(opaque, b"some bytes"))
        _same("keys", set(opaque), {"opaque", "again"})
    blobstore.dedup_programs([*sorted(theirs.glob("*.pte")), *data], folder / "slim")
    for path in sorted((folder / "slim").glob("*.pte")):
        _same(f"slim {path.name}", set(_outputs(path, [folder / "slim" / "shared.ptd"])), expected)
    return f"{len(list(theirs.iterdir()))} files are read, deduplicated and run"


def _give(python: Path, folder: Path) -> str:
    """Write files here; let the version read and run them."""
    store = BlobStore()
    tensors = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.arange(4), "tied": np.arange(4)}
    for key, array in tensors.items():
        store.add(key, array)
    store.add("opaque", b"some bytes", alignment=64)
    store.write_ptd(folder / "ours.ptd", metadata={"a": "b"})
    output = _call(python, "-W", "ignore", "-m", "campaigns.conformance.foreign", "read", folder)
    found = json.loads(output.splitlines()[-1])
    wanted: dict[str, Any] = {"opaque": [hashlib.sha256(b"some bytes").hexdigest(), [0, [10], [0]]]}
    for key, array in tensors.items():
        shape = [{"float32": 6, "int64": 4}[str(array.dtype)], list(array.shape), list(range(array.ndim))]
        wanted[key] = [hashlib.sha256(array.tobytes()).hexdigest(), shape]
    _same("keys of our .ptd", found["keys"], wanted)
    if "no runtime" in found:
        return f"its Python reads our .ptd; running: SKIPPED, its runtime cannot be loaded: {found['no runtime']}"
    expected = [float(network.expected(VALUE))]
    _same("outputs", found["outputs"], dict.fromkeys(found["outputs"], expected))
    _same("programs", len(found["outputs"]), 3)
    return f"its Python reads our .ptd, and its runtime runs {len(found['outputs'])} slim programs"


def _outputs(path: Path, data: list[Path]) -> list[float]:
    return Program(path, data=data).method()(network.INPUT).ravel().tolist()


def _same(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise ValueError(f"{what}: expected {str(expected)[:300]}, found {str(found)[:300]}")
