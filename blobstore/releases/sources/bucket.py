"""Releases in a bucket of S3, Google Cloud Storage or Azure, without a web server before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from blobstore.core.errors import TransferError
from blobstore.core.memory.digest import sha256
from blobstore.core.memory.mapped_file import PIECE
from blobstore.releases.index.index import INDEX_LIMIT, Object
from blobstore.releases.sources.patience import GoneError
from blobstore.releases.sources.source import INDEX, Body, Found, ReleaseFolder, check_pin
from blobstore.storage.objects import Objects

__all__ = ["BucketSource"]


class BucketSource(ReleaseFolder):
    """A release in a bucket. Credentials are those of the environment; see `Pool`.

    Args:
        url: `s3://bucket/…/NAME/VERSION`, perhaps with `/index.json` behind it.
        pin: the SHA-256 that the index must have.
    """

    def __init__(self, url: str, pin: str | None) -> None:
        self.name, self._pin = url, pin
        folder = url.removesuffix(f"/{INDEX}").rstrip("/")
        root, self._product, self._version = folder.rsplit("/", 2)
        self._objects = Objects(root)
        self._lock = threading.Lock()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self._fetched += nbytes
            self._requests += 1

    def _small(self, path: str, limit: int, *, fresh: bool = False) -> bytes | None:
        nbytes = self._objects.size(path)
        if nbytes is None:
            return None
        if nbytes > limit:
            raise TransferError(f"{self._objects.name(path)}: it has {nbytes} bytes; at most {limit} are possible")
        data = self._objects.get(path)
        self._count(len(data or b""))
        return data

    def find(self, known: str | None, *, tag: str | None = None, fresh: bool = False) -> Found:
        path = f"{self._product}/{self._version}/{INDEX}"
        index = self._small(path, INDEX_LIMIT)
        if index is None:
            raise TransferError(f"{self._objects.name(path)}: there is no such release")
        digest = sha256(index)
        check_pin(self._pin, digest, self.name)
        return Found(digest, index)

    @contextmanager
    def open(self, wanted: Object, start: int, stop: int) -> Iterator[Body]:
        yield Body(start, self._pieces(wanted, start, stop))

    def _pieces(self, wanted: Object, start: int, stop: int) -> Iterator[bytes]:
        while start < stop:
            piece = self._objects.read(wanted.path, start, min(PIECE, stop - start))
            if piece is None:
                raise GoneError(f"{self._objects.name(wanted.path)}: this object is missing")
            if not piece:
                return
            self._count(len(piece))
            yield bytes(piece)
            start += len(piece)
