"""save_file and load_file."""

from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore.errors import FileAccessError, UnsupportedDataError
from tests.helpers.process_memory import mapped_memory, memory


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_names_are_tied_where_that_is_asked_for(framework, tmp_path):
    """With `tied`, names of one blob share memory; writing to it never changes the file, which it outlives (R1, B5)."""
    path = tmp_path / "m.ptd"
    blobstore.save_file({"a": np.ones(3), "b": np.ones(3), "c": np.ones(4)}, path)
    before = path.read_bytes()
    for tied in (False, True):
        loaded = blobstore.load_file(path, framework, tied=tied)
        loaded["a"][0] = 5
        assert loaded["b"].tolist() == [5 if tied else 1, 1, 1]
        assert loaded["c"].tolist() == [1, 1, 1, 1]
    assert path.read_bytes() == before
    path.unlink()
    assert loaded["a"].tolist() == [5, 1, 1]


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs the memory accounting of Linux")
def test_loading_reads_nothing_and_takes_no_memory(tmp_path):
    """Also for names that share a blob: only what is written to takes memory of the process (D1)."""
    large = np.zeros(16 << 20, np.uint8)
    blobstore.save_file({**{str(i): large for i in range(50)}, "other": large[1:]}, tmp_path / "m.ptd")
    del large
    blobstore.load_file(tmp_path / "m.ptd", "np")  # whatever is imported is imported
    before = memory()
    loaded = blobstore.load_file(tmp_path / "m.ptd", "np")
    after = memory()
    assert after["Rss"] - before["Rss"] < 4096
    assert after["Anonymous"] - before["Anonymous"] < 4096
    loaded["7"][::4096] = 1
    assert mapped_memory(tmp_path / "m.ptd", "Anonymous") >= 16 << 20  # of these maps: others free memory meanwhile
    assert not loaded["8"].any()


def test_many_names_of_one_blob_take_no_file_descriptors(tmp_path):
    """One descriptor serves all maps of a file."""
    blobstore.save_file({str(i): np.ones(3) for i in range(3000)}, tmp_path / "m.ptd")
    loaded = blobstore.load_file(tmp_path / "m.ptd", "np")
    for i, array in enumerate(loaded.values()):
        np.add(array, i, out=array)
    assert [array[0] for array in loaded.values()] == [i + 1 for i in range(3000)]


def test_what_a_framework_lacks(tmp_path):
    """A dtype that it lacks, or an unknown framework, is an error that says so."""
    store = blobstore.BlobStore()
    store.add("q", b"\1", layout=blobstore.TensorLayout(blobstore.ScalarType.QINT8, (1,)))
    store.write_ptd(tmp_path / "q.ptd")
    for framework in ("pt", "np", "tf"):
        with pytest.raises(UnsupportedDataError):
            blobstore.load_file(tmp_path / "q.ptd", framework=framework)
    with pytest.raises(FileAccessError):
        blobstore.load_file(tmp_path / "missing.ptd")
