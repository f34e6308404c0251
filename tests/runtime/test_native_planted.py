"""What the C++ library cleans up is its user's own (S2)."""

import os
from pathlib import Path

import numpy as np
import pytest

from blobstore import save_file
from blobstore.runtime import BlobCache

NAME = f".blobstore-{'0' * 24}.tmp"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("mine", [True, False])
def test_temporary_files_of_another_user_stay(tmp_path: Path, mine: bool) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "a.ptd")
    (tmp_path / NAME).write_bytes(b"temporary")
    if not mine:
        os.chown(tmp_path / NAME, 12345, 12345)
    BlobCache(tmp_path / "a.ptd").save(tmp_path / "b.ptd")
    assert (tmp_path / NAME).exists() != mine
