"""The source that a reference leads to."""

from __future__ import annotations

import os

from blobstore.core.errors import ReleaseError
from blobstore.releases.index.references import Reference, parse_reference
from blobstore.releases.sources.patience import Patience
from blobstore.releases.sources.source import FolderSource, Source

__all__ = ["check_effort", "open_source"]

_MOST_THREADS = 1000


def open_source(reference: str | os.PathLike[str], patience: Patience, connections: int) -> Source:
    """Open a source; nothing is read yet.

    Args:
        reference: see `blobstore.releases.index.references.parse_reference`.
        patience: how long to try.
        connections: how many may be open at a time.

    Raises:
        ReleaseError: this is not a reference.
        MissingDependencyError: it needs a package that is not installed.
    """
    parsed = parse_reference(reference)
    check_effort(patience, connections)
    source = _opened(parsed, patience, connections)
    source.reference = parsed
    return source


def _opened(reference: Reference, patience: Patience, connections: int) -> Source:
    if reference.kind == "folder":
        return FolderSource(reference.place, reference.pin)
    if reference.kind == "layout":
        from blobstore.releases.sources.oci_layout import LayoutSource

        return LayoutSource(reference)
    if reference.kind == "bucket":
        from blobstore.releases.sources.bucket import BucketSource

        return BucketSource(reference.place, reference.pin)
    from blobstore.releases.sources.http import Client

    client = Client(patience, connections)
    if reference.kind == "web":
        from blobstore.releases.sources.web import WebSource

        return WebSource(reference.place, reference.pin, client)
    from blobstore.releases.sources.registry import RegistrySource

    return RegistrySource(reference, client)


def check_effort(patience: Patience, connections: int) -> None:
    """Raise ReleaseError unless these are a `Patience` and a number of requests that may be sent at a time."""
    if not isinstance(patience, Patience):
        raise ReleaseError(f"expected a Patience, not {patience!r}")
    if isinstance(connections, bool) or not isinstance(connections, int) or not 0 < connections <= _MOST_THREADS:
        raise ReleaseError(f"threads must be an integer from 1 to {_MOST_THREADS}, not {connections!r}")
