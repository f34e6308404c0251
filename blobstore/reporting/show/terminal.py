"""The report as text: the answer first; on a terminal nothing is wider than 100 columns, in a pipe nothing is cut."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blobstore.core.regions.region import RegionKind
from blobstore.core.text import printable, size
from blobstore.reporting.find import Cause, Changes, grouped
from blobstore.reporting.model import DUPLICATES, Finding
from blobstore.reporting.paths import short_paths, shortener
from blobstore.reporting.report_data import Folder, ReportData
from blobstore.reporting.show.changes import change_lines
from blobstore.reporting.show.lineage import Descent, descent_title, find_lineage
from blobstore.reporting.show.words import (
    CAUSES,
    COLORS,
    FINDINGS,
    branches,
    by_hand,
    headline,
    in_pool,
    nested,
    parameters,
)

__all__ = ["WIDTH", "print_changes", "print_report"]

WIDTH = 100

_FILES = 30
_FOLDERS = 20
_DESCENTS = 20
_CAUSES = 10
_COMMANDS = 4
_SHOWN = 2
_CELLS = {
    "weights": (RegionKind.TENSOR, RegionKind.CONSTANT, RegionKind.STATE, RegionKind.NAMED_DATA),
    "payloads": (RegionKind.PAYLOAD,),
    "structure": (RegionKind.STRUCTURE, RegionKind.METADATA),
    "padding": (RegionKind.PADDING, RegionKind.UNREFERENCED),
}
"""What the table of files says of each, in bytes."""
_BLOCK = 256
_NAME = 28
_WIDE = 1000
"""Columns from which nothing is cut, and tables have no lines: a console of so many is a pipe or a file."""


def print_report(report: ReportData, console: Console, *, top: int = 10) -> None:
    """Print a report, with the `top` largest findings.

    Args:
        report: the report.
        console: where to; at most `WIDTH` of its columns are used, unless it is wide.
        top: how many groups of findings to list.
    """
    width, wide = _width(console), _is_wide(console)
    console.print(Text(headline(report), style="bold"), width=width)
    if report.findings or report.pool:
        _print_actions(report, console, width)
    if report.findings:
        console.print(_kinds(report, wide), width=width)
        console.print(_largest(report, top, wide), width=width)
    if folders := branches(report.folders):
        _print_table(console, *_folders(folders, wide))
    _print_table(console, *_files(report, wide))
    if descents := find_lineage(report):
        console.print(_lineage(report, descents, wide), width=width)
    for problem in report.problems:
        line = Text.assemble(("not read: ", "bold red"), printable(f"{problem.path}: {problem.reason}"))
        console.print(line, width=width)


def _width(console: Console) -> int:
    return console.width if _is_wide(console) else min(console.width, WIDTH)


def _is_wide(console: Console) -> bool:
    return console.width >= _WIDE


def _print_actions(report: ReportData, console: Console, width: int) -> None:
    ordered = list(report.commands.items())
    shown = []
    if (pool := report.pool) is not None:
        estimated = "" if pool.is_bound else ", estimated from samples"
        shown.append((f"{in_pool(pool)} for all {len(report.files)} files to the bit{estimated}, by", pool.command))
    shown += [(f"{size(nbytes)} by", command) for command, nbytes in ordered[:_COMMANDS]]
    for what, command in shown:
        console.print(Text(what), width=width)
        # no line breaks are inserted, so that it can be copied
        console.print(Text("  " + printable(command), style="green"), soft_wrap=True)
    if rest := ordered[_COMMANDS:]:
        left = sum(nbytes for _, nbytes in rest)
        console.print(Text(f"{size(left)} by {len(rest)} more commands, see --json"), width=width)
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


def _largest(report: ReportData, top: int, wide: bool) -> Table:
    """One row for all findings of a kind in the same files, those that add most to the total first."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in report.findings:
        groups.setdefault((finding.kind, *dict.fromkeys(f for f, _ in finding.places)), []).append(finding)
    ordered = sorted(groups.values(), key=lambda group: -_counted(group))
    title = f"The largest of {len(report.findings):,} findings" if len(ordered) > top else "All findings"
    table = _table(title, [("saves", "right"), ("what", "left"), ("where", "left")], wide)
    line = ", " if wide else "\n"
    name_of = shortener([file.path for file in report.files])
    for group in ordered[:top]:
        what = Text(FINDINGS[group[0].kind], style=COLORS[group[0].kind])
        what.append("".join(f"{line}{printable(fact)}" for fact in _facts(report, group)), style="dim")
        files = list(map(name_of, report.paths(group[0])))
        places = group[0].places if len(group) == 1 else [finding.places[0] for finding in group]
        where = _files_and_keys(files, [report.region(place).name for place in places], wide)
        table.add_row(size(_counted(group)), what, where)
    return table


def _counted(group: Sequence[Finding]) -> int:
    return sum(finding.counted for finding in group)


def _files_and_keys(files: Sequence[str], keys: Iterable[str], wide: bool) -> Text:
    """The files in one line, the keys in another; in a pipe both in one."""
    text = Text(_joined(files, wide), style="bold")
    if names := list(dict.fromkeys(keys)):
        text.append(f"{': ' if wide else chr(10)}{_joined(names, wide)}", style="not bold")
    return text


def _facts(report: ReportData, group: Sequence[Finding]) -> Iterator[str]:
    """What there is to say of a finding that is alone, or how many blobs several are about."""
    first = group[0]
    if len(group) > 1:
        yield f"{len(group):,} blobs"
        return
    if first.kind not in DUPLICATES:
        yield first.detail
    region = report.region(first.places[0])
    if region.element_type:
        yield f"{region.element_type} {region.shape}".strip()


def _joined(texts: Sequence[str], wide: bool) -> str:
    """The first of some names, and how many there are besides."""
    shown = ", ".join(_cut(printable(text), wide) for text in texts[:_SHOWN])
    return f"{shown} and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else shown


def _cut(text: str, wide: bool) -> str:
    """Both ends of a long name: the end tells a parameter, the start a file."""
    return text if wide or len(text) <= _NAME else f"{text[: _NAME // 2 - 1]}…{text[-_NAME // 2 :]}"


_Rows = tuple[str, Sequence[str], Callable[[], Iterator[Sequence[str]]]]
"""A table: its title, what its columns are called, and what gives its rows, as often as it is called."""


def _folders(folders: Sequence[Folder], wide: bool) -> _Rows:
    """The largest folders in the order of their paths, each below the folder that it is in."""
    largest = set(sorted(folders, key=lambda folder: -folder.bytes)[: None if wide else _FOLDERS])
    shown = [folder for folder in folders if folder in largest]
    title = f"The largest of {len(folders)} folders" if len(shown) < len(folders) else "Folders"

    def rows() -> Iterator[Sequence[str]]:
        for depth, name, folder in nested(shown):
            text = "  " * depth + _cut(printable(name), wide)
            yield text, f"{folder.files:,}", _size(folder.bytes), _size(folder.saves)

    return title, ("folder", "files", "size", "can go"), rows


def _files(report: ReportData, wide: bool) -> _Rows:
    order = sorted(range(len(report.files)), key=lambda f: -report.files[f].size)
    most = len(order) if wide else _FILES
    name_of = shortener([file.path for file in report.files])

    def rows() -> Iterator[Sequence[str]]:
        for f in order[:most]:
            file = report.files[f]
            cells = [file.size, *(sum(file.by_kind.get(kind, 0) for kind in kinds) for kinds in _CELLS.values())]
            name = _cut(printable(name_of(file.path)), wide)
            yield (name, parameters(file).partition(" ")[0] or "-", *map(_size, cells), _size(report.saves_of[f]))
        if len(order) > most:
            left = sum(report.files[f].size for f in order[most:])
            yield f"{len(order) - most} more files", "", size(left), *[""] * (len(_CELLS) + 1)

    return "Files", ("file", "params", "size", *_CELLS, "can go"), rows


def _lineage(report: ReportData, descents: Sequence[Descent], wide: bool) -> Table:
    """What files come from; those that differ in the same way have one row."""
    name_of = shortener([file.path for file in report.files])
    alike: dict[tuple[int, str], list[str]] = {}
    for one in descents:
        alike.setdefault((one.base, one.words), []).append(name_of(report.files[one.file].path))
    table = _table(
        descent_title(descents),
        [("file", "left"), ("comes from", "left"), ("what differs", "left")],
        wide,
    )
    for (base, words), names in list(alike.items())[: None if wide else _DESCENTS]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        origin = _cut(printable(name_of(report.files[base].path)), wide)
        table.add_row(Text(_cut(printable(names[0]), wide) + more), Text(origin), Text(words))
    return table


@functools.lru_cache(maxsize=4096)
def _size(nbytes: int) -> str:
    return size(nbytes) if nbytes else "-"


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Callable[[], Iterator[Sequence[str]]]
) -> None:
    """Print a table of a name and numbers; a wide one line by line, since it may have many."""
    if not _is_wide(console):
        table = _table(title, [(name, "right" if i else "left") for i, name in enumerate(columns)], False)
        for row in rows():
            table.add_row(Text(row[0]), *row[1:])
        console.print(table, width=_width(console))
        return
    widths = list(map(len, columns))
    for row in rows():
        widths = list(map(max, widths, map(cell_len, row)))
    console.print(Text(title, style="bold"), width=_width(console))
    lines = ("  ".join(_padded(row, widths)) for row in itertools.chain([columns], rows()))
    while block := list(itertools.islice(lines, _BLOCK)):
        console.out("\n".join(block), highlight=False)


def _padded(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Cells of these widths, of which the first is flush left."""
    for i, (text, width) in enumerate(zip(row, widths, strict=True)):
        space = " " * (width - cell_len(text))
        yield space + text if i else text + space


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
    shown, left = (groups, []) if wide else (groups[:_CAUSES], groups[_CAUSES:])
    table = _table(title, [(what, "right"), ("why", "left"), ("before", "left"), ("now", "left")], wide)
    if not wide:
        for column in table.columns[2:]:
            column.min_width = _NAME + 1  # a name and a comma
    for group in shown:
        before = _places([place for cause in group for place in cause.before], wide)
        after = _places([place for cause in group for place in cause.after], wide)
        table.add_row(size(_cost(group)), Text(_why(group, wide)), before, after)
    if left:
        table.add_row(size(sum(map(_cost, left))), f"{len(left)} more rows, see --json", "", "")
    return table


def _why(group: Sequence[Cause], wide: bool) -> str:
    detail = group[0].detail if len(group) == 1 else f"{len(group):,} blobs"
    lines = [CAUSES[group[0].kind], detail] if detail else [CAUSES[group[0].kind]]
    return (", " if wide else "\n").join(map(printable, lines))


def _cost(group: Sequence[Cause]) -> int:
    return sum(cause.bytes for cause in group)


def _places(places: Sequence[tuple[str, str]], wide: bool) -> Text:
    if not places:
        return Text("-")
    paths = short_paths(list(dict.fromkeys(path for path, _ in places)))
    return _files_and_keys(paths, [key for _, key in places if key], wide)
