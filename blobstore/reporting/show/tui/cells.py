"""Text in cells of a terminal: names cut to a width, bars, and the colors of findings. Nothing here is markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.style import Style
from rich.text import Text

from blobstore.core.text import printable, size
from blobstore.reporting.model import FindingKind
from blobstore.reporting.show.words import COLORS, FINDINGS

__all__ = ["FAINT", "STRONG", "bar", "column", "fit", "folded", "kind_words", "shown", "wastes"]

STRONG = Style(bold=True)
FAINT = Style(dim=True)
_PLAIN = Style(reverse=False)
"""Also in the row that is chosen, since a color in reverse is another one."""
_MOST = 2000
"""Characters of a text that are looked at; no terminal shows more of a name."""


def shown(text: str) -> str:
    """Text from a file as it can be shown, without the middle of a very long one."""
    return printable(text if len(text) <= _MOST else f"{text[: _MOST // 2]}…{text[-_MOST // 2 :]}")


def fit(text: str, width: int) -> str:
    """Both ends of a text that is too long: the end tells a parameter, the start a file."""
    text = shown(text)
    if cell_len(text) <= width:
        return text
    if width < 2:
        return "…" * max(width, 0)
    tail = width // 2
    while tail and cell_len(text[-tail:]) > width // 2:
        tail -= 1
    end = text[-tail:] if tail else ""
    return f"{set_cell_size(text, width - 1 - cell_len(end)).rstrip()}…{end}"


def folded(text: str, width: int, lines: int) -> Text:
    """A text in so many lines that are full, or both ends of it."""
    text = printable(text)
    rows = chop_cells(text, max(width, 2))
    if len(rows) > lines:
        rows = chop_cells(fit(text, (lines - 1) * width), max(width, 2))
    return Text("\n").join(map(Text, rows[:lines]))


def column(text: str, width: int, *, right: bool = False) -> str:
    """A text in a column, cut or filled up with blanks."""
    text = fit(text, width)
    blanks = " " * (width - cell_len(text))
    return f"{blanks}{text}" if right else f"{text}{blanks}"


def kind_words(kind: FindingKind) -> Text:
    """A kind of finding with its color. The words have that of the terminal, so that they can be read on any."""
    return Text.assemble(("■", _PLAIN + Style(color=COLORS[kind])), " ", FINDINGS[kind])


def wastes(goes: Mapping[FindingKind, int]) -> Iterable[Text]:
    """Each kind of finding with the bytes that can go, the most first."""
    for kind, nbytes in sorted(goes.items(), key=lambda item: -item[1]):
        yield kind_words(kind).append(f" {size(nbytes)}")


def bar(nbytes: int, goes: Mapping[FindingKind, int], most: int, width: int) -> Text:
    """As long as `nbytes` of `most`; what can go is filled with the colors of findings, what stays is hatched."""
    text = Text("[", _PLAIN)
    end, at, done = _part(nbytes, most, width), 0, 0
    for kind in FindingKind:
        if part := goes.get(kind, 0):
            done += part
            stop = round(end * done / nbytes)
            text.append("█" * (stop - at), Style(color=COLORS[kind]))
            at = stop
    text.append("░" * (end - at), FAINT)
    return text.append(" " * (width - end) + "]")


def _part(nbytes: int, most: int, width: int) -> int:
    """How many cells; at least one if there is anything."""
    return max(round(width * nbytes / most), 1) if nbytes and most else 0
