"""Many tensors at once: each content once, whatever the digests say, and every byte where a plain dictionary has it."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import blobstore
from blobstore.core.errors import DataChangedError, InvalidKeyError, OutputPathError, UnsupportedDataError
from blobstore.core.files import save
from blobstore.core.formats.ptd.writer import write_batch
from blobstore.core.memory.batch import Batch
from blobstore.core.memory.tensors import FileSlice

_MANY: dict[str, Any] = {
    "contiguous": np.arange(12, dtype=np.float32).reshape(3, 4),
    "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "strided": np.arange(24, dtype=np.int16)[::2],
    "big-endian": np.arange(5, dtype=">i4"),
    "scalar": np.float64(2.5),
    "empty": np.zeros((0, 3), np.uint8),
    "bfloat16": np.arange(7).astype(ml_dtypes.bfloat16),
    "again": np.arange(12, dtype=np.float32).reshape(4, 3),
    "torch": torch.arange(12.0).reshape(3, 4),
    "large": np.arange(1 << 19, dtype=np.int32),
    "large again": np.arange(1 << 19, dtype=np.int32),
    "large bfloat16": np.arange(1 << 19).astype(ml_dtypes.bfloat16),
    "large bfloat16 again": np.arange(1 << 19).astype(ml_dtypes.bfloat16),
    "é": b"opaque",
    "last": np.ones(3, np.complex64),
}


def test_all_kinds_of_tensors_between_each_other(tmp_path: Path) -> None:
    """Small and large ones, of any memory; equal ones share a place (R1, R4)."""
    blobstore.save_file(_MANY, tmp_path / "a.ptd")
    assert save(_MANY) == (tmp_path / "a.ptd").read_bytes()
    with blobstore.open_ptd(tmp_path / "a.ptd", verify=True) as data_map:
        assert list(data_map) == list(_MANY)
        for key, tensor in _MANY.items():
            found = data_map.numpy(key)
            expected = np.frombuffer(tensor, np.uint8) if isinstance(tensor, bytes) else np.asarray(tensor)
            assert (found.shape, found.tobytes()) == (
                expected.shape,
                expected.astype(expected.dtype.newbyteorder("<")).tobytes(),
            ), key
        shared = {key: data_map.byte_range(key) for key in data_map}
    assert shared["contiguous"] == shared["again"] == shared["torch"] == shared["transposed"]
    assert shared["large"] == shared["large again"]
    assert shared["large bfloat16"] == shared["large bfloat16 again"]
    assert len(set(shared.values())) == len(_MANY) - 5


@given(st.lists(st.binary(max_size=3), max_size=40), st.integers(0, 2))
def test_each_content_is_known_by_its_first_key(contents: list[bytes], hashed: int) -> None:
    """Also where digests collide: here they are of a few bytes only."""
    with pytest.MonkeyPatch.context() as patch:
        real = xxhash.xxh3_128_digest
        patch.setattr(xxhash, "xxh3_128_digest", lambda data: real(bytes(data)[:hashed]))
        batch = Batch.of({str(number): content for number, content in enumerate(contents)})
    assert batch.first.tolist() == [contents.index(content) for content in contents]
    assert batch.nbytes == sum(map(len, set(contents)))


def test_a_tensor_that_changes_between_many_is_named(tmp_path: Path) -> None:
    """Nothing wrong is written (B5)."""
    tensors = {f"t{number}": np.full(8, number, np.int32) for number in range(100)}
    batch = Batch.of(tensors)
    tensors["t42"][3] = 7
    with (tmp_path / "a.ptd").open("wb") as file, pytest.raises(DataChangedError, match="'t42' changed after"):
        write_batch(file, batch, {})


def test_what_is_wrong_with_one_of_many_is_named(tmp_path: Path) -> None:
    """Nothing is written then."""
    good = {"good": np.ones(3)}
    for more, error, match in [
        ({"bad": [1, 2]}, UnsupportedDataError, "'bad'"),
        ({"dates": np.zeros(2, "M8[s]")}, UnsupportedDataError, "'dates'.*datetime64"),
        ({"": b""}, InvalidKeyError, "non-empty"),
        ({"a\0b": b""}, InvalidKeyError, "NUL"),
        ({"\ud800": b""}, InvalidKeyError, "Unicode"),
        ({7: b""}, InvalidKeyError, "7"),
    ]:
        with pytest.raises(error, match=match):
            blobstore.save_file(good | more, tmp_path / "a.ptd")  # type: ignore[operator]
    assert not (tmp_path / "a.ptd").exists()


def test_a_file_that_bytes_come_from_is_not_replaced(tmp_path: Path) -> None:
    (path := tmp_path / "a.ptd").write_bytes(save({"w": np.ones(3)}))
    with pytest.raises(OutputPathError):
        blobstore.save_file({"head": FileSlice(path, 0, 8)}, path)
