"""The report in a notebook: a summary without scripts, which takes the colors of the notebook."""

from __future__ import annotations

from blobstore.core.notebook import Markup, block, escape, heading, table
from blobstore.core.text import size
from blobstore.reporting.paths import short_paths
from blobstore.reporting.report_data import ReportData
from blobstore.reporting.show.words import COLORS, FINDINGS, branches, headline, in_pool

__all__ = ["summary"]

_ROWS = 8


def summary(report: ReportData) -> str:
    """The answer, a bar of all bytes, the kinds of findings, and the largest folders, or files if there is one folder."""
    parts = [heading(headline(report))]
    if report.total_saves:
        kinds = (
            (
                Markup(f'<span style="color:{COLORS[kind]}">&#9632;</span> {FINDINGS[kind]}'),
                f"{number:,}",
                size(counted),
            )
            for kind, (number, _, counted) in report.by_kind.items()
        )
        columns = ("what", "findings", "adds to total")
        parts += [_bar(report), table(columns, kinds, len(report.by_kind), numbers=columns[1:])]
    if (pool := report.pool) is not None:
        parts.append(Markup(f"<p>{in_pool(pool)}: <code>{escape(pool.command)}</code></p>"))
    folders = branches(report.folders)
    names = short_paths([file.path for file in report.files])
    items = [(folder.path, folder.bytes, folder.saves) for folder in folders if "/" not in folder.path] or [
        (name, file.size, saves) for name, file, saves in zip(names, report.files, report.saves_of, strict=True)
    ]
    items.sort(key=lambda item: -item[1])
    rows = ((name, size(nbytes), size(saves)) for name, nbytes, saves in items)
    columns = ("folder" if folders else "file", "size", "can go")
    parts.append(table(columns, rows, len(items), numbers=columns[1:], most=_ROWS))
    if report.problems:
        parts.append(Markup(f"<p>{len(report.problems):,} could not be read, see <code>.problems</code></p>"))
    return block(*parts, "<p><code>.to_html(path)</code> writes the whole report as a page.</p>")


def _bar(report: ReportData) -> Markup:
    cells = "".join(
        f'<span title="{FINDINGS[kind]}: {size(counted)}" style="display:inline-block;height:100%;'
        f'width:{counted / report.total_bytes:.2%};background:{COLORS[kind]}"></span>'
        for kind, (_, _, counted) in report.by_kind.items()
    )
    style = (
        "height:14px;max-width:480px;background:#9fb0bf;overflow:hidden;white-space:nowrap;font-size:0;line-height:0"
    )
    return Markup(f'<div style="{style}">{cells}</div>')
