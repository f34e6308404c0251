"""Files that are truncated while a cache maps them: an error wherever it can be detected, never other weights (B5)."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from blobstore import errors, open_ptd, save_file
from blobstore.runtime import BlobCache, make_working_copy

PAGES = np.arange(65_536, dtype=np.float32)
OLD = {"a": PAGES, "b": -PAGES}
NEW = np.full(65_536, 7, np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(OLD, tmp_path / "plain.ptd")
    make_working_copy(tmp_path / "plain.ptd", tmp_path / "w.ptd")
    return tmp_path / "w.ptd"


WORKS: dict[str, Callable[[BlobCache, Path], object]] = {
    "revert": lambda cache, _: cache.revert(),
    "revert of a key": lambda cache, _: cache.revert("a"),
    "verify": lambda cache, _: cache.verify(),
    "save": lambda cache, folder: cache.save(folder / "saved.ptd"),
    "commit": lambda cache, _: cache.update({"a": NEW}),
}


@pytest.mark.parametrize("work", WORKS)
def test_truncated_file(work: str, path: Path) -> None:
    """The error names the file and its length, and nothing is changed or written."""
    cache = BlobCache(path)
    cache.update({"a": NEW})
    generation = cache.generation
    os.truncate(path, 4096)
    with pytest.raises(errors.FileAccessError, match=r"w\.ptd: .*truncated: it has 4096 bytes, \d+ are expected"):
        WORKS[work](cache, path.parent)
    assert (cache.generation, cache.dirty) == (generation, ("a",))
    assert not (path.parent / "saved.ptd").exists()


def test_remaining_bytes_are_reverted(path: Path) -> None:
    """Keys whose bytes are still in the file can be reverted."""
    cache = BlobCache(path)
    cache.update({"a": NEW, "b": NEW})
    with path.open("rb") as file:
        end = file.read().index(OLD["b"].tobytes()) + OLD["b"].nbytes
    first, last = ("a", "b") if end > path.stat().st_size - 8192 else ("b", "a")
    os.truncate(path, end - OLD[last].nbytes)
    cache.revert(first)
    np.testing.assert_array_equal(cache.numpy(first), OLD[first])
    with pytest.raises(errors.FileAccessError, match="truncated"):
        cache.revert(last)
    assert cache.dirty == (last,)


@pytest.mark.parametrize("work", WORKS)
def test_mode_copy(work: str, path: Path) -> None:
    """A cache of mode "copy" is not affected."""
    cache = BlobCache(path, "copy")
    cache.update({"a": NEW})
    os.truncate(path, 4096)
    WORKS[work](cache, path.parent)
    assert np.array_equal(cache.numpy("a"), PAGES if "revert" in work else NEW)
    assert np.array_equal(cache.numpy("b"), -PAGES)


@pytest.mark.parametrize("work", ["verify", "save", "commit"])
def test_truncated_working_copy(work: str, path: Path) -> None:
    """Every use is an error, and the file is not extended."""
    make_working_copy(path, path.with_name("copy.ptd"))
    path = path.with_name("copy.ptd")
    cache = BlobCache(path, "shared")
    os.truncate(path, 4096)
    with pytest.raises(errors.FileAccessError, match="truncated"):
        WORKS[work](cache, path.parent)
    assert (path.stat().st_size, cache.generation) == (4096, 0)


def test_truncated_file_in_the_python_reader(path: Path) -> None:
    """The Python reader detects it too."""
    with open_ptd(path) as file:
        os.truncate(path, 4096)
        with pytest.raises(errors.FileAccessError, match="truncated: it has 4096 bytes"):
            file.verify()
