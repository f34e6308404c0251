"""A key with two contents, explained in terms of programs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from blobstore.core.errors import KeyConflictError
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.programs.deployed import taken_by

__all__ = ["ClashError"]


class ClashError(KeyConflictError):
    """A program or a data file of this run has other bytes for a key than the store; if it is for a delegate, which looks
    up the key, it cannot have another one."""

    def __init__(self, key: str, source: Path, error: KeyConflictError, *, delegate: bool) -> None:
        super().__init__(f"{source}: {error}")
        self.key, self.source, self.error, self.delegate = key, source, error, delegate

    def explained(
        self,
        takers: Mapping[str, Path],
        programs: Sequence[ProgramFile],
        others: Sequence[tuple[Path, Sequence[str]]],
    ) -> KeyConflictError:
        """The error for the user, who thinks in programs and files.

        `takers` has one program for each key that those take which stay, and `others` the data files of this run with other
        bytes for the key, each with all keys of which that holds.
        """
        why = ", its delegate looks for this key" if self.delegate else ""
        if self.key not in takers:
            if others and not programs:
                return self._of_data_files(*others[0])
            return KeyConflictError(
                f"{self}{why}; so these files cannot share a data file: tensors of different programs with the same name "
                "need separate data files, so lower these programs with different tags"
            )
        users = [program.path for program in programs if taken_by(program, [self.key])]
        who = self.source if self.delegate or not users else f"{users[0]}, which takes it from {self.source}"
        return KeyConflictError(
            f"{who}: {self.error}{why}; but {takers[self.key]}, which is in the folder, takes the bytes that are there. "
            "Replace that program, too, or write to another folder"
        )

    def _of_data_files(self, other: Path, keys: Sequence[str]) -> KeyConflictError:
        number = len(keys) - 1
        more = f", and so have {number:,} more keys" if number > 1 else ", and so has 1 more key" if number else ""
        return KeyConflictError(
            f"{self.source}: key {self.key!r} has other bytes than in {other}{more}; a data file has each key once, so these "
            "two cannot become one. Write them to different folders, or write only what differs: "
            f"blobstore delta {shlex.quote(str(other))} {shlex.quote(str(self.source))} -o FOLDER"
        )
