"""What a file consists of: its regions, and the table that describes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from blobstore.core.errors import InvalidFileError
from blobstore.core.formats.opening import Format, detect_format
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.memory.mapped_file import PIECE, map_file, named, read_pieces
from blobstore.releases.index.index import HOLE_LIMIT, Part, Table

__all__ = ["Region", "digest_of", "plain_table", "regions_of", "size_of"]

_PIECE_OF_OTHER = 1 << 23
"""Files without blobs are cut into regions of this size."""


def size_of(path: Path) -> int:
    """The size of a file in bytes.

    Raises:
        FileAccessError: it is not there, or cannot be reached.
    """
    with named(path):
        return path.stat().st_size


@dataclass(frozen=True)
class Region:
    """A range of a file that is not zeros.

    Attributes:
        offset: where it begins.
        data: its bytes.
        widths: sizes of an element, in bytes, that may make its planes compressible.
        keys: of a blob, its keys.
    """

    offset: int
    data: memoryview
    widths: tuple[int, ...] = (1,)
    keys: tuple[str, ...] = field(default=())


def digest_of(data: memoryview) -> str:
    """The SHA-256 of memory that may be a map of a file.

    Raises:
        FileAccessError: the file was truncated.
    """
    hasher = hashlib.sha256()
    for piece in read_pieces(data):
        hasher.update(piece)
    return hasher.hexdigest()


def regions_of(path: Path, *, keys: bool = True) -> list[Region]:
    """The regions of a file, by ascending offset: the blobs of a .ptd and what lies around them, or pieces.

    Args:
        path: the file.
        keys: look up the keys of blobs.

    Raises:
        FileAccessError, InvalidFileError: it cannot be read.
    """
    if size_of(path) == 0:
        return []
    try:
        if detect_format(path) is Format.PTD:
            return _regions_of_ptd(path, open_ptd(path), keys)
    except InvalidFileError:
        pass  # it is not what its name says; what to do with it is up to its user
    data = map_file(path)
    return [
        Region(start, data[start : start + _PIECE_OF_OTHER], (1, 2, 4))
        for start in range(0, len(data), _PIECE_OF_OTHER)
    ]


def _regions_of_ptd(path: Path, file: PtdDataMap, keys: bool) -> list[Region]:
    data = map_file(path)
    taken: dict[tuple[int, int], list[str]] = {}
    widths: dict[tuple[int, int], int] = {}
    for key in file if keys else ():
        extent = file.byte_range(key)
        taken.setdefault(extent, []).append(key)
        layout = file.get_tensor_layout(key)
        if layout is not None:
            widths.setdefault(extent, layout.scalar_type.itemsize)
    extents = [(0, file.head_size), *file.extents]
    if file.manifest_extent is not None:
        extents.append(file.manifest_extent)
    regions: list[Region] = []
    end = 0
    for start, stop in sorted({extent for extent in extents if extent[0] < extent[1]}):
        regions += _not_zero(data, end, start)
        width = widths.get((start, stop))
        tried = (1, 2, 4) if width is None or width not in {1, 2, 4, 8} else (1,) if width == 1 else (1, width)
        regions.append(Region(start, data[start:stop], tried, tuple(taken.get((start, stop), ()))))
        end = stop
    regions += _not_zero(data, end, len(data))
    return regions


def _not_zero(data: memoryview, start: int, stop: int) -> Iterator[Region]:
    """The pieces of padding that are not zeros, or that are too many, as foreign writers may leave them."""
    for at in range(start, stop, PIECE):
        piece = data[at : min(at + PIECE, stop)]
        if stop - start > HOLE_LIMIT or np.frombuffer(piece, np.uint8).any():
            yield Region(at, piece)


def plain_table(path: Path, sha256: str) -> Table:
    """The table of a file that is here, without other forms.

    Args:
        path: the file.
        sha256: its digest.
    """
    parts = tuple(
        Part(region.offset, len(region.data), digest_of(region.data)) for region in regions_of(path, keys=False)
    )
    return Table("blobstore.table.1", sha256, size_of(path), parts)
