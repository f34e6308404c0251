"""How objects show themselves in a notebook: small tables without scripts, in the notebook's own colors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from blobstore.core.reprs import shorten
from blobstore.core.text import printable

__all__ = ["ROWS", "Markup", "block", "escape", "heading", "shown", "table"]

ROWS = 20
"""The most rows of a table."""

_CELL = 56
"""The most characters of a cell, such as a key."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Text as HTML that shows it, whatever it has in it."""
    import html  # its table of names takes a twentieth of what importing the runtime takes

    return text if isinstance(text, Markup) else Markup(html.escape(printable(text)))


def heading(text: object, rest: object = "") -> Markup:
    """A line in bold, and what follows it in the same line."""
    return Markup(f"<p><strong>{escape(text)}</strong> {escape(rest)}</p>")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    total: int,
    *,
    numbers: Collection[str] = (),
    most: int = ROWS,
) -> Markup:
    """A table with its first rows, and how many more there are; nothing if there are none.

    Args:
        columns: their heads.
        rows: the cells of each row, as text or `Markup`. No more are taken than are shown.
        total: the number of rows.
        numbers: the columns that are aligned to the right.
        most: how many rows are shown.
    """
    if not total:
        return Markup()
    styles = [
        f'style="text-align:{"right" if name in numbers else "left"};padding:2px 12px 2px 0;white-space:nowrap"'
        for name in columns
    ]
    head = "".join(f"<th {style}>{escape(name)}</th>" for name, style in zip(columns, styles, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td {style}>{_cell(cell)}</td>' for cell, style in zip(row, styles, strict=True))}</tr>"
        for row in islice(rows, most)
    )
    more = f"<p>and {total - most:,} more</p>" if total > most else ""
    return Markup(f'<table style="margin:8px 0"><tr>{head}</tr>{body}</table>{more}')


def _cell(cell: object) -> Markup:
    return cell if isinstance(cell, Markup) else escape(shorten(cell, _CELL))


def block(*parts: str) -> str:
    """What `_repr_html_` returns, of its parts."""
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def shown(owner: object, make: Callable[[], str]) -> str:
    """What `make` returns; or the repr of an object that cannot be shown, because it is closed or its file is damaged."""
    try:
        return make()
    except Exception:  # a notebook would print a traceback where the object is displayed
        return block(f"<code>{escape(repr(owner))}</code>")
