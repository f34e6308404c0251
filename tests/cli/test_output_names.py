"""Nothing is written under a name that says something else (U1)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.errors import OutputPathError
from blobstore.programs import dedup_programs
from blobstore.releases import publish, pull
from blobstore.reporting import report
from blobstore.runtime import BlobCache, PackedStore, make_working_copy

FILES: dict[str, tuple[str, Callable[[Path, Path], Any]]] = {
    "save_file": ("x.safetensors", lambda data, to: blobstore.save_file({"w": np.zeros(3)}, to)),
    "save_file by force": ("x.pte", lambda data, to: blobstore.save_file({"w": np.zeros(3)}, to, force=True)),
    "write_ptd": ("x.html", lambda data, to: blobstore.BlobStore().write_ptd(to)),
    "cache.save": ("x.safetensors", lambda data, to: BlobCache(data).save(to)),
    "make_working_copy": ("x.pte", lambda data, to: make_working_copy(data, to)),
    "to_html": ("x.ptd", lambda data, to: report([data]).to_html(to)),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_of_another_format(what: str, tmp_path: Path) -> None:
    data = tmp_path / "w.ptd"
    blobstore.save_file({"w": np.zeros(3)}, data)
    name, write = FILES[what]
    with pytest.raises(OutputPathError, match=rf"{name}: this is the name of an? .*, and an? .* would be written"):
        write(data, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["w.ptd"]


FOLDERS: dict[str, Callable[[Path, Path], Any]] = {
    "dedup": lambda data, to: dedup_programs([data], to),
    "dry run of dedup": lambda data, to: dedup_programs([data], to, dry_run=True),
    "publish": lambda data, to: publish([data], to, name="a", version="1"),
    "pull": lambda data, to: pull(data.parent / "releases/a/1", to),
    "packed": lambda data, to: PackedStore(to),
    "packed of a cache": lambda data, to: BlobCache(data, packed=to),
}


@pytest.mark.parametrize("what", FOLDERS)
def test_any_folder_with_the_name_of_a_file(what: str, tmp_path: Path) -> None:
    data = tmp_path / "w.ptd"
    blobstore.save_file({"w": np.zeros(3)}, data)
    publish([data], tmp_path / "releases", name="a", version="1")
    for name in ("out.pte", "out.html"):
        with pytest.raises(OutputPathError, match=rf"{name}: this is the name of an? .*; expected that of a folder"):
            FOLDERS[what](data, tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"w.ptd", "releases"}
    (tmp_path / "out.pte").mkdir()
    FOLDERS[what](data, tmp_path / "out.pte")


@pytest.mark.parametrize("name", ["weights", "weights.dat", "w.PTD"])
def test_names_that_say_nothing(name: str, tmp_path: Path) -> None:
    blobstore.save_file({"w": np.zeros(3)}, tmp_path / name)
    assert blobstore.load_file(tmp_path / name)["w"].shape == (3,)
