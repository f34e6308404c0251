"""If a file is truncated while its map is being written, that is an error, and old files stay (B5)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore import BlobStore, open_ptd, save_file
from blobstore.core.memory.tensors import FileSlice, to_numpy
from blobstore.core.tools.convert import convert
from blobstore.errors import FileAccessError
from blobstore.programs import dedup_programs

TENSORS = {"a": np.arange(1 << 20, dtype=np.float32), "b": -np.arange(1 << 20, dtype=np.float32)}
LOST = r"source\.ptd: .*truncated: it has 4096 bytes, \d+ are expected"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two tensors, much longer than a piece that is written at a time."""
    save_file(TENSORS, tmp_path / "source.ptd")
    return tmp_path / "source.ptd"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    save_file({"old": np.ones(3, np.float32)}, tmp_path / "out" / "target.ptd")
    return tmp_path / "out" / "target.ptd"


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def cutting(path: Path) -> Callable[[str, int, int], None]:
    """Truncates the file when a part of its first blob is written."""
    return lambda what, done, total: cut(path) if done > 1 << 20 else None


def filled(source: Path, kind: str) -> BlobStore:
    """A store of views into the file."""
    store = BlobStore()
    data_map = open_ptd(source)
    if kind == "data map":
        store.merge(data_map)
    for key in data_map if kind == "arrays" else ():
        store.add(key, to_numpy(data_map.get_data(key), data_map.get_tensor_layout(key)))
    if kind == "file slice":
        start, end = data_map.byte_range("a")
        store.add("a", FileSlice(source, start, end - start))
    return store


@pytest.mark.parametrize("kind", ["data map", "arrays", "file slice"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_writing_a_store(kind: str, when: str, source: Path, target: Path) -> None:
    """The error names the file that lost its end, also while the first blob is written; the target stays (R1, B5)."""
    before = target.read_bytes()
    store = filled(source, kind)
    if when == "before":
        cut(source)
    with pytest.raises(FileAccessError, match=LOST):
        store.write_ptd(target, progress=cutting(source))
    assert target.read_bytes() == before and os.listdir(target.parent) == ["target.ptd"]


def test_adding_to_a_store(source: Path) -> None:
    """Neither the map itself nor a lost blob or base to compare with is read."""
    data_map, on_base, full = open_ptd(source), BlobStore(base=[source]), filled(source, "data map")
    view = data_map.get_data("a")
    cut(source)
    for work in (
        lambda: BlobStore().add("a", view),
        lambda: BlobStore().merge(data_map),
        lambda: on_base.add("a", TENSORS["a"]),
        lambda: full.add("again", TENSORS["a"]),
    ):
        with pytest.raises(FileAccessError, match=LOST):
            work()
    assert len(on_base) == 0 and list(full) == ["a", "b"]


def test_a_file_that_lost_its_end_while_it_was_mapped_is_not_read(source: Path) -> None:
    """Every access to the bytes checks the file first."""
    data_map = open_ptd(source)
    cut(source)
    for work in (lambda: data_map["a"], lambda: list(data_map.values()), lambda: data_map.digest("a")):
        with pytest.raises(FileAccessError, match=LOST):
            work()


@pytest.mark.parametrize("ending", ["ptd", "safetensors"])
def test_converting(ending: str, source: Path, tmp_path: Path) -> None:
    """In both directions; the source is truncated in the middle of the work."""
    if ending == "safetensors":
        convert(source, tmp_path / "source.safetensors")
        source = tmp_path / "source.safetensors"
    target = tmp_path / ("target.ptd" if ending == "safetensors" else "target.safetensors")
    with pytest.raises(FileAccessError, match=r"source\.\w+: .*truncated: it has 4096 bytes"):
        convert(source, target, progress=cutting(source))
    assert not target.exists()


def test_deduplicating(lowered: Any, tmp_path: Path) -> None:
    """If a program is truncated before its constants are in the data file, no output appears."""
    source = tmp_path / "source.pte"
    source.write_bytes(lowered.decoder(delegated=False).pte)

    size = source.stat().st_size

    def cut_while_reading(what: str, done: int, total: int) -> None:
        os.truncate(source, size // 2)

    with pytest.raises(FileAccessError, match=r"source\.pte: .*truncated"):
        dedup_programs([source], tmp_path / "out", progress=cut_while_reading)
    assert not (tmp_path / "out").exists()
