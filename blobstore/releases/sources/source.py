"""Where releases come from: what every kind of source offers, and the one that is a folder on this machine."""

from __future__ import annotations

import math
import os
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from blobstore.core.errors import FileAccessError, InvalidFileError, ReleaseError, TransferError, TrustError
from blobstore.core.memory.digest import sha256
from blobstore.core.memory.mapped_file import PIECE, open_regular
from blobstore.core.reprs import fields_line
from blobstore.releases.index.index import INDEX_LIMIT, Index, Object
from blobstore.releases.index.references import Reference, check_named

__all__ = [
    "FILES",
    "INDEX",
    "INDEXES",
    "SIGNATURES",
    "Body",
    "FolderSource",
    "Found",
    "InterruptedTransferError",
    "Patience",
    "SlowTransferError",
    "Source",
    "check_pin",
    "pieces_of",
    "read_small",
    "retry",
]

INDEX, FILES, SIGNATURES = "index.json", "files", "signatures"
"""In a release folder: NAME/VERSION/index.json, files/SHA256, and signatures/SHA256-of-an-index."""

INDEXES = "indexes"
"""In the folder of a device: indexes/SHA256.json. A folder with it is no release folder."""


Result = TypeVar("Result")


@dataclass(frozen=True)
class Patience:
    """How long to try.

    Attributes:
        attempts: how often, in all, without any progress in between.
        first, longest: seconds to wait after the first failure, which double with each, and the longest of these times.
        asked: the longest time that a server may ask for with Retry-After, in seconds.
        connect, read: seconds to wait for a connection, and for bytes.
        slowest: bytes per second, in the mean of `read` seconds; a server that sends fewer is left, and asked again.
        pause: waits.
    """

    __repr__ = fields_line

    attempts: int = 6
    first: float = 0.5
    longest: float = 30
    asked: float = 120
    connect: float = 15
    read: float = 60
    slowest: float = 256
    pause: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        for name, least in (("attempts", 1), ("first", 0), ("longest", 0), ("asked", 0), ("slowest", 0)):
            self._check(name, isinstance(self.attempts, int) and _is_number(getattr(self, name), least))
        for name in ("connect", "read"):
            self._check(name, _is_number(getattr(self, name), 0) and getattr(self, name) > 0)
        self._check("pause", callable(self.pause))

    def _check(self, name: str, sound: bool) -> None:
        """Raise ReleaseError unless a value is sound."""
        if not sound:
            raise ReleaseError(f"Patience cannot have {name} {getattr(self, name)!r}")

    def wait(self, error: InterruptedTransferError, failures: int) -> None:
        """Wait before the next attempt, after this error and so many in all without any progress in between.

        Raises:
            TransferError: that were too many, or the server asks for too long a time.
        """
        if failures >= self.attempts:
            raise TransferError(f"{error}; given up after {failures} attempts") from None
        asked = error.asked
        if asked is not None and asked > self.asked:
            raise TransferError(f"the server asks to come back in {asked:.0f} seconds")
        seconds = min(self.longest, self.first * 2 ** min(failures - 1, 60)) * (0.5 + random.random())  # noqa: S311 - no secret
        self.pause(max(seconds, asked or 0))


def _is_number(value: Any, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < math.inf


class InterruptedTransferError(TransferError):
    """A failure after which trying again may help.

    Attributes:
        asked: seconds that the server asked to wait; None if it did not.
    """

    def __init__(self, message: str, asked: float | None = None) -> None:
        super().__init__(message)
        self.asked = asked


def retry(patience: Patience, work: Callable[[], Result]) -> Result:
    """Do something until it succeeds.

    Raises:
        TransferError: it failed too often, or in a way that will not pass.
    """
    failures = 0
    while True:
        try:
            return work()
        except InterruptedTransferError as error:
            failures += 1
            patience.wait(error, failures)


class SlowTransferError(InterruptedTransferError):
    """Bytes came, but too slowly. It counts as a failure without progress, so that it cannot go on forever."""


@dataclass(frozen=True)
class Found:
    """What a source has under a reference.

    Attributes:
        sha256: of the index.
        index: its bytes; None if the caller has it already.
    """

    sha256: str
    index: bytes | None


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

    @property
    def fetched(self) -> int:
        """Bytes of all that was read so far."""
        return 0

    @property
    def requests(self) -> int:
        """The number of requests so far; 0 for a folder."""
        return 0

    @abstractmethod
    def find(self, known: str | None) -> Found:
        """Look up the release.

        Args:
            known: the SHA-256 of the index that the caller has; it is not fetched again.
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

    @abstractmethod
    def url(self, wanted: Object) -> str:
        """Where another program gets an object from."""

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


class FolderSource(Source):
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
        self._fetched = 0
        self._root = self.path.parent.parent.parent

    @property
    def fetched(self) -> int:
        return self._fetched

    def find(self, known: str | None) -> Found:
        index = read_small(self.path, INDEX_LIMIT)
        digest = sha256(index)
        self._fetched += len(index)
        check_pin(self._pin, digest, self.name)
        return Found(digest, index)

    def signature(self, index_sha256: str) -> str | None:
        try:
            return read_small(self._root / SIGNATURES / index_sha256, 1 << 16).decode("ascii")
        except (FileAccessError, UnicodeDecodeError):
            return None

    def _path(self, wanted: Object) -> Path:
        return self._root / FILES / wanted.sha256

    @contextmanager
    def open(self, wanted: Object, start: int, stop: int) -> Iterator[Body]:
        path = self._path(wanted)
        with open_regular(path) as descriptor:
            if (size := os.fstat(descriptor).st_size) != wanted.size:
                raise InvalidFileError(path, f"it has {size} bytes, the index says {wanted.size}")
            self._fetched += stop - start
            yield Body(start, pieces_of(descriptor, start, stop))

    def url(self, wanted: Object) -> str:
        return self._path(wanted).resolve().as_uri()


def pieces_of(descriptor: int, start: int, stop: int) -> Iterator[bytes]:
    """A range of an open file, in pieces; it ends early where the file does."""
    while start < stop:
        piece = os.pread(descriptor, min(PIECE, stop - start), start)
        if not piece:
            return
        yield piece
        start += len(piece)
