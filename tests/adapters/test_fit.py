"""Whether an adapter fits a foundation is told before anything runs (D2, L2). Nothing is lowered for that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blobstore import save_file
from blobstore.adapters import foundation_fingerprint, inspect_adapters
from blobstore.adapters.foundation import library
from blobstore.errors import KeyConflictError


@pytest.fixture
def foundation(tmp_path: Path) -> Path:
    save_file({"layer.weight": np.ones((6, 4), np.float32)}, tmp_path / "foundation.ptd")
    return tmp_path / "foundation.ptd"


def adapter(folder: Path, sizes: tuple[int, int], of: str | None, module: str = "layer") -> Path:
    """A file with one pair, for a weight of these sizes."""
    tensors = {
        f"{module}.lora_a.weight": np.ones((2, sizes[1]), np.float32),
        f"{module}.lora_b.weight": np.ones((sizes[0], 2), np.float32),
    }
    metadata = {"blobstore.adapter.foundation": of} if of else {}
    save_file(tensors, folder / "adapter.ptd", metadata=metadata)
    return folder / "adapter.ptd"


def problems(foundation: Path, adapter: Path) -> tuple[str, ...]:
    [found] = inspect_adapters(foundation, adapter).adapters
    assert found.fits == (not found.problems)
    return found.problems


def test_an_adapter_fits_its_foundation_alone(foundation: Path, tmp_path: Path) -> None:
    mine = foundation_fingerprint(foundation)
    assert problems(foundation, adapter(tmp_path, (6, 4), mine)) == ()
    assert problems(foundation, adapter(tmp_path, (6, 4), None)) == ()
    [problem] = problems(foundation, adapter(tmp_path, (6, 4), "0" * 32))
    assert mine in problem and "0" * 32 in problem


@pytest.mark.parametrize("sizes", [(4, 6), (6, 5), (1, 1)])
def test_the_product_has_the_shape_of_the_weight(foundation: Path, tmp_path: Path, sizes: tuple[int, int]) -> None:
    [problem] = problems(foundation, adapter(tmp_path, sizes, None))
    assert "layer.weight" in problem and str(list(sizes)) in problem


def test_a_module_is_in_the_foundation(foundation: Path, tmp_path: Path) -> None:
    [problem] = problems(foundation, adapter(tmp_path, (6, 4), None, "other"))
    assert "other" in problem


def test_files_of_a_foundation_agree(foundation: Path, tmp_path: Path) -> None:
    """One key has one content and one layout in all of them."""
    for other in (np.full((6, 4), 2, np.float32), np.ones((4, 6), np.float32)):
        save_file({"layer.weight": other}, tmp_path / "other.ptd")
        with pytest.raises(KeyConflictError, match=r"layer\.weight"):
            foundation_fingerprint([foundation, tmp_path / "other.ptd"])


def test_a_fingerprint_in_a_file_is_one(foundation: Path, tmp_path: Path) -> None:
    """It is printed, and compared with others."""
    for text in ("0" * 31, "0" * 33, "G" * 32, "", "A" * 32):
        path = adapter(tmp_path, (6, 4), text or " ")
        with pytest.raises(ValueError, match="fingerprint"):
            library().Adapter.read(bytes(path))
