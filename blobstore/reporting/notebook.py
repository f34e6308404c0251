"""The report in a notebook: a summary without scripts, which takes the colors of the notebook."""

from __future__ import annotations

import html

from blobstore.core.text import printable, size
from blobstore.reporting.report_data import ReportData
from blobstore.reporting.words import COLORS, FINDINGS, branches, headline, short_paths

__all__ = ["summary"]

_ROWS = 8
_CELL = 'style="text-align:left;padding:2px 12px 2px 0"'
_NUMBER = 'style="text-align:right;padding:2px 12px 2px 0"'


def summary(report: ReportData) -> str:
    """The answer, a bar of all bytes, the kinds of findings, and the largest folders, or files if there is one folder."""
    parts = [f"<p><strong>{html.escape(headline(report))}</strong></p>"]
    if report.total_saves:
        parts.append(_bar(report))
        rows = [
            f'<tr><td {_CELL}><span style="color:{COLORS[kind]}">&#9632;</span> {FINDINGS[kind]}</td>'
            f"<td {_NUMBER}>{number:,}</td><td {_NUMBER}>{size(counted)}</td></tr>"
            for kind, (number, _, counted) in report.by_kind.items()
        ]
        parts.append(_table(("what", "findings", "adds to total"), rows))
    folders = branches(report.folders)
    names = short_paths([file.path for file in report.files])
    items = [(folder.path, folder.bytes, folder.saves) for folder in folders if "/" not in folder.path] or [
        (name, file.size, saves) for name, file, saves in zip(names, report.files, report.saves_of, strict=True)
    ]
    items.sort(key=lambda item: -item[1])
    rows = [
        f"<tr><td {_CELL}>{html.escape(printable(name))}</td><td {_NUMBER}>{size(nbytes)}</td>"
        f"<td {_NUMBER}>{size(saves)}</td></tr>"
        for name, nbytes, saves in items[:_ROWS]
    ]
    if rows:
        parts.append(_table(("folder" if folders else "file", "size", "can go"), rows))
    if len(items) > _ROWS:
        parts.append(f"<p>and {len(items) - _ROWS:,} more</p>")
    if report.problems:
        parts.append(f"<p>{len(report.problems):,} could not be read, see <code>.problems</code></p>")
    return f"<div>{''.join(parts)}<p><code>.to_html(path)</code> writes the whole report as a page.</p></div>"


def _bar(report: ReportData) -> str:
    cells = "".join(
        f'<span title="{FINDINGS[kind]}: {size(counted)}" style="display:inline-block;height:100%;'
        f'width:{counted / report.total_bytes:.2%};background:{COLORS[kind]}"></span>'
        for kind, (_, _, counted) in report.by_kind.items()
    )
    style = (
        "height:14px;max-width:480px;background:#9fb0bf;overflow:hidden;white-space:nowrap;font-size:0;line-height:0"
    )
    return f'<div style="{style}">{cells}</div>'


def _table(columns: tuple[str, str, str], rows: list[str]) -> str:
    head = "".join(f"<th {_NUMBER if i else _CELL}>{name}</th>" for i, name in enumerate(columns))
    return f'<table style="margin:8px 0"><tr>{head}</tr>{"".join(rows)}</table>'
