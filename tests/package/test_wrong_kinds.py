"""A wrong kind of argument to anything public here gives success or a BlobStoreError, nothing else."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import blobstore
import blobstore.core.files
import blobstore.core.formats.opening
import blobstore.core.formats.safetensors
import blobstore.core.tensor_file
import blobstore.core.tools.compare
import blobstore.core.tools.convert
import blobstore.core.tools.inspection
import blobstore.numpy
import blobstore.reporting
import blobstore.testing
import blobstore.torch
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.reporting.json_output import to_json
from tests.package.wrong_kinds import PublicCallable, check, public_callables

RESULTS = {  # of which only the library makes objects, or whose names are those of types in annotations
    *(
        *("NamedDataMap", "StoreStats", "Change", "Comparison", "Difference"),
        *("FileComparison", "FolderComparison", "BlobInfo"),
    ),
    *("DelegateInfo", "ExternalInfo", "FileInfo", "Blob", "NamedDataMapContract", "Digest", "TensorSlice"),
    *("Device", "Framework", "Names", "Numpy", "Torch"),
    *(name for name, value in vars(blobstore.reporting).items() if isinstance(value, type)),
}

CALLABLES = [
    one
    for one in public_callables(
        blobstore,
        blobstore.core.tools.compare,
        blobstore.core.tools.convert,
        blobstore.core.formats.opening,
        blobstore.core.tools.inspection,
        blobstore.reporting,
        blobstore.core.files,
        blobstore.core.tensor_file,
        blobstore.torch,
        blobstore.numpy,
        results=RESULTS,
    )
    if one.owner is None or one.owner.__name__ not in RESULTS - {"TensorSlice"}
]


@pytest.fixture(scope="module")
def models(lowered: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program, a data file, a checkpoint, and a report."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "a.pte").write_bytes(lowered.counter().pte)
    blobstore.save_file({"w": np.arange(6.0), "b": b"opaque"}, folder / "a.ptd")
    blobstore.core.tools.convert.convert(folder / "a.ptd", folder / "a.safetensors")
    (folder / "report.json").write_text(json.dumps(to_json(blobstore.report([folder / "a.ptd"]))))
    return folder


def makers(models: Path, folder: Path, one: PublicCallable, manager: Any) -> dict[str, Callable[[], Any]]:
    def store() -> blobstore.BlobStore:
        made = blobstore.BlobStore()
        made.add("w", np.arange(6.0), tag="model")
        return made

    ptd = functools.partial(blobstore.open_ptd, models / "a.ptd")
    return {
        "BlobStore": store,
        "FileSlice": lambda: blobstore.FileSlice(models / "a.ptd", 0, 4),
        "MergedDataMap": lambda: blobstore.MergedDataMap([ptd()]),
        "PtdDataMap": ptd,
        "PteDataMap": lambda: blobstore.open_pte(models / "a.pte"),
        "SafetensorsDataMap": lambda: SafetensorsDataMap(models / "a.safetensors"),
        "TensorLayout": lambda: blobstore.TensorLayout(blobstore.ScalarType.FLOAT, (2,)),
        "PteDataMap.program": lambda: blobstore.open_pte(models / "a.pte").program,
        "TensorFile": lambda: blobstore.safe_open(models / "a.ptd"),
        "TensorSlice": lambda: blobstore.safe_open(models / "a.ptd").get_slice("w"),
        "TensorSlice.__getitem__.index": lambda: 0,
        "framework": lambda: "np",
        "model": lambda: torch.nn.ParameterDict({"w": torch.zeros(6, dtype=torch.float64)}),
        "load_model.strict": lambda: False,
        "name": lambda: "w",
        "load.data": lambda: blobstore.core.files.save({"w": np.zeros(3)}),
        "alignment": lambda: 16,
        "buffer": lambda: bytearray(64),
        "data": lambda: None if one.name == "PtdDataMap" else np.zeros(3),
        "default": lambda: None,
        "directory": lambda: folder / "out",
        "BlobStore.write.directory": lambda: folder,
        "filename": lambda: folder / "x.ptd" if one.name.startswith("save_") else models / "a.ptd",
        "index": lambda: 0,
        "inputs": lambda: models / "a.pte",
        "key": lambda: next(iter(blobstore.open_pte(models / "a.pte"))) if "PteDataMap" in str(one) else "w",
        "BlobStore.add.key": lambda: "new",
        "left": lambda: ptd() if one.name == "compare" else models / "a.ptd",
        "right": lambda: ptd() if one.name == "compare" else models / "a.ptd",
        "maps": lambda: [ptd()],
        "open_names.names": lambda: models / "a.ptd",
        "other": ptd,
        "load_report.path": lambda: models / "report.json",
        "path": lambda: models / ("a.pte" if one.name == "open_pte" else "a.ptd"),
        "BlobStore.write_ptd.path": lambda: folder / "y.ptd",
        "fuse_programs.output": lambda: folder / "one.pte",
        "paths": lambda: [models / "a.ptd"],
        "programs": lambda: {"a": manager},
        "scalar_type": lambda: blobstore.ScalarType.FLOAT,
        "sizes": lambda: (2,),
        "source": lambda: models / "a.ptd",
        "target": lambda: folder / "z.safetensors",
        "tensors": lambda: {"w": np.zeros(3)},
        "TensorFile.equal.other": lambda: "b",
        "BlobStore.merge.other": lambda: blobstore.open_pte(models / "a.pte"),
    }


@pytest.mark.long
@pytest.mark.parametrize("one", CALLABLES, ids=str)
def test_wrong_kinds_of_arguments(
    one: PublicCallable, models: Path, lowered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every public function and method with every wrong kind of argument."""
    folder = tmp_path / "here"  # ".." is one of the values; it must not lead to the files of other tests
    folder.mkdir()
    monkeypatch.chdir(folder)
    check(one, makers(models, folder, one, lowered.counter().manager), folder)
