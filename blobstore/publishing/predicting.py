"""What devices will fetch of a release: the pull of a device that is not there is planned, by the code that plans real ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from blobstore.core.memory.digest import sha256
from blobstore.publishing.released import Released
from blobstore.releases.device.installed import Installed, LocalBlob
from blobstore.releases.device.shopping import Shopping
from blobstore.releases.device.transfer import Transfer
from blobstore.releases.index.index import Index, Object, parse_index
from blobstore.releases.index.parts import Parts
from blobstore.releases.sources.source import Body, Found, Source

__all__ = ["predicted"]


class _Device(Installed):
    """A device with one release, or with nothing."""

    def __init__(self, release: Released | None) -> None:
        self._objects = set() if release is None else {*release.index.distinct, release.index.parts}
        self._current = None if release is None else (release.index.parts, release.parts)
        self._contents = {} if release is None else release.parts.contents

    def has(self, wanted: Object) -> bool:
        return wanted in self._objects

    def current(self) -> tuple[Object, Parts] | None:
        return self._current

    def blobs(self) -> dict[str, LocalBlob]:
        return {digest: LocalBlob(Path(os.devnull), 0, size) for digest, size in self._contents.items()}


class _Published(Source):
    """A server with a release, which sends several ranges of an object at a time. It counts what it is asked for."""

    most_ranges = 2

    def __init__(self, index: bytes, parts: bytes, lists: Mapping[str, bytes]) -> None:
        self.name, self._index, self._parts, self._lists = "the release", index, parts, lists

    def _counted(self, data: bytes) -> bytes:
        self._fetched += len(data)
        return data

    def find(self, known: str | None, *, tag: str | None = None, fresh: bool = False) -> Found:
        return Found(sha256(self._index), self._counted(self._index))

    def beside(self, index: Index, name: str, *, fresh: bool = False) -> bytes | None:
        data = self._lists.get(name)
        return None if data is None else self._counted(data)

    def signature(self, index_sha256: str) -> str | None:
        return None

    @contextmanager
    def open(self, wanted: Object, start: int, stop: int) -> Iterator[Body]:
        yield Body(0, iter([self._counted(self._parts)]))  # nothing else is read to plan a pull


def predicted(index: bytes, parts: bytes, lists: Mapping[str, bytes], previous: Released | None) -> int:
    """The bytes that a device fetches of a release, its index and lists included.

    Args:
        index, parts, lists: of the release, as they are stored; lists of ways and changes by their names.
        previous: the release that the device has; None for a device with nothing.
    """
    source = _Published(index, parts, lists)
    found = source.find(None)
    shopping = Shopping(_Device(previous), source, Path(os.devnull), plain=False)
    shopping.add(parse_index(index, source.name), found.sha256)
    transfer = Transfer(source, 1, None)
    for spool in shopping.spools:
        transfer.ask(spool, shopping.ranges.get(spool.wanted.sha256, ()))
    return source.fetched + transfer.asked
