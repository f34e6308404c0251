"""A report as plain data, with its sums."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

from blobstore.core.regions.region import Region
from blobstore.core.reprs import fields_line
from blobstore.reporting.model import FileReport, Finding, FindingKind, PoolAdvice, Problem
from blobstore.reporting.savings import attribute

__all__ = ["Folder", "ReportData"]


@dataclass(frozen=True)
class Folder:
    """A folder with all folders in it.

    Attributes:
        path: as it begins the paths of its files; empty for the current folder.
        files: how many of the report's files it has.
        bytes: of these files.
        saves: bytes of them that can go, as in `Report.saves_of`.
    """

    __repr__ = fields_line

    path: str
    files: int
    bytes: int
    saves: int


@dataclass(frozen=True, repr=False)
class ReportData:
    """What `Report` has, for every way to show it."""

    files: tuple[FileReport, ...]
    findings: tuple[Finding, ...]
    problems: tuple[Problem, ...] = field(default=())
    notes: tuple[str, ...] = ()
    pool: PoolAdvice | None = None

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def total_saves(self) -> int:
        """Bytes that acting on all findings saves; what two findings claim counts once."""
        return sum(finding.counted for finding in self.findings)

    @cached_property
    def command_saves(self) -> int:
        """The part of it that commands save, without lowering anything again."""
        return sum(finding.counted for finding in self.findings if finding.command)

    @cached_property
    def needs_lowering(self) -> bool:
        """Whether something that no command saves is in a program."""
        places = (place for finding in self.findings if not finding.command for place in finding.places)
        return any(self.files[f].format == "pte" for f, _ in places)

    @cached_property
    def commands(self) -> dict[str, int]:
        """The commands of the findings, and what each saves: the bytes that its findings add. The largest comes first."""
        sums: dict[str, int] = {}
        for finding in self.findings:
            if finding.command:
                sums[finding.command] = sums.get(finding.command, 0) + finding.counted
        ordered = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
        return {command: nbytes for command, nbytes in ordered if nbytes}

    @cached_property
    def by_kind(self) -> dict[FindingKind, tuple[int, int, int]]:
        """For each kind that occurs: how many findings, bytes they save, bytes that count towards the total."""
        sums: dict[FindingKind, tuple[int, int, int]] = {}
        for finding in self.findings:
            number, saves, counted = sums.get(finding.kind, (0, 0, 0))
            sums[finding.kind] = (number + 1, saves + finding.saves, counted + finding.counted)
        return sums

    @cached_property
    def goes(self) -> dict[tuple[int, int], dict[FindingKind, int]]:
        """For each region of which something can go: how many bytes, under the first kind of finding that claims them."""
        return attribute(self.findings)

    @cached_property
    def saves_of(self) -> tuple[int, ...]:
        """For each file the bytes of it that can go; together they are `total_saves`."""
        saves = [0] * len(self.files)
        for (file, _), kinds in self.goes.items():
            saves[file] += sum(kinds.values())
        return tuple(saves)

    @cached_property
    def folders(self) -> tuple[Folder, ...]:
        """The folders of the files and all folders between them and the one that holds all, in the order of their paths.

        Each counts with the folders in it. The folder that holds all files is the first.
        """
        own: dict[str, list[int]] = {}
        for file, saves in zip(self.files, self.saves_of, strict=True):
            path = file.path[: max(file.path.rfind("/"), file.path.rfind(os.sep)) + 1]
            _add(own.setdefault(path, [0, 0, 0]), (1, file.size, saves))
        chains = [_ancestors(folder) for folder in own]
        common = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, zip(*chains, strict=False)))
        sums: dict[str, list[int]] = {}
        for values, chain in zip(own.values(), chains, strict=True):
            for path in chain[max(common - 1, 0) :]:
                _add(sums.setdefault(path, [0, 0, 0]), values)
        return tuple(Folder(path, *sums[path]) for path in sorted(sums, key=lambda path: path.split("/")))

    def blobs(self) -> Iterator[tuple[tuple[int, int], Region]]:
        """All contents that could be shared, each with its place."""
        for f, file in enumerate(self.files):
            for r, region in enumerate(file.regions):
                if region.kind.is_blob:
                    yield (f, r), region

    def region(self, place: tuple[int, int]) -> Region:
        """The region at a place of a finding."""
        return self.files[place[0]].regions[place[1]]

    def names(self, finding: Finding) -> Iterator[tuple[str, str]]:
        """The path and the key of each place of a finding."""
        for file, region in finding.places:
            yield self.files[file].path, self.files[file].regions[region].name

    def paths(self, finding: Finding) -> Sequence[str]:
        """The files of a finding, each once."""
        return list(dict.fromkeys(path for path, _ in self.names(finding)))


def _add(sums: list[int], values: Iterable[int]) -> None:
    for i, value in enumerate(values):
        sums[i] += value


def _ancestors(path: str) -> list[str]:
    """The folders that a file is in, from the root, the current folder or the host of a URL down to its own."""
    root, inside = "", path.replace(os.sep, "/")
    if "://" in inside:
        protocol, _, rest = inside.partition("://")
        host, slash, inside = rest.partition("/")
        root, inside = (f"{protocol}://{host}", inside) if slash else (f"{protocol}://", host)
    elif inside.startswith("/"):
        root, inside = "/", inside[1:]
    ancestors = [root]
    for name in inside.split("/")[:-1]:
        ancestors.append(f"{ancestors[-1].removesuffix('/')}/{name}" if ancestors[-1] else name)
    return ancestors
