"""Which files a report is about, each once, with a stamp that tells whether it is as an earlier report knew it."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.core.disk.kinds import Format, by_name
from blobstore.core.distribution import install
from blobstore.core.errors import BlobStoreError, FileAccessError, MissingDependencyError
from blobstore.core.formats.sharded import with_shards
from blobstore.core.memory.mapped_file import Paths, as_path, listed
from blobstore.reporting.model import Problem
from blobstore.reporting.regions import SUFFIXES
from blobstore.reporting.source import Identity, identify, is_url, needs_package, stamp

__all__ = ["Listing", "list_files", "names_of_paths"]


@dataclass
class Listing:
    """Files in the order in which they were asked for.

    Attributes:
        numbers: by path, its place in this order.
        stamps: by number, as `source.stamp` makes it; 0 for what may have changed whenever it is looked at.
        aliases: by path, other names of the same file (links).
        problems: what names no file.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    stamps: array[int] = field(default_factory=lambda: array("Q"))
    aliases: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def stamp_of(self, path: str) -> int:
        """The stamp of a file; 0 if it is none of these."""
        number = self.numbers.get(path)
        return 0 if number is None else self.stamps[number]


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


def list_files(paths: Sequence[str], remote_stamps: bool = True) -> Listing:
    """Search folders, and look up every file.

    Args:
        paths: files, folders and URLs of either.
        remote_stamps: whether remote files need stamps, which may take a request for each.
    """
    listing = Listing()
    first: dict[object, str] = {}
    for path, identity in _all(paths, remote_stamps, listing.problems):
        if path in listing.numbers:
            continue
        # a file that cannot be looked up stays: opening it raises an error that says what is wrong
        same: object = path if identity is None or is_url(path) else identity.inode
        if (of := first.setdefault(same, path)) == path:
            listing.numbers[path] = len(listing.stamps)
            listing.stamps.append(stamp(identity))
        elif path not in (others := listing.aliases.setdefault(of, [])):
            others.append(path)
    return listing


def _all(paths: Sequence[str], remote_stamps: bool, problems: list[Problem]) -> Iterator[tuple[str, Identity | None]]:
    for path in paths:
        found: list[tuple[str, Identity | None]] = []
        try:
            if is_url(path):
                found = [(file, identify(file) if remote_stamps else None) for file in _remote(path)]
            elif os.path.isdir(path):  # noqa: PTH112
                found = list(_folder(path))
            else:
                names = with_shards(Path(path))[1:] if by_name(path) is Format.SHARDS else [path]
                found = [(str(name), identify(str(name))) for name in names]
        except (BlobStoreError, OSError) as error:
            problems.append(Problem(path, str(error)))
        yield from found


def _folder(path: str) -> Iterator[tuple[str, Identity | None]]:
    """The files of a folder, and then of each folder in it; links to folders are not followed."""
    left = [path]
    while left:
        folder = left.pop()
        with os.scandir(folder) as entries:
            by_entry = {entry.name: entry for entry in entries}
        real = os.path.realpath(folder)
        folders = []
        for name in sorted(by_entry):
            entry = by_entry[name]
            if entry.is_dir():
                if not entry.is_symlink():
                    folders.append(entry.path)
            elif name.endswith(SUFFIXES):
                # What a look at the file alone would find, without asking for its folder again.
                plain = not entry.is_symlink() and f"{name}.commits" not in by_entry
                yield entry.path, identify(entry.path, entry, real) if plain else identify(entry.path)
        left += reversed(folders)


def _remote(path: str) -> list[str]:
    try:
        import fsspec
    except ImportError:
        raise MissingDependencyError(f"a URL needs fsspec: {install('report')}") from None
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
