"""A release as an artifact of OCI: the index is the config, and its objects are layers.

Format: https://github.com/opencontainers/image-spec/blob/v1.1.0/manifest.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blobstore.core.errors import InvalidFileError, ReleaseError
from blobstore.core.memory.digest import sha256
from blobstore.releases.index.index import INDEX_LIMIT, TABLE_LIMIT, Index, Object
from blobstore.releases.index.ways import Ways

__all__ = ["MANIFEST_LIMIT", "MANIFEST_TYPE", "OciManifest", "layers_of", "make_manifest", "parse_manifest"]

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MANIFEST_LIMIT = 1 << 22
"""The largest manifest in bytes; registries refuse larger ones."""

_ARTIFACT = "application/vnd.blobstore.release.v1+json"
_CONFIG = "application/vnd.blobstore.release.index.v1+json"
_LAYER = "application/vnd.blobstore.object.v1"
_WAYS = "application/vnd.blobstore.release.ways.v1+json+zstd"
_EARLIER = "application/vnd.blobstore.release.earlier.v1+json+zstd"
_SIGNATURE = "dev.blobstore.signature"
_TITLE = "org.opencontainers.image.title"
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class OciManifest:
    """What a manifest says.

    Attributes:
        index: the config.
        ways, earlier: layers; None without them.
        signature: of the index; None without one.
    """

    index: Object
    ways: Object | None
    earlier: Object | None
    signature: str | None


@dataclass(frozen=True)
class Layer:
    """An object that is pushed, with the name of the file that it is, or None."""

    object: Object
    title: str | None


def layers_of(index: Index, ways: Sequence[Ways]) -> list[Layer]:
    """The objects of a release, each once.

    Raises:
        ReleaseError: there are too many for one manifest.
    """
    titles: dict[Object, str | None] = {
        **dict.fromkeys(one for some in ways for one in some.objects),
        index.parts: None,
    }
    if index.plain:
        for file in index.files:
            titles.setdefault(file.object, file.name)
    unique: dict[str, Layer] = {}
    for one, title in titles.items():
        if one.size:  # an empty file is not fetched
            unique.setdefault(one.sha256, Layer(one, title))
    if len(unique) > _MOST_LAYERS:
        raise ReleaseError(
            f"{index.name}:{index.version}: {len(unique)} objects are too many for a registry, which takes {_MOST_LAYERS}"
        )
    return list(unique.values())


def _descriptor(media_type: str, of: Object, **annotations: str) -> dict[str, Any]:
    descriptor: dict[str, Any] = {"mediaType": media_type, "digest": f"sha256:{of.sha256}", "size": of.size}
    return {**descriptor, "annotations": annotations} if annotations else descriptor


def make_manifest(
    index: Index, data: bytes, ways: Sequence[bytes], signature: str | None, layers: list[Layer]
) -> bytes:
    """The manifest of a release; equal releases have equal ones.

    Args:
        index, data: the release, and the bytes of its index.
        ways: to its contents, and those with ways to earlier contents, if there are such.
        signature: of the index.
        layers: what was pushed.

    Raises:
        ReleaseError: it would be larger than registries take.
    """
    annotations = {"org.opencontainers.image.version": index.version}
    if signature is not None:
        annotations[_SIGNATURE] = signature
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": _ARTIFACT,
            "config": _descriptor(_CONFIG, Object(sha256(data), len(data))),
            "layers": [
                *(
                    _descriptor(kind, Object(sha256(one), len(one)))
                    for kind, one in zip((_WAYS, _EARLIER), ways, strict=False)
                ),
                *(
                    _descriptor(_LAYER, layer.object, **({_TITLE: layer.title} if layer.title is not None else {}))
                    for layer in layers
                ),
            ],
            "annotations": annotations,
        },
        separators=(",", ":"),
    ).encode()
    if len(manifest) > MANIFEST_LIMIT:
        raise ReleaseError(
            f"{index.name}:{index.version}: its manifest has {len(manifest)} bytes, at most {MANIFEST_LIMIT} are possible"
        )
    return manifest


def parse_manifest(data: bytes, where: str) -> OciManifest:
    """Read a manifest.

    Raises:
        InvalidFileError: it is malformed, or that of something else.
    """
    try:
        content = json.loads(data)
        index = _described(content["config"], INDEX_LIMIT, where)
        kind = content["config"]["mediaType"]
        by_kind = {one["mediaType"]: one for one in reversed(content.get("layers") or ())}
        ways, earlier = (
            _described(by_kind[kind], TABLE_LIMIT, where) if kind in by_kind else None for kind in (_WAYS, _EARLIER)
        )
        signature = (content.get("annotations") or {}).get(_SIGNATURE)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InvalidFileError):
            raise
        raise InvalidFileError(where, "this is not a manifest of OCI with a config") from None
    if kind != _CONFIG:
        raise InvalidFileError(where, f"this is not a release: expected a config of type {_CONFIG}, found {kind!r}")
    if not isinstance(signature, str | None):
        raise InvalidFileError(where, "the signature is malformed")
    return OciManifest(index, ways, earlier, signature)


def _described(descriptor: Any, limit: int, where: str) -> Object:
    digest, size = descriptor["digest"], descriptor["size"]
    if not (
        isinstance(digest, str)
        and re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
        and type(size) is int
        and 0 < size <= limit
    ):
        raise InvalidFileError(where, "the descriptor of the config, or of the list of ways, is malformed")
    return Object(digest.removeprefix("sha256:"), size)
