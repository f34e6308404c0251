"""What releases on servers have in common, whichever protocol leads to their objects."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from blobstore.releases.index.index import Object
from blobstore.releases.sources.http import MOST_RANGES, Client
from blobstore.releases.sources.source import Body, Source

__all__ = ["ServerSource"]


class ServerSource(Source):
    """A release on a server.

    Args:
        name: as messages call it.
        client: sends the requests.
    """

    cached = True
    most_ranges = MOST_RANGES

    def __init__(self, name: str, client: Client) -> None:
        self.name, self.patience = name, client.patience
        self._client = client

    @property
    def fetched(self) -> int:
        return self._client.fetched

    @property
    def requests(self) -> int:
        return self._client.requests

    @abstractmethod
    def _url(self, wanted: Object) -> str:
        """Where an object is."""

    def open(self, wanted: Object, start: int, stop: int) -> AbstractContextManager[Body]:
        return self._client.body(self._url(wanted), wanted, start, stop)

    def open_ranges(
        self, wanted: Object, ranges: Sequence[tuple[int, int]]
    ) -> AbstractContextManager[Iterator[Body] | None]:
        return self._client.bodies(self._url(wanted), wanted, ranges)

    def gap(self, requests: int) -> int:
        return self._client.gap(requests)

    def close(self) -> None:
        self._client.close()
