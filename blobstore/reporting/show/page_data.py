"""What the scripts of the page draw, as plain data."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from blobstore.core.text import printable
from blobstore.reporting.model import FileReport, Finding, FindingKind
from blobstore.reporting.report_data import ReportData
from blobstore.reporting.show.after import After, after
from blobstore.reporting.show.tree import Node, Tree
from blobstore.reporting.show.words import FINDINGS, REGIONS, parameters, region_name, short_hashes

__all__ = ["page_data"]

_KEYS, _FILES = 4, 3  # of a finding that its row names

Row = tuple[int, str] | tuple[int, str, int]
"""A node of a tree: how many rows before it is what it is in, its label, and of a file or a blob how much greater its
number is than that of the one before. Numbers that repeat take a twentieth of the room on the packed page."""


def page_data(report: ReportData, names: Sequence[str], commands: int) -> dict[str, Any]:
    """Everything that the scripts take.

    Args:
        report: the report.
        names: what its files are called on the page.
        commands: how many of its commands the page shows, with the files after each.
    """
    shown = list(report.commands)[:commands]
    numbers = {command: number for number, command in enumerate(shown, 1)}
    first = [0, *itertools.accumulate(len(file.regions) for file in report.files)]
    tree = Tree.of(report, collects=False)
    return {
        "words": {kind.value: text for kind, text in FINDINGS.items()},
        "regions": {kind.value: text for kind, text in REGIONS.items()},
        "files": [{**_file(tree, f, first), "parameters": parameters(file)} for f, file in enumerate(report.files)],
        "folders": _folders(tree),
        "blobs": [blob for f, file in enumerate(report.files) for blob in _blobs(report, f, file)],
        "findings": [
            {**_finding(report, finding, names, numbers), "places": [first[f] + r for f, r in finding.places]}
            for finding in report.findings
        ],
        "after": {
            when: _after(report, tree, after(report, some), first)
            for when, some in _steps(list(report.commands), commands).items()
        },
    }


def _steps(commands: Sequence[str], most: int) -> dict[str, Sequence[str]]:
    """Each of the commands at the top of the page, by its number, and all commands."""
    steps: dict[str, Sequence[str]] = {str(number): [command] for number, command in enumerate(commands[:most], 1)}
    if len(commands) > 1:
        steps["all"] = commands
    return steps


def _blobs(report: ReportData, f: int, file: FileReport) -> Iterator[dict[str, Any]]:
    for r, region in enumerate(file.regions):
        yield {
            "file": f,
            "name": region_name(region),
            "kind": region.kind.value,
            "start": region.start,
            "nbytes": region.nbytes,
            "type": printable(region.element_type),
            "shape": region.shape,
            "goes": _by_word(report.goes.get((f, r), {})),
        }


def _after(report: ReportData, now: Tree, then: After, first: Sequence[int]) -> dict[str, Any]:
    """The files after commands: those that are there still by their numbers, and those that the commands write."""
    tree = now.after(then)
    gone = set(then.replaced)
    still = [f for f in range(len(report.files)) if f not in gone]
    return {
        "still": still,
        "files": [_file(tree, f, first) for f in range(len(still), len(tree.files))],
        "goes": {first[f] + r: _by_word(kinds) for (f, r), kinds in then.goes.items()},
        "folders": _folders(tree),
        "bytes": then.total_bytes(report),
    }


# ---- the tree


def _folders(tree: Tree) -> list[Row]:
    """Folders and files, which have their numbers in the tree."""
    return _rows(tree.root, lambda node: node.source, lambda node: [] if node.is_file else tree.children(node))


def _file(tree: Tree, f: int, first: Sequence[int]) -> dict[str, Any]:
    """A file of a tree, with its modules and blobs, which have their numbers on the page."""

    def number(node: Node) -> int | None:
        return first[node.place[0]] + node.place[1] if node.place is not None else None

    file = tree.files[f]
    return {"name": file.name, "format": file.format, "inside": _rows(tree.file(f), number, tree.children)}


def _rows(top: Node, number_of: Callable[[Node], int | None], inside: Callable[[Node], Sequence[Node]]) -> list[Row]:
    """What is in a node, each after what it is in; flat, since folders may be nested deeper than calls can be."""
    rows: list[Row] = []
    last = 0
    left = [(0, node) for node in reversed(inside(top))]
    while left:
        above, node = left.pop()
        back, number = len(rows) + 1 - above, number_of(node)
        if number is None:
            rows.append((back, node.label))
        else:
            rows.append((back, node.label, number - last))
            last = number
        here = len(rows)
        left += [(here, inner) for inner in reversed(inside(node))]
    return rows


# ---- findings


def _by_word(kinds: Mapping[FindingKind, int]) -> dict[str, int]:
    return {kind.value: nbytes for kind, nbytes in kinds.items()}


def _finding(report: ReportData, finding: Finding, names: Sequence[str], numbers: dict[str, int]) -> dict[str, Any]:
    by_key: dict[str, dict[str, None]] = defaultdict(dict)
    for f, r in finding.places:
        by_key[region_name(report.region((f, r)))][names[f]] = None
    where = []
    for key, files in list(by_key.items())[:_KEYS]:
        more = f" and {len(files) - _FILES} more" if len(files) > _FILES else ""
        where.append(f"{short_hashes(key)} in {', '.join(list(files)[:_FILES])}{more}")
    if len(by_key) > _KEYS:
        where.append(f"and {len(by_key) - _KEYS:,} more names")
    region = report.region(finding.places[0]) if finding.places else None
    return {
        "kind": finding.kind.value,
        "saves": finding.saves,
        "counted": finding.counted,
        "detail": printable(finding.detail),
        "type": printable(region.element_type) if region is not None else "",
        "shape": region.shape if region is not None else "",
        "where": where,
        "files": sorted({f for f, _ in finding.places}),
        "keys": list(by_key),
        "command": _command(finding, numbers),
        "is_code": finding.command is not None and finding.command not in numbers,
        "advice": finding.advice,
    }


def _command(finding: Finding, numbers: dict[str, int]) -> str:
    """The command; one that stands at the top of the page only by its number."""
    if finding.command in numbers:
        return f"run command {numbers[finding.command]}, above"
    return printable(finding.command or "")
