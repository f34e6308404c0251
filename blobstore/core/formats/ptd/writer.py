"""Writing a .ptd: the table of contents first, then each blob once, straight from its memory; see docs/format.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import xxhash

from blobstore.core.errors import DataChangedError, InvalidAlignmentError
from blobstore.core.formats.alignment import SEGMENT_ALIGNMENT, align_up
from blobstore.core.formats.ptd.header import FLATBUFFER_OFFSET, START, Header
from blobstore.core.formats.ptd.manifest import MAGIC, Manifest
from blobstore.core.formats.ptd.opaque import stand_ins
from blobstore.core.formats.ptd.table import encode_table
from blobstore.core.memory.batch import Batch
from blobstore.core.memory.digest import Digest
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import PIECE, check_length, read_pieces
from blobstore.core.memory.tensors import as_bytes

__all__ = ["MAX_ALIGNMENT", "BlobEntry", "batch_of", "copy_checked", "write_batch", "write_ptd"]

MAX_ALIGNMENT = 1 << 30
"""The largest alignment of a blob, and the largest common multiple in a file; it bounds the padding."""


class BlobEntry(NamedTuple):
    """One key of a file that will be written.

    Attributes:
        key: UTF-8 text without NUL, unique in the file.
        data: the bytes; entries with the same `blob` have the same bytes.
        digest: their content address.
        blob: number of the blob; entries with the same number share a segment.
        alignment: the alignment requested for this key, in bytes.
        layout: how the bytes form a tensor; None for opaque bytes.
    """

    key: str
    data: memoryview
    digest: Digest
    blob: int
    alignment: int
    layout: TensorLayout | None


def write_ptd(file: BinaryIO, entries: Sequence[BlobEntry], metadata: Mapping[str, str]) -> int:
    """`write_batch` with one object for each key."""
    return write_batch(file, batch_of(entries), metadata)


def batch_of(entries: Sequence[BlobEntry]) -> Batch:
    """The same keys as columns."""
    numbers: dict[int, int] = {}
    first = [numbers.setdefault(entry.blob, at) for at, entry in enumerate(entries)]
    return Batch(
        [entry.key for entry in entries],
        [entry.data for entry in entries],
        [entry.layout for entry in entries],
        np.frombuffer(b"".join(entry.digest.xxh3_128 for entry in entries), np.uint8).reshape(-1, 16),
        np.array(first, np.int64),
        np.array([entry.alignment for entry in entries], np.uint32),
    )


def write_batch(file: BinaryIO, batch: Batch, metadata: Mapping[str, str]) -> int:
    """Write a .ptd to an empty file; the result depends on nothing but the values of the arguments.

    Args:
        file: where to write; it is only written, never positioned.
        batch: the keys, in the order of the file; the blobs follow the order of their first keys.
        metadata: text to store with the file.

    Returns:
        The size of the file in bytes.

    Raises:
        DataChangedError: the bytes of a blob no longer have its digest. The file must then be discarded.
        FileAccessError: a file that holds the blobs was truncated.
        InvalidAlignmentError: the common multiple of all alignments is above `MAX_ALIGNMENT`.
        OSError: writing failed.
    """
    requested = sorted({SEGMENT_ALIGNMENT, *np.unique(batch.alignments).tolist()})
    base_alignment = math.lcm(*requested)
    if base_alignment > MAX_ALIGNMENT:
        raise InvalidAlignmentError(f"the alignments {requested} have a common multiple above {MAX_ALIGNMENT}")
    blobs = np.flatnonzero(batch.first == np.arange(len(batch.keys)))
    index = np.searchsorted(blobs, batch.first)
    alignments = np.full(len(blobs), SEGMENT_ALIGNMENT, np.int64)
    np.lcm.at(alignments, index, batch.alignments.astype(np.int64))
    sizes = [batch.data[at].nbytes for at in blobs.tolist()]
    offsets, end = [], 0
    for size, alignment in zip(sizes, alignments.tolist(), strict=True):
        offsets.append(align_up(end, alignment))
        end = offsets[-1] + size

    layouts = stand_ins(batch.layouts, [data.nbytes for data in batch.data])
    head = encode_table(batch.keys, index, layouts, offsets, sizes)
    base = align_up(len(head), base_alignment)
    header = Header(FLATBUFFER_OFFSET, len(head) - FLATBUFFER_OFFSET, base, end).pack(MAGIC)
    head[START : START + len(header)] = header
    file.write(head)
    hasher = xxhash.xxh3_128(head)
    _pad(file, base - len(head), hasher)
    del head
    _write_blobs(file, batch, blobs, offsets, sizes)

    opaque = [at for at, layout in enumerate(batch.layouts) if layout is None and layouts[at] is not None]
    manifest = Manifest(
        hasher.digest(), batch.digests[blobs], batch.alignments, metadata, np.array(opaque, np.uint32)
    ).pack()
    file.write(manifest)
    return base + end + len(manifest)


def _write_blobs(
    file: BinaryIO, batch: Batch, blobs: npt.NDArray[np.int64], offsets: Sequence[int], sizes: Sequence[int]
) -> None:
    """Write the blobs at their offsets; small ones, which are many, together."""
    limits = np.searchsorted(np.add(offsets, sizes), np.add(offsets, PIECE), "right").tolist()
    position = start = 0
    while start < len(blobs):
        stop = max(limits[start], start + 1)
        _pad(file, offsets[start] - position)
        run = blobs[start:stop].tolist()
        if len(run) == 1:
            digest = Digest(sizes[start], batch.digests[run[0]].tobytes())
            copy_checked(file, as_bytes(batch.data[run[0]])[0], digest, batch.keys[run[0]])
        else:
            _write_run(file, batch, run, [offset - offsets[start] for offset in offsets[start:stop]])
        position, start = offsets[stop - 1] + sizes[stop - 1], stop


def _write_run(file: BinaryIO, batch: Batch, run: Sequence[int], offsets: Sequence[int]) -> None:
    """Write the blobs of these keys at once, as a copy whose digests are compared."""
    parts: list[Any] = []
    end, ends = 0, []
    for at, offset in zip(run, offsets, strict=True):
        data = batch.data[at]
        check_length(data)
        parts += bytes(offset - end), data
        end = offset + data.nbytes
        ends.append(end)
    copy = memoryview(b"".join(parts))
    expected = batch.digests[run].tobytes()
    found = b"".join([xxhash.xxh3_128_digest(copy[start:stop]) for start, stop in zip(offsets, ends, strict=True)])
    if found != expected:
        at = next(at for at in range(len(run)) if found[16 * at : 16 * at + 16] != expected[16 * at : 16 * at + 16])
        _changed(batch.keys[run[at]], expected[16 * at : 16 * at + 16], found[16 * at : 16 * at + 16])
    file.write(copy)


def copy_checked(file: BinaryIO, data: memoryview, expected: Digest, key: str) -> None:
    """Write `data`, and raise DataChangedError if the bytes that were written do not have the digest `expected`."""
    hasher = xxhash.xxh3_128()
    for piece in read_pieces(data):
        hasher.update(piece)
        file.write(piece)
    if (found := hasher.digest()) != expected.xxh3_128:
        _changed(key, expected.xxh3_128, found)


def _changed(key: str, expected: bytes, found: bytes) -> NoReturn:
    raise DataChangedError(
        f"the bytes of {key!r} changed after they were added: expected xxh3-128 {expected.hex()}, found {found.hex()}"
    )


def _pad(file: BinaryIO, nbytes: int, hasher: xxhash.xxh3_128 | None = None) -> None:
    """Write zeros, in pieces that take little memory."""
    for start in range(0, nbytes, PIECE):
        zeros = bytes(min(PIECE, nbytes - start))
        file.write(zeros)
        if hasher:
            hasher.update(zeros)
