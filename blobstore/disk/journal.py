"""The journal of a group of files: what must still be renamed if the process is killed between two renames.

A journal is written when all files of the group are on the disk under temporary names, and before the first rename.
Whoever finds it after a kill therefore has all it takes to finish the group.

Each folder of the group has a copy, with paths relative to that folder, so that folders can be moved together. The copy
in the first folder is written last and removed first: while it is there, the group is under way, otherwise it was not
begun or is complete. A copy is a file of JSON:

    {"blobstore.journal": 1, "folders": [".", ...], "files": [{"place": "a.pte", "temporary": ".blobstore-...tmp",
     "backup": ".blobstore-...tmp", "before": [inode, size, mtime in ns] or null, "after": [...]}, ...]}
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.memory.mapped_file import Descriptor

__all__ = ["JOURNAL", "TEMPORARY", "Identity", "Journal", "Move", "identity", "sync_folder"]

TEMPORARY = re.compile(r"\.blobstore-[0-9a-f]{24}\.tmp")
"""Names of temporary files and backups."""

JOURNAL = re.compile(r"\.blobstore-[0-9a-f]{24}\.journal")
"""Names of journals; the copies of one have the same name."""

_LARGEST = 1 << 26  # bytes; a file takes some 300
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR}

Identity = tuple[int, int, int]
"""Inode, size, and time of the last change in ns: tells a file from one that replaced it, or was written over it."""


def identity(path: Path) -> Identity | None:
    """Which file has this name; None if none has."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Move:
    """One rename of a group.

    Attributes:
        place: where the file goes.
        temporary: the new file before the rename.
        backup: a second name of the old file, given just before the rename where the file system has links.
        before: which file is at `place` before the rename; None if none is.
        after: which one is there afterwards.
    """

    place: Path
    temporary: Path
    backup: Path
    before: Identity | None
    after: Identity | None

    def possible(self) -> bool:
        """Whether the rename was done, or still can be. If neither, it was undone."""
        # In this order, as another process may do the rename in between. A new file that is gone was removed by its user.
        return os.path.lexists(self.temporary) or self.before is None or identity(self.place) != self.before

    def do(self) -> None:
        """Rename, unless it was done, or somebody else put another file there since the kill: that file stays."""
        if os.path.lexists(self.temporary) and identity(self.place) == self.before:
            with contextlib.suppress(FileNotFoundError):  # another process did it
                os.replace(self.temporary, self.place)

    def undo(self) -> None:
        """Put the old file back where the new one is in its place; without an old file, make the new one temporary."""
        if not os.path.lexists(self.temporary) and identity(self.place) == self.after:
            if self.before is None:
                os.replace(self.place, self.temporary)
            elif os.path.lexists(self.backup):
                os.replace(self.backup, self.place)


@dataclass(frozen=True)
class Journal:
    """What a group renames, in order, and the folders that have a copy; the first one is described above."""

    moves: Sequence[Move]
    folders: Sequence[Path]

    def text(self, folder: Path) -> bytes:
        """The copy for one of the folders."""

        def relative(path: Path) -> str:
            return os.path.relpath(path, folder)

        files = [
            {
                "place": relative(move.place),
                "temporary": move.temporary.name,
                "backup": move.backup.name,
                "before": move.before,
                "after": move.after,
            }
            for move in self.moves
        ]
        return json.dumps(
            {"blobstore.journal": 1, "folders": [relative(f) for f in self.folders], "files": files}
        ).encode()

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """The journal of a copy; None if the file is not one.

        Raises:
            OSError: it cannot be read.
        """
        file = Descriptor()
        try:
            number = file.open(path, getattr(os, "O_NOFOLLOW", 0))
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
                return None
            with open(number, "rb", closefd=False) as stream:
                return cls._parse(stream.read(_LARGEST), path.parent)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        finally:
            file.close()

    @classmethod
    def _parse(cls, text: bytes, folder: Path) -> Journal:
        found = json.loads(text)
        if found["blobstore.journal"] != 1:
            raise ValueError("of another version")
        moves = []
        for file in found["files"]:
            place = folder / file["place"]
            moves.append(
                Move(
                    place,
                    place.with_name(_hidden(file["temporary"])),
                    place.with_name(_hidden(file["backup"])),
                    _identity(file["before"]),
                    _identity(file["after"]),
                )
            )
        folders = [folder / other for other in found["folders"]]
        if not folders:
            raise ValueError("without folders")
        return cls(moves, folders)

    def finish(self) -> None:
        """Bring a group that is under way to the new state, or to the old one if that cannot be done.

        It cannot if a rename was undone, so the process was killed while it undid the group because of an error; or if a
        rename fails again.

        Raises:
            OSError: neither state could be reached.
        """
        forward = all(move.possible() for move in self.moves)
        if forward:
            try:
                for move in self.moves:
                    move.do()
            except OSError:
                forward = False
        if not forward:
            for move in reversed(self.moves):
                move.undo()
        for folder in dict.fromkeys(move.place.parent for move in self.moves):
            with contextlib.suppress(FileNotFoundError):
                sync_folder(folder)

    def leftovers(self, name: str) -> Iterable[Path]:
        """What to remove when the group is finished: the copies of the journal by its name, then temporary files."""
        for folder in self.folders:
            yield folder / name
        for move in self.moves:
            yield from (move.temporary, move.backup)


def _hidden(name: Any) -> str:
    if not TEMPORARY.fullmatch(name):
        raise ValueError(f"{name}: not a name of ours")
    return str(name)


def _identity(found: Any) -> Identity | None:
    if found is None:
        return None
    inode, size, changed = map(int, found)
    return inode, size, changed


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the file system can do that.

    Raises:
        OSError: the disk failed, or there is no such folder.
    """
    file = Descriptor()
    try:
        os.fsync(file.open(folder))
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        file.close()
