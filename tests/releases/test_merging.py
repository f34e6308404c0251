"""Merging data files: digests that lie cost no time and are not believed (S1, S3)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash

from blobstore import errors, open_ptd, save_file
from blobstore.releases.index.merging import merge_files


def test_one_digest_for_many_blobs(tmp_path: Path, comparisons: list[int]) -> None:
    """Each blob was compared with all before it."""
    count = 300
    save_file({f"{i}": np.array([i], np.float32) for i in range(count)}, tmp_path / "a.ptd")
    save_file({"z": np.ones(1, np.float32)}, tmp_path / "b.ptd")
    data = (tmp_path / "a.ptd").read_bytes()
    with open_ptd(tmp_path / "a.ptd") as data_map:
        assert data_map.manifest_extent is not None
        start = data_map.manifest_extent[0]
        recorded = [data_map.digest(key).xxh3_128 for key in data_map]
    manifest = data[start:-32]
    for one in recorded:
        manifest = manifest.replace(one, recorded[0])
    lying = data[:start] + manifest + xxhash.xxh3_128_digest(manifest) + data[-16:]
    (tmp_path / "a.ptd").write_bytes(lying)
    (tmp_path / "files").mkdir()
    with pytest.raises(errors.DataChangedError, match="'1'"):
        merge_files(tmp_path / "files", [tmp_path / "a.ptd", tmp_path / "b.ptd"])
    assert 0 < len(comparisons) <= 2 * count
