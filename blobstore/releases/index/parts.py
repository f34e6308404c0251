"""Which contents the files of a release consist of: blobs mostly, each with its SHA-256.

The list is JSON, an object that the index names by its digest, so it is trusted like the index. It comes from servers and
is hostile until it is parsed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal

from blobstore.core.constants import HOLE_LIMIT, MOST_FILES
from blobstore.core.errors import InvalidFileError
from blobstore.releases.index.index import Index, Meta, Object, Sha256, Size, Struct, parse_json

__all__ = ["Part", "Parts", "check_hole", "parse_parts"]


class Part(Struct, frozen=True, array_like=True):
    """A range of a file with one content.

    Attributes:
        offset, size: where it lies in the file, in bytes.
        sha256: of its bytes.
    """

    offset: Size
    size: Annotated[int, Meta(ge=1, le=(1 << 53) - 1)]
    sha256: Sha256


class Parts(Struct, frozen=True, dict=True):
    """The parts of all files. What lies between those of a file is zeros, at most `HOLE_LIMIT` of them in one place.

    Attributes:
        format: the version of this format.
        files: for each content of a file, in the order of the index, its parts by ascending offset, without overlaps.
    """

    format: Literal["blobstore.parts.1"]
    files: Annotated[tuple[tuple[Part, ...], ...], Meta(max_length=MOST_FILES)]

    def of(self, index: Index) -> Iterator[tuple[Object, tuple[Part, ...]]]:
        """The contents of the files of the release with this index, each with its parts."""
        return zip(index.distinct, self.files, strict=True)

    @cached_property
    def contents(self) -> dict[str, int]:
        """The digests of all contents and their sizes in bytes, in the order in which they first occur."""
        sizes: dict[str, int] = {}
        for parts in self.files:
            for part in parts:
                sizes.setdefault(part.sha256, part.size)
        return sizes


def parse_parts(data: bytes, index: Index, where: str) -> Parts:
    """Read and check the parts of a release.

    Args:
        data: the JSON.
        index: of the release.
        where: the file or URL that it comes from, for messages.

    Raises:
        InvalidFileError: it is malformed, or the list of another release.
    """
    parts = parse_json(data, Parts, where, "a list of the parts of a release")
    if len(parts.files) != len(index.distinct):
        raise InvalidFileError(
            where, f"expected the parts of {len(index.distinct)} different files, found those of {len(parts.files)}"
        )
    for file, listed in parts.of(index):
        _check_file(file, listed, where)
    sizes = parts.contents
    for part in (part for listed in parts.files for part in listed):
        if sizes[part.sha256] != part.size:
            raise InvalidFileError(
                where, f"the content {part.sha256} occurs with {sizes[part.sha256]} and {part.size} bytes"
            )
    return parts


def _check_file(file: Object, listed: tuple[Part, ...], where: str) -> None:
    end = 0
    for part in listed:
        if part.offset < end or part.offset + part.size > file.size:
            raise InvalidFileError(
                where,
                f"the part of {part.size} bytes at {part.offset} of {file.sha256} overlaps another one, or the end of the "
                f"file at {file.size}",
            )
        check_hole(end, part.offset, where)
        end = part.offset + part.size
    check_hole(end, file.size, where)


def check_hole(start: int, stop: int, where: str) -> None:
    """Raise InvalidFileError if too many zeros lie between two places of a file."""
    if stop - start > HOLE_LIMIT:
        raise InvalidFileError(
            where, f"no part covers the {stop - start} bytes at {start}; at most {HOLE_LIMIT} may lie between parts"
        )
