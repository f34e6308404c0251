"""What a file consists of: its blobs, with their digests, and small samples of them by which they are compared."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from blobstore.core.codec.elements import element
from blobstore.core.constants import HOLE_LIMIT
from blobstore.core.errors import DataChangedError, InvalidFileError, MissingDependencyError
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import check_length, map_file, named, read_pieces
from blobstore.core.regions.reading import read_regions
from blobstore.core.regions.region import Region, RegionKind
from blobstore.core.regions.source import open_source
from blobstore.pool.digests import blake3
from blobstore.pool.pieces import LEAST

__all__ = [
    "SEED",
    "SKETCHED",
    "FileRange",
    "PartTensor",
    "ScannedFile",
    "ScannedPart",
    "checked",
    "scan",
    "scan_parts",
    "sketched",
]

SEED = 8
"""Bytes of a check that say how it was made."""

SKETCHED = 4096
"""A blob with fewer bytes is only compared for equality."""

_SAMPLES = 256
_PRIMES = 2 * 3 * 5 * 7 * 11
_PIECE = 1 << 23
"""Files that are of no known kind are cut into blobs of this size."""


@dataclass(frozen=True)
class FileRange:
    """Bytes of a local file, `start` to `stop` exclusive."""

    path: str
    start: int
    stop: int

    def view(self) -> memoryview:
        """The bytes, as a map.

        Raises:
            FileAccessError: the file is gone.
            DataChangedError: it is shorter than it was.
        """
        return self.of(map_file(self.path))

    def of(self, data: memoryview) -> memoryview:
        """The same of a map of the file, which was made before."""
        check_length(data)
        view = data[self.start : self.stop]
        if len(view) != self.stop - self.start:
            raise DataChangedError(f"{self.path}: the file changed while it was added")
        return view


class PartTensor(NamedTuple):
    """A tensor as the table of parts has it. Equal bytes may be several, each with its own type and shape."""

    name: str
    dtype: str
    shape: str
    order: str


@dataclass(frozen=True)
class ScannedPart:
    """A range of a file that is one blob.

    Attributes:
        source: where it is.
        digest: SHA-256 of its bytes.
        tensors: those that it is, or is a part of; none for what is not looked up.
        dtype, shape, order: as in the tables.
        sketch: some of its elements; empty if it is small.
        check: of its bytes, as `checked` makes it.
    """

    source: FileRange
    digest: bytes
    tensors: tuple[PartTensor, ...]
    dtype: str
    shape: str
    order: str
    sketch: bytes
    check: bytes

    @property
    def size(self) -> int:
        """Bytes of the blob."""
        return self.source.stop - self.source.start

    @property
    def has_rows(self) -> bool:
        """Whether it may have rows in common with others."""
        return bool(self.dtype) and not self.order and self.size >= LEAST


@dataclass(frozen=True)
class ScannedFile:
    """A file, as its parts; what no part covers is zeros.

    Attributes:
        name: its path in the version.
        size: in bytes.
        sha256, blake3: of all its bytes, in hexadecimal.
        parts: by ascending offset.
    """

    name: str
    size: int
    sha256: str
    blake3: str
    parts: tuple[ScannedPart, ...]


def checked(pieces: Iterable[memoryview], seed: bytes) -> bytes:
    """A check of bytes that are read twice: a fast hash, with a seed that whoever changes them meanwhile does not know."""
    hasher = _check(seed)
    for piece in pieces:
        hasher.update(piece)
    return seed + hasher.digest()


def _check(seed: bytes) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(seed=int.from_bytes(seed, "little"))


def scan(path: str, name: str) -> ScannedFile:
    """Read a file once.

    Raises:
        FileAccessError: it cannot be read, or changes meanwhile.
    """
    with named(Path(path)):
        empty = os.path.getsize(path) == 0  # noqa: PTH202
    if empty:
        return ScannedFile(name, 0, hashlib.sha256().hexdigest(), blake3().hexdigest(), ())
    data = map_file(path)
    whole, fast = hashlib.sha256(), blake3()
    seed = secrets.token_bytes(SEED)
    parts = []
    for region in _regions(path, len(data)):
        view = data[region.start : region.stop]
        own, check = hashlib.sha256(), _check(seed)
        is_hole, zeros = region.kind is RegionKind.PADDING and len(view) <= HOLE_LIMIT, True
        for piece in read_pieces(view):
            whole.update(piece)
            fast.update(piece)
            if is_hole:
                zeros = zeros and not np.frombuffer(piece, np.uint8).any()
            else:
                own.update(piece)
                check.update(piece)
        if is_hole:
            if zeros:
                continue
            own.update(view)
            check.update(view)
        parts.append(_part(path, region, view, own.digest(), seed + check.digest()))
    return ScannedFile(name, len(data), whole.hexdigest(), fast.hexdigest(), tuple(parts))


def _part(path: str, region: Region, view: memoryview, digest: bytes, check: bytes) -> ScannedPart:
    is_blob = region.kind.is_blob
    is_named = is_blob or region.kind is RegionKind.METADATA
    dtype, shape, order = _described(region.layout, region.dtype) if is_blob else ("", "", "")
    return ScannedPart(
        FileRange(path, region.start, region.stop),
        digest,
        tuple(
            PartTensor(key, *_described(layout, region.dtype))
            for key, layout in region.exact
            if is_named and _is_text(key)
        ),
        dtype,
        shape,
        order,
        _sketch(view, element(dtype)[0]) if is_blob and len(view) >= SKETCHED else b"",
        check,
    )


def _is_text(name: str) -> bool:
    """Whether the tables can have a name: a pickle can spell half of a surrogate pair."""
    return name.isascii() or name == name.encode(errors="replace").decode()


def _described(layout: TensorLayout | None, dtype: str) -> tuple[str, str, str]:
    """Type, shape and order of a tensor as in the tables."""
    if layout is None:
        return dtype.lower(), "", ""
    is_plain = layout.dim_order == tuple(range(len(layout.sizes)))
    shape, order = (",".join(map(str, numbers)) for numbers in (layout.sizes, () if is_plain else layout.dim_order))
    return layout.scalar_type.name.lower(), shape, order


def scan_parts(part: ScannedPart, cuts: Sequence[tuple[int, str]]) -> list[ScannedPart]:
    """Take a tensor apart.

    Args:
        part: the tensor.
        cuts: where each part ends, in bytes, and its shape.

    Raises:
        DataChangedError: the file changed since it was scanned.
    """
    view, start, seed = part.source.view(), 0, part.check[:SEED]
    whole, parts = _check(seed), []
    for stop, shape in cuts:
        digest, check = hashlib.sha256(), _check(seed)
        for piece in read_pieces(view[start:stop]):
            for hasher in (digest, check, whole):
                hasher.update(piece)
        source = FileRange(part.source.path, part.source.start + start, part.source.start + stop)
        sketch = _sketch(view[start:stop], element(part.dtype)[0]) if stop - start >= SKETCHED else b""
        own = ScannedPart(
            *(source, digest.digest(), part.tensors, part.dtype, shape, part.order, sketch, seed + check.digest())
        )
        parts.append(own)
        start = stop
    if seed + whole.digest() != part.check:
        raise DataChangedError(f"{part.source.path}: the file changed while it was added")
    return parts


def _sketch(view: memoryview, width: int) -> bytes:
    count = len(view) // width
    elements = np.frombuffer(view[: count * width], f"<u{width}")
    return elements[:: _step(count)][:_SAMPLES].tobytes()


def sketched(count: int) -> npt.NDArray[np.int64]:
    """Which of as many elements are in a sketch."""
    return np.arange(0, count, _step(count), dtype=np.int64)[:_SAMPLES]


def _step(count: int) -> int:
    """Not a multiple of a usual dimension: otherwise, a sketch would have the first column of a matrix, or the corners of filters."""
    step = max(count // _SAMPLES, 1)
    while math.gcd(step, _PRIMES) > 1:
        step -= 1
    return step


def _regions(path: str, size: int) -> Iterator[Region]:
    try:
        with open_source(path) as source:
            regions = read_regions(source)[1]
            source.check_unchanged()
        yield from regions
    except (InvalidFileError, MissingDependencyError):  # of another kind, or a damaged one: it is kept as it is
        for start in range(0, size, _PIECE):
            yield Region(RegionKind.UNREFERENCED, start, min(start + _PIECE, size))
