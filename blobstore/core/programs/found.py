"""What a run finds in its folder: data files, and programs that are not part of the run but take weights from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.programs.deployed import old_data, old_programs, other_data, taken_from

__all__ = ["Earlier", "find"]


@dataclass(frozen=True)
class Earlier:
    """What earlier runs left: `old`, those of the data files of this run that exist, and its `neighbours`, by file name.

    The programs that stay, with the keys that they take from each of `old`, cannot be rewritten, so these keys must keep
    their bytes.
    """

    old: Mapping[str, PtdDataMap]
    neighbours: Mapping[str, PtdDataMap]
    staying: Mapping[ProgramFile, Mapping[str, set[str]]]

    @cached_property
    def takers(self) -> dict[str, Path]:
        """For each key that programs take which stay, one of them."""
        return {key: program.path for program, of in self.staying.items() for keys in of.values() for key in keys}

    @cached_property
    def inside(self) -> dict[str, Path]:
        """The keys that programs which stay have in themselves, each with one of these programs.

        The runtime refuses a key that it finds in two places.
        """
        return {blob.key: program.path for program in self.staying for blob in program.named_data}

    def held(self, tag: str) -> set[str]:
        """The keys that programs which stay take from one of `old`."""
        return set().union(*(files.get(tag, ()) for files in self.staying.values()))

    def bytes_held(self, inputs: Collection[Path]) -> int:
        """The bytes that programs which stay take from `old`, but for those of `inputs`.

        What only replaced programs took is not counted, because it is in the inputs, too: the same run a second time saves as
        much as the first.
        """
        return sum(
            len(data_map.get_data(key))
            for tag, data_map in self.old.items()
            if data_map.path not in inputs
            for key in self.held(tag)
        )


def find(directory: Path, tags: Sequence[str], outputs: Collection[Path], *, force: bool) -> Earlier:
    """Read a folder for a run with data files of these names and these programs as outputs; `force` as for `old_data`."""
    paths = [directory / tag for tag in tags]
    old = {data_map.path.name: data_map for data_map in old_data(paths, force=force)}
    neighbours = {data_map.path.name: data_map for data_map in other_data(directory, paths)}
    data_files = {**neighbours, **old}
    staying: dict[ProgramFile, Mapping[str, set[str]]] = {}
    # Where no data file will be written over, no program can lose anything, so none is read.
    for program in old_programs(directory, outputs) if old else ():
        taken = taken_from(program, data_files, directory)
        of_old = {tag: keys for tag, keys in taken.items() if tag in old}
        if any(of_old.values()):
            staying[program] = of_old
    return Earlier(old, neighbours, staying)
