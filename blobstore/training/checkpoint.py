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
from dataclasses import dataclass, field
from typing import Any

import xxhash
from torch import Tensor

from blobstore.data_map import NamedDataMap
from blobstore.digest import digest
from blobstore.errors import CheckpointError, IntegrityError, InvalidFileError
from blobstore.layout import ScalarType, TensorLayout
from blobstore.ptd.manifest import KEY_PREFIX
from blobstore.ptd.reader import PtdDataMap, open_ptd
from blobstore.store import BlobStore
from blobstore.tensors import as_bytes, to_torch
from blobstore.training.optimizers import OptimizerState

__all__ = ["Checkpoint", "open_bases", "read", "write"]

_FORMAT = "blobstore training checkpoint"
_BEGIN = b'{"format": "' + _FORMAT.encode()
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
    optimizer: OptimizerState | None = None
    frozen: str = ""

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by key."""
        return {**self.parameters, **self.buffers, **(self.optimizer.tensors if self.optimizer else {})}


@dataclass
class _Listed:
    """A tensor as the list tells of it."""

    layout: TensorLayout
    digest: str
    here: bool


@dataclass
class _List:
    """The list, checked."""

    parameters: list[str]
    buffers: list[str]
    tensors: dict[str, _Listed]
    frozen: str
    bases: list[str]
    optimizer: dict[str, Any] | None = field(default=None)


def open_bases(paths: Sequence[str | os.PathLike[str]]) -> list[PtdDataMap]:
    """The files of a base; where two have a key, the later one counts."""
    return [open_ptd(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def _in_base(bases: Sequence[NamedDataMap], key: str) -> NamedDataMap | None:
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
    listed: dict[str, Any] = {}
    for key, tensor in checkpoint.tensors().items():
        data, layout = as_bytes(tensor)
        if layout is None:
            raise CheckpointError(f"'{key}' is no tensor")
        base = _in_base(bases, key)
        here = base is None or base.get_tensor_layout(key) != layout or base.get_data(key) != data
        address = store.add(key, data, layout=layout, alignment=_ALIGNMENT) if here else digest(data)
        listed[key] = {
            "scalar_type": int(layout.scalar_type),
            "sizes": layout.sizes,
            "dim_order": layout.dim_order,
            "xxh3_128": address.xxh3_128.hex(),
            "here": here,
        }
    optimizer = checkpoint.optimizer
    contents = {
        "format": _FORMAT,
        "version": 0,
        "parameters": list(checkpoint.parameters),
        "buffers": list(checkpoint.buffers),
        "tensors": listed,
        "frozen": checkpoint.frozen,
        "bases": [base.path.name for base in bases],
        "optimizer": optimizer and {"kind": optimizer.kind, "groups": optimizer.groups, "state": optimizer.state},
    }
    blob = json.dumps(contents).encode()
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
    out = Checkpoint(
        {name: found.pop(name) for name in contents.parameters},
        {name: found.pop(name) for name in contents.buffers},
        frozen=contents.frozen,
    )
    if contents.optimizer is not None:
        saved = contents.optimizer
        out.optimizer = OptimizerState(saved["kind"], saved["groups"], saved["state"], found)
    return out


def _take(file: PtdDataMap, bases: Sequence[PtdDataMap], key: str, listed: _Listed, contents: _List) -> Tensor:
    """A copy of one tensor, checked."""
    source: NamedDataMap | None = file if listed.here else _in_base(bases, key)
    if listed.here and key not in file:
        raise InvalidFileError(file.path, f"the checkpoint lists {key!r}, which the file does not have")
    if source is None:
        given = ", ".join(str(base.path) for base in bases) or "none was given"
        raise CheckpointError(
            f"{file.path}: '{key}' is not in the checkpoint but in its base, {', '.join(contents.bases)}; base: {given}"
        )
    data = memoryview(bytearray(source.get_data(key)))
    if source.get_tensor_layout(key) != listed.layout or digest(data).xxh3_128.hex() != listed.digest:
        if listed.here:
            raise IntegrityError(file.path, f"the bytes of {key!r} are damaged: expected {listed.digest}")
        raise CheckpointError(
            f"{file.path}: '{key}' is another in {source.name} than in the base that the checkpoint was written on, "
            f"{', '.join(contents.bases)}: expected {listed.layout} with digest {listed.digest}"
        )
    return to_torch(data, listed.layout)


def _find_list(file: PtdDataMap) -> _List:
    for key in file:
        if key.startswith(KEY_PREFIX) and (data := bytes(file.get_data(key))).startswith(_BEGIN):
            if key != KEY_PREFIX + xxhash.xxh3_128_hexdigest(data):
                raise IntegrityError(file.path, "the list of what belongs to the checkpoint is damaged")
            try:
                return _parse(json.loads(data))
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise InvalidFileError(file.path, f"the checkpoint's list is malformed: {error!r}") from None
    raise InvalidFileError(file.path, "is no checkpoint: it has no list of what belongs to one")


def _parse(contents: Any) -> _List:
    """Check what was read. Raises ValueError, TypeError or KeyError for what `write` cannot have written."""
    if contents["version"] != 0:
        raise ValueError(f"version {contents['version']!r} is not known")
    tensors = {
        _text(key): _Listed(
            TensorLayout(ScalarType(one["scalar_type"]), tuple(one["sizes"]), tuple(one["dim_order"])),
            _text(one["xxh3_128"]),
            one["here"] is True,
        )
        for key, one in contents["tensors"].items()
    }
    names = [_text(name) for name in (*contents["parameters"], *contents["buffers"])]
    if len(set(names)) != len(names) or not set(names) <= set(tensors):
        raise ValueError("the names of parameters and buffers are not those of its tensors")
    optimizer = contents["optimizer"]
    if optimizer is not None:
        _text(optimizer["kind"])
        for group in optimizer["groups"]:
            group["options"].keys()
            [_text(name) for name in group["params"]]
        if not set(optimizer["state"]) <= {name for group in optimizer["groups"] for name in group["params"]}:
            raise ValueError("the optimizer has state for what is none of its parameters")
    return _List(
        [_text(name) for name in contents["parameters"]],
        [_text(name) for name in contents["buffers"]],
        tensors,
        _text(contents["frozen"]),
        [_text(name) for name in contents["bases"]],
        optimizer,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
