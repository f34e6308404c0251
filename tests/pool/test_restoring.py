"""Restoring with threads, and with bases that stay decoded: the files that were added, to the byte (R1, B5)."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from blobstore.core.errors import IntegrityError, PoolError
from blobstore.pool import Pool
from blobstore.pool.bases import KeptBases
from tests.pool.models import contents

SIZES = [(5, 3), (512, 700), (0, 4), (1100, 1031), (64,), (700, 512), (1,)]


def write_version(folder: Path, number: int) -> dict[str, bytes]:
    """Fine-tunes of one model in half and in float, with small, large and empty tensors, and a file that is no checkpoint."""
    random = np.random.default_rng(7)
    weights = {f"t{at}": random.standard_normal(size).astype(np.float32) for at, size in enumerate(SIZES)}
    for step in range(number):
        random = np.random.default_rng(step)
        weights = {key: tensor * np.float32(1 + 2e-4 * random.random()) for key, tensor in weights.items()}
    folder.mkdir(parents=True)
    save_file({key: tensor.astype(np.float16) for key, tensor in weights.items()}, folder / "half.safetensors")
    (folder / "more").mkdir()
    save_file(weights, folder / "more" / "float.safetensors")
    (folder / "empty.txt").touch()
    (folder / "noise.bin").write_bytes(np.random.default_rng(number).bytes(3_000_001))
    return contents(folder)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, bytes]]]:
    folder = tmp_path_factory.mktemp("restoring")
    versions = []
    with Pool(folder / "pool", create=True) as made:
        for number in range(4):
            versions.append(write_version(folder / str(number), number))
            made.add(folder / str(number), f"m@{number}", executor="threads:1")
        encodings = {encoding.partition(":")[0] for encoding in made.stats().encodings}
    assert {"near", "planes", "raw"} <= encodings
    return folder / "pool", versions


@pytest.mark.parametrize("executor", [None, "threads:1", "threads:3", ThreadPoolExecutor(2)])
def test_versions_in_a_row(executor: Any, pool: tuple[Path, list[dict[str, bytes]]], tmp_path: Path) -> None:
    """Also when all bases are decoded already."""
    url, versions = pool
    with Pool(url) as opened:
        for turn in range(2):
            for number, files in enumerate(versions):
                opened.get(f"m@{number}", out := tmp_path / f"{turn}{number}", executor=executor)
                assert contents(out) == files
        assert opened.verify() == []


@pytest.mark.parametrize("executor", ["processes:1", "threads:0", "nobody", 3])
def test_what_has_no_threads(executor: Any, pool: tuple[Path, list[dict[str, bytes]]], tmp_path: Path) -> None:
    """It is refused before there are files."""
    with Pool(pool[0]) as opened, pytest.raises(PoolError, match="threads:"):
        opened.get("m@1", tmp_path / "out", executor=executor)
    assert not (tmp_path / "out").exists()


def test_a_damaged_pack(tmp_path: Path) -> None:
    """Threads bring the error that names the content, and no file is written, also when a base was decoded before."""
    with Pool(tmp_path / "pool", create=True) as opened:
        for number in range(3):
            write_version(tmp_path / str(number), number)
            opened.add(tmp_path / str(number), f"m@{number}", executor="threads:1")
        newest = max(
            (tmp_path / "pool" / "packs").rglob("*"), key=lambda path: (path.is_file(), path.stat().st_mtime_ns)
        )
        data = bytearray(newest.read_bytes())
        for at in range(100, len(data), 5000):
            data[at] ^= 8
        newest.chmod(0o644)
        newest.write_bytes(data)
    with Pool(tmp_path / "pool") as opened:
        for number in (1, 0):
            opened.get(f"m@{number}", tmp_path / f"out{number}", executor="threads:2")
        with pytest.raises(IntegrityError, match="blob"):
            opened.get("m@2", tmp_path / "out2", executor="threads:2")
        assert not [path for path in (tmp_path / "out2").rglob("*") if path.is_file()]
        assert [version for version, _ in opened.verify()] == ["m@2"]


def decode(of: bytes, asked: list[int], number: int) -> Callable[[memoryview], object]:
    def write(room: memoryview) -> None:
        asked.append(number)
        room[:] = hashlib.sha256(of).digest()[:1] * len(room)

    return write


def test_a_base_is_kept_from_its_second_version_on() -> None:
    """Within the budget, each chunk is decoded once; what two versions in a row do not need makes room."""
    bases, one, other = KeptBases(budget=5 << 20), b"1" * 32, b"2" * 32
    bases.next_version()
    assert bases.get(one, 3 << 20) is None
    bases.next_version()
    kept = bases.get(one, 3 << 20)
    assert kept is not None
    asked: list[int] = []
    for number in (2, 0, 2, 0):
        chunk = kept.chunk(number, decode(one, asked, number))
        assert bytes(chunk) == hashlib.sha256(one).digest()[:1] * (1 << 20)
    assert asked == [2, 0]
    assert bases.get(other, 3 << 20) is None
    for _ in range(2):
        bases.next_version()
        assert bases.get(other, 3 << 20) is None  # there is no room yet
    bases.next_version()
    assert bases.get(other, 3 << 20) is not None
    assert bases.get(one, 1) is None
