"""Packed weights on disk: what XNNPACK makes of weights when it loads them, made once and mapped by every later load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from blobstore.core import errors
from blobstore.core.disk.kinds import check_folder_name
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.reprs import fields_line, line
from blobstore.core.text import size
from blobstore.runtime.native import as_count, decode_text, native, native_path

__all__ = ["PackedFile", "PackedStats", "PackedStore", "as_packed"]

DEFAULT_LIMIT = 4 << 30
DEFAULT_READ_AHEAD = 16 << 20


@dataclass(frozen=True)
class PackedFile:
    """A file of a packed store.

    Attributes:
        path: the file.
        nbytes: its size in bytes.
        entries: the number of packed weights in it.
        mapped: of those, the ones that updates write in place.
        used: when a load last used it, in seconds since 1970.
        in_use: whether a living process uses it; known on Linux only, elsewhere False.
        problem: why it cannot be used; empty if it can.
        unchecked: entries of a working copy that `verify` could not compare: not up to date, or being written. The next
            load of a program makes them anew.
    """

    __repr__ = fields_line

    path: Path
    nbytes: int
    entries: int
    mapped: int
    used: int
    in_use: bool
    problem: str
    unchecked: int


@dataclass(frozen=True)
class PackedStats:
    """What happened through one `PackedStore` in this process. Counted or measured, never estimated.

    Attributes:
        hits: delegates whose weights were all in a file.
        builds: files that were written.
        fallbacks: delegates that packed weights to the heap.
        written: packed weights that updates wrote in place.
        repacked: delegates that an update packed anew, as a weight of theirs cannot be written in place.
        reasons: why, and how often.
        dropped: files that were damaged.
        verified_bytes: bytes that were compared with digests.
        mapped_bytes: the size of the files that programs use now.
        heap_bytes: by how much the anonymous memory of the process grew while delegates fell back; None if none did, or if
            this system does not say.
    """

    __repr__ = fields_line

    hits: int
    builds: int
    fallbacks: int
    written: int
    repacked: int
    reasons: dict[str, int]
    dropped: int
    verified_bytes: int
    mapped_bytes: int
    heap_bytes: int | None


_Files: TypeAlias = list[PackedFile]  # in the class, `list` is a method


class PackedStore:
    """A folder with files of packed weights, one for each foundation, the data files of a cache without a base.

    All programs on a foundation use its file: methods, input lengths, a base with adapters. Entries are named by content,
    so other weights, scales, or layouts have other entries. Give the store, or its folder, as `packed` where a cache is
    opened or a program is loaded. When the first method of a program is loaded that no file has, all its methods are
    packed into memory and written to a new file. Loads then map this file, read-only; they pack nothing, and processes
    share its pages.

    If no file can be used or written, weights are packed to the heap, as without a store. Programs load all the same, and
    `stats` has the reason. Any number of threads and processes may use a folder at a time.

    Args:
        folder: made when the first file is written.
        limit: the size of all files together in bytes. Where it would be exceeded, files that no living process uses go,
            the least recently used first. A file that is larger by itself is not written.
        verify: compare the file with its digests at every load. Otherwise only if it is new, or was changed since it was
            last compared.
        read_ahead: how many bytes of the packed weights of a method, from those on that a call needs first, a load asks
            the system to read where they are not in memory, while the load returns and the first call computes. Never
            more than half of the memory that the process can have. With 0, pages are read when they are used.

    Attributes:
        folder: the absolute path.
        limit, read_ahead: as given.

    Raises:
        FileAccessError: the path is something else than a folder.
        OutputPathError: it ends like the path of a file, such as `.ptd`.
        UnsupportedDataError: `folder` is not a path.
        InputError: `limit` or `read_ahead` is not an integer, or is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        limit: int = DEFAULT_LIMIT,
        verify: bool = False,
        read_ahead: int = DEFAULT_READ_AHEAD,
    ) -> None:
        self.limit = as_count(limit, "the limit")
        self.read_ahead = as_count(read_ahead, "read_ahead")
        check_folder_name(as_path(folder))
        self._native: Any = native.PackedStore.open(native_path(folder), self.limit, bool(verify), self.read_ahead)
        self.folder = Path(os.fsdecode(self._native.folder))

    @property
    def stats(self) -> PackedStats:
        """What happened so far."""
        *counts, reasons, heap_bytes = self._native.stats()
        hits, builds, fallbacks, written, repacked, dropped, verified_bytes, mapped_bytes = counts
        named = {decode_text(reason): count for reason, count in reasons}
        return PackedStats(
            hits, builds, fallbacks, written, repacked, named, dropped, verified_bytes, mapped_bytes, heap_bytes
        )

    def list(self) -> _Files:
        """The files, the most recently used first. Their tables are read.

        Raises:
            FileAccessError: the folder cannot be read.
        """
        return [_file(row) for row in self._native.list()]

    def verify(self) -> _Files:
        """As `list`, and compare all bytes with their digests. Removes nothing."""
        return [_file(row) for row in self._native.verify()]

    def gc(self) -> _Files:
        """Remove what killed processes left, files that are damaged or that a newer one replaced, and then those that
        exceed the limit. Files that a living process uses stay.

        Returns:
            What was removed.

        Raises:
            FileAccessError: the folder cannot be changed.
        """
        return [_file(row) for row in self._native.gc()]

    def __repr__(self) -> str:
        return line("PackedStore", self.folder, f"at most {size(self.limit)}")


def _file(row: tuple[bytes, int, int, int, int, bool, bytes, int]) -> PackedFile:
    path, nbytes, entries, mapped, used, in_use, problem, unchecked = row
    return PackedFile(Path(os.fsdecode(path)), nbytes, entries, mapped, used, in_use, decode_text(problem), unchecked)


def as_packed(packed: PackedStore | str | os.PathLike[str] | None) -> PackedStore | None:
    """What `packed` stands for: a store, or the folder of one.

    Raises:
        UnsupportedDataError: it is neither.
    """
    if packed is None or isinstance(packed, PackedStore):
        return packed
    if not isinstance(packed, (str, os.PathLike)):
        raise errors.UnsupportedDataError(f"packed must be a PackedStore or the path of a folder, not {packed!r}")
    return PackedStore(packed)
