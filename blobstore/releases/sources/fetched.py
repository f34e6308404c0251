"""What the downloader of an application fetched, as a source; it needs no network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blobstore.core.errors import FileAccessError, InvalidFileError, TransferError
from blobstore.core.memory.mapped_file import named
from blobstore.releases.index.index import Index, Object
from blobstore.releases.sources.source import Body, Found, Source, pieces_of

__all__ = ["FetchedSource", "fetched_name"]

_NAME = re.compile(r"([0-9a-f]{64})(?:\.([0-9]{1,16})-([0-9]{1,16}))?")


def fetched_name(wanted: Object, start: int, stop: int) -> str:
    """The name of the file for the bytes from `start` up to `stop` of an object."""
    return wanted.sha256 if (start, stop) == (0, wanted.size) else f"{wanted.sha256}.{start}-{stop - 1}"


class FetchedSource(Source):
    """A folder of fetched files, each named as `fetched_name` says.

    Files are looked up when this is made. A file with the name of a range may have the whole object, because some servers
    ignore ranges.

    Args:
        folder: where they are.
        name: that of the source that they come from.
        found: the index.
        signature: of the index.
        ways: to the contents of the release.
    """

    planned = True

    def __init__(self, folder: Path, name: str, found: Found, signature: str | None, ways: bytes | None) -> None:
        self.folder, self.name, self._found, self._signature, self._ways = folder, name, found, signature, ways
        self._files: dict[str, list[tuple[int, int | None, Path]]] = {}
        self._fetched = 0
        with named(folder):
            for one in sorted(os.listdir(folder)):
                if match := _NAME.fullmatch(one):
                    start, stop = (int(match[2]), int(match[3]) + 1) if match[2] else (0, None)
                    self._files.setdefault(match[1], []).append((start, stop, folder / one))

    @property
    def fetched(self) -> int:
        return self._fetched

    def find(self, known: str | None, *, tag: str | None = None, fresh: bool = False) -> Found:
        return self._found

    def ways(self, index: Index, *, earlier: bool = False, fresh: bool = False) -> bytes | None:
        return None if earlier else self._ways

    def signature(self, index_sha256: str) -> str | None:
        return self._signature

    def url(self, wanted: Object) -> str:
        raise TransferError(f"{self.name}: {wanted.sha256} is not among the fetched files in {self.folder}")

    @contextmanager
    def open(self, wanted: Object, start: int, stop: int) -> Iterator[Body]:
        yield Body(start, self._pieces(wanted, start, stop))

    def _pieces(self, wanted: Object, start: int, stop: int) -> Iterator[bytes]:
        at = start
        while at < stop:
            path, first, end = self._place(wanted, at)
            with named(path), path.open("rb", buffering=0) as file:
                for piece in pieces_of(file.fileno(), at - first, min(stop, end) - first):
                    at += len(piece)
                    self._fetched += len(piece)
                    yield piece
            if at < min(stop, end):
                raise FileAccessError(path, "the file was truncated while it was read")

    def _place(self, wanted: Object, at: int) -> tuple[Path, int, int]:
        """A file with a byte of an object, the place of its first byte, and of the one behind its last."""
        for start, stop, path in self._files.get(wanted.sha256, ()):
            with named(path):
                size = path.stat().st_size
            first, end = start, wanted.size if stop is None else stop
            if size == wanted.size:
                first, end = 0, size
            elif size != end - first:
                expected = f"{end - first} bytes" + ("" if stop is None else f", or all {wanted.size} of the object")
                raise InvalidFileError(path, f"expected {expected}, found {size}")
            if first <= at < end:
                return path, first, end
        raise TransferError(
            f"{self.folder}: byte {at} of {wanted.sha256} is not in the fetched files; a new plan says what is missing"
        )
