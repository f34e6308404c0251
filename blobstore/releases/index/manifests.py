"""A release as an artifact of OCI: the index is the config, and a file is a layer.

Format: https://github.com/opencontainers/image-spec/blob/v1.1.0/manifest.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from blobstore.core.errors import InvalidFileError, ReleaseError
from blobstore.core.memory.digest import sha256
from blobstore.releases.index.index import INDEX_LIMIT, File, Index, Object, Table

__all__ = ["MANIFEST_LIMIT", "MANIFEST_TYPE", "Manifest", "layers_of", "make_manifest", "parse_manifest"]

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MANIFEST_LIMIT = 1 << 22
"""The largest manifest in bytes; registries refuse larger ones."""

_ARTIFACT = "application/vnd.blobstore.release.v1+json"
_CONFIG = "application/vnd.blobstore.release.index.v1+json"
_LAYER = "application/vnd.blobstore.object.v1"
_SIGNATURE = "dev.blobstore.signature"
_TITLE = "org.opencontainers.image.title"
_MOST_LAYERS = 1000


@dataclass(frozen=True)
class Manifest:
    """What a manifest says.

    Attributes:
        index: the config.
        signature: of the index; None without one.
    """

    index: Object
    signature: str | None


@dataclass(frozen=True)
class Layer:
    """An object that is pushed, with the name of the file that it is, or None."""

    object: Object
    title: str | None


def layers_of(index: Index, table_of: Callable[[File], Table]) -> list[Layer]:
    """The objects of a release, each once.

    Args:
        index: the release.
        table_of: gives the table of a file that has one.

    Raises:
        ReleaseError: there are too many for one manifest.
    """
    packed = {name for pack in index.packs for name, _ in pack.files}
    every = list(dict.fromkeys(_layers(index, table_of, frozenset())))
    if len(every) > _MOST_LAYERS // 2:  # a small file is in its pack anyway
        every = list(dict.fromkeys(_layers(index, table_of, packed)))
    unique: dict[str, Layer] = {}
    for layer in every:
        if layer.object.size:  # an empty file is not fetched
            unique.setdefault(layer.object.sha256, layer)
    if len(unique) > _MOST_LAYERS:
        raise ReleaseError(
            f"{index.name}:{index.version}: {len(unique)} objects are too many for a registry, which takes {_MOST_LAYERS}"
        )
    return list(unique.values())


def _layers(index: Index, table_of: Callable[[File], Table], without: frozenset[str] | set[str]) -> Iterator[Layer]:
    for file in index.files:
        if file.name not in without:
            yield Layer(file.object, file.name)
        if file.table is not None:
            yield Layer(file.table, None)
            yield from (Layer(one, None) for one in table_of(file).objects)
    yield from (Layer(pack.object, None) for pack in index.packs)


def _descriptor(media_type: str, of: Object, **annotations: str) -> dict[str, Any]:
    descriptor: dict[str, Any] = {"mediaType": media_type, "digest": f"sha256:{of.sha256}", "size": of.size}
    return {**descriptor, "annotations": annotations} if annotations else descriptor


def make_manifest(index: Index, data: bytes, signature: str | None, layers: list[Layer]) -> bytes:
    """The manifest of a release; equal releases have equal ones.

    Args:
        index, data: the release, and the bytes of its index.
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
                _descriptor(_LAYER, layer.object, **({_TITLE: layer.title} if layer.title is not None else {}))
                for layer in layers
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


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest.

    Raises:
        InvalidFileError: it is malformed, or that of something else.
    """
    try:
        content = json.loads(data)
        config = content["config"]
        kind, digest, size = config["mediaType"], config["digest"], config["size"]
        signature = (content.get("annotations") or {}).get(_SIGNATURE)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidFileError(where, "this is not a manifest of OCI with a config") from None
    if kind != _CONFIG:
        raise InvalidFileError(where, f"this is not a release: expected a config of type {_CONFIG}, found {kind!r}")
    if (
        not isinstance(digest, str)
        or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest)
        or type(size) is not int
        or not 0 < size <= INDEX_LIMIT
        or not isinstance(signature, str | None)
    ):
        raise InvalidFileError(where, "the descriptor of the config is malformed")
    return Manifest(Object(digest.removeprefix("sha256:"), size), signature)
