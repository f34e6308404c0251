"""Where releases come from: what every kind of source offers, and the one that is a folder on this machine."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.constants import MOST_GAP
from blobstore.core.errors import InvalidFileError, TrustError
from blobstore.core.memory.digest import sha256
from blobstore.core.memory.mapped_file import PIECE, named, open_regular
from blobstore.releases.index.index import INDEX_LIMIT, TABLE_LIMIT, Index, Object
from blobstore.releases.index.references import Reference, check_named
from blobstore.releases.sources.patience import Patience

__all__ = [
    "FILES",
    "INDEX",
    "INDEXES",
    "LATEST",
    "RANGE_COST",
    "SIGNATURES",
    "Body",
    "FolderSource",
    "Found",
    "ReleaseFolder",
    "Source",
    "check_pin",
    "pieces_of",
    "read_small",
    "sha256_of",
]

INDEX, FILES, SIGNATURES = "index.json", "files", "signatures"
"""In a release folder: NAME/VERSION/index.json, files/SHA256, and signatures/SHA256-of-an-index."""

LATEST = "latest"
"""The folder of the newest release of a name; no version can have this name."""

RANGE_COST = 200
"""Bytes that another range costs in a request that has several, here and in the answer."""

INDEXES = "indexes"
"""In the folder of a device: indexes/SHA256.json. A folder with it is no release folder."""


@dataclass(frozen=True)
class Found:
    """What a source has under a reference.

    Attributes:
        sha256: of the index.
        index: its bytes; None if the caller has it already.
        tag: what `find` takes to ask for changes only.
        unchanged: whether only a tag says that it is the index that the caller has.
        age: the seconds that the answer was in a cache; 0 if none says so.
    """

    sha256: str
    index: bytes | None
    tag: str | None = None
    unchanged: bool = False
    age: int = 0


@dataclass
class Body:
    """A part of an object that is being read.

    Attributes:
        start: where it begins: 0 if the source has no ranges.
        pieces: its bytes, in order.
    """

    start: int
    pieces: Iterator[bytes]


class Source(ABC):
    """A place with releases. Its methods may be called from several threads, but for `find`."""

    name: str
    """As messages call it."""
    reference: Reference | None = None
    """What was asked for."""
    patience = Patience()
    """How long to try."""
    remote = True
    """Whether bytes are dear, so that decoding pays off."""
    most_ranges = 1
    """How many ranges a single request may ask for."""
    cached = False
    """Whether caches may answer in its place, with what it had before."""

    _fetched = _requests = 0

    @property
    def fetched(self) -> int:
        """Bytes of all that was read so far."""
        return self._fetched

    @property
    def requests(self) -> int:
        """The number of requests so far; 0 for a folder."""
        return self._requests

    @property
    def moving(self) -> bool:
        """Whether the reference leads to whatever release is the newest."""
        return self.reference is not None and self.reference.pin is None and not self.reference.named[1]

    @abstractmethod
    def find(self, known: str | None, *, tag: str | None = None, fresh: bool = False) -> Found:
        """Look up the release.

        Args:
            known: the SHA-256 of the index that the caller has; it is not fetched again.
            tag: what an earlier call gave for that index.
            fresh: let no cache answer.
        """

    @abstractmethod
    def beside(self, index: Index, name: str, *, fresh: bool = False) -> bytes | None:
        """A list beside the index that was found: of ways, or of what changed (`WAYS`, `EARLIER`, `changes_since`); None if the
        source does not have it.

        Args:
            index: the release.
            name: of the list.
            fresh: let no cache answer.

        Raises:
            TransferError: the source fails.
        """

    @abstractmethod
    def signature(self, index_sha256: str) -> str | None:
        """The signature of the index, None if it has none."""

    @abstractmethod
    def open(self, wanted: Object, start: int, stop: int) -> AbstractContextManager[Body]:
        """Read a range of an object.

        Raises:
            TransferError: the source does not have it, or fails.
        """

    def open_ranges(
        self, wanted: Object, ranges: Sequence[tuple[int, int]]
    ) -> AbstractContextManager[Iterator[Body] | None]:
        """Read several ranges of an object, in order, by one request.

        The bodies may be of fewer or of longer ranges than were asked for, but lie between the first and the last byte of
        them. Read each before the next one. None if the source cannot do this.

        Raises:
            As `open`.
        """
        return nullcontext(None)

    def gap(self, requests: int) -> int:
        """The most bytes between two ranges that cost less than another request, if so many are sent at a time."""
        return MOST_GAP if self.remote else RANGE_COST

    def check(self, index: Index) -> None:
        """Raise TrustError if this is not the release that was asked for."""
        if self.reference is not None:
            check_named(self.reference, index.name, index.version)

    def close(self) -> None:  # noqa: B027 - a folder has nothing to close
        """Give up connections."""

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_pin(pin: str | None, found: str, what: str) -> None:
    """Raise TrustError if something was pinned, and this is something else."""
    if pin is not None and pin != found:
        raise TrustError(f"{what}: expected the digest sha256:{pin}, found sha256:{found}")


def read_small(path: Path, limit: int) -> bytes:
    """A small file.

    Raises:
        FileAccessError: it cannot be read.
        InvalidFileError: it has more than `limit` bytes.
    """
    with open_regular(path) as descriptor:
        if os.fstat(descriptor).st_size > limit:
            raise InvalidFileError(path, f"it has more than {limit} bytes")
        return b"".join(pieces_of(descriptor, 0, limit))


class ReleaseFolder(Source):
    """A release in a release folder, wherever that is: lists and signatures are small files at known paths."""

    @abstractmethod
    def _small(self, path: str, limit: int, *, fresh: bool = False) -> bytes | None:
        """A file below the folder, of at most `limit` bytes; None if it is not there."""

    def beside(self, index: Index, name: str, *, fresh: bool = False) -> bytes | None:
        # not beside the one that was found: "latest" may be another release by now
        return self._small(f"{index.name}/{index.version}/{name}", TABLE_LIMIT, fresh=fresh)

    def signature(self, index_sha256: str) -> str | None:
        signature = self._small(f"{SIGNATURES}/{index_sha256}", 1 << 16)
        return None if signature is None else signature.decode("ascii", "replace")


class FolderSource(ReleaseFolder):
    """A release folder on this machine.

    Args:
        place: an index, or the folder that it is in.
        pin: the SHA-256 that the index must have.
    """

    remote = False

    def __init__(self, place: str, pin: str | None) -> None:
        path = Path(place)
        self.path = path / INDEX if os.path.isdir(path) else path  # noqa: PTH112 - whatever the text is
        self.name, self._pin = str(self.path), pin
        self._root = self.path.parent.parent.parent

    def find(self, known: str | None, *, tag: str | None = None, fresh: bool = False) -> Found:
        index = read_small(self.path, INDEX_LIMIT)
        digest = sha256(index)
        self._fetched += len(index)
        check_pin(self._pin, digest, self.name)
        return Found(digest, index)

    def _small(self, path: str, limit: int, *, fresh: bool = False) -> bytes | None:
        place = self._root / path
        with named(place):
            if not place.exists():
                return None
        data = read_small(place, limit)
        self._fetched += len(data)
        return data

    @contextmanager
    def open(self, wanted: Object, start: int, stop: int) -> Iterator[Body]:
        path = self._root / wanted.path
        with open_regular(path) as descriptor:
            if (size := os.fstat(descriptor).st_size) != wanted.size:
                raise InvalidFileError(path, f"it has {size} bytes, the index says {wanted.size}")
            self._fetched += stop - start
            yield Body(start, pieces_of(descriptor, start, stop))


def sha256_of(path: Path, start: int = 0, stop: int | None = None) -> str:
    """The SHA-256 of a file, or of a range of it; of fewer bytes where the file ends early.

    Raises:
        FileAccessError: it cannot be read.
    """
    hasher = hashlib.sha256()
    with open_regular(path) as descriptor:
        for piece in pieces_of(descriptor, start, os.fstat(descriptor).st_size if stop is None else stop):
            hasher.update(piece)
    return hasher.hexdigest()


def pieces_of(descriptor: int, start: int, stop: int) -> Iterator[bytes]:
    """A range of an open file, in pieces; it ends early where the file does."""
    while start < stop:
        piece = os.pread(descriptor, min(PIECE, stop - start), start)
        if not piece:
            return
        yield piece
        start += len(piece)
