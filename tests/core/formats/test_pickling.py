"""Readers in another process: pickled as the path of their file, never as its bytes."""

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore import MergedDataMap, PtdDataMap, errors, open_ptd, open_pte
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.core.tools.convert import convert
from blobstore.runtime import BlobCache

LARGE = np.zeros(1 << 20)


@pytest.fixture
def folder(lowered: Any, tmp_path: Path) -> Path:
    """One file of every format; one without digests, as ExecuTorch writes it."""
    blobstore.save_file({"w": LARGE, "b": b"opaque"}, tmp_path / "a.ptd")
    blobstore.save_file({"w": LARGE}, tmp_path / "b.ptd")
    convert(tmp_path / "b.ptd", tmp_path / "a.safetensors")
    (tmp_path / "a.pte").write_bytes(lowered.counter().pte)
    without = (tmp_path / "b.ptd").read_bytes()
    with open_ptd(tmp_path / "b.ptd") as data_map:
        assert data_map.manifest_extent is not None
        end = data_map.manifest_extent[0]
    at = without.index(b"FH01") + 40  # the mark in the header's padding vouches for the manifest
    (tmp_path / "plain.ptd").write_bytes(without[:at] + bytes(8) + without[at + 8 : end])
    return tmp_path


READERS: dict[str, Callable[[Path], Any]] = {
    "ptd": lambda folder: open_ptd(folder / "a.ptd"),
    "pte": lambda folder: open_pte(folder / "a.pte"),
    "safetensors": lambda folder: SafetensorsDataMap(folder / "a.safetensors"),
    "merged": lambda folder: MergedDataMap([open_ptd(folder / "a.ptd"), open_ptd(folder / "b.ptd")]),
    "file": lambda folder: blobstore.safe_open(folder / "a.ptd", "np"),
}


def contents(reader: Any) -> dict[str, bytes]:
    if isinstance(reader, blobstore.NamedDataMap):
        return {key: reader.bytes(key) for key in reader}
    return {key: reader.get_tensor(key).tobytes() for key in list(reader.keys())}


def test_a_spawned_process_opens_the_files_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where paths were relative to a folder that the process left. What is pickled is the path, not the bytes."""
    monkeypatch.chdir(folder)
    readers = [make(Path()) for make in READERS.values()]
    monkeypatch.chdir("/")
    for reader in readers:
        raw = pickle.dumps(reader)
        assert len(raw) < 2000 and type(pickle.loads(raw)) is type(reader)  # noqa: S301 - our own
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        found = list(executor.map(contents, readers))
    assert found == [contents(reader) for reader in readers]


@pytest.mark.parametrize("kind", ["ptd", "safetensors", "pte"])
def test_a_file_that_is_gone(folder: Path, kind: str) -> None:
    reader = READERS[kind](folder)
    raw = pickle.dumps(reader)
    reader.sources[0].unlink()
    with pytest.raises(errors.FileAccessError, match=rf"a\.{kind}"):
        pickle.loads(raw)  # noqa: S301


@pytest.mark.parametrize("kind", ["ptd", "safetensors", "pte"])
def test_a_file_that_was_replaced(folder: Path, lowered: Any, kind: str) -> None:
    """By another one of the same format, and by one of another format."""
    path = folder / f"a.{kind}"
    raw = pickle.dumps(READERS[kind](folder))
    new = folder / f"new.{kind}"
    if kind == "pte":
        new.write_bytes(lowered.counter().pte)
    else:  # as large as the old one
        blobstore.save_file({"w": LARGE + 1, "b": b"opaque"} if kind == "ptd" else {"w": LARGE + 1}, folder / "new.ptd")
    if kind == "safetensors":
        convert(folder / "new.ptd", new)
    os.replace(new, path)
    with pytest.raises(errors.DataChangedError, match=rf"a\.{kind}: the file was changed or replaced"):
        pickle.loads(raw)  # noqa: S301
    os.replace(folder / "b.ptd" if kind != "ptd" else folder / "a.safetensors", path)
    with pytest.raises(errors.DataChangedError, match=rf"a\.{kind}: the file was changed or replaced"):
        pickle.loads(raw)  # noqa: S301


def test_a_file_with_digests_may_be_written_again(folder: Path) -> None:
    """What counts is what is in it, not when it was written."""
    reader = open_ptd(folder / "a.ptd")
    raw = pickle.dumps(reader)
    blobstore.save_file({"w": LARGE, "b": b"opaque"}, folder / "a.ptd")
    os.utime(folder / "a.ptd", ns=(1, 1))
    assert contents(pickle.loads(raw)) == contents(reader)  # noqa: S301


def test_a_file_without_digests_must_not_have_been_touched(folder: Path) -> None:
    reader = open_ptd(folder / "plain.ptd")
    assert not reader.has_digests
    raw = pickle.dumps(reader)
    assert contents(pickle.loads(raw)) == contents(reader)  # noqa: S301
    with (folder / "plain.ptd").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"x")
    os.utime(folder / "plain.ptd", ns=(1, 1))  # file systems count time in steps
    with pytest.raises(errors.DataChangedError, match=r"plain\.ptd"):
        pickle.loads(raw)  # noqa: S301


def test_what_cannot_be_pickled(folder: Path) -> None:
    cache = BlobCache(folder / "a.ptd")
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(errors.UnsupportedOperationError, match=r"a\.ptd: a BlobCache cannot be pickled.*'shared'"):
            call(cache)
    with pytest.raises(errors.UnsupportedOperationError, match="BlobCache"):
        pickle.dumps(MergedDataMap([cache]))
    in_memory = PtdDataMap("x.ptd", data=memoryview((folder / "a.ptd").read_bytes()))
    with pytest.raises(errors.UnsupportedOperationError, match=r"x\.ptd: only a map of a file"):
        pickle.dumps(in_memory)
    for make in READERS.values():
        reader = make(folder)
        reader.close()
        with pytest.raises(errors.ClosedError):
            pickle.dumps(reader)
