"""Checkpoints: a `.ptd` with parameters, buffers and an optimizer's tensors, and a list of what belongs to it.

The parameters and buffers have their own names as keys, so any reader of `.ptd` files can use them. The list is an
additional blob of JSON under the key `metadata.blobstore.` + xxh3-128 of its bytes. It contains the digest of every
tensor, and the layout of those that are stored in a base instead of the file. Only tensors in the list, with the
digests of the list, are trusted. `runtime_bindings/src/training/checkpoint.cpp` writes and reads the same files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor

from blobstore.core.errors import CheckpointError, IntegrityError, InvalidFileError, KeyConflictError
from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.memory.digest import digest
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import Paths, as_paths
from blobstore.core.memory.tensors import as_bytes, to_torch
from blobstore.core.store import BlobStore
from blobstore.training.json_values import text
from blobstore.training.optimizers import OptimizerState

__all__ = ["Checkpoint", "open_bases", "read", "write"]

_FORMAT = "blobstore training checkpoint"
_VERSION = 0
_BEGIN = b'{"format":"' + _FORMAT.encode()
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # from parsing a list
_ALIGNMENT = 16  # the default of ExecuTorch's serializer


@dataclass
class Checkpoint:
    """One moment of a training run. Its tensors own their memory.

    Attributes:
        parameters, buffers: tensors by name.
        optimizer: the optimizer's state, or None.
        frozen: a digest of the weights that the program uses and does not train; empty if none are in data files.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: OptimizerState | None
    frozen: str


@dataclass
class _Listed:
    """A tensor in the list: the xxh3-128 of its bytes, in hexadecimal, and its layout if it is stored in the base."""

    digest: str
    layout: TensorLayout | None = None


@dataclass
class _List:
    """A list whose structure was checked, except for the optimizer's part, which is checked with its tensors."""

    parameters: list[str]
    buffers: list[str]
    tensors: dict[str, _Listed]
    frozen: str
    bases: list[str]
    optimizer: Any


def open_bases(paths: Paths) -> list[PtdDataMap]:
    """The files of a base. If several have a key, the last one counts."""
    return [open_ptd(path) for path in as_paths(paths)]


def _in_base(bases: Sequence[PtdDataMap], key: str) -> PtdDataMap | None:
    return next((base for base in reversed(bases) if key in base), None)


def write(
    path: str | os.PathLike[str],
    checkpoint: Checkpoint,
    bases: Sequence[PtdDataMap],
    metadata: Mapping[str, str] | None,
) -> int:
    """Write the tensors that the bases lack, and the list. At any time the path has the old file or the new one, whole.

    Returns:
        The size of the file in bytes.
    """
    store = BlobStore()
    optimizer, tensors = checkpoint.optimizer.encode() if checkpoint.optimizer else (None, {})
    listed: dict[str, Any] = {}
    for key, tensor in (*checkpoint.parameters.items(), *checkpoint.buffers.items(), *tensors.items()):
        if key in listed:
            raise KeyConflictError(f"two tensors of the checkpoint would have the key '{key}'")
        data, layout = as_bytes(tensor)
        base = _in_base(bases, key)
        if (
            base is not None
            and layout is not None
            and base.get_tensor_layout(key) == layout
            and base.get_data(key) == data
        ):
            place = [int(layout.scalar_type), layout.sizes, layout.dim_order]
            listed[key] = [digest(data).xxh3_128.hex(), place]
        else:
            listed[key] = [store.add(key, tensor, alignment=_ALIGNMENT).xxh3_128.hex()]
    contents = {
        "format": _FORMAT,
        "version": _VERSION,
        "parameters": list(checkpoint.parameters),
        "buffers": list(checkpoint.buffers),
        "tensors": listed,
        "frozen": checkpoint.frozen,
        "bases": [base.path.name for base in bases],
        "optimizer": optimizer,
    }
    blob = json.dumps(contents, separators=(",", ":")).encode()
    store.add(KEY_PREFIX + xxhash.xxh3_128_hexdigest(blob), blob)
    return store.write_ptd(path, metadata=metadata)


def read(path: str | os.PathLike[str], bases: Sequence[PtdDataMap]) -> Checkpoint:
    """Read a checkpoint from its file and its base, and compare all tensors with their digests.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted, or is not a checkpoint.
        CheckpointError: the base lacks a tensor or has another one in its place.
    """
    with open_ptd(path) as file:
        contents = _find_list(file)
        tensors = {key: _take(file, bases, key, listed, contents) for key, listed in contents.tensors.items()}
        try:
            saved = contents.optimizer
            optimizer = None if saved is None else OptimizerState.decode(saved, tensors)
        except _MALFORMED as error:
            raise _malformed(file, error) from None
    return Checkpoint(
        {name: tensors[name] for name in contents.parameters},
        {name: tensors[name] for name in contents.buffers},
        optimizer,
        contents.frozen,
    )


def _take(file: PtdDataMap, bases: Sequence[PtdDataMap], key: str, listed: _Listed, contents: _List) -> Tensor:
    """A copy of one tensor, after checking it."""
    if listed.layout is None:
        return _take_from_file(file, key, listed.digest)
    named = ", ".join(contents.bases)
    base = _in_base(bases, key)
    if base is None:
        given = ", ".join(str(base.path) for base in bases) or "none is given"
        raise CheckpointError(f"{file.path}: '{key}' is not in the checkpoint but in its base, {named}; {given}")
    data = memoryview(bytearray(base.get_data(key)))
    found, layout = digest(data).xxh3_128.hex(), base.get_tensor_layout(key)
    if found != listed.digest or layout != listed.layout:
        raise CheckpointError(
            f"{file.path}: its base, {named}, is not {base.path}: '{key}' is {listed.layout} with digest {listed.digest} "
            f"in the former, {layout} with digest {found} in the latter"
        )
    return to_torch(data, layout)


def _take_from_file(file: PtdDataMap, key: str, expected: str) -> Tensor:
    if key not in file:
        raise InvalidFileError(file.path, f"the checkpoint's list contains {key!r}, the file does not")
    layout = file.get_tensor_layout(key)
    if layout is None:
        raise InvalidFileError(
            file.path, f"the checkpoint's list contains {key!r}, which is opaque bytes, not a tensor"
        )
    data = memoryview(bytearray(file.get_data(key)))
    if (found := digest(data).xxh3_128.hex()) != expected:
        raise IntegrityError(file.path, f"the bytes of {key!r} are damaged: expected {expected}, found {found}")
    return to_torch(data, layout)


def _find_list(file: PtdDataMap) -> _List:
    for key in file:
        if key.startswith(KEY_PREFIX) and (data := bytes(file.get_data(key))).startswith(_BEGIN):
            if key != KEY_PREFIX + xxhash.xxh3_128_hexdigest(data):
                raise IntegrityError(file.path, "the checkpoint's list of its tensors is damaged")
            try:
                return _parse(json.loads(data))
            except _MALFORMED as error:
                raise _malformed(file, error) from None
    raise InvalidFileError(file.path, "not a checkpoint: the file has no list of a checkpoint's tensors")


def _malformed(file: PtdDataMap, error: Exception) -> InvalidFileError:
    return InvalidFileError(file.path, f"the checkpoint's list of its tensors is malformed: {error!r}")


def _parse(contents: Any) -> _List:
    """Check the JSON of a list. Raises one of `_MALFORMED` if `write` cannot have written it."""
    if contents["version"] != _VERSION:
        raise ValueError(f"unknown version {contents['version']!r}")
    tensors = {key: _listed(*one) for key, one in contents["tensors"].items()}
    parameters, buffers, bases = (list(map(text, contents[what])) for what in ("parameters", "buffers", "bases"))
    names = {*parameters, *buffers}
    if len(names) != len(parameters) + len(buffers) or not names <= set(tensors):
        raise ValueError("a parameter or buffer is named twice, or is not among the tensors")
    return _List(parameters, buffers, tensors, text(contents["frozen"]), bases, contents["optimizer"])


def _listed(address: Any, place: Any = None) -> _Listed:
    if place is None:
        return _Listed(text(address))
    scalar_type, sizes, dim_order = place
    return _Listed(text(address), TensorLayout(ScalarType(scalar_type), tuple(sizes), tuple(dim_order)))
