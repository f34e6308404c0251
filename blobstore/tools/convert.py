"""`.safetensors` to `.ptd` and back."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

from blobstore.disk.progress import Progress
from blobstore.disk.staging import Staging, refuse_inputs
from blobstore.errors import OutputPathError, UnsupportedDataError
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.opening import Format, by_name, detect_format
from blobstore.formats.ptd.reader import open_ptd
from blobstore.formats.safetensors import SafetensorsDataMap, write_safetensors
from blobstore.memory.dtypes import SAFETENSORS
from blobstore.memory.layout import ScalarType, TensorLayout
from blobstore.memory.mapped_file import as_path, map_file
from blobstore.memory.tensors import in_dim_order
from blobstore.store import BlobStore

__all__ = ["OPAQUE", "convert"]

OPAQUE = "blobstore.opaque"
"""Metadata key in a .safetensors; its value is a JSON list of the keys that are opaque blobs, not tensors of bytes."""

_MOST, _ALWAYS = 64, 1 << 28
"""A .safetensors may be this many times as large as its .ptd, and may always have this many bytes."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    force: bool = False,
) -> None:
    """Convert a .safetensors into a .ptd, or a .ptd into a .safetensors, depending on the content of the source.

    Names, dtypes, shapes, values and metadata are kept. A .safetensors has neither dim orders nor opaque blobs, so tensors
    are made contiguous, and opaque blobs become tensors of bytes, which become opaque again on the way back.

    Args:
        source: the file to read.
        target: the file to write.
        progress: called after every write.
        force: replace a file of any format; the source itself is never replaced.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be read or written, or is malformed.
        UnsupportedDataError: the source has neither format, or has a dtype that the target's format lacks, or so many of
            its keys share their bytes that the .safetensors would be more than 64 times as large.
        OutputPathError: the target is the source, its name ends like the source's format, or it is a file of a format
            that differs from the written one.
    """
    source, target = as_path(source), as_path(target)
    refuse_inputs([target], [source])
    kind = detect_format(source)
    if by_name(target) is kind:
        raise OutputPathError(f"{target}: the target must have the other format; {source} is {kind.value} already")
    if kind is Format.SAFETENSORS:
        _to_ptd(source, target, progress, force)
    elif kind is Format.PTD:
        _to_safetensors(source, target, progress, force)
    else:
        raise UnsupportedDataError(f"{source}: {kind.value}; a .safetensors or a .ptd can be converted into the other")


def _to_ptd(source: Path, target: Path, progress: Progress | None, force: bool) -> None:
    with SafetensorsDataMap(source) as data_map:
        metadata = dict(data_map.metadata)
        opaque = _opaque_keys(metadata.pop(OPAQUE, "[]"))
        store = BlobStore()
        for key, data in data_map.items():
            layout = data_map.get_tensor_layout(key)
            if layout is None:
                raise UnsupportedDataError(
                    f"{data_map.name}: tensor {key!r} has dtype {data_map.dtypes[key]} or a size that a .ptd cannot name"
                )
            store.add(key, data, layout=None if key in opaque else layout)
        store.write_ptd(target, metadata=metadata, progress=progress, force=force)


def _opaque_keys(text: str) -> set[str]:
    """The keys listed in the metadata; empty if another application used the name for something else."""
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError):
        return set()
    return {key for key in keys if isinstance(key, str)} if isinstance(keys, list) else set()


def _to_safetensors(source: Path, target: Path, progress: Progress | None, force: bool) -> None:
    with open_ptd(source, verify=True) as data_map:
        layouts: dict[str, TensorLayout] = {}
        opaque = []
        for key, data in data_map.items():
            layout = data_map.get_tensor_layout(key)
            if layout is None:
                opaque.append(key)
                layout = TensorLayout(ScalarType.BYTE, (len(data),))
            if layout.scalar_type not in SAFETENSORS.values():
                raise UnsupportedDataError(f"{data_map.name}: {key!r} is {layout}, which a .safetensors cannot name")
            layouts[key] = TensorLayout(layout.scalar_type, layout.sizes)
        metadata = dict(data_map.metadata)
        if opaque:
            metadata[OPAQUE] = json.dumps(opaque)
        nbytes = sum(layout.nbytes for layout in layouts.values())
        most = max(_MOST * len(map_file(source)), _ALWAYS)
        if nbytes > most:
            raise UnsupportedDataError(
                f"{source}: its keys share their bytes, which is impossible in a .safetensors: it would have {nbytes:,} "
                f"bytes, at most {most:,} are written"
            )
        with (
            Staging(progress, force=force) as staging,
            staging.open(target, nbytes, kind=Format.SAFETENSORS) as file,
        ):
            write_safetensors(file, layouts, functools.partial(_contiguous, data_map), metadata)


def _contiguous(data_map: NamedDataMap, key: str) -> memoryview:
    """The bytes of a tensor in contiguous order; a copy only if they have another order."""
    data, layout = data_map.get_data(key), data_map.get_tensor_layout(key)
    return data if layout is None else in_dim_order(data, layout)
