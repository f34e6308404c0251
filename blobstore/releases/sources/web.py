"""Releases on a static web server: a release folder that was copied there, by any tool."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit, urlunsplit

from blobstore.core.memory.digest import sha256
from blobstore.releases.index.index import INDEX_LIMIT, Object
from blobstore.releases.sources.http import Client
from blobstore.releases.sources.server import ServerSource
from blobstore.releases.sources.source import Found, ReleaseFolder, check_pin

__all__ = ["WebSource"]


class WebSource(ServerSource, ReleaseFolder):
    """A release on a web server.

    Args:
        url: of the index: `…/NAME/VERSION/index.json`.
        pin: the SHA-256 that the index must have.
        client: sends the requests.
    """

    def __init__(self, url: str, pin: str | None, client: Client) -> None:
        super().__init__(url, client)
        self._pin = pin
        self._signatures: dict[str, str | None] = {}
        parts = urlsplit(url)
        self._query = parts.query  # a signed URL; its query counts for all files
        self._base = urlunsplit(parts._replace(query="", fragment=""))

    def _at(self, path: str) -> str:
        url = urljoin(self._base, f"../../{path}")
        return f"{url}?{self._query}" if self._query else url

    def find(self, known: str | None, *, tag: str | None = None, fresh: bool = False) -> Found:
        found = self._client.poll(self.name, INDEX_LIMIT, tag=tag if known else None, fresh=fresh)
        digest = known if found.data is None else sha256(found.data)
        assert digest is not None  # noqa: S101 - a tag is sent only for a known index
        check_pin(self._pin, digest, self.name)
        return Found(digest, found.data, found.tag, found.data is None, found.age)

    def _small(self, path: str, limit: int, *, fresh: bool = False) -> bytes | None:
        headers = {"Cache-Control": "no-cache"} if fresh else None
        return self._client.get(self._at(path), limit, headers=headers, missing=True)

    def signature(self, index_sha256: str) -> str | None:
        if index_sha256 not in self._signatures:
            self._signatures[index_sha256] = super().signature(index_sha256)
        return self._signatures[index_sha256]

    def _url(self, wanted: Object) -> str:
        return self._at(wanted.path)
