"""Releases in a folder in OCI's image layout, as `skopeo copy` and others read and write it.

Format: https://github.com/opencontainers/image-spec/blob/v1.1.0/image-layout.md
"""

from __future__ import annotations

import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blobstore.core.disk.locks import exclusive
from blobstore.core.disk.recovery import recover
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import FileAccessError, IntegrityError, InvalidFileError
from blobstore.core.memory.digest import sha256
from blobstore.core.memory.mapped_file import as_path, named, open_regular
from blobstore.releases.index.index import INDEX_LIMIT, TABLE_LIMIT, Index, Object
from blobstore.releases.index.manifests import MANIFEST_LIMIT, MANIFEST_TYPE, OciManifest, parse_manifest
from blobstore.releases.index.objects import store_bytes, store_file
from blobstore.releases.index.references import Reference
from blobstore.releases.index.ways import EARLIER, WAYS
from blobstore.releases.sources.source import Body, Found, Source, check_pin, pieces_of, read_small

__all__ = ["LayoutSource", "LayoutTarget", "OciSource"]

_REF_NAME = "org.opencontainers.image.ref.name"


def _read(folder: Path) -> dict[str, Any]:
    """The folder's index.json, whose "manifests" are descriptors."""
    path = folder / "index.json"
    try:
        index: dict[str, Any] = json.loads(read_small(path, INDEX_LIMIT))
        manifests = index["manifests"]
        if not isinstance(manifests, list) or not all(isinstance(one, dict) for one in manifests):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidFileError(path, "this is not the index of an image layout of OCI") from None
    return index


def _tag(descriptor: dict[str, Any]) -> Any:
    annotations = descriptor.get("annotations")
    return annotations.get(_REF_NAME) if isinstance(annotations, dict) else None


class OciSource(Source):
    """A release whose manifest leads to its index and its lists."""

    _manifest: OciManifest | None = None

    @abstractmethod
    def _blob(self, wanted: Object, limit: int) -> bytes:
        """What has the name of a digest, of at most `limit` bytes; it is not compared."""

    def _found(self, manifest: bytes, known: str | None) -> Found:
        """What a manifest leads to, whose own digest was compared."""
        self._manifest = parse_manifest(manifest, self.name)
        wanted = self._manifest.index
        return Found(wanted.sha256, None if wanted.sha256 == known else self._compared(wanted, INDEX_LIMIT, "index"))

    def _compared(self, wanted: Object, limit: int, what: str) -> bytes:
        data = self._blob(wanted, limit)
        if sha256(data) != wanted.sha256:
            raise IntegrityError(
                self.name, f"the {what} does not have the digest of the manifest, sha256:{wanted.sha256}"
            )
        return data

    def beside(self, index: Index, name: str, *, fresh: bool = False) -> bytes | None:
        if self._manifest is None:
            return None
        wanted = {WAYS: self._manifest.ways, EARLIER: self._manifest.earlier}.get(name)
        return None if wanted is None else self._compared(wanted, TABLE_LIMIT, "list of ways")

    def signature(self, index_sha256: str) -> str | None:
        return self._manifest.signature if self._manifest and self._manifest.index.sha256 == index_sha256 else None


class LayoutSource(OciSource):
    """A release in an image layout.

    Args:
        reference: where it is.
    """

    remote = False

    def __init__(self, reference: Reference) -> None:
        self._reference, self._folder, self.name = reference, as_path(reference.place), reference.text

    def _path(self, digest: str) -> Path:
        return self._folder / "blobs" / "sha256" / digest

    def _digest(self) -> str:
        if self._reference.pin:
            return self._reference.pin
        for descriptor in _read(self._folder)["manifests"]:
            if _tag(descriptor) == self._reference.tag:
                match = re.fullmatch(r"sha256:([0-9a-f]{64})", str(descriptor.get("digest")))
                if match is None:
                    raise InvalidFileError(
                        self._folder / "index.json", f"the digest of {self._reference.tag!r} is malformed"
                    )
                return match[1]
        raise FileAccessError(self._folder, f"the image layout has no tag {self._reference.tag!r}")

    def find(self, known: str | None, *, tag: str | None = None, fresh: bool = False) -> Found:
        digest = self._digest()
        data = read_small(self._path(digest), MANIFEST_LIMIT)
        self._fetched += len(data)
        check_pin(digest, sha256(data), self.name)
        return self._found(data, known)

    def _blob(self, wanted: Object, limit: int) -> bytes:
        data = read_small(self._path(wanted.sha256), limit)
        self._fetched += len(data)
        return data

    @contextmanager
    def open(self, wanted: Object, start: int, stop: int) -> Iterator[Body]:
        path = self._path(wanted.sha256)
        with open_regular(path) as descriptor:
            if (size := os.fstat(descriptor).st_size) != wanted.size:
                raise InvalidFileError(path, f"it has {size} bytes, the index says {wanted.size}")
            self._fetched += stop - start
            yield Body(start, pieces_of(descriptor, start, stop))


class LayoutTarget:
    """An image layout that a release is pushed to; it is made if it is missing.

    Args:
        reference: where it is.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference, self._folder, self.name = reference, as_path(reference.place), reference.text
        self._blobs = self._folder / "blobs" / "sha256"
        with named(self._folder):
            self._blobs.mkdir(parents=True, exist_ok=True)
        recover(self._blobs)

    def has(self, wanted: Object) -> bool:
        """Whether the layout has an object."""
        try:
            return os.lstat(self._blobs / wanted.sha256).st_size == wanted.size
        except OSError:
            return False

    def put(self, wanted: Object, path: Path, sent: Callable[[int], None]) -> None:
        """Copy an object.

        Raises:
            IntegrityError: the file at `path` has another digest.
        """
        if store_file(self._blobs, path).sha256 != wanted.sha256:
            raise IntegrityError(path, f"it does not have the digest that the index says, {wanted.sha256}")
        sent(wanted.size)

    def put_manifest(self, data: bytes) -> str:
        """Add the manifest, under the tag if there is one; its SHA-256."""
        with exclusive(self._folder):
            stored = store_bytes(self._blobs, data)
            with named(self._folder):
                is_new = not (self._folder / "index.json").exists()
            old: dict[str, Any] = {"schemaVersion": 2, "manifests": []} if is_new else _read(self._folder)
            new: dict[str, Any] = {"mediaType": MANIFEST_TYPE, "digest": f"sha256:{stored.sha256}", "size": stored.size}
            if self._reference.tag:
                new["annotations"] = {_REF_NAME: self._reference.tag}
            kept = [one for one in old["manifests"] if (one.get("digest"), _tag(one)) != (new["digest"], _tag(new))]
            kept = [one for one in kept if not self._reference.tag or _tag(one) != self._reference.tag]
            index = {**old, "manifests": [*kept, new]}
            with Staging(force=True) as staging:
                for name, value in (("oci-layout", {"imageLayoutVersion": "1.0.0"}), ("index.json", index)):
                    with staging.open(self._folder / name) as file:
                        file.write(json.dumps(value).encode())
        return stored.sha256

    def close(self) -> None:
        """Nothing is open."""
