"""The report as one page that needs nothing but a browser: no network, no other file, no library."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Sequence
from importlib import resources

from blobstore.core.regions.region import RegionKind
from blobstore.core.text import printable, size
from blobstore.reporting.find import Changes, is_nameless
from blobstore.reporting.model import PoolAdvice
from blobstore.reporting.paths import short_paths
from blobstore.reporting.report_data import Folder, ReportData
from blobstore.reporting.show.changes_html import changes_section
from blobstore.reporting.show.common_html import common_section, share_bar
from blobstore.reporting.show.page_data import page_data
from blobstore.reporting.show.words import COLORS, FINDINGS, branches, by_hand, headline, in_pool, inputs, nested

__all__ = ["to_html"]

_FOLDERS = 400
_COMMANDS = 6
_UNFOLDED = 2  # of these; the map begins on the first screen
_SCRIPTS = (
    "base.js",
    "commands.js",
    "tree.js",
    "copies.js",
    "search.js",
    "address.js",
    "map.js",
    "table.js",
    "paper.js",
    "start.js",
)


def to_html(report: ReportData, changes: Changes | None = None) -> str:
    """The page: about 30 KB, and the packed data of the report. What it draws is drawn by its own scripts.

    Args:
        report: the report.
        changes: what changed since an earlier one, if the page is to say it.
    """
    names = [printable(name) for name in short_paths([file.path for file in report.files])]
    data = json.dumps(page_data(report, names, _COMMANDS), separators=(",", ":")).encode()
    parts = {
        "css": _page("page.css").replace("{{colors}}", _colors(), 1),
        "headline": html.escape(headline(report)),
        "actions": _actions(report),
        "problems": _problems(report),
        "changes": changes_section(changes) if changes is not None else "",
        "notes": "".join(f'<p class="notice">{html.escape(printable(note))}</p>' for note in report.notes),
        "legend": _legend(report),
        "naming": _naming(report),
        "folders": _folders(branches(report.folders)),
        "groups": common_section(report, names),
        "footer": _footer(report),
        "data": base64.b64encode(gzip.compress(data, 6, mtime=0)).decode(),  # an alphabet that means nothing in HTML
        "js": "\n".join(_page(name) for name in _SCRIPTS),
    }
    # in one pass: what is filled in may look like a place to fill
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _page("page.html"))


def _page(name: str) -> str:
    return resources.files("blobstore.reporting.show").joinpath("page", name).read_text(encoding="utf-8")


def _colors() -> str:
    """A variable for each kind of finding, and one for text on it: black or white, whichever has more contrast."""
    return " ".join(f"--c-{kind.value}: {color}; --i-{kind.value}: {_ink(color)};" for kind, color in COLORS.items())


def _ink(color: str) -> str:
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return "#000000" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "#ffffff"


# ----------------------------------------------------------------------------------------- what the page says at once


def _actions(report: ReportData) -> str:
    ordered = list(report.commands.items())
    parts = [
        _action(f"{number}. <b>{size(nbytes)}</b> {_faint(_inputs(command))}", command)
        for number, (command, nbytes) in enumerate(ordered[:_COMMANDS], 1)
    ]
    if len(parts) > _UNFOLDED + 1:
        folded = size(sum(nbytes for _, nbytes in ordered[_UNFOLDED:_COMMANDS]))
        summary = f"<summary>{len(parts) - _UNFOLDED} more commands, {folded}</summary>"
        parts[_UNFOLDED:] = [
            f'<li><details>{summary}<ol class="actions">{"".join(parts[_UNFOLDED:])}</ol></details></li>'
        ]
    if report.pool is not None:
        parts.insert(
            0, _action(f"<b>{in_pool(report.pool)}</b> {_faint(_of_pool(report, report.pool))}", report.pool.command)
        )
    text = f'<ol class="actions">{"".join(parts)}</ol>' if parts else ""
    left = []
    if rest := sum(nbytes for _, nbytes in ordered[_COMMANDS:]):
        left.append(f"{size(rest)} by {len(ordered) - _COMMANDS} more commands")
    if other := report.total_saves - report.command_saves:
        left.append(f"{size(other)} {by_hand(report)}")
    return text + (f'<p class="action">{", and ".join(left)}: see the table.</p>' if left else "")


def _action(what: str, command: str) -> str:
    code = f'<div class="command"><pre><code>{html.escape(printable(command))}</code></pre></div>'
    return f'<li class="action"><p>{what}</p>{code}</li>'


def _faint(text: str) -> str:
    return f'<span class="faint">{text}</span>'


def _of_pool(report: ReportData, pool: PoolAdvice) -> str:
    estimate = "" if pool.is_bound else " (estimate)"
    return f"all {len(report.files)} files{estimate}"


def _inputs(command: str) -> str:
    number = inputs(command)
    return f"in {number} files" if number > 1 else ""


def _problems(report: ReportData) -> str:
    if not report.problems:
        return ""
    items = "".join(f"<li>{html.escape(printable(f'{p.path}: {p.reason}'))}</li>" for p in report.problems)
    return f'<div class="notice">Not read, and not in the numbers:<ul>{items}</ul></div>'


def _footer(report: ReportData) -> str:
    if not report.findings:
        return ""
    return f"{len(report.findings):,} findings; bytes that two findings claim are counted once."


def _legend(report: ReportData) -> str:
    items = [(kind.value, FINDINGS[kind], size(counted)) for kind, (_, _, counted) in report.by_kind.items() if counted]
    structure = sum(file.by_kind.get(RegionKind.STRUCTURE, 0) for file in report.files)
    if report.total_bytes:
        stays = report.total_bytes - report.total_saves - structure
        items += [("stays", "stays", size(stays)), ("structure", "headers and tables", size(structure))]
    return "".join(
        f'<li><span class="swatch k-{kind}" style="background:var(--c-{kind})"></span>'
        f'<span>{words} <span class="faint">{nbytes}</span></span></li>'
        for kind, words, nbytes in items
    )


def _naming(report: ReportData) -> str:
    """How what has no names gets them, where that is most of the bytes."""
    blobs = [region for file in report.files for region in file.regions if region.kind.is_blob]
    nameless = sum(region.nbytes for region in blobs if is_nameless(region))
    if 2 * nameless <= sum(region.nbytes for region in blobs):
        return ""
    return (
        f'<p class="hint">{size(nameless)} have no names, since programs record none. They get those of a checkpoint '
        "that is beside the files, in the folder above, or given with <code>--names</code>.</p>"
    )


def _folders(folders: Sequence[Folder]) -> str:
    """A table of folders, each below the one that it is in."""
    if not folders:
        return ""
    rows = []
    for depth, name, folder in nested(folders[:_FOLDERS]):
        rows.append(
            f'<tr><th scope="row" style="padding-left:{0.7 + 1.2 * depth:.1f}rem">'
            f"{html.escape(printable(name))}</th>"
            f'<td class="number">{folder.files:,}</td><td class="number">{size(folder.bytes)}</td>'
            f'<td class="number">{size(folder.saves)}</td><td class="wide">{share_bar(folder.saves, folder.bytes)}</td></tr>'
        )
    more = f'<p class="hint">and {len(folders) - _FOLDERS:,} more</p>' if len(folders) > _FOLDERS else ""
    head = '<thead><tr><th scope="col">Folder</th><th scope="col" class="number">Files</th>'
    head += '<th scope="col" class="number">Size</th><th scope="col" class="number">Can go</th>'
    head += '<th scope="col" class="wide"><span class="hidden">Share that can go</span></th></tr></thead>'
    return (
        '<section aria-labelledby="folders-title" id="folders"><h2 id="folders-title">Folders</h2>'
        '<p class="hint">Each counts with the folders in it.</p>'
        '<div class="scroll" tabindex="0" role="region" aria-labelledby="folders-title">'
        f"<table>{head}<tbody>{''.join(rows)}</tbody></table></div>{more}</section>"
    )
