"""The files that a path stands for: itself, or those in a folder and below it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from blobstore.core.errors import FileAccessError
from blobstore.core.programs.deployed import tree

__all__ = ["SUFFIXES", "files_of", "nothing_here"]

SUFFIXES = (".pte", ".ptd", ".safetensors")
"""The files that a folder is searched for."""


def files_of(path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files in a folder and below it with these suffixes, in order, without hidden ones; any other path is itself.

    Raises:
        FileAccessError: a folder cannot be read, or has no such file.
    """
    if not os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises an error for a name that is too long
        return [path]
    files = tree(path, suffixes)
    if not files:
        raise FileAccessError(path, nothing_here(suffixes))
    return files


def nothing_here(suffixes: Sequence[str]) -> str:
    """The reason of an error about a folder without a file with one of these suffixes."""
    *others, last = suffixes
    return f"there is no {', '.join(others)}{' or ' * bool(others)}{last} in this folder"
