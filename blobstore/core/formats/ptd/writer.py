"""Writing a .ptd: the table of contents first, then each blob once, straight from its memory; see docs/format.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import xxhash

from blobstore.core.errors import DataChangedError, InvalidAlignmentError
from blobstore.core.formats.alignment import SEGMENT_ALIGNMENT, align_up
from blobstore.core.formats.ptd.header import FLATBUFFER_OFFSET, START, Header
from blobstore.core.formats.ptd.manifest import MAGIC, Manifest
from blobstore.core.formats.ptd.opaque import stand_ins
from blobstore.core.formats.ptd.table import encode_table
from blobstore.core.memory.digest import Digest
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import PIECE, read_pieces

__all__ = ["MAX_ALIGNMENT", "BlobEntry", "copy_checked", "write_ptd"]

MAX_ALIGNMENT = 1 << 30
"""The largest alignment of a blob, and the largest common multiple in a file; it bounds the padding."""


@dataclass(frozen=True, slots=True)
class BlobEntry:
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
    """Write a .ptd to an empty file; the result depends on nothing but the values of the arguments.

    Args:
        file: where to write; it is only written, never positioned.
        entries: the keys, in the order of the file; the blobs follow the order of their first keys.
        metadata: text to store with the file.

    Returns:
        The size of the file in bytes.

    Raises:
        DataChangedError: the bytes of a blob no longer have its digest. The file must then be discarded.
        FileAccessError: a file that holds the blobs was truncated.
        InvalidAlignmentError: the common multiple of all alignments is above `MAX_ALIGNMENT`.
        OSError: writing failed.
    """
    index, blobs, alignments = _distinct(entries)
    base_alignment = math.lcm(SEGMENT_ALIGNMENT, *set(alignments))
    if base_alignment > MAX_ALIGNMENT:
        raise InvalidAlignmentError(
            f"the alignments {sorted(set(alignments))} have a common multiple above {MAX_ALIGNMENT}"
        )
    offsets, end = [], 0
    for entry, alignment in zip(blobs, alignments, strict=True):
        offsets.append(align_up(end, alignment))
        end = offsets[-1] + len(entry.data)

    sizes = [len(entry.data) for entry in blobs]
    layouts = stand_ins([entry.layout for entry in entries], [len(entry.data) for entry in entries])
    table = encode_table([entry.key for entry in entries], index, layouts, offsets, sizes)
    base = align_up(len(table), base_alignment)
    header = Header(FLATBUFFER_OFFSET, len(table) - FLATBUFFER_OFFSET, base, end).pack(MAGIC)
    head = b"".join((table[:START], header, table[START + len(header) :]))
    file.write(head)
    hasher = xxhash.xxh3_128(head)
    _pad(file, base - len(head), hasher)

    position = 0
    for entry, offset in zip(blobs, offsets, strict=True):
        _pad(file, offset - position)
        copy_checked(file, entry.data, entry.digest, entry.key)
        position = offset + len(entry.data)

    digests = np.frombuffer(b"".join(entry.digest.xxh3_128 for entry in blobs), np.uint8).reshape(-1, 16)
    requested = np.array([entry.alignment for entry in entries], np.uint32)
    opaque = [i for i, entry in enumerate(entries) if entry.layout is None and layouts[i] is not None]
    manifest = Manifest(hasher.digest(), digests, requested, metadata, np.array(opaque, np.uint32)).pack()
    file.write(manifest)
    return base + end + len(manifest)


def _distinct(entries: Sequence[BlobEntry]) -> tuple[list[int], list[BlobEntry], list[int]]:
    """For each entry the index of its blob, for each blob its first entry, and the alignment of each blob."""
    number: dict[int, int] = {}
    blobs: list[BlobEntry] = []
    alignments: list[int] = []
    for entry in entries:
        at = number.setdefault(entry.blob, len(blobs))
        if at == len(blobs):
            blobs.append(entry)
            alignments.append(SEGMENT_ALIGNMENT)
        alignments[at] = math.lcm(alignments[at], entry.alignment)
    return [number[entry.blob] for entry in entries], blobs, alignments


def copy_checked(file: BinaryIO, data: memoryview, expected: Digest, key: str) -> None:
    """Write `data`, and raise DataChangedError if the bytes that were written do not have the digest `expected`."""
    hasher = xxhash.xxh3_128()
    for piece in read_pieces(data):
        hasher.update(piece)
        file.write(piece)
    found = hasher.digest()
    if found != expected.xxh3_128:
        raise DataChangedError(
            f"the bytes of {key!r} changed after they were added: expected xxh3-128 {expected.xxh3_128.hex()}, found "
            f"{found.hex()}"
        )


def _pad(file: BinaryIO, nbytes: int, hasher: xxhash.xxh3_128 | None = None) -> None:
    """Write zeros, in pieces that take little memory."""
    for start in range(0, nbytes, PIECE):
        zeros = bytes(min(PIECE, nbytes - start))
        file.write(zeros)
        if hasher:
            hasher.update(zeros)
