"""Which files a report is about, each once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.core.disk.kinds import TORCH_SUFFIXES, Format, by_content, by_name
from blobstore.core.errors import BlobStoreError, FileAccessError
from blobstore.core.formats.sharded import with_shards
from blobstore.core.memory.mapped_file import Paths, as_path, listed
from blobstore.core.regions.reading import SUFFIXES
from blobstore.core.regions.source import is_url, needs_package
from blobstore.core.requirements import needed
from blobstore.reporting.model import Problem

__all__ = ["Listing", "list_files", "names_of_paths"]


@dataclass
class Listing:
    """Files in the order in which they were asked for, each once.

    Attributes:
        paths: the files.
        aliases: by path, other names of the same file (links).
        problems: what names no file.
    """

    paths: list[str] = field(default_factory=list)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def names_of_paths(paths: Paths) -> list[str]:
    """The paths and URLs as text, each as it was given.

    Raises:
        FileAccessError: one of them is not a path.
    """
    names = []
    for path in listed(paths):
        if not (isinstance(path, str) and is_url(path)):
            as_path(path)  # raises if it is not a path
        names.append(os.fsdecode(path))
    return names


def list_files(paths: Sequence[str]) -> Listing:
    """Search folders, and find out which paths lead to the same file."""
    listing = Listing()
    first: dict[object, str] = {}
    for path in dict.fromkeys(_all(paths, listing.problems)):
        of = first.setdefault(_inode(path) or path, path)
        if of == path:
            listing.paths.append(path)
        else:
            listing.aliases.setdefault(of, []).append(path)
    return listing


def _inode(path: str) -> tuple[int, int] | None:
    """Which file it is; None if it cannot be looked up: opening it raises an error that says what is wrong."""
    if is_url(path):
        return None
    try:
        status = os.stat(path)  # noqa: PTH116 - text stays text
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _all(paths: Sequence[str], problems: list[Problem]) -> Iterator[str]:
    for path in paths:
        try:
            yield from _files(path)
        except (BlobStoreError, OSError) as error:
            problems.append(Problem(path, str(error)))


def _files(path: str) -> list[str]:
    if is_url(path):
        return _remote(path)
    if os.path.isdir(path):  # noqa: PTH112
        return _folder(path)
    if by_name(path) is Format.SHARDS:
        return list(map(str, with_shards(Path(path))[1:]))
    return [path]


def _folder(path: str) -> list[str]:
    """The files of a folder, and then of each folder in it; links to folders are not followed."""
    found = []
    left = [path]
    while left:
        with os.scandir(left.pop()) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        found += [entry.path for entry in ordered if not entry.is_dir() and _is_readable(entry.path)]
        left += [entry.path for entry in reversed(ordered) if entry.is_dir(follow_symlinks=False)]
    return found


def _is_readable(path: str) -> bool:
    """Whether a file of a folder is of a kind that is read; `.bin` and the like are files of many programs."""
    if path.endswith(TORCH_SUFFIXES):
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - text stays text
                return by_content("", file.read(64)) is Format.TORCH
        except OSError:
            return False
    return path.endswith(SUFFIXES)


def _remote(path: str) -> list[str]:
    with needed("a URL needs fsspec", "report"):
        import fsspec
    try:
        system, inside = fsspec.core.url_to_fs(path)
        if not system.isdir(inside):
            return [path]
        names = sorted(name for name in system.find(inside) if name.endswith(SUFFIXES))
    except ImportError as error:
        raise needs_package(path, error) from None
    except Exception as error:  # each protocol's package raises errors of its own
        raise FileAccessError(path, error if isinstance(error, OSError) else str(error)) from None
    return [str(system.unstrip_protocol(name)) for name in names]
