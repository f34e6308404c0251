"""What a run returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from blobstore.core.reprs import count, fields_line, line, listed
from blobstore.core.text import size

__all__ = ["DataResult", "DedupResult", "KeyResult", "ProgramResult"]


@dataclass(frozen=True)
class ProgramResult:
    """What a run did to one program.

    Attributes:
        source: the program that was given.
        path: the slim program.
        bytes_before, bytes_after: the sizes of the two files in bytes.
        moved: the number of tensors and blobs that left it.
        moved_bytes: their size in bytes.
        missing: keys that it asks for and that none of the data files of this run has. They are in a file that was not
            among the inputs, and the slim program still needs that file.
        inside: the bytes of tensors of `names` that lie in payloads of delegates, which keep them.
        inside_of: the backends of these payloads.
    """

    source: Path
    path: Path
    bytes_before: int
    bytes_after: int
    moved: int
    moved_bytes: int
    missing: tuple[str, ...]
    inside: int = 0
    inside_of: tuple[str, ...] = ()

    def __repr__(self) -> str:
        sizes = f"{size(self.bytes_before)} to {size(self.bytes_after)}"
        missing = f"{len(self.missing):,} missing" if self.missing else ""
        return line("ProgramResult", self.path, sizes, f"{self.moved:,} moved", missing)


@dataclass(frozen=True)
class KeyResult:
    """What became of a key of a data file that was given.

    Attributes:
        key: the key; it does not change.
        path: the data file that has it now.
        merged_with: the data file that had this key with equal bytes already, an input before this one or a file of the
            folder, so that the two are one key now; None if no other had it.
        same_as: another key of `path` with the same bytes, which are stored once for both; None for the first of such keys.
    """

    __repr__ = fields_line

    key: str
    path: Path
    merged_with: Path | None = None
    same_as: str | None = None


@dataclass(frozen=True)
class DataResult:
    """What a run did with a data file that was given.

    Attributes:
        source: the data file, which stays as it is.
        keys: what became of each of its keys, in its order.
        lost_metadata: names of its metadata that no data file of the folder has with the same value.
    """

    __repr__ = fields_line

    source: Path
    keys: tuple[KeyResult, ...]
    lost_metadata: tuple[str, ...] = ()


@dataclass(frozen=True)
class DedupResult:
    """What a run did.

    Attributes:
        programs: one entry for each program, in the order in which they were given.
        data_inputs: one for each data file that was given.
        data_files: the data files of these programs, including those that had all they need already; empty if nothing
            was moved and there was no data file before.
        bytes_before: the size of all inputs, and of what programs that stay take from the old data files, in bytes.
        bytes_after: the size of all outputs, in bytes.
        kept: programs of earlier runs that take weights from these data files, and still can.
        replaced: those of the outputs that replaced a program of an earlier run.
        replaced_keys: keys that have other bytes than before in the data files, or that a program now has in itself; no
            program takes the old ones.
        unused_keys: keys of the data files that no program in the folder takes.
        pruned_keys: such keys that were dropped.
        named: how many names of tensors were taken from each checkpoint, by its path.
    """

    programs: list[ProgramResult]
    data_files: list[Path]
    bytes_before: int
    bytes_after: int
    kept: list[Path]
    replaced: list[Path]
    replaced_keys: list[str]
    unused_keys: list[str]
    pruned_keys: list[str]
    data_inputs: list[DataResult] = field(default_factory=list)
    named: dict[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        sizes = f"{size(self.bytes_before)} to {size(self.bytes_after)}"
        data = listed((path.name for path in self.data_files), 1)
        return line("DedupResult", "", count(len(self.programs), "program"), sizes, data and f"data in {data}")
