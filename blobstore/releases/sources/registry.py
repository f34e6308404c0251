"""Releases in a registry: the distribution API of OCI.

Format: https://github.com/opencontainers/distribution-spec/blob/v1.1.0/spec.md
"""

from __future__ import annotations

import io
import os
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from blobstore.core.errors import FileAccessError, TransferError
from blobstore.core.memory.digest import sha256
from blobstore.core.memory.mapped_file import named
from blobstore.releases.index.index import Object
from blobstore.releases.index.manifests import MANIFEST_LIMIT, MANIFEST_TYPE
from blobstore.releases.index.references import Reference, is_loopback
from blobstore.releases.sources.http import Client, joined, natural, origin
from blobstore.releases.sources.oci_layout import OciSource
from blobstore.releases.sources.patience import InterruptedTransferError, retry
from blobstore.releases.sources.server import ServerSource
from blobstore.releases.sources.source import Found, check_pin

__all__ = ["RegistrySource", "RegistryTarget"]

_CHUNK = 1 << 26
"""Larger objects are uploaded in chunks of this size, in bytes; a failed upload goes on at the border of one."""


def _root_of(reference: Reference) -> str:
    """Where the repository is."""
    host = urllib.parse.urlsplit(f"//{reference.place}").hostname or ""
    return f"{'http' if is_loopback(host) else 'https'}://{reference.place}/v2/{reference.repository}"


class RegistrySource(ServerSource, OciSource):
    """A release in a registry.

    Args:
        reference: where it is.
        client: sends the requests.
    """

    def __init__(self, reference: Reference, client: Client) -> None:
        super().__init__(reference.text, client)
        self._asked, self._root = reference, _root_of(reference)

    def find(self, known: str | None, *, tag: str | None = None, fresh: bool = False) -> Found:
        pin = self._asked.pin
        url = f"{self._root}/manifests/{f'sha256:{pin}' if pin else self._asked.tag}"
        accept = {"Accept": MANIFEST_TYPE}
        found = self._client.poll(url, MANIFEST_LIMIT, tag=tag if known else None, fresh=fresh, headers=accept)
        if found.data is None:
            assert known is not None  # noqa: S101 - a tag is sent only for a known index
            return Found(known, None, found.tag, True, found.age)
        check_pin(pin, sha256(found.data), self.name)
        return replace(self._found(found.data, known), tag=found.tag, age=found.age)

    def _blob(self, wanted: Object, limit: int) -> bytes:
        return self._client.get(self._url(wanted), limit) or b""

    def _url(self, wanted: Object) -> str:
        return f"{self._root}/blobs/sha256:{wanted.sha256}"


class _Slice(io.RawIOBase):
    """A range of a file, for one request; it is read once, from its start."""

    def __init__(self, descriptor: int, start: int, stop: int, sent: Callable[[int], None]) -> None:
        super().__init__()
        self._descriptor, self._at, self._stop, self._sent = descriptor, start, stop, sent

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        left = self._stop - self._at
        piece = os.pread(self._descriptor, min(size, left) if size >= 0 else left, self._at)
        self._at += len(piece)
        self._sent(len(piece))
        return piece


class RegistryTarget:
    """A repository that a release is pushed to. Its methods may be called from several threads.

    Args:
        reference: where it is.
        client: sends the requests.
    """

    def __init__(self, reference: Reference, client: Client) -> None:
        self._reference, self._root, self._client = reference, _root_of(reference), client
        self.name = reference.text

    def has(self, wanted: Object) -> bool:
        """Whether the repository has an object."""

        def ask() -> bool:
            url = f"{self._root}/blobs/sha256:{wanted.sha256}"
            with self._client.request("HEAD", url, accept=(200, 404)) as response:
                length = response.headers.get("Content-Length")
                return response.status == 200 and length in {None, str(wanted.size)}

        return bool(retry(self._client.patience, ask))

    def put(self, wanted: Object, path: Path, sent: Callable[[int], None]) -> None:
        """Upload an object.

        Args:
            wanted: the object.
            path: a file with its bytes.
            sent: called with numbers of bytes as they are sent.

        Raises:
            TransferError: patience ended, or the registry refuses.
            FileAccessError: the file cannot be read, or has another size.
        """
        with _readable(path, wanted) as descriptor:
            upload = _Upload(self._client, self._root, wanted, descriptor, sent)
            retry(self._client.patience, upload.go_on)

    def put_manifest(self, data: bytes) -> str:
        """Upload the manifest, under the tag if there is one; its SHA-256."""
        digest = sha256(data)
        tag = self._reference.tag or f"sha256:{digest}"

        def put() -> None:
            url, headers = f"{self._root}/manifests/{tag}", {"Content-Type": MANIFEST_TYPE}
            with self._client.request("PUT", url, headers=headers, body=data, accept=(200, 201)):
                pass

        retry(self._client.patience, put)
        return digest

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


class _Upload:
    """The upload of one object, from where it stopped."""

    def __init__(self, client: Client, root: str, wanted: Object, descriptor: int, sent: Callable[[int], None]) -> None:
        self._client, self._root, self._wanted, self._descriptor, self._sent = client, root, wanted, descriptor, sent
        self._location: str | None = None
        self._at = 0

    def go_on(self) -> None:
        """Upload what is missing. After an error that may pass, this is called again."""
        if self._location is not None and self._at:
            self._find_place()
        if self._location is None:
            self._at = 0
            with self._client.request("POST", f"{self._root}/blobs/uploads/", body=b"", accept=(202,)) as response:
                self._follow(f"{self._root}/blobs/uploads/", response.headers.get("Location"))
        size = self._wanted.size
        while size > _CHUNK and self._at < size:
            self._send("PATCH", self._location, min(self._at + _CHUNK, size), (202,))
        assert self._location is not None  # noqa: S101 - it was just set
        joint = "&" if urllib.parse.urlsplit(self._location).query else "?"
        self._send("PUT", f"{self._location}{joint}digest=sha256:{self._wanted.sha256}", size, (201, 204))

    def _follow(self, url: str, location: str | None) -> None:
        if not location:
            raise TransferError(f"{url}: the registry does not say where to upload to")
        target = joined(url, location)
        if origin(target) != origin(self._root):  # it would get the object, and credentials if it asks for them
            raise TransferError(
                f"{url}: the registry leads an upload to another host: expected {origin(self._root)}, found {origin(target)}"
            )
        self._location = target

    def _send(self, method: str, url: str | None, stop: int, accept: tuple[int, ...]) -> None:
        assert url is not None  # noqa: S101 - there is an upload
        body = _Slice(self._descriptor, self._at, stop, self._sent)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(stop - self._at)}
        if method == "PATCH":
            headers["Content-Range"] = f"{self._at}-{stop - 1}"
        try:
            with self._client.request(method, url, headers=headers, body=body, accept=accept) as response:
                if method == "PATCH":
                    self._follow(url, response.headers.get("Location"))
        except InterruptedTransferError:
            if method == "PUT":  # whether it arrived is unknown: begin again, unless chunks are there already
                self._location = self._location if self._at else None
            raise
        self._at = stop

    def _find_place(self) -> None:
        """How far the registry got; if it forgot the upload, it begins again."""
        assert self._location is not None  # noqa: S101 - the caller checked
        with self._client.request("GET", self._location, accept=(200, 202, 204, 404)) as response:
            first, dash, last = response.headers.get("Range", "").removeprefix("bytes=").partition("-")
            if response.status == 404 or not dash or first != "0" or natural(last) != self._at - 1:
                self._location = None  # in the middle of a chunk: the bytes so far cannot be trusted
                return
            if (location := response.headers.get("Location")) is not None:
                self._follow(self._location, location)


@contextmanager
def _readable(path: Path, wanted: Object) -> Iterator[int]:
    with named(path), path.open("rb", buffering=0) as file:
        if (size := os.fstat(file.fileno()).st_size) != wanted.size:
            raise FileAccessError(path, f"it has {size} bytes, the index says {wanted.size}")
        yield file.fileno()
