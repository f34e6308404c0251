"""`save_file` and `load_file`: tensors by name in a .ptd, with the API of safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from blobstore.errors import UnsupportedDataError
from blobstore.formats.ptd.reader import PtdDataMap
from blobstore.memory.mapped_file import PrivateFile
from blobstore.memory.tensors import to_numpy, to_torch
from blobstore.store import BlobStore

__all__ = ["load_file", "save_file"]


def save_file(
    tensors: Mapping[str, Any],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
) -> None:
    """Save tensors by name. Equal tensors, including tied ones, are stored once.

    Args:
        tensors: torch tensors on the CPU or numpy arrays; other buffers become opaque blobs.
        filename: the .ptd; one that exists is replaced when the new one is complete.
        metadata: text to store in the file, under text keys.
        force: replace a file of any format.

    Raises:
        As `BlobStore.add` and `BlobStore.write_ptd`.
    """
    if not isinstance(tensors, Mapping):
        raise UnsupportedDataError(f"expected tensors by name, found a {type(tensors).__qualname__}")
    store = BlobStore()
    for key, tensor in tensors.items():
        store.add(key, tensor)
    store.write_ptd(filename, metadata=metadata, force=force)


def load_file(
    filename: str | os.PathLike[str], framework: Literal["pt", "np"] = "pt", *, tied: bool = False
) -> dict[str, Any]:
    """Load all tensors of a .ptd by name; opaque blobs are returned as uint8.

    The tensors are views of private maps of the file, which they keep alive. Nothing is read before it is used, and
    writing to a tensor changes neither the file nor another process. Each name has its own memory, even if the file
    stores equal tensors once, so tensors can be trained independently. With `tied`, names that share a blob share memory.

    Args:
        filename: the .ptd.
        framework: "pt" for torch tensors, "np" for numpy arrays.
        tied: whether writing to a tensor also writes to all others that share its blob.

    Raises:
        FileAccessError, InvalidFileError: as `open_ptd`; or tens of thousands of names share blobs, and the system allows
            no more maps.
        MissingDependencyError: torch is not installed, or numpy needs ml_dtypes for bfloat16 or float8.
        UnsupportedDataError: the framework is unknown, or lacks a dtype of the file.
    """
    if not isinstance(framework, str) or framework not in ("pt", "np"):
        raise UnsupportedDataError(f"framework must be 'pt' or 'np', got {framework!r}")
    convert: Any = to_torch if framework == "pt" else to_numpy
    with PrivateFile(filename) as file, PtdDataMap(filename, data=file.data) as data_map:
        views = dict(data_map)
        if not tied:
            first: dict[int, str] = {}
            later = [k for k, view in views.items() if view and first.setdefault(data_map.segment_of(k), k) != k]
            views |= zip(later, file.again([data_map.byte_range(key) for key in later]), strict=True)
        return {key: convert(view, data_map.get_tensor_layout(key)) for key, view in views.items()}
