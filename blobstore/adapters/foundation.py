"""What an adapter is made for: the fingerprint of a foundation, and the named tensors of a file."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from blobstore.adapters.lora_names import is_lora
from blobstore.errors import AdapterError
from blobstore.formats.data_map import MergedDataMap, NamedDataMap
from blobstore.formats.keys import KEY_PREFIX
from blobstore.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.logical.updates import LogicalTensors
from blobstore.memory.layout import ScalarType
from blobstore.memory.mapped_file import Paths, as_paths

__all__ = [
    "FOUNDATION",
    "SCALE",
    "NamedTensor",
    "content_keys",
    "fingerprint",
    "foundation_fingerprint",
    "named_tensors",
    "open_foundation",
]

FOUNDATION = "blobstore.adapter.foundation"
"""Key in the metadata of an adapter: the fingerprint of the foundation."""

SCALE = "blobstore.adapter.scale"
"""Key in the metadata of an adapter: alpha / rank, as Python writes a float."""

_MAGIC = b"BSFOUND0"


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a model in a data file.

    Attributes:
        name: its fully qualified name.
        scalar_type, sizes: its dtype and shape in the model.
        nbytes: its size in the file in bytes; if it is stored in several layouts, the sum.
        keys: the keys that it is stored under.
    """

    name: str
    scalar_type: ScalarType
    sizes: tuple[int, ...]
    nbytes: int
    keys: tuple[str, ...]


def content_keys(blobs: NamedDataMap) -> list[str]:
    """The keys of a file without those of records and manifests."""
    return [key for key in blobs if not key.startswith(KEY_PREFIX)]


def named_tensors(blobs: NamedDataMap, logical: LogicalTensors | None = None) -> dict[str, NamedTensor]:
    """The tensors whose names and shapes a file records: by the layout of a key, or by the record of a delegate's blob.

    Args:
        blobs: the file.
        logical: the tensors of its records, if the caller has them already.
    """
    logical = LogicalTensors(blobs) if logical is None else logical
    found: dict[str, NamedTensor] = {}
    claimed: set[str] = set()
    for name, tensor in logical.items():
        claimed.update(tensor.keys)
        keys = tuple(key for key in dict.fromkeys((name, *tensor.aliases, *tensor.keys)) if key in blobs)
        if keys and not tensor.auxiliary:
            claimed.update(keys)
            nbytes = sum(len(blobs.get_data(key)) for key in keys)
            found[name] = NamedTensor(name, tensor.scalar_type, tensor.sizes, nbytes, keys)
    for key in content_keys(blobs):
        if key not in claimed and (layout := blobs.get_tensor_layout(key)) is not None:
            found[key] = NamedTensor(key, layout.scalar_type, layout.sizes, layout.nbytes, (key,))
    return found


def fingerprint(blobs: NamedDataMap) -> str:
    """The fingerprint of the foundation in a data map, 32 hexadecimal digits; docs/format.md defines it.

    It depends on the keys, layouts and contents of the blobs, but not on their order or on the program that wrote the
    file. Records, manifests and tensors of LoRA adapters do not count. A blob is not read if the file records its
    digest.
    """
    hasher = xxhash.xxh3_128(_MAGIC)
    for name, key in sorted((key.encode(), key) for key in content_keys(blobs)):
        if is_lora(key):
            continue
        layout, digest = blobs.get_tensor_layout(key), blobs.digest(key)
        hasher.update(struct.pack("<I", len(name)) + name)
        if layout is None:
            hasher.update(b"\xff")
        else:
            rank = len(layout.sizes)
            hasher.update(struct.pack(f"<BB{rank}Q{rank}B", layout.scalar_type, rank, *layout.sizes, *layout.dim_order))
        hasher.update(struct.pack("<Q", digest.nbytes) + digest.xxh3_128)
    return hasher.hexdigest()


def foundation_fingerprint(foundation: Paths) -> str:
    """The fingerprint of a foundation, 32 hexadecimal digits. A file that is rewritten with the same keys, layouts and
    contents keeps its fingerprint.

    Args:
        foundation: its `.ptd`, or several that are used together.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        KeyConflictError: two files have different contents under one key.
        AdapterError: a file is an adapter itself, or no file is given.
    """
    with open_foundation(foundation) as blobs:
        return fingerprint(blobs)


def open_foundation(foundation: Paths) -> MergedDataMap:
    """The files of a foundation as one map.

    Raises:
        As `foundation_fingerprint`.
    """
    paths = as_paths(foundation)
    if not paths:
        raise AdapterError("a foundation needs at least one file")
    maps = [open_ptd(path) for path in paths]
    for blobs in maps:
        if is_adapter_file(blobs):
            raise AdapterError(f"{blobs.name}: this file is an adapter, not a foundation")
    return MergedDataMap(maps)


def is_adapter_file(blobs: PtdDataMap) -> bool:
    """Whether a file records a foundation that it was made for, or has only tensors of an adapter."""
    keys = content_keys(blobs)
    return FOUNDATION in blobs.metadata or (bool(keys) and all(is_lora(key) for key in keys))
