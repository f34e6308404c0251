"""The report as one page that needs nothing but a browser: no network, no other file."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
from collections import defaultdict
from importlib import resources
from typing import Any

from blobstore.errors import MissingDependencyError
from blobstore.reporting.model import FileReport, Finding, Region, RegionKind, Report
from blobstore.reporting.words import FINDINGS, REGIONS, headline, printable, short_paths, size

__all__ = ["to_html"]

_PLACES = 12
_MATRIX = 40
_COMMANDS = 6


def to_html(report: Report) -> str:
    """The page; about two megabytes, most of them the plotting library.

    Raises:
        MissingDependencyError: plotly is not installed.
    """
    page = _page("page.html")
    parts = {
        "css": _page("page.css"),
        "headline": html.escape(headline(report)),
        "actions": _actions(report),
        "problems": _problems(report),
        "footer": f"{len(report.findings):,} findings; what two findings claim is counted once.",
        "data": _packed(json.dumps(_data(report), separators=(",", ":")).encode()),
        "plotly": _plotly(),
        "js": _page("page.js"),
    }
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text, 1)
    return page


def _page(name: str) -> str:
    return resources.files("blobstore.reporting").joinpath("page", name).read_text(encoding="utf-8")


def _packed(data: bytes) -> str:
    """Compressed, and in an alphabet that means nothing in HTML."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


@functools.cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingDependencyError('a page needs plotly: pip install "blobstore[report]"') from None
    return _packed(get_plotlyjs().encode())


def _commands(report: Report) -> list[tuple[int, str]]:
    """What each command saves, the largest first."""
    sums: dict[str, int] = defaultdict(int)
    for finding in report.findings:
        if finding.command:
            sums[finding.command] += finding.counted
    return sorted(((nbytes, command) for command, nbytes in sums.items() if nbytes), reverse=True)


def _actions(report: Report) -> str:
    parts = []
    ordered = _commands(report)
    for number, (nbytes, command) in enumerate(ordered[:_COMMANDS], 1):
        text = html.escape(printable(command))
        parts.append(f'<div class="action">{number}. {size(nbytes)} by <pre><code>{text}</code></pre></div>')
    if rest := sum(nbytes for nbytes, _ in ordered[_COMMANDS:]):
        parts.append(f'<p class="action">{size(rest)} by {len(ordered) - _COMMANDS} more commands, see the table</p>')
    if other := report.total_saves - report.command_saves:
        parts.append(f'<p class="action">{size(other)} by lowering or exporting again, see the table</p>')
    return "\n".join(parts)


def _problems(report: Report) -> str:
    if not report.problems:
        return ""
    items = "".join(f"<li>{html.escape(printable(f'{p.path}: {p.reason}'))}</li>" for p in report.problems)
    return f'<div class="notice">Not read, and not in the numbers:<ul>{items}</ul></div>'


def _data(report: Report) -> dict[str, Any]:
    names = [printable(name) for name in short_paths([file.path for file in report.files])]
    why: dict[tuple[int, int], str] = {}
    for finding in report.findings:
        for claim in finding.claims:
            why.setdefault((claim.file, claim.region), finding.kind.value)
    numbers = {command: number for number, (_, command) in enumerate(_commands(report)[:_COMMANDS], 1)}
    words = {kind.value: text for kind, text in FINDINGS.items()}
    return {
        "headline": headline(report),
        "total": report.total_bytes,
        "words": {"": "stays", **words, "structure": "headers and tables"},
        "regions": {kind.value: text for kind, text in REGIONS.items()},
        "files": [
            {"name": name, "size": file.size, "format": file.format}
            for name, file in zip(names, report.files, strict=True)
        ],
        "blobs": [
            {
                "file": f,
                "name": printable(region.name if region.keys else REGIONS[region.kind]),
                "kind": region.kind.value,
                "start": region.start,
                "nbytes": region.nbytes,
                "layout": _layout(region),
                "finding": why.get((f, r), ""),
            }
            for f, file in enumerate(report.files)
            for r, region in enumerate(file.regions)
        ],
        "findings": [_finding(report, finding, names, numbers) for finding in report.findings],
        "matrix": _matrix(report.files, names),
    }


def _layout(region: Region) -> str:
    return str(region.layout) if region.layout is not None else printable(region.dtype)


def _finding(report: Report, finding: Finding, names: list[str], numbers: dict[str, int]) -> dict[str, Any]:
    by_key: dict[str, list[str]] = defaultdict(list)
    for f, r in finding.places[:_PLACES]:
        region = report.region((f, r))
        by_key[printable(region.name if region.keys else REGIONS[region.kind])].append(names[f])
    where = [f"{key} in {', '.join(dict.fromkeys(files))}" for key, files in by_key.items()]
    if len(finding.places) > _PLACES:
        where.append(f"and {len(finding.places) - _PLACES:,} more")
    return {
        "kind": finding.kind.value,
        "saves": finding.saves,
        "counted": finding.counted,
        "detail": printable(finding.detail),
        "where": where,
        "command": _command(finding, numbers),
        "is_code": finding.command is not None and finding.command not in numbers,
        "advice": finding.advice,
    }


def _command(finding: Finding, numbers: dict[str, int]) -> str:
    """The command; one that stands at the top of the page only by its number."""
    if finding.command in numbers:
        return f"run command {numbers[finding.command]}, above"
    return printable(finding.command or "")


def _matrix(files: tuple[FileReport, ...], names: list[str]) -> dict[str, Any]:
    """Bytes of contents that each two files share; on the diagonal, of copies within a file."""
    where: dict[tuple[str, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for f, file in enumerate(files):
        for region in file.regions:
            if region.kind.is_blob and region.kind is not RegionKind.PAYLOAD:
                where[region.digest, region.nbytes][f] += 1
    shared: dict[tuple[int, int], int] = defaultdict(int)
    for (_, nbytes), counts in where.items():
        for f, number in counts.items():
            shared[f, f] += nbytes * (number - 1)
            for g in counts:
                if f != g:
                    shared[f, g] += nbytes
    weight = [0] * len(files)
    for (f, _), nbytes in shared.items():
        weight[f] += nbytes
    shown = sorted(sorted(range(len(files)), key=lambda f: -weight[f])[:_MATRIX])
    return {
        "names": [names[f] for f in shown],
        "values": [[shared.get((f, g), 0) for g in shown] for f in shown],
        "left_out": len(files) - len(shown),
    }
