"""Paths without the folder that they have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from blobstore.core.regions.source import is_url

__all__ = ["short_paths", "shortener"]


def short_paths(paths: Sequence[str]) -> list[str]:
    """The paths relative to the folder that holds all of them."""
    return list(map(shortener(paths), paths))


def shortener(paths: Sequence[str]) -> Callable[[str], str]:
    """What makes one of some paths relative to the folder that holds all of them."""
    local = {os.path.dirname(path) for path in paths if not is_url(path)}  # noqa: PTH120 - text stays text
    if not local or any(map(is_url, paths)):
        return str
    try:
        common = os.path.commonpath(local) if any(local) else ""
    except ValueError:  # absolute ones and relative ones
        return str
    return lambda path: os.path.relpath(path, common) if common else path
