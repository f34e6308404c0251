"""What could not be read, and notes."""

from __future__ import annotations

from rich.text import Text

from blobstore.reporting.show.tui.cells import FAINT, STRONG, fit, shown
from blobstore.reporting.show.tui.facts import Facts
from blobstore.reporting.show.tui.view import Details, View

__all__ = ["Unread"]


class Unread(View):
    """Files that are not in the numbers, each with the reason, and what did not go as requested."""

    NAME = "Not read"
    KEYS = "i all of it  ? help  q quit"

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._problems = facts.report.problems
        self._notes = facts.report.notes
        self.fill()

    def fill(self) -> None:
        self.rows = [*((one.path, one.reason) for one in self._problems), *(("note", note) for note in self._notes)]

    def heading(self) -> Text:
        return Text("not read, and not in the numbers" if self._problems else "notes")

    def columns(self, width: int) -> Text:
        return Text(" what: why", FAINT)

    def line(self, row: tuple[str, str], width: int) -> Text:
        what = fit(row[0], max(width // 2, 10))
        text = Text.assemble(" ", (what, STRONG), ": ")
        return text.append(fit(row[1], width - text.cell_len))

    def about(self, row: tuple[str, str] | None, width: int, lines: int) -> Text:
        return Text(f"{shown(row[0])}: {shown(row[1])}" if row is not None else "Everything was read.")

    def details(self, row: tuple[str, str] | None) -> Details | None:
        return Details(shown(row[0]), [Text(shown(row[1]))]) if row is not None else None
