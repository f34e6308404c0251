"""What changed since an earlier report, as a section of the page."""

from __future__ import annotations

import html
from collections.abc import Sequence

from blobstore.core.text import printable, size
from blobstore.reporting.find import Cause, Changes, grouped
from blobstore.reporting.paths import short_paths
from blobstore.reporting.show.changes import change_lines
from blobstore.reporting.show.words import CAUSES, short_hashes

__all__ = ["changes_section"]

_ROWS, _NAMES = 20, 3


def changes_section(changes: Changes) -> str:
    """How much more there is, and why; the largest causes in a table."""
    first, *others = change_lines(changes)
    more = "".join(f"<li>{_text(line.strip())}</li>" for line in others)
    listed = f"<details><summary>Files and findings</summary><ul>{more}</ul></details>" if more else ""
    return (
        '<section aria-labelledby="changes-title" id="changes"><h2 id="changes-title">What changed</h2>'
        f"<p>{_text(first)}</p>"
        f"{_table('Why sharing was lost', 'Costs', changes.lost)}{_table('Why less is wasted', 'Frees', changes.gained)}"
        f"{listed}</section>"
    )


def _table(title: str, what: str, causes: Sequence[Cause]) -> str:
    """A row for all causes of a kind in the same files."""
    groups = grouped(causes)
    if not groups:
        return ""
    rows = [
        f'<tr><td class="number">{size(sum(cause.bytes for cause in group))}</td><td>{_why(group)}</td>'
        f"<td>{_places([place for cause in group for place in cause.before])}</td>"
        f"<td>{_places([place for cause in group for place in cause.after])}</td></tr>"
        for group in groups[:_ROWS]
    ]
    left = f'<p class="hint">and {len(groups) - _ROWS:,} more, see --json</p>' if len(groups) > _ROWS else ""
    head = f'<thead><tr><th scope="col" class="number">{what}</th>'
    head += f'<th scope="col" style="min-width:14rem">{title}</th>'
    head += '<th scope="col">Before</th><th scope="col">Now</th></tr></thead>'
    return (
        f'<div class="scroll" style="margin-bottom:1rem" tabindex="0" role="region" aria-label="{title}">'
        f"<table>{head}<tbody>{''.join(rows)}</tbody></table></div>{left}"
    )


def _why(group: Sequence[Cause]) -> str:
    detail = group[0].detail if len(group) == 1 else f"{len(group):,} blobs"
    return f'{CAUSES[group[0].kind]}<br><span class="faint">{_text(detail)}</span>' if detail else CAUSES[group[0].kind]


def _places(places: Sequence[tuple[str, str]]) -> str:
    files = short_paths(list(dict.fromkeys(path for path, _ in places)))
    keys = [key for key in dict.fromkeys(key for _, key in places) if key]
    return f'<b>{_joined(files)}</b><br><span class="faint">{_joined(keys)}</span>' if files else "-"


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
    return ", ".join(_text(name) for name in names[:_NAMES]) + more


def _text(text: str) -> str:
    """For HTML, with both ends of digests: what follows a digest in a key may be what changed."""
    return html.escape(short_hashes(printable(text)))
