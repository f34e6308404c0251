"""The page's section on files with bytes in common: families of files, and how much of each two is the same."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence

from blobstore.core.text import size
from blobstore.reporting.find import CONNECTING
from blobstore.reporting.report_data import ReportData
from blobstore.reporting.show.groups import Group, common_bytes, find_groups
from blobstore.reporting.show.lineage import descent_title, find_lineage
from blobstore.reporting.show.words import parameters

__all__ = ["common_section", "share_bar"]

_MATRIX = 16
_GROUPS = 40
_DESCENTS = 200
_MEMBERS = 60
_STEPS = 5


def common_section(report: ReportData, names: Sequence[str]) -> str:
    """The section; empty if no two files have much in common.

    Args:
        report: the report.
        names: what its files are called on the page.
    """
    groups = find_groups(report)
    together = [group for group in groups if len(group.files) > 1]
    if len(names) > _MATRIX:
        sets = [group.files for group in groups]
        labels = [_numbered_label(names, number, files) for number, files in enumerate(sets, 1)]
    else:
        sets = [(f,) for group in groups for f in group.files]
        labels = [_label(names[f]) for (f,) in sets]
    lineage = _lineage(report, names)
    text = lineage + _families(report, names, together) + _matrix(labels, common_bytes(report, sets))
    if not text:
        return ""
    return (
        '<section aria-labelledby="common-title" id="common"><h2 id="common-title">Files with bytes in common</h2>'
        f"{text}</section>"
    )


def _lineage(report: ReportData, names: Sequence[str]) -> str:
    """What files come from, a row for each."""
    descents = find_lineage(report)
    if not descents:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(names[one.file])}</th><td>{html.escape(names[one.base])}</td>'
        f"<td>{html.escape(one.words)}</td></tr>"
        for one in descents[:_DESCENTS]
    )
    more = f'<p class="hint">and {len(descents) - _DESCENTS:,} more</p>' if len(descents) > _DESCENTS else ""
    head = '<tr><th scope="col">File</th><th scope="col">comes from</th><th scope="col">what differs</th></tr>'
    return (
        f'<details class="group" id="lineage"><summary><span class="name">{descent_title(descents)}, '
        "by the names of their tensors</span></summary>"
        f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>{more}</details>"
    )


def share_bar(part: int, whole: int, kind: str = "duplicate_files") -> str:
    """A bar of which a part is colored."""
    width = f"{part / whole:.1%}" if whole else "0%"
    return f'<span class="bar"><span style="width:{width};background:var(--c-{kind})"></span></span>'


def _numbered_label(names: Sequence[str], number: int, files: Sequence[int]) -> str:
    """The first file of a group; of several, by the number of the group and with how many others there are."""
    label = _label(names[files[0]])
    return f"{number}. {label} and {len(files) - 1} more" if len(files) > 1 else label


def _families(report: ReportData, names: Sequence[str], groups: Sequence[Group]) -> str:
    if not groups:
        return ""
    grouped = sum(len(group.files) for group in groups)
    copies = sum(group.bytes - group.once for group in groups)
    noun = "group" if len(groups) == 1 else "groups"
    alone = len(names) - grouped
    others = f"; {alone} {'file stands' if alone == 1 else 'files stand'} alone" if alone else ""
    more = f'<p class="hint">and {len(groups) - _GROUPS} more groups</p>' if len(groups) > _GROUPS else ""
    return (
        f'<p class="hint">{grouped} files are in {len(groups)} {noun} with {size(copies)} of copies{others}. '
        "The first file of a group holds at least half of each other one.</p>"
        f"{''.join(_group(report, names, i, group) for i, group in enumerate(groups[:_GROUPS], 1))}{more}"
    )


def _group(report: ReportData, names: Sequence[str], number: int, group: Group) -> str:
    first, *others = group.files
    folders = list(dict.fromkeys(os.path.dirname(names[f]) for f in group.files))  # noqa: PTH120 - text stays text
    folders = [folder for folder in folders if folder]
    where = ", ".join(folders[:3]) + (f" and {len(folders) - 3} more" if len(folders) > 3 else "")
    alike = common_bytes(report, [(first,), *((f,) for f in others[:_MEMBERS])])
    rows = []
    for at, f in enumerate(group.files[: _MEMBERS + 1]):
        part = alike[0][at] / max(alike[at][at], 1)
        said = f"{part:.0%} of it is in the first" if at else "the first"
        rows.append(
            f"<tr><td>{html.escape(names[f])}</td><td class='number'>{size(report.files[f].size)}</td>"
            f"<td class='number'>{parameters(report.files[f])}</td><td class='number'>{said}</td></tr>"
        )
    if len(others) > _MEMBERS:
        rows.append(f"<tr><td colspan='4'>and {len(others) - _MEMBERS} more</td></tr>")
    return (
        f'<details class="group"><summary><span class="name">{number}. {html.escape(_label(names[first]))} '
        f"and {len(others)} more</span>"
        f"<span class='faint'>{size(group.bytes)}, {size(group.once)} if stored once</span>"
        f"{share_bar(group.bytes - group.once, group.bytes)}</summary>"
        f'<p class="hint">{html.escape(where) or "all in one folder"}</p><table>{"".join(rows)}</table></details>'
    )


def _label(name: str) -> str:
    """Both ends of a long name."""
    return name if len(name) <= 48 else f"{name[:18]}…{name[-28:]}"


def _matrix(labels: Sequence[str], common: Sequence[Sequence[int]]) -> str:
    """A table of shares of the smaller one of each two, in five steps that mean the same in each report."""
    shown = [i for i, row in enumerate(common) if max([*row[:i], *row[i + 1 :]], default=0) >= CONNECTING]
    weight = {i: sum(common[i]) - common[i][i] for i in shown}
    kept = sorted(sorted(shown, key=lambda i: -weight[i])[:_MATRIX])
    if len(kept) < 2:
        return ""
    head = "".join(f'<th scope="col"><span>{html.escape(labels[i])}</span></th>' for i in kept)
    rows = []
    for i in kept:
        cells = "".join(_cell(common, i, j) for j in kept)
        rows.append(f'<tr><th scope="row">{html.escape(labels[i])}</th>{cells}</tr>')
    left = f" {len(shown) - len(kept)} with less are left out." if len(shown) > len(kept) else ""
    scale = "".join(
        f'<li><span class="swatch s{step}"></span>{100 * (step - 1) // _STEPS}&ndash;{100 * step // _STEPS}%</li>'
        for step in range(1, _STEPS + 1)
    )
    return (
        f'<p class="hint">Bytes that each two of them have in common, colored by their share of the smaller one.{left}</p>'
        f'<ul class="legend">{scale}</ul>'
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="common-title">'
        f'<table class="matrix"><thead><tr><td></td>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _cell(common: Sequence[Sequence[int]], i: int, j: int) -> str:
    """What two sets have in common, or nothing of a set with itself."""
    nbytes, smaller = common[i][j], min(common[i][i], common[j][j])
    if i == j:
        return '<td class="own"></td>'
    if not nbytes:
        return "<td></td>"
    step = min(int(nbytes / smaller * _STEPS), _STEPS - 1) + 1
    return f'<td class="s{step}" title="{size(nbytes)}, {nbytes / smaller:.1%}">{size(nbytes)}</td>'
