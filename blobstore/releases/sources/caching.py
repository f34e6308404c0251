"""What caches may keep of a release folder, and how long."""

from __future__ import annotations

import re

from blobstore.releases.sources.source import INDEX

__all__ = ["cache_control"]

_FOR_EVER = "max-age=31536000, immutable"
_SHORT = "max-age=60"
_OBJECT = re.compile(r"(files|packs/[0-9a-f]{2})/[0-9a-f]{64}")
_VERSION = re.compile(r"v?[0-9]")


def cache_control(path: str) -> str:
    """The value of the header `Cache-Control` for a file of a release folder.

    What is named by its own digest never changes, and neither does the index of a version. The index of `latest` is another
    one after each release, `ways.json.zst` after `gc`, and a signature may come after its index.

    Args:
        path: below the release folder, with slashes.
    """
    *folders, name = path.split("/")
    if _OBJECT.fullmatch(path):
        return _FOR_EVER
    if name == INDEX and len(folders) == 2 and _VERSION.match(folders[1]):
        return _FOR_EVER
    return _SHORT
