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
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np

__all__ = ["COMPRESSING", "REGISTRY", "SKOPEO", "STORES", "registry"]

REGISTRY, SKOPEO = shutil.which("docker-registry"), shutil.which("skopeo")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _restic(versions: Sequence[Path], folder: Path, *, compression: str = "off") -> int | None:
    """Bytes of a repository that has the contents of some folders, beside what it had before."""
    restic = shutil.which("restic")
    if restic is None:
        return None
    environment = {**os.environ, "RESTIC_PASSWORD": "1", "RESTIC_REPOSITORY": str(folder / "restic")}
    if not (folder / "restic").exists():
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
    for version in versions:
        command = [casync, "make", "--compression=zstd", f"--store={store}", str(folder / f"{version.name}.caidx")]
        _run([*command, str(version)], os.environ)
    if compressed:
        return _bytes(folder)
    chunks = sum(
        len(zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()))
        for path in store.rglob("*.cacnk")
    )
    return chunks + sum(path.stat().st_size for path in folder.glob("*.caidx"))


_XET = "import hf_xet, sys; hf_xet.upload_files(sys.argv[2:], 'local://' + sys.argv[1], None, None, None, None)"


def _xet(versions: Sequence[Path], folder: Path, *, compression: str = "none") -> int | None:
    """The same for hf-xet, with a folder as its server: its xorbs and shards, without the database for lookups."""
    if importlib.util.find_spec("hf_xet") is None:
        return None
    environment = {
        **os.environ,
        "HF_XET_XORB_COMPRESSION_POLICY": compression,
        "HF_HOME": str(folder / "home"),
        "HF_XET_LOG_LEVEL": "error",
    }
    for version in versions:
        _run([sys.executable, "-c", _XET, str(folder / "xet"), *map(str, _files(version))], environment)
    kept = folder / "xet" / "xet" / "xorbs"
    return _bytes(kept / "xorbs") + _bytes(kept / "shards")


def _borg(versions: Sequence[Path], folder: Path) -> int | None:
    """The same for borg, compressed, with the level of zstd that its documentation names first."""
    borg = shutil.which("borg")
    if borg is None:
        return None
    environment = {**os.environ, "BORG_BASE_DIR": str(folder / "home"), "BORG_REPO": str(folder / "borg")}
    if not (folder / "borg").exists():
        _run([borg, "init", "--encryption=none"], environment)
    for version in versions:
        _run([borg, "create", "--compression=zstd,3", f"::{version.name}", str(version)], environment)
    return _bytes(folder / "borg")


def _files(version: Path) -> list[Path]:
    return sorted(path for path in version.rglob("*") if path.is_file() and path.stat().st_size)


def _zipnn(versions: Sequence[Path], folder: Path, *, differences: bool = False) -> int | None:
    """The same for ZipNN, which keeps no versions: each file alone, or its exclusive-or with that of the first version."""
    del folder
    if importlib.util.find_spec("zipnn") is None:
        return None
    from zipnn import ZipNN

    taken = 0
    for version in versions:
        for first, path in zip(_files(versions[0]), _files(version), strict=True):
            nbytes = path.read_bytes()
            if differences and version != versions[0]:
                bits = np.frombuffer(nbytes, np.uint8) ^ np.frombuffer(first.read_bytes(), np.uint8)
                nbytes = bits.tobytes()
            # it writes into what it is given
            compressed = ZipNN(bytearray_dtype="bfloat16").compress(bytearray(nbytes))
            if bytes(ZipNN(bytearray_dtype="bfloat16").decompress(compressed)) != nbytes:
                raise ValueError(f"{path}: ZipNN did not return what it was given")
            taken += len(compressed)
    return taken


def _bsdiff(versions: Sequence[Path], folder: Path, *, chain: bool = False) -> int | None:
    """The same for patches of bsdiff against the first version, or each against the one before; the first by zstd."""
    del folder
    if importlib.util.find_spec("bsdiff4") is None:
        return None
    import zstandard

    first = sum(len(zstandard.compress(path.read_bytes(), 3)) for path in _files(versions[0]))
    bases = versions[:-1] if chain else [versions[0]] * (len(versions) - 1)
    pairs = [
        pair
        for base, version in zip(bases, versions[1:], strict=True)
        for pair in zip(_files(base), _files(version), strict=True)
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return first + sum(pool.map(_patch, *zip(*pairs, strict=True)))


def _patch(base: Path, path: Path) -> int:
    import bsdiff4

    return len(bsdiff4.diff(base.read_bytes(), path.read_bytes()))


STORES: dict[str, Callable[[Sequence[Path], Path], int | None]] = {
    "restic": _restic,
    "casync": _casync,
    "hf-xet": _xet,
}


COMPRESSING: dict[str, Callable[[Sequence[Path], Path], int | None]] = {
    "borg": _borg,
    "restic": functools.partial(_restic, compression="auto"),
    "casync": functools.partial(_casync, compressed=True),
    "hf-xet": functools.partial(_xet, compression="auto"),
    "ZipNN, each file alone": _zipnn,
    "ZipNN of what the first version differs in": functools.partial(_zipnn, differences=True),
    "bsdiff, each against the first": _bsdiff,
    "bsdiff, each against the one before": functools.partial(_bsdiff, chain=True),
}
"""With compression, for versions that are kept and not sent. A chain of patches alone is no store: the last of 30 is read
through all 30."""


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
