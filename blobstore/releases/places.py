"""The source that a reference leads to."""

from __future__ import annotations

import os

from blobstore.releases.references import parse_reference
from blobstore.releases.sources import FolderSource, Patience, Source

__all__ = ["open_source"]


def open_source(reference: str | os.PathLike[str], patience: Patience, connections: int) -> Source:
    """Open a source; nothing is read yet.

    Args:
        reference: see `blobstore.releases.references.parse_reference`.
        patience: how long to try.
        connections: how many may be open at a time.

    Raises:
        ReleaseError: this is not a reference.
        MissingDependencyError: it needs a package that is not installed.
    """
    found = parse_reference(reference)
    if found.kind == "folder":
        return FolderSource(found.place, found.pin)
    if found.kind == "layout":
        from blobstore.releases.oci_layout import LayoutSource

        return LayoutSource(found)
    from blobstore.releases.http import Client

    client = Client(patience, connections)
    if found.kind == "web":
        from blobstore.releases.web import WebSource

        return WebSource(found.place, found.pin, client)
    from blobstore.releases.registry import RegistrySource

    return RegistrySource(found, client)
