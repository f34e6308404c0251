"""The header between the flatbuffer's first 8 bytes and the rest of it; see docs/format.md."""

from __future__ import annotations

import struct
from typing import NamedTuple

from blobstore.core.disk.kinds import is_pointer

__all__ = ["FILE_IDENTIFIER", "FLATBUFFER_OFFSET", "MARK", "Header", "PtdHeaderError"]

FILE_IDENTIFIER = b"FT01"
MAGIC = b"FH01"
START = 8  # behind the root offset and the file identifier
FLATBUFFER_OFFSET = 48
"""The bytes that the header and the mark insert; a multiple of 16, so that the flatbuffer stays aligned."""

_FIELDS = struct.Struct("<4sIQQQQ")
MARK = slice(START + _FIELDS.size, START + FLATBUFFER_OFFSET)
"""Where a file with a manifest has its mark. ExecuTorch pads its header with zeros here."""


class PtdHeaderError(ValueError):
    """Why the first bytes are not those of a .ptd."""


class Header(NamedTuple):
    """Where the parts of a .ptd lie; all in bytes.

    Attributes:
        flatbuffer_offset: the number of bytes inserted before those of the flatbuffer.
        flatbuffer_size: size of the flatbuffer without the insertion.
        segment_base: where the segments begin.
        segment_data_size: bytes from there to the end of the last segment.
    """

    flatbuffer_offset: int
    flatbuffer_size: int
    segment_base: int
    segment_data_size: int

    @property
    def flatbuffer_end(self) -> int:
        """First byte behind the flatbuffer."""
        return self.flatbuffer_offset + self.flatbuffer_size

    @property
    def segment_end(self) -> int:
        """First byte behind the segments; stock readers expect the file to reach this far."""
        return self.segment_base + self.segment_data_size

    def pack(self, mark: bytes) -> bytes:
        """The `FLATBUFFER_OFFSET` bytes to insert at offset 8, with `mark` at `MARK`."""
        return _FIELDS.pack(MAGIC, _FIELDS.size, *self) + mark

    @classmethod
    def parse(cls, data: memoryview) -> Header:
        """Read and check the header of a file whose bytes are `data`.

        Raises:
            PtdHeaderError: this is not a .ptd, or its parts cannot lie in `data`.
        """
        if len(data) < START + _FIELDS.size:
            raise PtdHeaderError(f"{len(data)} bytes are too few for a .ptd")
        if (found := bytes(data[4:8])) != FILE_IDENTIFIER:
            raise PtdHeaderError(
                f"not a .ptd: expected the identifier {FILE_IDENTIFIER!r}, found {found!r}{_other_kind(bytes(data[:32]))}"
            )
        magic, length, *fields = _FIELDS.unpack_from(data, START)
        if magic != MAGIC:
            raise PtdHeaderError(f"expected the header magic {MAGIC!r}, found {magic!r}")
        if length < _FIELDS.size:
            raise PtdHeaderError(f"header length {length} is below {_FIELDS.size}")
        header = cls(*fields)
        if header.flatbuffer_offset < START + _FIELDS.size or header.flatbuffer_end > header.segment_base:
            raise PtdHeaderError(
                f"flatbuffer of {header.flatbuffer_size} bytes at {header.flatbuffer_offset} does not lie between "
                f"the header and the segment base {header.segment_base}"
            )
        if header.segment_end > len(data):
            raise PtdHeaderError(
                f"truncated: {header.segment_data_size} bytes of segments at {header.segment_base} are expected, "
                f"the file has {len(data)} bytes"
            )
        return header


def _other_kind(head: bytes) -> str:
    """What a file that is no .ptd is, of the kinds that are often taken for one, and what to do; empty if unknown."""
    if is_pointer(head):
        return ": this is a pointer of Git LFS; git lfs pull fetches the file"
    if head[6:9] == b"\0\0{":  # the length of a JSON object, and its brace
        return ": this is a .safetensors; blobstore convert makes a .ptd of it"
    return ": this is a program, a .pte" if head[4:6] == b"ET" else ""
