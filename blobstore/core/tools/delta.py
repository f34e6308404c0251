"""What of data files and checkpoints differs from a base: only these tensors, each file in its own format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.disk.folders import folders
from blobstore.core.disk.kinds import whole_name
from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.disk.staging import Staging, check_writable, refuse_inputs
from blobstore.core.errors import OutputPathError, UnsupportedDataError
from blobstore.core.formats.keys import OF_PROGRAMS
from blobstore.core.formats.opening import Format, detect_format
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.formats.ptd.writer import batch_of
from blobstore.core.formats.safetensors import CheckpointDataMap, write_safetensors
from blobstore.core.formats.sharded import open_checkpoint
from blobstore.core.memory.buffers import address_of, same_bytes
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths, same_file
from blobstore.core.programs.deployed import USERS
from blobstore.core.programs.inputs import output_places
from blobstore.core.store import BlobStore, stage_ptd

__all__ = ["DeltaResult", "write_deltas"]

_DataMap = PtdDataMap | CheckpointDataMap


@dataclass(frozen=True)
class DeltaResult:
    """What became of one file.

    Attributes:
        source: the file that was given.
        path: the file with what differs.
        bytes_before, bytes_after: the sizes of the two in bytes.
        keys: the number of keys in `path`.
        left_out: the number of keys that the base has with equal bytes.
    """

    source: Path
    path: Path
    bytes_before: int
    bytes_after: int
    keys: int
    left_out: int


def write_deltas(
    base: str | os.PathLike[str],
    files: Paths,
    directory: str | os.PathLike[str],
    *,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> list[DeltaResult]:
    """Write of each file the tensors and blobs that the base does not have under the same key with equal bytes and layout.

    All tensors of a file are those of the base, replaced and completed by those of its delta:
    `{**load_file(base), **load_file(delta)}`. Either all files are written or none.

    Args:
        base: a `.ptd` or `.safetensors`, or the index of a sharded checkpoint; it stays as it is.
        files: one or several of these; each delta has the format of its file, and that of a sharded checkpoint is one file.
        directory: where the deltas go under the names of the files; made if it is missing. Files of one name keep as many of
            their parent folders as needed.
        force: replace files of any format.
        dry_run: check and compute everything, and write nothing.
        progress: called with every step.

    Returns:
        One entry for each file, in the order in which they were given.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be read or written, or is malformed or damaged.
        UnsupportedDataError: a file has neither format, or a dtype that cannot be written; or it lacks a key of the base,
            which a delta cannot take away.
        OutputPathError: an output would be the base or one of the files, or a file of another format.
    """
    check_progress(progress)
    base, directory, sources = as_path(base), as_path(directory), as_paths(files)
    if twice := next((path for path in sources if same_file(path, base)), None):
        raise OutputPathError(f"{twice}: this is the base; give only the files that are compared with it")
    places = output_places([(path, Path(path.name)) for path in sources])
    outputs = [directory / place.with_name(whole_name(place.name)) for place in places]
    refuse_inputs(outputs, [base, *sources])
    if dry_run:
        check_writable(directory, directory)
    with (
        _opened(base) as reference,
        folders([] if dry_run else [output.parent for output in outputs]),
        Staging(progress, force=force, folder=directory, dry_run=dry_run) as staging,
    ):
        return [_delta(reference, *paths, staging) for paths in zip(sources, outputs, strict=True)]


def _opened(path: Path) -> _DataMap:
    kind = detect_format(path)
    if kind is Format.PTD:
        return open_ptd(path, verify=True)
    if kind in {Format.SAFETENSORS, Format.SHARDS}:
        return open_checkpoint(path)
    raise UnsupportedDataError(f"{path}: {kind.value}; expected a .ptd or a .safetensors")


def _delta(base: _DataMap, source: Path, output: Path, staging: Staging) -> DeltaResult:
    with _opened(source) as data_map:
        if missing := next((key for key in base if key not in data_map), None):
            raise UnsupportedDataError(
                f"{source}: it lacks key {missing!r} of {base.name}; a delta cannot take a key away"
            )
        known: dict[tuple[int, ...], bool] = {}
        kept = [key for key in data_map if not _has(base, data_map, key, known)]
        if isinstance(data_map, PtdDataMap):
            nbytes = _write_ptd(data_map, kept, output, staging)
        else:
            nbytes = _write_safetensors(data_map, kept, output, staging)
        bytes_before = sum(path.stat().st_size for path in data_map.sources)
        left_out = len(data_map) - len(kept)
    return DeltaResult(source, output, bytes_before, nbytes, len(kept), left_out)


def _has(base: _DataMap, data_map: _DataMap, key: str, known: dict[tuple[int, ...], bool]) -> bool:
    """Whether a base has an equal blob under a key.

    `known` has which places are equal, so that each two are compared once: a small file may have millions of keys for one
    large blob.
    """
    if (
        key not in base
        or base.get_tensor_layout(key) != data_map.get_tensor_layout(key)
        or _dtype(base, key) != _dtype(data_map, key)
    ):
        return False
    one, other = base.get_data(key), data_map.get_data(key)
    places = (*address_of(one), *address_of(other))
    if places not in known:
        known[places] = same_bytes(one, other)
    return known[places]


def _dtype(data_map: _DataMap, key: str) -> tuple[str, tuple[int, ...]] | None:
    """The dtype and shape of what a layout cannot express; None for what it can, and for opaque blobs."""
    if isinstance(data_map, PtdDataMap) or data_map.get_tensor_layout(key) is not None:
        return None
    return data_map.dtypes[key], data_map.shapes[key]


def _write_ptd(data_map: PtdDataMap, keys: Sequence[str], output: Path, staging: Staging) -> int:
    store = BlobStore()
    for key in keys:
        layout, alignment = data_map.get_tensor_layout(key), data_map.alignment(key)
        store.add(key, data_map.get_data(key), alignment=alignment, layout=layout)
    # a delta is not the data file that programs were written with
    of_programs = {*OF_PROGRAMS, USERS}
    metadata = {name: text for name, text in data_map.metadata.items() if name not in of_programs}
    return stage_ptd(staging, output, batch_of(store.entries()), metadata)


def _write_safetensors(data_map: CheckpointDataMap, keys: Sequence[str], output: Path, staging: Staging) -> int:
    layouts: dict[str, TensorLayout] = {}
    for key in keys:
        layout = data_map.get_tensor_layout(key)
        if layout is None:
            raise UnsupportedDataError(
                f"{data_map.name}: tensor {key!r} has dtype {data_map.dtypes[key]} or too large a size"
            )
        layouts[key] = layout
    return write_safetensors(staging, output, layouts, data_map.get_data, data_map.metadata)
