"""The manifest: what blobstore records about a .ptd beyond FT01; see docs/format.md.

It is the last segment of the file, under a key of its own, and consists of a flatbuffer (`schema/manifest.fbs`), the
xxh3-128 of that flatbuffer, and a magic that ends the file. So a single flipped bit anywhere in the file is noticed:
in the head by `head`, in a blob by its digest, in the manifest by its own, and in the manifest's key, which would hide
it, by the magic at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import flatbuffers
import numpy as np
import numpy.typing as npt
import xxhash

from blobstore._generated.manifest import Manifest as Fb
from blobstore._generated.manifest import Pair
from blobstore.ptd.columns import Columns, ColumnsError

__all__ = ["END_MAGIC", "FILE_IDENTIFIER", "KEY_PREFIX", "Manifest", "ManifestError"]

KEY_PREFIX = "metadata.blobstore."
FILE_IDENTIFIER = b"BM01"
END_MAGIC = b"BLOBEND1"
VERSION = 0
_DIGEST = 16


class ManifestError(ValueError):
    """Why a manifest cannot be believed."""


@dataclass(frozen=True)
class Manifest:
    """Digests, alignments and metadata of one .ptd.

    Attributes:
        head: xxh3-128 of the file from byte 0 up to the segment base, 16 bytes.
        segments: xxh3-128 of each segment, uint8 of shape (segments, 16); zeros for the manifest's own.
        alignments: what each key asked for in bytes, uint32 of shape (keys,).
        metadata: free text of whoever wrote the file.
    """

    head: bytes
    segments: npt.NDArray[np.uint8]
    alignments: npt.NDArray[np.uint32]
    metadata: Mapping[str, str]

    def pack(self) -> bytes:
        """The bytes of the segment; their number does not depend on the digests."""
        builder = flatbuffers.Builder(256 + self.segments.nbytes + self.alignments.nbytes)
        builder.ForceDefaults(True)
        pairs = []
        for key, value in sorted(self.metadata.items()):
            key_at, value_at = builder.CreateString(key), builder.CreateString(value)
            Pair.PairStart(builder)
            Pair.PairAddKey(builder, key_at)
            Pair.PairAddValue(builder, value_at)
            pairs.append(Pair.PairEnd(builder))
        Fb.ManifestStartMetadataVector(builder, len(pairs))
        for pair in reversed(pairs):
            builder.PrependUOffsetTRelative(pair)
        metadata = builder.EndVector()
        alignments = builder.CreateNumpyVector(np.ascontiguousarray(self.alignments, "<u4"))
        segments = _struct_vector(builder, self.segments)
        Fb.ManifestStart(builder)
        Fb.ManifestAddVersion(builder, VERSION)
        builder.Prep(1, _DIGEST)
        for byte in reversed(self.head):
            builder.PrependByte(byte)
        Fb.ManifestAddHead(builder, builder.Offset())
        Fb.ManifestAddSegments(builder, segments)
        Fb.ManifestAddAlignments(builder, alignments)
        Fb.ManifestAddMetadata(builder, metadata)
        builder.Finish(Fb.ManifestEnd(builder), file_identifier=FILE_IDENTIFIER)
        body = bytes(builder.Output())
        return body + xxhash.xxh3_128_digest(body) + END_MAGIC

    @classmethod
    def parse(cls, data: memoryview, segments: int, keys: int) -> Manifest:
        """Read and check a manifest.

        Args:
            data: the bytes of its segment.
            segments: number of segments that the file has.
            keys: number of keys that the file has.

        Raises:
            ManifestError: it is damaged, of a later version, or of another file.
        """
        tail = _DIGEST + len(END_MAGIC)
        if len(data) < 16 + tail or data[-len(END_MAGIC) :] != END_MAGIC or data[4:8] != FILE_IDENTIFIER:
            raise ManifestError("the manifest is damaged: its magic is missing")
        body = data[:-tail]
        if xxhash.xxh3_128_digest(body) != data[-tail : -len(END_MAGIC)]:
            raise ManifestError("the manifest is damaged: its digest differs")
        try:
            return cls._parse(Columns(body), segments, keys)
        except (ColumnsError, UnicodeDecodeError) as error:
            raise ManifestError(f"the manifest is malformed: {error}") from None

    @classmethod
    def _parse(cls, columns: Columns, segments: int, keys: int) -> Manifest:
        version, head, digests, alignments, metadata = columns.fields(
            columns.root(), {0: 4, 1: _DIGEST, 2: 4, 3: 4, 4: 4}
        )
        if version[0] and (found := int(columns.u32(version)[0])) > VERSION:
            raise ManifestError(f"the manifest has version {found}, this blobstore reads up to {VERSION}")
        if not head[0]:
            raise ManifestError("the manifest is malformed: it lacks the digest of the head")
        digest_at, digest_count = columns.vectors(digests, _DIGEST)
        alignment_at, alignment_count = columns.vectors(alignments, 4)
        if digest_count[0] != segments or alignment_count[0] != keys:
            raise ManifestError(
                f"the manifest tells of {digest_count[0]} segments and {alignment_count[0]} keys, the file has "
                f"{segments} and {keys}"
            )
        pairs = columns.fields(columns.tables(metadata), {0: 4, 1: 4})
        texts = []
        for fields in pairs:
            starts, counts = columns.vectors(fields, 1)
            texts.append([columns.raw(s, n).decode() for s, n in zip(starts, counts, strict=True)])
        return cls(
            head=columns.raw(int(head[0]), _DIGEST),
            segments=np.frombuffer(columns.raw(int(digest_at[0]), _DIGEST * segments), np.uint8).reshape(-1, _DIGEST),
            alignments=np.frombuffer(columns.raw(int(alignment_at[0]), 4 * keys), "<u4"),
            metadata=dict(zip(*texts, strict=True)),
        )


def _struct_vector(builder: flatbuffers.Builder, digests: npt.NDArray[np.uint8]) -> int:
    """A vector of Digest structs in one step; flatbuffers offers only one byte at a time."""
    raw = digests.tobytes()
    builder.StartVector(_DIGEST, len(digests), 1)
    builder.head = builder.head - len(raw)
    builder.Bytes[builder.head : builder.head + len(raw)] = raw
    offset: int = builder.EndVector()
    return offset


def is_manifest(key: str, data: memoryview) -> bool:
    """Whether a blob is a manifest, and not another record under the same prefix."""
    return key.startswith(KEY_PREFIX) and data[4:8] == FILE_IDENTIFIER


def manifest_key(sequence: Sequence[bytes]) -> str:
    """The key for a file with this blob table: never the same in two different files."""
    hasher = xxhash.xxh3_128()
    for part in sequence:
        hasher.update(part)
    return KEY_PREFIX + hasher.hexdigest()
