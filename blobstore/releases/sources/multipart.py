"""Answers with several ranges: multipart/byteranges.

Format: RFC 9110, 14.6. Nothing is looked for in the contents: the head of each part says how long it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from blobstore.core.text import printable
from blobstore.releases.sources.patience import WrongAnswerError
from blobstore.releases.sources.source import Body

__all__ = ["OVERHEAD", "boundary_of", "parts_of"]

OVERHEAD = 1 << 10
"""The most bytes before a part: its boundary and its head."""

_TYPE = re.compile(
    r"multipart/byteranges\s*;(?:.*;)?\s*boundary=(?:\"([^\"\r\n]{1,70})\"|([^\s\";]{1,70}))\s*(?:;.*)?", re.I
)
_RANGE = re.compile(rb"content-range:[ \t]*bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)[ \t]*", re.I)


def boundary_of(content_type: str) -> str | None:
    """What separates the parts of an answer with this Content-Type; None if it has no parts."""
    match = _TYPE.fullmatch(content_type)
    return None if match is None else match[1] or match[2]


def parts_of(name: str, pieces: Iterator[bytes], boundary: str, start: int, stop: int, size: int) -> Iterator[Body]:
    """The parts of an answer, in the order in which they come; the pieces of each must be read before the next one.

    Args:
        name: of the object, for messages.
        pieces: the body.
        boundary: what separates them.
        start, stop: where all parts must lie.
        size: that of the object.

    Raises:
        WrongAnswerError: this is something else, or a part lies elsewhere.
    """
    reader = _Reader(name, pieces)
    line = f"--{boundary}".encode()
    while True:
        found = reader.line()
        if not found:
            continue
        if found.rstrip(b" \t") == line + b"--":
            return
        if found.rstrip(b" \t") != line:
            raise WrongAnswerError(f"{name}: expected {line!r} between ranges, the server sends {found[:100]!r}")
        first, end = _head(reader, name, size)
        if not start <= first < end <= stop:
            raise WrongAnswerError(
                f"{name}: asked for bytes from {start} up to {stop}, the server sends {first}-{end - 1}"
            )
        yield Body(first, reader.bytes(end - first))
        if reader.line():
            raise WrongAnswerError(f"{name}: the range {first}-{end - 1} has more bytes")


def _head(reader: _Reader, name: str, size: int) -> tuple[int, int]:
    """The range of a part."""
    found: tuple[int, int] | None = None
    while line := reader.line():
        if (match := _RANGE.fullmatch(line)) and match[3] in {b"*", str(size).encode()}:
            found = int(match[1]), int(match[2]) + 1
        elif line.lower().startswith(b"content-range:"):
            raise WrongAnswerError(
                f"{name}: expected a range of {size} bytes, the server sends {printable(repr(line))}"
            )
    if found is None:
        raise WrongAnswerError(f"{name}: the server sends a range without saying which")
    return found


class _Reader:
    """A body, by lines and by counts of bytes."""

    def __init__(self, name: str, pieces: Iterator[bytes]) -> None:
        self._name, self._pieces = name, pieces
        self._kept, self._at, self._lines = b"", 0, 0

    def _more(self) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            raise WrongAnswerError(f"{self._name}: the server ends before the last range does")
        self._kept, self._at = self._kept[self._at :] + piece, 0

    def line(self) -> bytes:
        """The next line, without its end."""
        while (end := self._kept.find(b"\r\n", self._at)) < 0 and len(self._kept) - self._at <= OVERHEAD:
            self._more()
        self._lines += 2 + (end if end >= 0 else len(self._kept)) - self._at
        if end < 0 or self._lines > OVERHEAD:
            raise WrongAnswerError(f"{self._name}: more than {OVERHEAD} bytes between two ranges")
        line, self._at = self._kept[self._at : end], end + 2
        return line

    def bytes(self, count: int) -> Iterator[bytes]:
        """The next bytes, in pieces."""
        self._lines = 0
        while count:
            if self._at == len(self._kept):
                self._more()
            piece = self._kept[self._at : self._at + count]
            self._at += len(piece)
            count -= len(piece)
            yield piece
