"""`save_file`, `load_file`, `save`, `load`: tensors by name in a .ptd or in its bytes, with the API of safetensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from blobstore.core.disk.staging import Staging, refuse_inputs
from blobstore.core.formats.keys import check_keys
from blobstore.core.formats.opening import Format, by_name, detect_format
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.sharded import ShardedDataMap
from blobstore.core.memory.batch import Batch
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.memory.tensors import AnyTensor, Array, FileSlice, bytes_of, check_by_name, to_framework
from blobstore.core.store import ptd_bytes, stage_ptd
from blobstore.core.tensor_file import Device, Framework, Numpy, TensorFile, Torch, framework_name

if TYPE_CHECKING:
    import torch

__all__ = ["load", "load_file", "save", "save_file"]


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
    batch = _batch(tensors)
    if not force:
        sources = [as_path(tensor.path) for tensor in tensors.values() if isinstance(tensor, FileSlice)]
        refuse_inputs([as_path(filename)], sources)
    with Staging(force=force) as staging:
        stage_ptd(staging, filename, batch, metadata)


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of the file that `save_file` would write.

    Args:
        tensors, metadata: as for `save_file`.

    Raises:
        As `BlobStore.add` and `BlobStore.to_bytes`.
    """
    return ptd_bytes(_batch(tensors), metadata)


def _batch(tensors: Mapping[str, Any]) -> Batch:
    check_by_name(tensors)
    check_keys(tensors)
    return Batch.of(tensors)


@overload
def load_file(
    filename: str | os.PathLike[str], framework: Torch, device: Device = "cpu", *, tied: bool = False
) -> dict[str, torch.Tensor]: ...
@overload
def load_file(
    filename: str | os.PathLike[str], framework: Numpy, device: Device = "cpu", *, tied: bool = False
) -> dict[str, Array]: ...
@overload
def load_file(
    filename: str | os.PathLike[str], framework: None = None, device: Device = "cpu", *, tied: bool = False
) -> dict[str, AnyTensor]: ...
def load_file(
    filename: str | os.PathLike[str], framework: Framework | None = None, device: Device = "cpu", *, tied: bool = False
) -> Any:
    """Load all tensors of a .ptd by name; opaque blobs are returned as uint8. A .safetensors and a .pte work, too.

    The tensors are views of private maps of the file, which they keep alive. Nothing is read before it is used, and
    writing to a tensor changes neither the file nor another process. Each name has its own memory, even if the file
    stores equal tensors once, so tensors can be trained independently. With `tied`, names that share a blob share memory,
    on the CPU.

    Args:
        filename: the file, or the index of a sharded checkpoint.
        framework: "pt" for torch tensors, "np" for numpy arrays; by default torch's if torch is installed.
        device: where torch tensors are put. On any device other than the CPU they are copies; numpy takes only "cpu".
        tied: whether writing to a tensor also writes to all others that share its blob.

    Raises:
        FileAccessError, InvalidFileError: as `open_ptd`; or tens of thousands of names share blobs, and the system allows
            no more maps.
        MissingDependencyError: torch is not installed, or numpy needs ml_dtypes for bfloat16 or float8.
        UnsupportedDataError: the framework or the device is unknown, or the framework lacks a dtype of the file.
    """
    if by_name(filename) is Format.SHARDS and detect_format(filename) is Format.SHARDS:
        with ShardedDataMap(filename) as checkpoint:
            homes = {key: checkpoint.shard_of(key) for key in checkpoint}
        shards = {path: load_file(path, framework, device, tied=tied) for path in dict.fromkeys(homes.values())}
        return {key: shards[path][key] for key, path in homes.items()}
    opened: TensorFile[Any] = TensorFile(filename, framework, device)
    with opened as file:
        return file.get_tensors(tied=tied)


@overload
def load(data: bytes, framework: Torch) -> dict[str, torch.Tensor]: ...
@overload
def load(data: bytes, framework: Numpy) -> dict[str, Array]: ...
@overload
def load(data: bytes, framework: None = None) -> dict[str, AnyTensor]: ...
def load(data: bytes, framework: Framework | None = None) -> Any:
    """Load all tensors of a .ptd whose bytes are in memory; opaque blobs are returned as uint8.

    Each tensor is a copy, which belongs to the caller.

    Args:
        data: what `save` returned, or a file's contents: anything with the buffer protocol.
        framework: "pt" for torch tensors, "np" for numpy arrays; by default torch's if torch is installed.

    Raises:
        InvalidFileError: the bytes are not a .ptd. IntegrityError: they are damaged.
        MissingDependencyError, UnsupportedDataError: as `load_file`; or `data` has no buffer.
    """
    library = framework_name(framework)
    with PtdDataMap("<bytes>", data=bytes_of(data)) as data_map:
        data_map.verify()
        return {
            key: to_framework(library, memoryview(bytearray(view)), data_map.get_tensor_layout(key))
            for key, view in data_map.views()
        }
