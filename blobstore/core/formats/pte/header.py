"""The extended header of a .pte, between the flatbuffer's file identifier and its first object.

    offset  bytes  what
    0       4      distance to the root table
    4       4      "ET12"
    8       4      "eh00"; anything else: there is no extended header, and the flatbuffer is the whole file
    12      4      length of the extended header, at least 24
    16      8      size of the flatbuffer, counted from the start of the file
    24      8      where segment offsets count from; 0 without segments
    32      8      bytes from there to the end of the last segment (only if the length is at least 32)

ExecuTorch reads it in `schema/extended_header.cpp`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from blobstore.core.errors import InvalidFileError

__all__ = ["HEADER_OFFSET", "HEADER_WITH_DATA_SIZE", "ExtendedHeader"]

IDENTIFIER = b"ET12"
HEADER_OFFSET = 8
HEADER_MAGIC = b"eh00"
HEADER_MIN = 24
HEADER_WITH_DATA_SIZE = 32


class ExtendedHeader(NamedTuple):
    """Where the parts of a .pte lie; all in bytes.

    Attributes:
        length: of the extended header; 0 if there is none.
        program_size: of the flatbuffer, counted from the start of the file.
        segment_base: where segment offsets count from; 0 without segments.
        segments_stop: first byte behind the segments; the end of the file if the header does not record it.
    """

    length: int
    program_size: int
    segment_base: int
    segments_stop: int

    @classmethod
    def parse(cls, data: memoryview, path: Path) -> ExtendedHeader:
        """Read and check the header of a file whose bytes are `data`.

        Raises:
            InvalidFileError: this is not a .pte, or its parts cannot lie in `data`.
        """
        if len(data) < HEADER_OFFSET + 4:
            raise InvalidFileError(path, f"{len(data)} bytes are too few for a program")
        if data[4:8] != IDENTIFIER:
            raise InvalidFileError(
                path, f"not a program: expected {IDENTIFIER!r} at byte 4, found {bytes(data[4:8])!r}"
            )
        if data[HEADER_OFFSET : HEADER_OFFSET + 4] != HEADER_MAGIC:
            return cls(0, len(data), 0, len(data))
        if len(data) < HEADER_OFFSET + HEADER_WITH_DATA_SIZE:
            raise InvalidFileError(path, "the file ends inside the extended header")
        length, program_size, base, data_size = struct.unpack_from("<IQQQ", data, HEADER_OFFSET + 4)
        if length < HEADER_MIN:
            raise InvalidFileError(path, f"the extended header has {length} bytes, expected at least {HEADER_MIN}")
        if program_size > len(data):
            raise InvalidFileError(path, f"truncated: the program takes {program_size} bytes, the file has {len(data)}")
        if HEADER_OFFSET + length > program_size:
            raise InvalidFileError(
                path, f"the extended header of {length} bytes does not fit a program of {program_size}"
            )
        if base and not program_size <= base <= len(data):
            raise InvalidFileError(path, f"segments begin at {base}, outside {program_size}..{len(data)}")
        if length < HEADER_WITH_DATA_SIZE or data_size == 0:
            return cls(length, program_size, base, len(data))
        if data_size > len(data) - base:
            raise InvalidFileError(
                path, f"truncated: segments take {data_size} bytes from {base}, the file has {len(data)}"
            )
        return cls(length, program_size, base, base + data_size)
