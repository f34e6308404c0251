"""A file of any format opens with its own reader, whatever its name (R5)."""

import numpy as np
import pytest
import safetensors.numpy

from blobstore import BlobStore, PtdDataMap, PteDataMap
from blobstore.core.formats.opening import open_any
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.errors import FileAccessError, InvalidFileError, UnsupportedDataError


def test_the_contents_choose_the_reader(lowered, tmp_path):
    """Files are often renamed."""
    store = BlobStore()
    store.add("w", np.ones(2, np.float32))
    store.write_ptd(tmp_path / "a")
    safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, tmp_path / "b")
    lowered.mlp().write(tmp_path, "c").rename(tmp_path / "c")
    for name, kind in {"a": PtdDataMap, "b": SafetensorsDataMap, "c": PteDataMap}.items():
        for ending in ("", ".pte", ".ptd", ".safetensors"):
            (tmp_path / f"copy{ending}").write_bytes((tmp_path / name).read_bytes())
            with open_any(tmp_path / f"copy{ending}") as data_map:
                assert type(data_map) is kind
                assert len(data_map) > 0


def test_other_files_are_refused(tmp_path):
    """The error says what kind of file it is."""
    (tmp_path / "page").write_text("<html></html>")
    (tmp_path / "notes").write_text("some text of a user")
    (tmp_path / "bad.ptd").write_text("some text of a user")
    for name, error in {
        "page": UnsupportedDataError, "notes": UnsupportedDataError, "bad.ptd": InvalidFileError, "none": FileAccessError,
    }.items():  # fmt: skip
        with pytest.raises(error, match=name):
            open_any(tmp_path / name)
