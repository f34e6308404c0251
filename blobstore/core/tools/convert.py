"""`.safetensors` to `.ptd` and back, one file or all in a folder."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from pathlib import Path

from blobstore.core.disk.folders import folders
from blobstore.core.disk.kinds import whole_name
from blobstore.core.disk.progress import Progress
from blobstore.core.disk.staging import Staging, refuse_inputs
from blobstore.core.errors import FileAccessError, OutputPathError, UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.opening import Format, by_name, detect_format
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.formats.ptd.writer import batch_of
from blobstore.core.formats.safetensors import write_safetensors
from blobstore.core.formats.sharded import open_checkpoint
from blobstore.core.memory.dtypes import SAFETENSORS
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import as_path, map_file
from blobstore.core.memory.tensors import in_dim_order
from blobstore.core.store import BlobStore, stage_ptd
from blobstore.core.tools.folders import files_of, nothing_here

__all__ = ["OPAQUE", "convert", "pairs"]

OPAQUE = "blobstore.opaque"
"""Metadata key in a .safetensors; its value is a JSON list of the keys that are opaque blobs, not tensors of bytes."""

_MOST, _ALWAYS = 64, 1 << 28
"""A .safetensors may be this many times as large as its .ptd, and may always have this many bytes."""

_OTHER = {".safetensors": ".ptd", ".ptd": ".safetensors"}


def pairs(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[tuple[Path, Path]]:
    """The files to convert, each with the file to write.

    Args:
        source: a file; or a folder, which stands for each .safetensors and .ptd in it and below it.
        target: the file to write or a folder for it; for a folder the folder that gets its structure. Files in a target
            below the source are outputs of an earlier run, and are not converted.

    Raises:
        FileAccessError: the folder cannot be read, or has no such file.
        OutputPathError: the source is a folder and the target a file; or an output would be one of the inputs.
    """
    source, target = as_path(source), as_path(target)
    into = os.path.isdir(target)  # noqa: PTH112 - raises nothing for a name that is too long
    if not os.path.isdir(source):  # noqa: PTH112 - raises nothing for a name that is too long
        plain = Path(whole_name(source.name))
        name = plain.with_suffix(_OTHER.get(plain.suffix, ".ptd")) if into else ""
        return [(source, target / name)]
    if not into and os.path.lexists(target):
        raise OutputPathError(f"{target}: a folder is converted into a folder, and this is a file")
    inside, output = files_of(source, tuple(_OTHER)), os.path.realpath(target)
    if output != os.path.realpath(source):
        inside = [file for file in inside if not Path(os.path.realpath(file)).is_relative_to(output)]
    if not inside:
        raise FileAccessError(source, nothing_here(tuple(_OTHER)))
    conversions = [(file, target / file.relative_to(source).with_suffix(_OTHER[file.suffix])) for file in inside]
    refuse_inputs([output for _, output in conversions], inside)
    return conversions


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    force: bool = False,
    parents: bool = False,
    dry_run: bool = False,
) -> int:
    """Convert a .safetensors into a .ptd, or a .ptd into a .safetensors, depending on the content of the source.

    The index of a sharded checkpoint stands for all its tensors.

    Names, dtypes, shapes, values and metadata are kept. A .safetensors has neither dim orders nor opaque blobs, so tensors
    are made contiguous, and opaque blobs become tensors of bytes, which become opaque again on the way back.

    Args:
        source: the file to read.
        target: the file to write.
        progress: called after every write.
        force: replace a file of any format; the source itself is never replaced.
        parents: make the folders of the target that are missing.
        dry_run: check everything, and write nothing.

    Returns:
        The size of the target in bytes.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be read or written, or is malformed.
        UnsupportedDataError: the source has neither format, or has a dtype that the target's format lacks, or so many of
            its keys share their bytes that the .safetensors would be more than 64 times as large.
        OutputPathError: the target is the source, its name has another ending than that of the written format, or it is a
            file of another format.
    """
    source, target = as_path(source), as_path(target)
    refuse_inputs([target], [source])
    kind = detect_format(source)
    if by_name(target) is kind:
        raise OutputPathError(f"{target}: the target must have the other format; {source} is {kind.value} already")
    if kind not in (Format.SAFETENSORS, Format.SHARDS, Format.PTD):
        raise UnsupportedDataError(f"{source}: {kind.value}; a .safetensors or a .ptd can be converted into the other")
    if target.suffix and by_name(target) is Format.UNKNOWN:
        other = ".safetensors" if kind is Format.PTD else ".ptd"
        raise OutputPathError(
            f"{target}: expected a name that ends in {other}, because that is the format of the output"
        )
    if dry_run and not parents and not os.path.isdir(target.parent):  # noqa: PTH112
        raise FileAccessError(target, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    with (
        folders([target.parent]) if parents and not dry_run else contextlib.nullcontext(),
        Staging(progress, force=force, dry_run=dry_run) as staging,
    ):
        return (_to_safetensors if kind is Format.PTD else _to_ptd)(source, target, staging)


def _to_ptd(source: Path, target: Path, staging: Staging) -> int:
    with open_checkpoint(source) as data_map:
        metadata = dict(data_map.metadata)
        opaque = _opaque_keys(metadata.pop(OPAQUE, "[]"))
        store = BlobStore()
        for key, data in data_map.views():
            layout = data_map.get_tensor_layout(key)
            if layout is None:
                raise UnsupportedDataError(
                    f"{data_map.name}: tensor {key!r} has dtype {data_map.dtypes[key]} or a size that a .ptd cannot name"
                )
            store.add(key, data, layout=None if key in opaque else layout)
        return stage_ptd(staging, target, batch_of(store.entries()), metadata)


def _opaque_keys(text: str) -> set[str]:
    """The keys listed in the metadata; empty if another application used the name for something else."""
    try:
        keys = json.loads(text)
    except (ValueError, RecursionError):
        return set()
    return {key for key in keys if isinstance(key, str)} if isinstance(keys, list) else set()


def _to_safetensors(source: Path, target: Path, staging: Staging) -> int:
    with open_ptd(source, verify=True) as data_map:
        layouts: dict[str, TensorLayout] = {}
        opaque = []
        for key, data in data_map.views():
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
        total = sum(layout.nbytes for layout in layouts.values())
        most = max(_MOST * len(map_file(source)), _ALWAYS)
        if total > most:
            raise UnsupportedDataError(
                f"{source}: its keys share their bytes, which is impossible in a .safetensors: it would have {total:,} "
                f"bytes, at most {most:,} are written"
            )
        return write_safetensors(staging, target, layouts, functools.partial(_contiguous, data_map), metadata)


def _contiguous(data_map: NamedDataMap, key: str) -> memoryview:
    """The bytes of a tensor in contiguous order; a copy only if they have another order."""
    data, layout = data_map.get_data(key), data_map.get_tensor_layout(key)
    return data if layout is None else in_dim_order(data, layout)
