"""The pool of the campaign, and the models that go into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from blobstore import save_file
from blobstore.pool import Pool

GRACE = 3.0
"""Seconds after which a version is given up; adding one takes less, or ends with an error."""


@dataclass(frozen=True)
class Where:
    """The pool of a run: its URL, the options of its store, and a folder for copies of its tables."""

    url: str
    options: Mapping[str, str]
    cache: Path

    def open(self, *, create: bool = False) -> Pool:
        """The pool."""
        return Pool(self.url, create=create, cache=self.cache, **self.options)


def make_models(folder: Path, seed: int) -> None:
    """Folders with the files of models that are stored whole, as differences, narrower and quantized."""
    random = np.random.default_rng(seed)
    wide = {f"layer.{at}": random.standard_normal((48, 32), np.float32) for at in range(2)}
    half = {name: values.astype(np.float16) for name, values in wide.items()}
    models: dict[str, dict[str, npt.NDArray[np.generic]]] = {"wide": {**wide}, "half": {**half}}
    for number in range(4):
        models[f"tuned{number}"] = {
            name: np.where(random.random(values.shape) < 0.05, np.nextafter(values, np.float16(9)), values)
            for name, values in half.items()
        }
    models["int8"] = {
        name: np.rint(values / (np.abs(values).max(1, keepdims=True) / np.float32(127))).astype(np.int8)
        for name, values in wide.items()
    }
    models["other"] = {"layer.0": random.standard_normal((48, 32), np.float32), "layer.1": wide["layer.1"]}
    for name, tensors in models.items():
        (folder / name).mkdir(parents=True)
        save_file(tensors, folder / name / "model.ptd")
    (folder / "wide" / "notes.bin").write_bytes(random.bytes(20_000))
