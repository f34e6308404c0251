"""Writing a .ptd: the table of contents first, then each blob once, straight from its memory; see docs/format.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import xxhash

from blobstore.digest import Digest
from blobstore.errors import DataChangedError, InvalidAlignmentError
from blobstore.layout import TensorLayout
from blobstore.ptd.header import FLATBUFFER_OFFSET, START, Header
from blobstore.ptd.manifest import Manifest, manifest_key
from blobstore.ptd.table import align, encode_table

__all__ = ["MAX_ALIGNMENT", "SEGMENT_ALIGNMENT", "Entry", "copy_checked", "write_ptd"]

SEGMENT_ALIGNMENT = 128
"""What ExecuTorch aligns every segment to."""

MAX_ALIGNMENT = 1 << 30
"""Of a blob and of the common multiple of all blobs of a file; it bounds what padding can cost."""

_CHUNK = 1 << 20  # hashed and then written while it is in the cache


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a file to be written.

    Attributes:
        key: UTF-8 text without NUL, unique in the file.
        data: the bytes; entries with the same `blob` have the same bytes.
        digest: their content address.
        blob: identity of the blob; entries that share it share a segment.
        alignment: what this key asks for, in bytes.
        layout: how the bytes are a tensor, None for opaque bytes.
    """

    key: str
    data: memoryview
    digest: Digest
    blob: int
    alignment: int
    layout: TensorLayout | None


def write_ptd(file: BinaryIO, entries: Sequence[Entry], metadata: Mapping[str, str]) -> int:
    """Write a .ptd to an empty file, from its start; the result depends on nothing but the arguments' values.

    Args:
        file: where to write; only written to, never moved in.
        entries: the keys, in any order; the file has them by ascending UTF-8 bytes.
        metadata: free text to keep with the file.

    Returns:
        The size of the file in bytes.

    Raises:
        DataChangedError: the bytes of a blob no longer have its digest. The file is then to be thrown away.
        InvalidAlignmentError: the common multiple of all alignments is above `MAX_ALIGNMENT`.
        OSError: writing failed.
    """
    entries = sorted(entries, key=lambda entry: entry.key.encode())
    index: dict[int, int] = {}
    blobs: list[Entry] = []  # the first entry of each blob
    alignments: list[int] = []
    for entry in entries:
        at = index.setdefault(entry.blob, len(blobs))
        if at == len(blobs):
            blobs.append(entry)
            alignments.append(SEGMENT_ALIGNMENT)
        alignments[at] = math.lcm(alignments[at], entry.alignment)
    base_alignment = math.lcm(SEGMENT_ALIGNMENT, *set(alignments))
    if base_alignment > MAX_ALIGNMENT:
        raise InvalidAlignmentError(
            f"the alignments {sorted(set(alignments))} have a common multiple above {MAX_ALIGNMENT}"
        )

    segments = [index[entry.blob] for entry in entries]
    offsets, end = [], 0
    for entry, alignment in zip(blobs, alignments, strict=True):
        offsets.append(align(end, alignment))
        end = offsets[-1] + len(entry.data)

    def manifest(head: bytes, order: int) -> Manifest:
        digests = np.frombuffer(b"".join(entry.digest.xxh3_128 for entry in blobs) + bytes(16), np.uint8)
        asked = [entry.alignment for entry in entries]
        asked.insert(order, SEGMENT_ALIGNMENT)
        return Manifest(head, digests.reshape(-1, 16), np.array(asked, np.uint32), metadata)

    draft = manifest(bytes(16), len(entries)).pack()
    key = manifest_key([draft, *_table_bytes(entries, segments)])
    order = sum(entry.key.encode() < key.encode() for entry in entries)
    sizes = [len(entry.data) for entry in blobs] + [len(draft)]
    offsets.append(align(end, SEGMENT_ALIGNMENT))

    rows = [(entry.key, at, entry.layout) for entry, at in zip(entries, segments, strict=True)]
    rows.insert(order, (key, len(blobs), None))
    head, base = _head(rows, offsets, sizes, base_alignment)
    file.write(head)
    hasher = xxhash.xxh3_128(head)
    _pad(file, base - len(head), hasher)
    position = 0
    for entry, offset in zip(blobs, offsets, strict=False):
        _pad(file, offset - position)
        copy_checked(file, entry.data, entry.digest, entry.key)
        position = offset + len(entry.data)
    _pad(file, offsets[-1] - position)
    file.write(manifest(hasher.digest(), order).pack())
    return base + offsets[-1] + sizes[-1]


def copy_checked(file: BinaryIO, data: memoryview, expected: Digest, key: str) -> None:
    """Write `data` and raise DataChangedError if what was written does not have the digest `expected`."""
    if len(data) <= _CHUNK:
        found = xxhash.xxh3_128_digest(data)
        file.write(data)
    else:
        hasher = xxhash.xxh3_128()
        for start in range(0, len(data), _CHUNK):
            chunk = data[start : start + _CHUNK]
            hasher.update(chunk)
            file.write(chunk)
        found = hasher.digest()
    if found != expected.xxh3_128:
        raise DataChangedError(
            f"the bytes of {key!r} changed after they were added: expected xxh3-128 {expected.xxh3_128.hex()}, found "
            f"{found.hex()}"
        )


def _head(
    rows: Sequence[tuple[str, int, TensorLayout | None]],
    offsets: Sequence[int],
    sizes: Sequence[int],
    base_alignment: int,
) -> tuple[bytes, int]:
    """What stands in front of the segments, and the segment base, up to which zeros follow."""
    keys, segments, layouts = zip(*rows, strict=True)
    table = encode_table(keys, segments, layouts, offsets, sizes)
    base = align(len(table), base_alignment)
    header = Header(FLATBUFFER_OFFSET, len(table) - FLATBUFFER_OFFSET, base, offsets[-1] + sizes[-1]).pack()
    return b"".join((table[:START], header, table[START + len(header) :])), base


def _pad(file: BinaryIO, nbytes: int, hasher: xxhash.xxh3_128 | None = None) -> None:
    """Write zeros, in pieces that take little memory."""
    for start in range(0, nbytes, _CHUNK):
        zeros = bytes(min(_CHUNK, nbytes - start))
        file.write(zeros)
        if hasher:
            hasher.update(zeros)


def _table_bytes(entries: Sequence[Entry], segments: Sequence[int]) -> list[bytes]:
    """What tells this file's keys from another's, as bytes to hash."""
    keys = "\0".join(entry.key for entry in entries)
    layouts = "\0".join(str(entry.layout) for entry in entries)
    lengths = [len(entry.data) for entry in entries]
    return [keys.encode(), layouts.encode(), np.array([segments, lengths], "<u8").tobytes()]
