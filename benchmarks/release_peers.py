"""Other tools that keep or copy versions of files, each measured only where it is installed."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["COMPRESSING", "REGISTRY", "SKOPEO", "STORES", "registry"]

REGISTRY, SKOPEO = shutil.which("docker-registry"), shutil.which("skopeo")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _restic(versions: Sequence[Path], folder: Path, *, compression: str = "off") -> int | None:
    """Bytes of a repository that has the contents of some folders."""
    restic = shutil.which("restic")
    if restic is None:
        return None
    environment = {**os.environ, "RESTIC_PASSWORD": "1", "RESTIC_REPOSITORY": str(folder / "restic")}
    _run([restic, "init", "--repository-version", "2"], environment)
    for version in versions:
        _run([restic, "backup", "--compression", compression, "--no-cache", str(version)], environment)
    return _bytes(folder / "restic")


def _casync(versions: Sequence[Path], folder: Path, *, compressed: bool = False) -> int | None:
    """The same for casync; it has no store without compression, so its chunks are decompressed for that."""
    casync = shutil.which("casync")
    if casync is None:
        return None
    import zstandard

    store = folder / "casync"
    for number, version in enumerate(versions):
        command = [casync, "make", "--compression=zstd", f"--store={store}", str(folder / f"{number}.caidx")]
        _run([*command, str(version)], os.environ)
    if compressed:
        return _bytes(folder)
    chunks = sum(
        len(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))
        for path in store.rglob("*.cacnk")
    )
    return chunks + sum(path.stat().st_size for path in folder.glob("*.caidx"))


_XET = "import hf_xet, sys; hf_xet.upload_files(sys.argv[2:], 'local://' + sys.argv[1], None, None, None, None)"


def _xet(versions: Sequence[Path], folder: Path) -> int | None:
    """The same for hf-xet, with a folder as its server: its xorbs and shards, without the database for lookups."""
    if importlib.util.find_spec("hf_xet") is None:
        return None
    environment = {
        **os.environ,
        "HF_XET_XORB_COMPRESSION_POLICY": "none",
        "HF_HOME": str(folder / "home"),
        "HF_XET_LOG_LEVEL": "error",
    }
    for version in versions:
        files = [str(path) for path in sorted(version.rglob("*")) if path.is_file() and path.stat().st_size]
        _run([sys.executable, "-c", _XET, str(folder / "xet"), *files], environment)
    kept = folder / "xet" / "xet" / "xorbs"
    return _bytes(kept / "xorbs") + _bytes(kept / "shards")


def _borg(versions: Sequence[Path], folder: Path) -> int | None:
    """The same for borg, compressed, with the level of zstd that its documentation names first."""
    borg = shutil.which("borg")
    if borg is None:
        return None
    environment = {**os.environ, "BORG_BASE_DIR": str(folder / "home"), "BORG_REPO": str(folder / "borg")}
    _run([borg, "init", "--encryption=none"], environment)
    for number, version in enumerate(versions):
        _run([borg, "create", "--compression=zstd,3", f"::{number}", str(version)], environment)
    return _bytes(folder / "borg")


STORES: dict[str, Callable[[Sequence[Path], Path], int | None]] = {
    "restic": _restic,
    "casync": _casync,
    "hf-xet": _xet,
}


COMPRESSING: dict[str, Callable[[Sequence[Path], Path], int | None]] = {
    "borg": _borg,
    "restic": functools.partial(_restic, compression="auto"),
    "casync": functools.partial(_casync, compressed=True),
}
"""With compression, for versions that are kept and not sent."""


def _run(command: Sequence[str], environment: os._Environ[str] | dict[str, str]) -> None:
    subprocess.run(command, env=dict(environment), check=True, stdout=subprocess.DEVNULL)


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Debian's docker-registry on this machine; its host and port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "version": "0.1",
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder)}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    folder.mkdir()
    (folder / "registry.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [REGISTRY or "", "serve", str(folder / "registry.yml")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
