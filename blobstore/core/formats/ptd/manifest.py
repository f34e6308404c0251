"""The manifest: what blobstore records about a .ptd beyond FT01; see docs/format.md.

It lies behind the last segment, where stock readers do not look: a flatbuffer (`schema/manifest.fbs`), the xxh3-128 of
that flatbuffer, its length, and a magic that ends the file. The header has the same magic as a mark. So a single
flipped bit anywhere in the file is detected: in the head by `head`, in a blob by its digest, in the manifest by its own
digest, and in the mark or the magic, which would hide the manifest, by the other of the two. A truncated file lacks the
magic.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from blobstore.core.constants import MANIFEST_IDENTIFIER as FILE_IDENTIFIER
from blobstore.core.constants import MANIFEST_MAGIC as MAGIC
from blobstore.core.formats.flatbuffer import STRING, U32, Struct, TableType, Vector
from blobstore.core.formats.ptd.columns import Columns, ColumnsError, Positions
from blobstore.core.formats.ptd.header import MARK, Header
from blobstore.core.formats.table_builder import TableBuilder

__all__ = [
    "FILE_IDENTIFIER",
    "MAGIC",
    "Manifest",
    "ManifestError",
    "find_manifest",
    "peek_metadata",
]


VERSION = 0
DIGEST = Struct(16)
PAIR = TableType("Pair", key=STRING, value=STRING)
MANIFEST = TableType(
    "Manifest",
    version=U32,
    head=DIGEST,
    segments=Vector(DIGEST),
    alignments=Vector(U32),
    metadata=Vector(PAIR),
    opaque=Vector(U32),
)
_TAIL = 8 + len(MAGIC)  # the length and the magic


class ManifestError(ValueError):
    """Why a manifest cannot be trusted."""


@dataclass(frozen=True)
class Manifest:
    """Digests, alignments and metadata of one .ptd.

    Attributes:
        head: xxh3-128 of the file from byte 0 up to the segment base, 16 bytes.
        segments: xxh3-128 of each segment, uint8 of shape (segments, 16).
        alignments: the alignment requested for each key in bytes, uint32 of shape (keys,).
        metadata: text of the application that wrote the file.
        opaque: indices of the keys whose layout stands in for none, ascending, not checked; see `opaque.py`.
    """

    head: bytes
    segments: npt.NDArray[np.uint8]
    alignments: npt.NDArray[np.uint32]
    metadata: Mapping[str, str]
    opaque: npt.NDArray[np.uint32]

    def pack(self) -> bytes:
        """The bytes that end the file, from the end of its last segment."""
        builder = TableBuilder(256 + self.segments.nbytes + self.alignments.nbytes)
        builder.ForceDefaults(True)
        pairs = []
        for key, value in sorted(self.metadata.items()):
            key_at, value_at = builder.CreateString(key), builder.CreateString(value)
            pairs.append(builder.table(PAIR, key=key_at, value=value_at))
        metadata = builder.references(pairs)
        opaque = builder.numbers(U32, self.opaque) if len(self.opaque) else None
        alignments = builder.numbers(U32, self.alignments)
        segments = builder.structs(DIGEST, len(self.segments), self.segments.tobytes())
        table = builder.table(
            MANIFEST,
            version=VERSION,
            head=self.head,
            segments=segments,
            alignments=alignments,
            metadata=metadata,
            opaque=opaque,
        )
        body = builder.finish(table, FILE_IDENTIFIER)
        return b"".join((body, xxhash.xxh3_128_digest(body), len(body).to_bytes(8, "little"), MAGIC))

    @classmethod
    def parse(cls, data: memoryview, segments: int, keys: int) -> Manifest:
        """Read the flatbuffer of a manifest, and its digest.

        Raises:
            ManifestError: it is damaged, has a later version, or belongs to a file with other numbers of segments or keys.
        """
        body = _checked(data)
        try:
            return cls._parse(Columns(body), segments, keys)
        except (ColumnsError, UnicodeDecodeError) as error:
            raise ManifestError(f"the manifest is malformed: {error}") from None

    @classmethod
    def _parse(cls, columns: Columns, segments: int, keys: int) -> Manifest:
        version, head, digests, alignments, metadata, opaque = columns.fields(
            columns.root(), {0: 4, 1: DIGEST.width, 2: 4, 3: 4, 4: 4, 5: 4}
        )
        if version[0] and (found := int(columns.u32(version)[0])) > VERSION:
            raise ManifestError(f"the manifest has version {found}, this blobstore reads up to {VERSION}")
        if not head[0]:
            raise ManifestError("the manifest is malformed: it lacks the digest of the head")
        digest_at, digest_count = columns.vectors(digests, DIGEST.width)
        alignment_at, alignment_count = columns.vectors(alignments, 4)
        opaque_at, opaque_count = columns.vectors(opaque, 4)
        if digest_count[0] != segments or alignment_count[0] != keys:
            raise ManifestError(
                f"the manifest is for {digest_count[0]} segments and {alignment_count[0]} keys, the file has "
                f"{segments} and {keys}"
            )
        return cls(
            head=columns.raw(int(head[0]), DIGEST.width),
            segments=np.frombuffer(columns.raw(int(digest_at[0]), DIGEST.width * segments), np.uint8).reshape(
                -1, DIGEST.width
            ),
            alignments=np.frombuffer(columns.raw(int(alignment_at[0]), 4 * keys), "<u4"),
            metadata=_metadata(columns, columns.fields(columns.tables(metadata), {0: 4, 1: 4})),
            opaque=np.frombuffer(columns.raw(int(opaque_at[0]), 4 * int(opaque_count[0])), "<u4"),
        )


def _checked(data: memoryview) -> memoryview:
    """The flatbuffer of a manifest, whose digest and identifier are right."""
    body = data[: -DIGEST.width]
    if xxhash.xxh3_128_digest(body) != data[-DIGEST.width :]:
        raise ManifestError("the manifest is damaged: its digest differs")
    if body[4:8] != FILE_IDENTIFIER:
        raise ManifestError(f"the manifest is malformed: its identifier is {bytes(body[4:8])!r}")
    return body


def _metadata(columns: Columns, pairs: Sequence[Positions]) -> dict[str, str]:
    vectors = [columns.vectors(fields, 1) for fields in pairs]
    if sum(int(counts.sum()) for _, counts in vectors) > columns.size:  # many fields may refer to one text
        raise ColumnsError("the texts of the metadata together are longer than the manifest")
    keys, values = ([columns.raw(start, n) for start, n in zip(*vector, strict=True)] for vector in vectors)
    if any(left >= right for left, right in itertools.pairwise(keys)):
        raise ColumnsError("the keys of the metadata do not ascend")
    return {key.decode(): value.decode() for key, value in zip(keys, values, strict=True)}


def peek_metadata(data: memoryview) -> Mapping[str, str]:
    """The metadata of a .ptd by its header and manifest alone, which say nothing of its table; empty without a manifest.

    Raises:
        PtdHeaderError, ManifestError: these are not well-formed.
    """
    place = find_manifest(data, Header.parse(data))
    if place is None:
        return {}
    body = _checked(place)
    try:
        columns = Columns(body)
        (metadata,) = columns.fields(columns.root(), {4: 4})
        return _metadata(columns, columns.fields(columns.tables(metadata), {0: 4, 1: 4}))
    except (ColumnsError, UnicodeDecodeError) as error:
        raise ManifestError(f"the manifest is malformed: {error}") from None


def find_manifest(data: memoryview, header: Header) -> memoryview | None:
    """The flatbuffer of the manifest behind the last segment, with its digest; None if the file has none there.

    Raises:
        ManifestError: it is missing or incomplete, or bytes follow it.
    """
    start = header.segment_end
    marked = data[MARK] == MAGIC
    ended = len(data) - start >= _TAIL and data[-len(MAGIC) :] == MAGIC
    if not marked and not ended:
        return None
    if not marked:
        raise ManifestError("the file ends like one with a manifest, but the mark in its header is damaged")
    if not ended:
        raise ManifestError("the file was cut, or is damaged at its end: the magic of its manifest is missing")
    length = int.from_bytes(data[-_TAIL : -len(MAGIC)], "little")
    if start + length + DIGEST.width + _TAIL != len(data):
        raise ManifestError(
            f"a manifest of {length} bytes does not fit between the segments, which end at byte {start}, and the end "
            f"of the file at {len(data)}"
        )
    return data[start:-_TAIL]
