"""Tensors by name, to a .ptd and back, as the safetensors package does it: in files, or in bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from blobstore.errors import UnsupportedDataError
from blobstore.formats.ptd.reader import PtdDataMap
from blobstore.memory.tensors import bytes_of, to_numpy, to_torch
from blobstore.store import BlobStore
from blobstore.tensor_file import Device, Framework, TensorFile, framework_name

__all__ = ["load", "load_file", "save", "save_file"]


def save_file(
    tensors: Mapping[str, Any],
    filename: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
) -> None:
    """Save tensors by name; equal ones are stored once, tied ones included.

    Args:
        tensors: torch tensors on the CPU or numpy arrays (or other buffers, which become opaque blobs).
        filename: the .ptd; a .ptd that is there is replaced once the new one is complete.
        metadata: free text to keep with the file.
        force: replace a file of any format.

    Raises:
        As `BlobStore.add` and `BlobStore.write_ptd`.
    """
    _store(tensors).write_ptd(filename, metadata=metadata, force=force)


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of the file that `save_file` would write.

    Args:
        tensors, metadata: as for `save_file`.

    Raises:
        As `BlobStore.add` and `BlobStore.to_bytes`.
    """
    return _store(tensors).to_bytes(metadata=metadata)


def _store(tensors: Mapping[str, Any]) -> BlobStore:
    if not isinstance(tensors, Mapping):
        raise UnsupportedDataError(f"expected tensors by name, found a {type(tensors).__qualname__}")
    store = BlobStore()
    for key, tensor in tensors.items():
        store.add(key, tensor)
    return store


def load_file(
    filename: str | os.PathLike[str], framework: Framework = "pt", device: Device = "cpu", *, tied: bool = False
) -> dict[str, Any]:
    """Load all tensors of a .ptd by name; opaque blobs come as uint8. It takes a .safetensors and a .pte, too.

    The tensors lie in private maps of the file: nothing is read before it is used, and writing to a tensor changes
    neither the file nor another process. Each name has memory of its own, also where the file stores equal tensors
    once, so they can be trained apart. `tied` gives names that share a blob one memory, on the CPU.

    Args:
        filename: the file.
        framework: "pt" for torch tensors, "np" for numpy arrays.
        device: where torch tensors are put; on another device than the CPU they are copies. numpy has "cpu" only.
        tied: whether writing to one of the names that share a blob writes to all of them.

    Raises:
        FileAccessError, InvalidFileError: as `open_ptd`; or the system has no more maps, where tens of thousands of
            names share blobs.
        MissingDependencyError: torch is not installed, or numpy needs ml_dtypes for bfloat16 or float8.
        UnsupportedDataError: the framework has no such dtype, or it or the device is not known.
    """
    with TensorFile(filename, framework, device) as file:
        return file.get_tensors(tied=tied)


def load(data: bytes, framework: Framework = "pt") -> dict[str, Any]:
    """Load all tensors of a .ptd that is in memory; opaque blobs come as uint8.

    Each tensor is a copy, which belongs to the caller.

    Args:
        data: what `save` returned, or a file's contents: anything with the buffer protocol.
        framework: "pt" for torch tensors, "np" for numpy arrays.

    Raises:
        InvalidFileError: the bytes are not those of a .ptd. IntegrityError: they are damaged.
        MissingDependencyError, UnsupportedDataError: as `load_file`; or no bytes can be taken from `data`.
    """
    known = framework_name(framework)
    convert: Any = to_torch if known == "pt" else to_numpy
    with PtdDataMap("<bytes>", data=bytes_of(data)) as data_map:
        data_map.verify()
        return {
            key: convert(memoryview(bytearray(view)), data_map.get_tensor_layout(key)) for key, view in data_map.items()
        }
