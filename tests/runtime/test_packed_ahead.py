"""What a load asks the system to read ahead of the first call, as the system tells which pages are in memory."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from blobstore.errors import InputError
from blobstore.runtime import BlobCache, PackedStore, Program
from blobstore.runtime.packed import DEFAULT_READ_AHEAD
from tests.helpers import memory_limits, waiting
from tests.runtime import packed_files
from tests.runtime.packed_files import Running, ones

pytestmark = pytest.mark.long

MIB = 1 << 20


@contextmanager
def _pages(path: Path) -> Iterator[mmap.mmap]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as pages:
        yield pages


def _in_memory(path: Path) -> np.ndarray:
    """Which pages of a file are in the page cache."""
    with _pages(path) as pages:
        found = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
        at = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        assert mincore(ctypes.c_void_p(at), ctypes.c_size_t(len(pages)), found.ctypes.data_as(ctypes.c_void_p)) == 0
    return found & 1 == 1


def _drop(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def packed(large: Path, tmp_path: Path) -> Path:
    """A folder with a file of packed weights, of 16 MiB, that is not in memory."""
    for _ in range(2):  # the second load verifies what the first one wrote
        packed_files.run_child(folder=large, sizes=[1, 1024], packed=tmp_path)
    path = packed_files.only(tmp_path)
    _drop(path)
    if _in_memory(path).any():
        pytest.skip("this file system keeps files in memory")
    return tmp_path


@pytest.mark.parametrize("nbytes", [0, MIB, 3 * MIB + 4096])
def test_a_load_reads_as_many_bytes_ahead_as_it_may(large: Path, packed: Path, nbytes: int) -> None:
    """From the first entry on, and nothing behind, up to where the table at the end of the file is."""
    store = PackedStore(packed, read_ahead=nbytes)
    running = Running.open(large, ones(1, 1024), store)
    asked = -(-nbytes // mmap.PAGESIZE)
    path = packed_files.only(packed)
    waiting.until(lambda: _in_memory(path)[:asked].all())
    assert not _in_memory(path)[asked : 4 * MIB // mmap.PAGESIZE].any()
    assert running() == Running.open(large, ones(1, 1024))()
    assert store.read_ahead == nbytes and (store.stats.hits, store.stats.fallbacks) == (1, 0)


def test_a_budget_above_the_weights_reads_all_of_them(large: Path, packed: Path) -> None:
    """Up to the last entry."""
    path = packed_files.only(packed)
    end = max(entry.offset + entry.size for entry in packed_files.read(path).entries)
    _drop(path)
    store = PackedStore(packed, read_ahead=2 * end)
    method = Program(large / "model.pte", BlobCache(large / "model.ptd", packed=store)).method()
    waiting.until(lambda: _in_memory(path)[: end // mmap.PAGESIZE].all())
    assert method is not None
    assert PackedStore(packed).read_ahead == DEFAULT_READ_AHEAD


_LOAD = """
import sys
from pathlib import Path
from blobstore.runtime import BlobCache, Program
folder, packed = map(Path, sys.argv[1:])
print(flush=True)
sys.stdin.readline()  # until it is in the group
method = Program(folder / "model.pte", BlobCache(folder / "model.ptd", packed=packed)).method()
print(flush=True)
sys.stdin.readline()  # until it may end
"""


@pytest.mark.skipif(not memory_limits.available(), reason="this process may not limit memory (cgroup)")
def test_no_more_is_read_than_half_of_what_may_be_in_memory(large: Path, packed: Path) -> None:
    """More would replace what was read first."""
    path = packed_files.only(packed)
    with (
        memory_limits.group(16 * MIB) as group,
        subprocess.Popen(
            [sys.executable, "-c", _LOAD, large, packed], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        assert process.stdin and process.stdout
        process.stdout.readline()
        group.add(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        waiting.until(lambda: _in_memory(path)[: 8 * MIB // mmap.PAGESIZE].all())
        assert not _in_memory(path)[8 * MIB // mmap.PAGESIZE : 10 * MIB // mmap.PAGESIZE].any()
        process.stdin.close()


@pytest.mark.parametrize("read_ahead", [-1, 1 << 64, 1.5, "1", None])
def test_other_numbers_are_refused(tmp_path: Path, read_ahead: object) -> None:
    """As those of the limit are."""
    with pytest.raises(InputError, match="read_ahead"):
        PackedStore(tmp_path / "packed", read_ahead=read_ahead)  # type: ignore[arg-type]
