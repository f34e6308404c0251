"""Data files that are damaged, or lie about their digests, below a packed store (S1, B5)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from blobstore import dedup_programs, errors, open_ptd, save_programs
from blobstore.lowering import lower
from blobstore.runtime import BlobCache, PackedStore, Program, make_working_copy
from tests.lowering import nets
from tests.lowering.live import seeded

pytestmark = pytest.mark.long

X = torch.ones(2, 16)


def blobstores(folder: Path) -> tuple[Path, Path]:
    save_programs({"model": lower(seeded(nets.MLP), (X,), tag="model")}, folder)
    return folder / "model.pte", folder / "model.ptd"


def stock(folder: Path) -> tuple[Path, Path]:
    folder.mkdir()
    (folder / "stock.pte").write_bytes(lower(seeded(nets.MLP), (X,)).buffer)
    dedup_programs([folder / "stock.pte"], folder / "slim")
    return folder / "slim" / "stock.pte", folder / "slim" / "shared.ptd"


@pytest.fixture(scope="module", params=[blobstores, stock])
def model(request: Any, tmp_path_factory: Any) -> tuple[Path, Path]:
    return request.param(tmp_path_factory.mktemp("sources") / "model")


@pytest.mark.parametrize("mode", ["private", "copy", "shared"])
def test_nothing_is_packed_of_damaged_weights(model: tuple[Path, Path], mode: Any, tmp_path: Path) -> None:
    """They are an error that names the file, and a good file finds nothing of them in the store."""
    program, data = model
    with open_ptd(data) as data_map:
        place = max((data_map.byte_range(key) for key in data_map), key=lambda one: one[1] - one[0])[0] + 3
    paths = {"good": tmp_path / "good.ptd", "bad": tmp_path / "bad.ptd"}
    for path in paths.values():
        if mode == "shared":
            make_working_copy(data, path)
            with open_ptd(path) as data_map:
                place = max((data_map.byte_range(key) for key in data_map), key=lambda one: one[1] - one[0])[0] + 3
        else:
            path.write_bytes(data.read_bytes())
    damaged = bytearray(paths["bad"].read_bytes())
    damaged[place] ^= 2
    paths["bad"].write_bytes(damaged)
    packed = tmp_path / "packed"

    with pytest.raises(errors.IntegrityError, match=r"bad\.ptd: .*damaged"):
        Program(program, BlobCache(paths["bad"], mode, packed=packed)).method()
    assert list(packed.glob("*.packed")) == []

    right = Program(program, BlobCache(data)).method().execute(X)
    store = PackedStore(packed, verify=True)
    for _ in range(2):
        outputs = Program(program, BlobCache(paths["good"], mode, packed=store)).method().execute(X)
        assert [torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(outputs, right, strict=True)] == [
            True
        ]
    assert store.stats.builds <= 1
