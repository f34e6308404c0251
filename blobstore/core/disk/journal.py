"""The journal of a group of files: the renames that remain if the process is killed between two of them.

The journal is written when all files of the group are on the disk under temporary names, before the first rename. So
the process that finds it after a kill can finish the group.

Each folder of the group has a copy, with paths relative to that folder, so that folders can be moved together. The copy
in the first folder is written last and removed first: while it exists, the group is being committed; otherwise the
commit has not begun or is complete. A copy is a JSON file:

    {"blobstore.journal": 1, "folders": [".", ...], "files": [{"place": "a.pte", "temporary": ".blobstore-...tmp",
     "backup": ".blobstore-...tmp", "before": [inode, size, mtime in ns] or null, "after": [...]}, ...]}

The temporary file and the backup are beside the place; if the file has `"scratch": ".blobstore-...tmp"`, they are in this folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.core.disk.names import JOURNAL, TEMPORARY
from blobstore.core.memory.mapped_file import Descriptor

__all__ = ["Identity", "Journal", "Move", "identity", "sync_folder"]

_LARGEST = 1 << 26  # bytes of a journal; one file of a group takes about 300
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR}

Identity = tuple[int, int, int]
"""Inode, size, and time of the last change in ns. They differ if the file was replaced or overwritten."""


def identity(path: Path) -> Identity | None:
    """The identity of the file with this name; None if there is no such file."""
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
        backup: a second name that the old file gets just before the rename, where the file system has links.
        before: the identity of the file at `place` before the rename; None if there is no such file.
        after: the identity of the file there after the rename.
        scratch: the folder of the temporary file and the backup; None if they are beside the place.
    """

    place: Path
    temporary: Path
    backup: Path
    before: Identity | None
    after: Identity | None
    scratch: Path | None = None

    def possible(self) -> bool:
        """Whether the rename was done, or still can be. If neither, it was undone."""
        # In this order, because another process may do the rename in between. If both files are gone, a user removed them.
        return os.path.lexists(self.temporary) or self.before is None or identity(self.place) != self.before

    def do(self) -> None:
        """Rename, unless it was done already. A file that was put in the place after the kill stays."""
        if os.path.lexists(self.temporary) and identity(self.place) == self.before:
            with contextlib.suppress(FileNotFoundError):  # another process renamed it
                os.replace(self.temporary, self.place)

    def undo(self) -> None:
        """If the new file is in its place, put the old one back; without an old one, rename the new one back."""
        if not os.path.lexists(self.temporary) and identity(self.place) == self.after:
            if self.before is None:
                os.replace(self.place, self.temporary)
            elif os.path.lexists(self.backup):
                os.replace(self.backup, self.place)


@dataclass(frozen=True)
class Journal:
    """The renames of a group, in order, and the folders that have a copy; the first of them is special (see above)."""

    moves: Sequence[Move]
    folders: Sequence[Path]

    def text(self, folder: Path) -> bytes:
        """The contents of the copy in one of the folders."""

        def relative(path: Path) -> str:
            return os.path.relpath(path, folder)

        files = [
            {
                "place": relative(move.place),
                "temporary": move.temporary.name,
                "backup": move.backup.name,
                "before": move.before,
                "after": move.after,
                **({} if move.scratch is None else {"scratch": relative(move.scratch)}),
            }
            for move in self.moves
        ]
        return json.dumps(
            {"blobstore.journal": 1, "folders": [relative(f) for f in self.folders], "files": files}
        ).encode()

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """Read a copy; None if the file is not a journal, or not one of this user alone.

        Raises:
            OSError: the file cannot be read.
        """
        file = Descriptor()
        try:
            number = file.open(path, getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST or not _is_own(status):
                return None
            with open(number, "rb", closefd=False) as stream:
                return cls._parse(stream.read(_LARGEST), path.parent)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        finally:
            file.close()

    @classmethod
    def _parse(cls, text: bytes, folder: Path) -> Journal:
        content = json.loads(text)
        if content["blobstore.journal"] != 1:
            raise ValueError("unknown version")
        moves = []
        for file in content["files"]:
            place = folder / _path(file["place"])
            scratch = folder / _path(file["scratch"]) if "scratch" in file else None
            if scratch is not None:
                _hidden(scratch.name)
            inside = place.parent if scratch is None else scratch
            moves.append(
                Move(
                    place,
                    inside / _hidden(file["temporary"]),
                    inside / _hidden(file["backup"]),
                    _identity(file["before"]),
                    _identity(file["after"]),
                    scratch,
                )
            )
        folders = [folder / _path(other) for other in content["folders"]]
        if not folders:
            raise ValueError("no folders")
        _check_moves(moves)
        return cls(moves, folders)

    def finish(self) -> None:
        """Bring an interrupted group to the new state, or else to the old one.

        The new state cannot be reached if a rename was undone already (the process was killed while it undid the group
        after an error), or if a rename fails again.

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
        """The files to remove when the group is finished: the copies of the journal, then the temporary files."""
        for folder in self.folders:
            yield folder / name
        for move in self.moves:
            yield from (move.temporary, move.backup)


def _check_moves(moves: Sequence[Move]) -> None:
    """Refuse what no group writes, because undoing it could remove a file that is not of the group."""
    hidden = [name for move in moves for name in (move.temporary, move.backup)]
    if len(set(hidden)) < len(hidden):
        raise ValueError("two moves have the same temporary file or backup")
    places: dict[str, Identity] = {}
    for move in moves:
        place = os.path.normpath(move.place)
        if TEMPORARY.fullmatch(move.place.name) or JOURNAL.fullmatch(move.place.name):
            raise ValueError(f"{place}: not a place for an output")
        if move.after is None or places.get(place, move.before) != move.before:
            raise ValueError(f"{place}: its moves do not follow each other")
        places[place] = move.after


def _is_own(status: os.stat_result) -> bool:
    """Whether a file is this user's own, and others may not write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & stat.S_IWOTH


def _hidden(name: Any) -> str:
    if not TEMPORARY.fullmatch(name):
        raise ValueError(f"{name}: not the name of a temporary file")
    return str(name)


def _path(name: Any) -> str:
    if b"\0" in os.fsencode(name):  # which raises a ValueError for what no file system can have
        raise ValueError(f"{name!r}: not a path")
    return str(name)


def _identity(numbers: Any) -> Identity | None:
    if numbers is None:
        return None
    inode, size, changed = map(int, numbers)
    return inode, size, changed


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, if the file system supports that.

    Raises:
        OSError: the disk failed, or the folder does not exist.
    """
    file = Descriptor()
    try:
        os.fsync(file.open(folder))
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        file.close()
