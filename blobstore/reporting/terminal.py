"""The report as text: the answer first; on a terminal nothing is wider than 100 columns, in a pipe nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blobstore.core.text import printable, size
from blobstore.reporting.baseline import Changes, change_lines
from blobstore.reporting.causes import Cause, grouped
from blobstore.reporting.model import Finding, FindingKind, RegionKind
from blobstore.reporting.report_data import Folder, ReportData
from blobstore.reporting.words import CAUSES, COLORS, FINDINGS, branches, by_hand, headline, short_paths

__all__ = ["WIDTH", "print_changes", "print_report"]

WIDTH = 100

_DUPLICATES = {
    FindingKind.DUPLICATE_FILES,
    FindingKind.DUPLICATE_METHODS,
    FindingKind.DUPLICATE_TIED,
    FindingKind.DUPLICATE_PAYLOAD,
}
_COMMANDS = 4
_FILES = 30
_FOLDERS = 20
_CAUSES = 10
_NAME = 28
_WIDE = 1000
"""Columns from which nothing is cut, and tables have no lines: a console of so many is a pipe or a file."""


def print_report(report: ReportData, console: Console, *, top: int = 10) -> None:
    """Print a report.

    Args:
        report: the report.
        console: where to; at most `WIDTH` of its columns are used, unless it is wide.
        top: how many of the largest findings are listed.
    """
    names = short_paths([file.path for file in report.files])
    width, wide = _width(console), _is_wide(console)
    console.print(Text(headline(report), style="bold"), width=width)
    if report.findings:
        _print_actions(report, console, width)
        console.print(_kinds(report, wide), width=width)
        console.print(_largest(report, names, top, wide), width=width)
    if folders := branches(report.folders):
        console.print(_folders(folders, wide), width=width)
    console.print(_files(report, names, wide), width=width)
    for problem in report.problems:
        line = Text.assemble(("not read: ", "bold red"), printable(f"{problem.path}: {problem.reason}"))
        console.print(line, width=width)


def _width(console: Console) -> int:
    return console.width if _is_wide(console) else min(console.width, WIDTH)


def _is_wide(console: Console) -> bool:
    return console.width >= _WIDE


def _print_actions(report: ReportData, console: Console, width: int) -> None:
    ordered = list(report.commands.items())
    for command, nbytes in ordered[:_COMMANDS]:
        console.print(Text(f"{size(nbytes)} by"), width=width)
        # no line breaks are inserted, so that it can be copied
        console.print(Text("  " + printable(command), style="green"), soft_wrap=True)
    rest = len(ordered) - _COMMANDS
    if rest > 0:
        left = size(sum(nbytes for _, nbytes in ordered[_COMMANDS:]))
        console.print(Text(f"{left} by {rest} more commands, see --json"), width=width)
    if other := report.total_saves - report.command_saves:
        console.print(Text(f"{size(other)} {by_hand(report)}: see the list"), width=width)
    console.print()


def _table(title: str, columns: Sequence[tuple[str, str]], wide: bool) -> Table:
    box = None if wide else SIMPLE_HEAD
    table = Table(title=title, title_justify="left", title_style="bold", box=box, pad_edge=False)
    for name, justify in columns:
        right = justify == "right"
        table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return table


def _kinds(report: ReportData, wide: bool) -> Table:
    columns = [("what", "left"), ("findings", "right"), ("saves alone", "right"), ("adds to total", "right")]
    table = _table("", columns, wide)
    for kind, (number, saves, counted) in report.by_kind.items():
        what = Text(FINDINGS[kind], style=COLORS[kind])
        table.add_row(what, f"{number:,}", size(saves), size(counted))
    table.add_section()
    table.add_row(Text("together", style="bold"), f"{len(report.findings):,}", "", size(report.total_saves))
    return table


def _largest(report: ReportData, names: Sequence[str], top: int, wide: bool) -> Table:
    """One row for all findings of a kind in the same files."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in report.findings:
        key = (finding.kind, tuple(dict.fromkeys(f for f, _ in finding.places)))
        groups.setdefault(key, []).append(finding)
    ordered = sorted(groups.values(), key=lambda group: -sum(finding.counted for finding in group))
    title = f"The largest of {len(report.findings):,} findings" if len(ordered) > top else "All findings"
    table = _table(title, [("saves", "right"), ("what", "left"), ("where", "left")], wide)
    line = ", " if wide else "\n"
    for group in ordered[:top]:
        first = group[0]
        what = Text(FINDINGS[first.kind], style=COLORS[first.kind])
        if len(group) > 1:
            what.append(f"{line}{len(group):,} blobs", style="dim")
        else:
            region = report.region(first.places[0])
            facts = [] if first.kind in _DUPLICATES else [first.detail]
            facts += [f"{region.element_type} {region.shape}".strip()] if region.element_type else []
            what.append("".join(f"{line}{printable(fact)}" for fact in facts), style="dim")
        table.add_row(size(sum(finding.counted for finding in group)), what, _where(report, group, names, wide))
    return table


def _where(report: ReportData, group: Sequence[Finding], names: Sequence[str], wide: bool) -> Text:
    """The files in one line, the keys in another; in a pipe both in one."""
    first = group[0]
    files = list(dict.fromkeys(names[f] for f, _ in first.places))
    if len(group) > 1:
        keys = [report.region(finding.places[0]).name for finding in group]
    else:
        keys = list(dict.fromkeys(report.region(place).name for place in first.places))
    text = Text(_joined(files, 2, wide), style="bold")
    text.append(f"{': ' if wide else chr(10)}{_joined(keys, 2, wide)}", style="not bold")
    return text


def _joined(texts: Sequence[str], most: int, wide: bool) -> str:
    shown = ", ".join(_cut(printable(text), wide) for text in texts[:most])
    return shown if len(texts) <= most else f"{shown} and {len(texts) - most:,} more"


def _cut(text: str, wide: bool) -> str:
    """Both ends of a long name: the end tells a parameter, the start a file."""
    return text if wide or len(text) <= _NAME else f"{text[: _NAME // 2 - 1]}…{text[-_NAME // 2 :]}"


def _folders(folders: Sequence[Folder], wide: bool) -> Table:
    """The largest folders in the order of their paths, each below the folder that it is in."""
    largest = sorted(folders, key=lambda folder: -folder.bytes)[: None if wide else _FOLDERS]
    shown = [folder for folder in folders if folder in largest]
    title = f"The largest of {len(folders)} folders" if len(shown) < len(folders) else "Folders"
    table = _table(title, [("folder", "left"), ("files", "right"), ("size", "right"), ("can go", "right")], wide)
    outer: list[str] = []
    for folder in shown:
        while outer and not folder.path.startswith(f"{outer[-1]}/"):
            outer.pop()
        name = folder.path[len(outer[-1]) + 1 :] if outer else folder.path
        text = "  " * len(outer) + _cut(printable(name), wide)
        table.add_row(Text(text), f"{folder.files:,}", size(folder.bytes), size(folder.saves) if folder.saves else "-")
        outer.append(folder.path)
    return table


def _files(report: ReportData, names: Sequence[str], wide: bool) -> Table:
    columns = [("file", "left"), ("size", "right"), ("weights", "right"), ("payloads", "right")]
    columns += [("structure", "right"), ("padding", "right"), ("can go", "right")]
    table = _table("Files", columns, wide)
    most = len(names) if wide else _FILES
    order = sorted(range(len(report.files)), key=lambda f: -report.files[f].size)
    for f in order[:most]:
        file, parts = report.files[f], report.files[f].by_kind
        weights = sum(parts.get(kind, 0) for kind in RegionKind if kind.is_blob) - parts.get(RegionKind.PAYLOAD, 0)
        other = parts.get(RegionKind.PADDING, 0) + parts.get(RegionKind.UNREFERENCED, 0)
        cells = (file.size, weights, parts.get(RegionKind.PAYLOAD, 0), parts.get(RegionKind.STRUCTURE, 0), other)
        table.add_row(
            Text(_cut(printable(names[f]), wide)), *(size(n) if n else "-" for n in (*cells, report.saves_of[f]))
        )
    if len(order) > most:
        rest = sum(report.files[f].size for f in order[most:])
        table.add_row(f"{len(order) - most} more files", size(rest))
    return table


def print_changes(changes: Changes, console: Console) -> None:
    """Print what differs from an earlier report, and why."""
    width, wide = _width(console), _is_wide(console)
    for line in change_lines(changes):
        console.print(Text(printable(line)), width=width)
    for title, what, causes in (
        ("Why sharing was lost", "costs", changes.lost),
        ("Why less is wasted", "frees", changes.gained),
    ):
        if causes:
            console.print()
            console.print(_causes(title, what, causes, wide), width=width)


def _causes(title: str, what: str, causes: Sequence[Cause], wide: bool) -> Table:
    groups = grouped(causes)
    table = _table(title, [(what, "right"), ("why", "left"), ("before", "left"), ("now", "left")], wide)
    for column in table.columns[2:] if not wide else ():
        column.min_width = _NAME + 1  # a name and a comma
    for group in groups if wide else groups[:_CAUSES]:
        first = group[0]
        lines = [CAUSES[first.kind], first.detail if len(group) == 1 else f"{len(group):,} blobs"]
        why = Text((", " if wide else "\n").join(printable(line) for line in lines if line))
        before = _places([place for cause in group for place in cause.before], wide)
        after = _places([place for cause in group for place in cause.after], wide)
        table.add_row(size(sum(cause.bytes for cause in group)), why, before, after)
    if not wide and len(groups) > _CAUSES:
        left = sum(cause.bytes for group in groups[_CAUSES:] for cause in group)
        table.add_row(size(left), f"{len(groups) - _CAUSES} more rows, see --json", "", "")
    return table


def _places(places: Sequence[tuple[str, str]], wide: bool) -> Text:
    """The files in one line, the keys in another; in a pipe both in one."""
    if not places:
        return Text("-")
    text = Text(_joined(short_paths(list(dict.fromkeys(path for path, _ in places))), 2, wide), style="bold")
    if keys := [key for key in dict.fromkeys(key for _, key in places) if key]:
        text.append(f"{': ' if wide else chr(10)}{_joined(keys, 2, wide)}", style="not bold")
    return text
