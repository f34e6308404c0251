"""Windows over the list: everything about a row, and what keys do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static

from blobstore.core.text import size
from blobstore.reporting.model import Place
from blobstore.reporting.show.tui.cells import FAINT, STRONG, fit
from blobstore.reporting.show.tui.facts import Facts
from blobstore.reporting.show.tui.listing import RowList
from blobstore.reporting.show.tui.view import Details

__all__ = ["DetailsWindow", "HelpWindow"]

_HELP = """
↑ ↓ j k|choose a row; also PgUp, PgDn, Home, End
→ Enter l|open it: a folder, a file, a module of a model, a blob
← < h Backspace|back to what it is in
1 2 3 4 Tab|files, findings, commands, what was not read
n|sort by name; once more turns the order round
s|sort by size, or by what a finding adds to the total
w|sort by what can go, or by what a finding saves alone
C|sort by the number of items
t|folders before files
g|bar, share of the folder, both, or neither
c|number of items; in the list of commands, copy
f F|the next or the previous kind of finding
/|find: all words, in files, names, types, shapes and kinds; Esc leaves
i|all about the row; Enter goes to one of its copies
b|back to where that started
a|the files after all commands, or as they are; in the list of commands, after the chosen one
y|copy the command; it is printed again at the end
q Ctrl-C|quit; Ctrl-C with exit code 130

A bar is as long as the row's share of the largest one. What can go has the color of its kind of finding, what stays is hatched.
Nothing is ever deleted or written here: commands are for you to run.
"""


class Window(ModalScreen[Place | None]):
    """A frame around a listing of text and of places."""

    DEFAULT_CSS = """
    Window { align: center middle; background: transparent; }
    Window > Vertical { width: 90%; max-width: 110; height: auto; max-height: 90%; border: round ansi_default; background: ansi_default; }
    Window RowList { height: auto; }
    Window Static { height: 1; text-wrap: nowrap; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,left,h,less_than_sign,backspace,i,question_mark", "dismiss(None)", show=False),
    ]

    def __init__(self, title: str, hint: str) -> None:
        super().__init__()
        self._caption = title
        self._hint = hint
        self.listing = RowList(self._line)

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text(self._caption, STRONG))
            yield self.listing
            yield Static(Text(self._hint, FAINT), id="hint")

    def on_mount(self) -> None:
        self.on_resize()

    def on_resize(self) -> None:
        """Break lines anew."""
        width = min(110, self.app.size.width * 9 // 10) - 4
        rows = self._rows(max(width, 10))
        self.listing.styles.max_height = max(self.app.size.height * 9 // 10 - 4, 1)
        self.listing.styles.height = max(len(rows), 1)
        self.listing.show(rows, self._start(rows))

    def _rows(self, width: int) -> list[Any]:
        raise NotImplementedError

    def _start(self, rows: list[Any]) -> int:
        return self.listing.cursor

    def _line(self, row: Any, width: int) -> Text:
        return Text.assemble(row)


class DetailsWindow(Window):
    """Everything about a row; gives the place that was gone to, if any."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,right,l", "go", show=False),
        Binding("y,c", "copy", show=False),
    ]

    def __init__(
        self, details: Details, facts: Facts, copy: Callable[[str], None], chosen: Place | None = None
    ) -> None:
        keys = ["↑↓ choose", "Enter go to it"] if details.places else []
        keys += ["y copy command"] if details.command else []
        super().__init__(fit(details.title, 200), "  ".join([*keys, "q close"]))
        self._details = details
        self._facts = facts
        self._copy = copy
        self._chosen = chosen

    def _rows(self, width: int) -> list[Any]:
        rows: list[Any] = []
        for fact in self._details.facts:
            rows += fact.wrap(self.app.console, width)
        if self._details.places:
            rows += [Text(), Text(f"{self._details.heading}:", FAINT)]
        return [*rows, *self._details.places]

    def _start(self, rows: list[Any]) -> int:
        """The row that was chosen, also when lines are broken anew; before that the first place."""
        before = self.listing.rows[self.listing.cursor] if self.listing.rows else self._chosen
        if before in self._details.places:
            return rows.index(before)
        return 0 if self.listing.rows else len(rows) - len(self._details.places)

    def _line(self, row: Any, width: int) -> Text:
        if isinstance(row, Text):
            return super()._line(row, width)
        nbytes = size(self._facts.report.region(row).nbytes)
        return Text(f"{nbytes:>8}  {fit(self._facts.where(row), width - 10)}")

    def action_go(self) -> None:
        row = self.listing.rows[self.listing.cursor]
        if not isinstance(row, Text):
            self.dismiss(row)

    def on_row_list_opened(self, message: RowList.Opened) -> None:
        message.stop()
        self.action_go()

    def action_copy(self) -> None:
        if self._details.command:
            self._copy(self._details.command)
            self.query_one("#hint", Static).update(Text(f"Copied.  {self._hint}", FAINT))


class HelpWindow(Window):
    """What keys do."""

    def __init__(self) -> None:
        super().__init__("Keys, as in ncdu where it has them", "q close")

    def _rows(self, width: int) -> list[Any]:
        rows: list[Any] = []
        for line in _HELP.strip().splitlines():
            keys, cut, words = line.partition("|")
            if not cut:
                rows += Text(keys).wrap(self.app.console, width)
                continue
            parts = Text(words).wrap(self.app.console, max(width - 18, 10))
            rows += [Text.assemble((f"{keys if not i else '':>16}  ", STRONG), part) for i, part in enumerate(parts)]
        return rows
