"""What a command of the report makes of the files: which of them it replaces, and where their bytes are then."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.programs.inputs import output_places
from blobstore.core.programs.options import DATA_NAME
from blobstore.core.regions.region import RegionKind
from blobstore.reporting.find import left_out
from blobstore.reporting.model import FindingKind
from blobstore.reporting.report_data import ReportData
from blobstore.reporting.savings import attribute

__all__ = ["After", "FileAfter", "after"]

_MOVED = {RegionKind.TENSOR, RegionKind.CONSTANT, RegionKind.NAMED_DATA}
"""What `blobstore dedup` moves to the data file."""


@dataclass(frozen=True)
class FileAfter:
    """A file that a command writes.

    Attributes:
        path: as the command makes it.
        format: as in `FileReport`.
        places: the regions whose bytes it gets, as (file, region). What the command writes itself, such as entries of
            tables, is not among them.
    """

    path: str
    format: str
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class After:
    """The files once commands were run, and those replaced were deleted.

    Attributes:
        replaced: indices into `Report.files`.
        files: what is there instead.
        goes: of the regions in `files` what can still go, as in `ReportData.goes`.
    """

    replaced: tuple[int, ...]
    files: tuple[FileAfter, ...]
    goes: Mapping[tuple[int, int], Mapping[FindingKind, int]]

    def total_bytes(self, report: ReportData) -> int:
        made = sum(report.region(place).nbytes for file in self.files for place in file.places)
        return report.total_bytes - sum(report.files[f].size for f in self.replaced) + made


def after(report: ReportData, commands: Collection[str]) -> After:
    """The files after some of the commands of a report's findings.

    Args:
        report: the report.
        commands: commands of its findings; no file is in two of them.
    """
    replaced: list[int] = []
    made: list[FileAfter] = []
    at = {file.path: f for f, file in enumerate(report.files)}
    for command in commands:
        gone, new = _run(report, at, command)
        replaced += gone
        made += new
    left = attribute(finding for finding in report.findings if finding.command not in commands)
    kept = {place for file in made for place in file.places}
    return After(tuple(replaced), tuple(made), {place: kinds for place, kinds in left.items() if place in kept})


def _run(report: ReportData, at: Mapping[str, int], command: str) -> tuple[list[int], list[FileAfter]]:
    """What a command replaces, and what it writes. `at` has the numbers of the files by their paths."""
    _, what, *paths = shlex.split(command)
    target = paths.pop()
    # a path that begins with a hyphen has ./ before it in a command
    inputs = [at[path] if path in at else at[path.removeprefix("./")] for path in paths if path != "-o"]
    if what == "dedup":
        return inputs, _dedup(report, inputs, target)
    if what == "delta":
        base, *members = inputs
        return members, _deltas(report, base, members, target)
    return inputs, [FileAfter(target, "ptd", _once(report, _places(report, inputs[0], moved=True)))]


def _deltas(report: ReportData, base: int, inputs: Sequence[int], folder: str) -> list[FileAfter]:
    made = []
    for f, output in zip(inputs, _outputs(report, inputs), strict=True):
        file = report.files[f]
        gone = left_out(report.files[base], file)
        places = [place for place in _places(report, f, moved=True) if place[1] not in gone]
        kept = _once(report, places) if file.format == "ptd" else tuple(places)
        made.append(FileAfter(os.path.join(folder, output), file.format, kept))  # noqa: PTH118 - it stays text
    return made


def _outputs(report: ReportData, inputs: Sequence[int]) -> list[Path]:
    return output_places([(Path(report.files[f].path), Path(Path(report.files[f].path).name)) for f in inputs])


def _dedup(report: ReportData, inputs: Sequence[int], folder: str) -> list[FileAfter]:
    programs = [f for f in inputs if report.files[f].format == "pte"]
    outputs = _outputs(report, programs)
    slim = [
        FileAfter(os.path.join(folder, output), "pte", _places(report, f, moved=False))  # noqa: PTH118 - it stays text
        for f, output in zip(programs, outputs, strict=True)
    ]
    shared = _once(report, [place for f in inputs for place in _places(report, f, moved=True)])
    return [*slim, FileAfter(os.path.join(folder, DATA_NAME), "ptd", shared)]  # noqa: PTH118


def _places(report: ReportData, f: int, *, moved: bool) -> tuple[tuple[int, int], ...]:
    return tuple((f, r) for r, region in enumerate(report.files[f].regions) if (region.kind in _MOVED) is moved)


def _once(report: ReportData, places: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The first place of each content."""
    first: dict[tuple[str, int], tuple[int, int]] = {}
    for place in places:
        region = report.region(place)
        first.setdefault((region.digest, region.nbytes), place)
    return tuple(first.values())
