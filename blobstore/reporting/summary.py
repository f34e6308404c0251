"""What the terminal shows of a report: sums, and the largest of everything.

It is put together from digests of parts, which are plain data that a cache keeps; a whole report is digested as one part.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from blobstore.reporting.model import Finding, FindingKind, Problem, RegionKind
from blobstore.reporting.report_data import Folder, ReportData, folders_of

__all__ = ["CELLS", "COMMANDS", "Group", "Summary", "digest", "summarize", "summary_of"]

CELLS = ("size", "weights", "payloads", "structure", "padding", "saves")
"""What is known of each file, in bytes."""
COMMANDS = 4
_SHOWN = 2
_DUPLICATES = {
    FindingKind.DUPLICATE_FILES,
    FindingKind.DUPLICATE_METHODS,
    FindingKind.DUPLICATE_TIED,
    FindingKind.DUPLICATE_PAYLOAD,
}
_KINDS = list(FindingKind)


@dataclass(frozen=True)
class Group:
    """All findings of a kind in the same files.

    Attributes:
        kind: the kind.
        counted: bytes that they add to the total.
        findings: how many they are.
        facts: what there is to say of one that is alone.
        paths, keys: the first of the files and of the names of the blobs.
        more_paths, more_keys: how many there are besides.
    """

    kind: FindingKind
    counted: int
    findings: int
    facts: tuple[str, ...]
    paths: tuple[str, ...]
    more_paths: int
    keys: tuple[str, ...]
    more_keys: int


@dataclass(frozen=True)
class Summary:
    """A report in short. Attributes that `ReportData` has, too, are the same here.

    Attributes:
        files: the paths.
        cells: `CELLS` of each file, (number of files, number of cells), int64.
        commands: those that save most.
        more_commands: how many there are besides, and the bytes that these save.
        needs_lowering: whether something that no command saves is in a program.
        groups: those that add most to the total.
        more_groups: how many there are besides.
    """

    files: Sequence[str]
    cells: npt.NDArray[np.int64]
    findings: int
    total_saves: int
    command_saves: int
    commands: Mapping[str, int]
    more_commands: tuple[int, int]
    needs_lowering: bool
    by_kind: Mapping[FindingKind, tuple[int, int, int]]
    groups: Sequence[Group]
    more_groups: int
    problems: Sequence[Problem]
    notes: Sequence[str] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return int(self.cells[:, 0].sum())

    @property
    def folders(self) -> tuple[Folder, ...]:
        """As `ReportData.folders`."""
        return folders_of(self.files, self.cells[:, 0].tolist(), self.cells[:, -1].tolist())


def digest(part: ReportData) -> dict[str, Any]:
    """What `summarize` needs to know of a part."""
    return {
        "paths": [file.path for file in part.files],
        "cells": list(_cells(part)),
        "findings": len(part.findings),
        "kinds": {kind.value: sums for kind, sums in part.by_kind.items()},
        "commands": part.commands,
        "command_saves": part.command_saves,
        "needs_lowering": part.needs_lowering,
        "groups": list(_groups(part)),
    }


def _cells(part: ReportData) -> Iterator[list[int]]:
    for file, saves in zip(part.files, part.saves_of, strict=True):
        kinds = file.by_kind
        payloads = kinds.get(RegionKind.PAYLOAD, 0)
        weights = sum(kinds.get(kind, 0) for kind in RegionKind if kind.is_blob) - payloads
        other = kinds.get(RegionKind.PADDING, 0) + kinds.get(RegionKind.UNREFERENCED, 0)
        structure = kinds.get(RegionKind.STRUCTURE, 0) + kinds.get(RegionKind.METADATA, 0)
        yield [file.size, weights, payloads, structure, other, saves]


def _groups(part: ReportData) -> Iterator[list[Any]]:
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in part.findings:
        key = (finding.kind, tuple(dict.fromkeys(f for f, _ in finding.places)))
        groups.setdefault(key, []).append(finding)
    for (_, files), group in groups.items():
        first = group[0]
        region = part.region(first.places[0])
        facts = [] if first.kind in _DUPLICATES else [first.detail]
        facts += [f"{region.element_type} {region.shape}".strip()] if region.element_type else []
        if len(group) > 1:
            facts = []
            keys = [part.region(finding.places[0]).name for finding in group]
        else:
            keys = list(dict.fromkeys(part.region(place).name for place in first.places))
        shown = [files[:_SHOWN], len(files), keys[:_SHOWN], len(keys)]  # type: ignore[index, arg-type]
        # a group is as early in the report as its first finding, see `savings.count`
        begins = [_KINDS.index(first.kind), -first.saves, *first.places[0]]
        yield [sum(finding.counted for finding in group), begins, len(group), facts, *shown]


def summary_of(report: ReportData, top: int) -> Summary:
    """A report in short, with `top` groups of findings."""
    paths = [file.path for file in report.files]
    number_of = {path: f for f, path in enumerate(paths)}
    return summarize([digest(report)], number_of, {}, top, report.problems)


def summarize(
    digests: Iterable[Mapping[str, Any]],
    number_of: Mapping[str, int],
    whole: Mapping[str, str],
    top: int,
    problems: Sequence[Problem],
) -> Summary:
    """Put parts together.

    Args:
        digests: of each part, in any order; each is looked at once.
        number_of: by path, in the order of the report, a number that grows; paths that are in no part are left out.
        whole: as `commands.complete` returns it, for commands that are not whole.
        top: how many groups of findings are wanted.
        problems: as in `ReportData`.
    """
    cells = np.full((max(number_of.values(), default=-1) + 1, len(CELLS)), -1, np.int64)
    commands: list[tuple[int, str]] = []
    groups: list[tuple[Any, ...]] = []
    kinds = {kind: [0, 0, 0] for kind in FindingKind}
    findings = command_saves = more_groups = number_of_commands = saved_by_commands = 0
    needs_lowering = False
    for number, part in enumerate(digests):
        at = [number_of[path] for path in part["paths"]]
        cells[at] = part["cells"]
        findings += part["findings"]
        command_saves += part["command_saves"]
        needs_lowering |= part["needs_lowering"]
        for kind, sums in part["kinds"].items():
            kinds[FindingKind(kind)] = [a + b for a, b in zip(kinds[FindingKind(kind)], sums, strict=True)]
        saving = [(-nbytes, whole.get(command, command)) for command, nbytes in part["commands"].items()]
        number_of_commands += len(saving)
        saved_by_commands -= sum(nbytes for nbytes, _ in saving)
        commands = heapq.nsmallest(COMMANDS, [*commands, *saving])
        more_groups += len(part["groups"])
        few = [
            (-counted, *begins[:2], at[begins[2]], begins[3], number, i, [part["paths"][f] for f in group[2]], group)
            for i, (counted, begins, *group) in enumerate(part["groups"])
        ]
        groups = heapq.nsmallest(top, [*groups, *few])
    there = cells[:, 0] >= 0
    return Summary(
        files=[path for path, f in number_of.items() if there[f]],
        cells=cells[there],
        findings=findings,
        total_saves=sum(sums[2] for sums in kinds.values()),
        command_saves=command_saves,
        commands={command: -nbytes for nbytes, command in commands},
        more_commands=(
            number_of_commands - len(commands),
            saved_by_commands + sum(nbytes for nbytes, _ in commands),
        ),
        needs_lowering=needs_lowering,
        by_kind={kind: (sums[0], sums[1], sums[2]) for kind, sums in kinds.items() if sums[0]},
        groups=[_group(*entry) for entry in groups],
        more_groups=more_groups - len(groups),
        problems=problems,
    )


def _group(saves: int, kind: int, *rest: Any) -> Group:
    paths, (findings, facts, _, files, keys, number) = rest[-2:]
    return Group(
        _KINDS[kind], -saves, findings, tuple(facts), tuple(paths), files - len(paths), tuple(keys), number - len(keys)
    )
