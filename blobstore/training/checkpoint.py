"""Checkpoints: a `.ptd` with parameters, buffers and an optimizer's tensors, and a list of what belongs to it.

The parameters and buffers have their own names as keys, so any reader of `.ptd` files can use them. The list is one more
blob, JSON, whose key is `metadata.blobstore.` and the xxh3-128 of its bytes. It names each tensor with its layout and
digest, also those that are not in the file because a base has them. Nothing is believed that is not in the list with its
digest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor

from blobstore.errors import CheckpointError, IntegrityError, InvalidFileError, KeyConflictError
from blobstore.formats.ptd.manifest import KEY_PREFIX
from blobstore.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.memory.digest import digest
from blobstore.memory.layout import ScalarType, TensorLayout
from blobstore.memory.mapped_file import Paths, as_paths
from blobstore.memory.tensors import as_bytes, to_torch
from blobstore.store import BlobStore
from blobstore.training.optimizers import OptimizerState

__all__ = ["Checkpoint", "open_bases", "read", "write"]

_FORMAT = "blobstore training checkpoint"
_VERSION = 0
_BEGIN = b'{"format":"' + _FORMAT.encode()
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # of a list
_ALIGNMENT = 16  # as ExecuTorch's own serializer asks for


@dataclass
class Checkpoint:
    """One moment of a training run, in memory of its own.

    Attributes:
        parameters, buffers: by name.
        optimizer: its state, if it is kept.
        frozen: digest of the weights that the program uses and does not change; empty if it has none in data files.
    """

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    optimizer: OptimizerState | None
    frozen: str


@dataclass
class _Listed:
    """A tensor as the list tells of it: with its layout if it is not in the file but in the base."""

    digest: str
    layout: TensorLayout | None = None


@dataclass
class _List:
    """The list, checked; the optimizer's part is checked with its tensors."""

    parameters: list[str]
    buffers: list[str]
    tensors: dict[str, _Listed]
    frozen: str
    bases: list[str]
    optimizer: Any


def open_bases(paths: Paths) -> list[PtdDataMap]:
    """The files of a base; where two have a key, the later one counts."""
    return [open_ptd(path) for path in as_paths(paths)]


def _in_base(bases: Sequence[PtdDataMap], key: str) -> PtdDataMap | None:
    return next((base for base in reversed(bases) if key in base), None)


def write(
    path: str | os.PathLike[str],
    checkpoint: Checkpoint,
    bases: Sequence[PtdDataMap],
    metadata: Mapping[str, str] | None,
) -> int:
    """Write what the bases do not have, and the list. The old file or the new one, whole.

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
        if base is not None and layout is not None and base.get_tensor_layout(key) == layout and base[key] == data:
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
    """Everything that a checkpoint holds, with what its base holds of it, compared with its digests.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted, or is no checkpoint.
        CheckpointError: a tensor is not in the base, or is another there.
    """
    with open_ptd(path) as file:
        contents = _find_list(file)
        found = {key: _take(file, bases, key, listed, contents) for key, listed in contents.tensors.items()}
        try:
            saved = contents.optimizer
            optimizer = None if saved is None else OptimizerState.decode(saved, found)
        except _MALFORMED as error:
            raise _malformed(file, error) from None
    return Checkpoint(
        {name: found[name] for name in contents.parameters},
        {name: found[name] for name in contents.buffers},
        optimizer,
        contents.frozen,
    )


def _take(file: PtdDataMap, bases: Sequence[PtdDataMap], key: str, listed: _Listed, contents: _List) -> Tensor:
    """A copy of one tensor, checked."""
    named = ", ".join(contents.bases)
    if listed.layout is None:
        if key not in file:
            raise InvalidFileError(file.path, f"the checkpoint's list has {key!r}, which the file has not")
        source, layout = file, file.get_tensor_layout(key)
        if layout is None:
            raise InvalidFileError(file.path, f"{key!r} is opaque bytes, a checkpoint has tensors")
    else:
        base, layout = _in_base(bases, key), listed.layout
        if base is None:
            given = ", ".join(str(base.path) for base in bases) or "none is given"
            raise CheckpointError(f"{file.path}: '{key}' is not in the checkpoint but in its base, {named}; {given}")
        source = base
    data = memoryview(bytearray(source.get_data(key)))
    found = digest(data).xxh3_128.hex()
    if source is file and found != listed.digest:
        raise IntegrityError(file.path, f"the bytes of {key!r} are damaged: expected {listed.digest}, found {found}")
    if found != listed.digest or source.get_tensor_layout(key) != layout:
        raise CheckpointError(
            f"{file.path}: its base, {named}, is another than {source.path}: '{key}' is {layout} with digest "
            f"{listed.digest} in the one, {source.get_tensor_layout(key)} with {found} in the other"
        )
    return to_torch(data, layout)


def _find_list(file: PtdDataMap) -> _List:
    for key in file:
        if key.startswith(KEY_PREFIX) and (data := bytes(file.get_data(key))).startswith(_BEGIN):
            if key != KEY_PREFIX + xxhash.xxh3_128_hexdigest(data):
                raise IntegrityError(file.path, "the list of what belongs to the checkpoint is damaged")
            try:
                return _parse(json.loads(data))
            except _MALFORMED as error:
                raise _malformed(file, error) from None
    raise InvalidFileError(file.path, "is no checkpoint: it has no list of what belongs to one")


def _malformed(file: PtdDataMap, error: Exception) -> InvalidFileError:
    return InvalidFileError(file.path, f"the list of what belongs to the checkpoint is malformed: {error!r}")


def _parse(contents: Any) -> _List:
    """Check what was read. Raises one of `_MALFORMED` for what `write` cannot have written."""
    if contents["version"] != _VERSION:
        raise ValueError(f"version {contents['version']!r} is not known")
    tensors = {key: _listed(*one) for key, one in contents["tensors"].items()}
    parameters, buffers, bases = (list(map(_text, contents[what])) for what in ("parameters", "buffers", "bases"))
    names = {*parameters, *buffers}
    if len(names) != len(parameters) + len(buffers) or not names <= set(tensors):
        raise ValueError("parameters and buffers are named twice, or are not among the tensors")
    return _List(parameters, buffers, tensors, _text(contents["frozen"]), bases, contents["optimizer"])


def _listed(address: Any, place: Any = None) -> _Listed:
    if place is None:
        return _Listed(_text(address))
    scalar_type, sizes, dim_order = place
    return _Listed(_text(address), TensorLayout(ScalarType(scalar_type), tuple(sizes), tuple(dim_order)))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
