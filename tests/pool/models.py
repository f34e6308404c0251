"""Files of a model and its relatives, made without the code under test."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from safetensors.numpy import save_file

Tensors = dict[str, npt.NDArray[np.generic]]


def tensors(seed: int = 0) -> Tensors:
    """A small model in float32."""
    random = np.random.default_rng(seed)
    return {
        "embed.weight": random.standard_normal((64, 48), np.float32) * np.float32(0.02),
        "layer.weight": random.standard_normal((48, 96), np.float32) * np.float32(0.02),
        "layer.bias": random.standard_normal(96, np.float32),
        "steps": np.arange(3),
    }


def tuned(model: Tensors, seed: int, share: float = 0.05) -> Tensors:
    """The model with a share of its elements moved by one step of their type."""
    random = np.random.default_rng(seed)
    moved: Tensors = {}
    for name, values in model.items():
        moved[name] = values
        if values.dtype.kind == "f":
            nearest = np.nextafter(values, values.dtype.type(np.inf))
            moved[name] = np.where(random.random(values.shape) < share, nearest, values).astype(values.dtype)
    return moved


def halves(model: Tensors) -> Tensors:
    """The model in float16."""
    return {name: values.astype(np.float16) if values.dtype.kind == "f" else values for name, values in model.items()}


def write(path: Path, model: Tensors) -> Path:
    """A .safetensors file, by its own library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(model, path)
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def described(name: str, data: bytes = b"", **other: Any) -> dict[str, Any]:
    """A file as the event of a version describes it."""
    digests = {"sha256": hashlib.sha256(data).hexdigest(), "blake3": blake3(data).hexdigest()}
    return {"name": name, "size": len(data), **digests, **other}
