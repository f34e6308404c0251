"""What a user finds by looking: modules, names, defaults."""

import pydoc
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import blobstore
from blobstore import errors

MODULES = [
    *("adapters", "errors", "llm", "lowering", "numpy", "pool", "programs", "releases"),
    *("reporting", "runtime", "store", "testing", "torch", "training"),
]


@pytest.mark.long
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_there_after_importing_the_package(name: str) -> None:
    """In a process of its own, because another test may have imported it."""
    code = f"import blobstore; print(blobstore.{name}.__name__)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"blobstore.{name}", done.stderr


def test_dir_lists_public_names_and_no_others() -> None:
    names = dir(blobstore)
    assert set(blobstore.__all__) <= set(names) and {"runtime", "lowering", "__version__"} <= set(names)
    assert not {"annotations", "lazily", "core", "TYPE_CHECKING"} & set(names)
    for name in names:
        assert getattr(blobstore, name) is not None
    modules = [getattr(blobstore, name) for name in MODULES]
    assert {module.__name__ for module in modules} == {
        f"blobstore.{name}" for name in names if isinstance(getattr(blobstore, name), types.ModuleType)
    }
    for module in modules:
        assert sorted(dir(module)) == sorted(module.__all__)
        assert not any(isinstance(getattr(module, name), types.ModuleType) for name in dir(module))


def test_help_is_a_page() -> None:
    page = pydoc.plain(pydoc.render_doc(blobstore))
    for word in ("save_file, load_file", "dedup_programs", "blobstore.runtime", "https://"):
        assert word in page


def test_a_blob_is_a_tensor(tmp_path: Path) -> None:
    """Of the framework that is installed; its bytes are asked for by name."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    blobstore.save_file({"w": array, "raw": b"abc"}, tmp_path / "w.ptd")
    with blobstore.open_ptd(tmp_path / "w.ptd") as data:
        assert torch.equal(data["w"], torch.from_numpy(array))  # type: ignore[arg-type]
        assert data["raw"].tolist() == list(b"abc")
        assert data.bytes("w") == array.tobytes() and isinstance(data.bytes("w"), bytes)
        assert {key: bytes(view) for key, view in data.views()} == {"w": array.tobytes(), "raw": b"abc"}
        assert data.get("nothing") is None
        with pytest.raises(errors.KeyNotFoundError, match="typo"):
            data.bytes("typo")
    loaded = blobstore.load_file(tmp_path / "w.ptd")
    assert isinstance(loaded["w"], torch.Tensor) and loaded["raw"].tolist() == list(b"abc")
    with blobstore.safe_open(tmp_path / "w.ptd") as file:
        assert isinstance(file.get_tensor("w"), torch.Tensor)
