"""Listing what a file holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import UnsupportedDataError
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.opening import open_any
from blobstore.formats.ptd.reader import PtdDataMap
from blobstore.formats.pte.data_map import PteDataMap
from blobstore.formats.safetensors import SafetensorsDataMap
from blobstore.memory.layout import TensorLayout

__all__ = ["BlobInfo", "FileInfo", "inspect_file"]


@dataclass(frozen=True)
class BlobInfo:
    """One key.

    Attributes:
        key: the key; for a constant of a program that has no name, one made of its content.
        kind: "tensor" or "blob"; in a program "constant", "state" or "named data".
        layout: None for opaque bytes.
        nbytes: bytes of the blob.
        alignment: in bytes; 1 if the file does not record it.
        digest: its xxh3-128 in hexadecimal.
        shared: the first key with the same bytes; empty if this is the first.
    """

    key: str
    kind: str
    layout: TensorLayout | None
    nbytes: int
    alignment: int
    digest: str
    shared: str


@dataclass(frozen=True)
class FileInfo:
    """One file.

    Attributes:
        path: the file.
        format: "pte", "ptd" or "safetensors".
        size: bytes of the file.
        facts: other facts about the file, by name.
        blobs: its blobs, in the order of the file.
    """

    path: Path
    format: str
    size: int
    facts: dict[str, str]
    blobs: list[BlobInfo]


def inspect_file(path: str | os.PathLike[str]) -> FileInfo:
    """List a .pte, .ptd or .safetensors.

    Raises:
        FileAccessError, InvalidFileError, UnsupportedDataError: as `open_any`.
    """
    with open_any(path) as data_map:
        facts: dict[str, str] = {}
        kinds: dict[str, str] = {}
        if isinstance(data_map, PtdDataMap):
            file_format = "ptd"
            facts["digests"] = "yes" if data_map.has_digests else "no"
            facts |= {f"metadata {key}": value for key, value in data_map.metadata.items()}
        elif isinstance(data_map, PteDataMap):
            file_format = "pte"
            facts, kinds = _program_facts(data_map)
        elif isinstance(data_map, SafetensorsDataMap):
            file_format = "safetensors"
            facts |= {f"metadata {key}": value for key, value in data_map.metadata.items()}
        else:
            raise UnsupportedDataError(f"{os.fspath(path)}: a file of this format cannot be listed")
        return FileInfo(Path(path), file_format, Path(path).stat().st_size, facts, _blobs(data_map, kinds))


def _blobs(data_map: NamedDataMap, kinds: dict[str, str]) -> list[BlobInfo]:
    first: dict[object, str] = {}
    blobs = []
    for key, data in data_map.items():
        address = data_map.digest(key)
        layout = data_map.get_tensor_layout(key)
        shared = first.setdefault(address, key)
        kind = kinds.get(key, "blob" if layout is None else "tensor")
        alignment = data_map.alignment(key)
        digest = address.xxh3_128.hex()
        blobs.append(BlobInfo(key, kind, layout, len(data), alignment, digest, "" if shared == key else shared))
    return blobs


def _program_facts(data_map: PteDataMap) -> tuple[dict[str, str], dict[str, str]]:
    program = data_map.program
    facts = {"methods": ", ".join(program.methods), "flatbuffer": f"{program.program_size:,} bytes"}
    for delegate in program.delegates:
        name = f"delegate {delegate.method}/{delegate.index}"
        facts[name] = f"{delegate.backend}, payload of {delegate.span.size:,} bytes"
    if program.externals:
        keys = sorted({external.key for external in program.externals})
        facts["external tensors"] = f"{len(keys)}, such as {keys[0]!r}"
    kinds = {item.key: item.kind.replace("_", " ") for item in program.movable()}
    return facts, kinds
