"""The commands, with what each saves, and all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text

from blobstore.core.reprs import count
from blobstore.core.text import printable, size
from blobstore.reporting.show.after import after
from blobstore.reporting.show.tui.cells import FAINT, STRONG, column, fit, folded
from blobstore.reporting.show.tui.facts import Facts
from blobstore.reporting.show.tui.view import Details, View
from blobstore.reporting.show.words import by_hand, in_pool, inputs

__all__ = ["Commands", "Some"]

_SIZE = 8
_INPUTS = 9


@dataclass(frozen=True)
class Some:
    """A command, or all of them.

    Attributes:
        name: how it is called.
        commands: in the order in which they are to be run.
        saves: bytes.
        is_pool: whether it puts all files into a pool, instead of replacing some of them.
    """

    name: str
    commands: Sequence[str]
    saves: int
    is_pool: bool = False

    @property
    def text(self) -> str:
        """The command; several are one line of a shell, which stops at the first that fails."""
        return " && ".join(map(printable, self.commands))


class Commands(View):
    """What can be run."""

    NAME = "Commands"
    KEYS = "enter the files after it  y c copy  i info  ? help  q quit"
    ABOUT: ClassVar[int] = 8

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts
        self.fill()

    def fill(self) -> None:
        """Each command, the one that saves most first; below them all. A pool for all files comes before them."""
        report = self._facts.report
        saves = report.commands
        rows = [Some(f"command {number}", [one], nbytes) for number, (one, nbytes) in enumerate(saves.items(), 1)]
        if len(rows) > 1:
            rows.append(Some("all commands", list(saves), sum(saves.values())))
        if (pool := report.pool) is not None:
            rows.insert(0, Some(in_pool(pool), [pool.command], max(0, report.total_bytes - pool.bytes), is_pool=True))
        self.rows = rows

    def heading(self) -> Text:
        report = self._facts.report
        other = report.total_saves - report.command_saves
        text = Text(f"{size(report.command_saves)} by commands")
        return text.append(f", {size(other)} {by_hand(report)}" if other else "")

    def columns(self, width: int) -> Text:
        return Text(f"{'saves':>{_SIZE + 1}}  {'reads':{_INPUTS}}  command", FAINT)

    def line(self, row: Some, width: int) -> Text:
        """What it saves, how many files it reads, and both ends of it."""
        number = len(self._facts.report.files) if row.is_pool else sum(map(inputs, row.commands))
        text = Text(f"{size(row.saves):>{_SIZE + 1}}  {column(count(number, 'file'), _INPUTS)}  ")
        if len(row.commands) > 1:
            return text.append(f"all {len(row.commands)} commands", STRONG)
        return text.append(fit(row.text, width - text.cell_len))

    def about(self, row: Some | None, width: int, lines: int) -> Text:
        if row is None:
            return Text("No command saves anything here. The findings say what does.")
        return folded(row.text, width, lines)

    def details(self, row: Some | None) -> Details | None:
        if row is None:
            return None
        report = self._facts.report
        if row.is_pool:
            kept = Text(f"{size(report.total_bytes)} now, {row.name}, which gives every file back to the bit")
            return Details(row.name, [kept, Text(row.text)], command=row.text)
        then = after(report, row.commands)
        facts = [
            Text(f"{size(report.total_bytes)} now, {size(then.total_bytes(report))} after it"),
            Text(
                f"{count(len(then.replaced), 'file')} replaced by {count(len(then.files), 'file')}; delete them once these are in use"
            ),
            Text(row.text),
        ]
        return Details(row.name, facts, command=row.text)

    def command(self, row: Some | None) -> str | None:
        return row.text if row is not None else None
