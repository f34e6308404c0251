"""The browser: its lists, the keys of ncdu, and the way from one to another."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.theme import BUILTIN_THEMES
from textual.timer import Timer
from textual.widgets import Input, Static

from blobstore.core.text import printable
from blobstore.reporting.model import Place
from blobstore.reporting.report_data import ReportData
from blobstore.reporting.show.tui.cells import FAINT, column
from blobstore.reporting.show.tui.commands import Commands, Some
from blobstore.reporting.show.tui.facts import Facts
from blobstore.reporting.show.tui.files import Files
from blobstore.reporting.show.tui.findings import Findings
from blobstore.reporting.show.tui.listing import RowList
from blobstore.reporting.show.tui.popups import DetailsWindow, HelpWindow
from blobstore.reporting.show.tui.unread import Unread
from blobstore.reporting.show.tui.view import Details, View
from blobstore.reporting.show.words import headline

__all__ = ["Browser"]

_REVERSE = Style(reverse=True)
_PAUSE = 0.15
"""Seconds after a key until what is typed is searched for."""
_TERMINAL = replace(
    BUILTIN_THEMES["ansi-dark"],
    name="terminal",
    variables={
        **BUILTIN_THEMES["ansi-dark"].variables,
        **dict.fromkeys(("input-cursor-background", "input-cursor-foreground"), "ansi_default"),
        "input-cursor-text-style": "reverse",
        **dict.fromkeys(("scrollbar", "scrollbar-hover", "scrollbar-active"), "ansi_bright_black"),
        **dict.fromkeys(
            (f"scrollbar-{part}" for part in ("background", "background-hover", "background-active", "corner-color")),
            "ansi_default",
        ),
    },
)
"""The colors of the terminal, light or dark."""


class Tab(Static):
    """The name of a view; a click shows it."""

    def __init__(self, number: int) -> None:
        super().__init__(markup=False)
        self._number = number

    async def on_click(self) -> None:
        await self.run_action(f"app.show({self._number})")


class SearchInput(Input):
    """What is searched for."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.leave", show=False),
        Binding("up,down", "app.focus_list", show=False),
    ]


class Browser(App[None]):
    """A report, to walk through.

    Attributes:
        copied: the commands that were copied, in this order, as text.
        interrupted: whether it ended by Ctrl-C.
    """

    CSS = """
    Screen { layout: vertical; }
    Screen > Static { height: 1; text-wrap: nowrap; }
    #tabs { height: 1; }
    #tabs Tab { width: auto; margin-right: 2; }
    #about { padding: 0 1; text-wrap: wrap; overflow-y: hidden; }
    SearchInput, SearchInput:focus { height: 1; border: none; padding: 0 1; display: none; background: ansi_default; }
    """
    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", priority=True, show=False),
        Binding("tab", "next(1)", priority=True, show=False),
        Binding("shift+tab", "next(-1)", priority=True, show=False),
        Binding("ctrl+z", "suspend_process", show=False),
        Binding("q", "quit", show=False),
        *(Binding(str(number + 1), f"show({number})", show=False) for number in range(4)),
        Binding("enter,right,l", "open", show=False),
        Binding("left,h,less_than_sign,backspace", "up", show=False),
        Binding("escape", "leave", show=False),
        Binding("n", "sort('name')", show=False),
        Binding("s", "sort('size')", show=False),
        Binding("w", "sort('waste')", show=False),
        Binding("C", "sort('items')", show=False),
        Binding("t", "change('folders')", show=False),
        Binding("g", "change('graph')", show=False),
        Binding("c", "counts_or_copy", show=False),
        Binding("y", "copy", show=False),
        Binding("f", "kind(1)", show=False),
        Binding("F", "kind(-1)", show=False),
        Binding("slash", "find", show=False),
        Binding("i", "info", show=False),
        Binding("a", "after", show=False),
        Binding("b", "return", show=False),
        Binding("question_mark", "help", show=False),
    ]

    def __init__(self, report: ReportData) -> None:
        super().__init__()
        self.register_theme(_TERMINAL)
        self.theme = _TERMINAL.name
        self.copied: list[str] = []
        self.interrupted = False
        self._facts = Facts(report)
        self._files = Files(self._facts)
        self._commands = Commands(self._facts)
        self._findings = Findings(self._facts)
        self._views: list[View] = [self._files, self._findings, self._commands]
        if report.problems or report.notes:
            self._views.append(Unread(self._facts))
        self._view: View = self._files
        self._back: list[tuple[View, Callable[[], None], Details, Place]] = []
        self._typed: Timer | None = None
        self._lines = 0
        self._listing = RowList(self._line, self._choose)

    # ---- what is on the screen

    def compose(self) -> ComposeResult:
        yield Static(id="title")
        with Horizontal(id="tabs"):
            for number in range(len(self._views)):
                yield Tab(number)
        yield Static(id="heading")
        yield Static(id="columns")
        yield self._listing
        yield Static(id="about")
        yield SearchInput()
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Show the files; a signal ends this as the key does."""
        if not self.is_headless:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.action_interrupt)
        self._listing.focus()
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        view, width, height = self._view, self.size.width, self.size.height
        title = column(f"blobstore report  {headline(self._facts.report)}", width - 2)
        self._put("title", Text(f" {title} ", _REVERSE))
        for number, (tab, other) in enumerate(zip(self.query(Tab), self._views, strict=True), 1):
            style = _REVERSE if other is view else Style()
            tab.update(Text.assemble((f" {number} {other.NAME} ", style)))
        heading = view.heading()
        heading.truncate(max(width - 8, 1), overflow="ellipsis")
        line = Text.assemble("─── ", heading, " ")
        self._put("heading", line.append("─" * max(width - line.cell_len, 0)))
        self._put("columns", view.columns(width))
        self._lines = min(view.ABOUT, max((height - 6) // 3, 0))
        self.query_one("#about", Static).styles.height = self._lines + 1 if self._lines else 0
        self._listing.show(view.rows, view.cursor)
        self._tell(view.KEYS)

    def _put(self, name: str, text: Text) -> None:
        self.query_one(f"#{name}", Static).update(text)

    def _tell(self, text: str) -> None:
        """Say something in the last line."""
        self._put("keys", Text(f" {column(text, self.size.width - 2)} ", _REVERSE))

    def _describe(self) -> None:
        view, width = self._view, max(self.size.width - 2, 2)
        text = view.about(view.chosen, width, self._lines)
        self._put("about", Text.assemble(("─" * width, FAINT), "\n", text))

    def _line(self, row: Any, width: int) -> Text:
        return self._view.line(row, width)

    def _choose(self, cursor: int) -> None:
        self._view.cursor = cursor
        self._describe()

    async def on_row_list_opened(self) -> None:
        self.action_open()

    # ---- keys

    def action_interrupt(self) -> None:
        """End as Ctrl-C ends any command."""
        self.interrupted = True
        self.exit()

    def action_show(self, number: int) -> None:
        if number < len(self._views):
            self._view = self._views[number]
            self._listing.focus()
            self._draw()
            self._show_search(bool(self._view.query))

    def action_next(self, step: int) -> None:
        if len(self.screen_stack) == 1:
            self.action_show((self._views.index(self._view) + step) % len(self._views))

    def action_open(self) -> None:
        """Go into what is chosen, or show everything about it."""
        row = self._view.chosen
        if self._view is self._commands:
            self._show_after(self._commands.chosen)
        elif self._view is self._files and self._files.open(row):
            self._draw()
            self._show_search(False)
        else:
            self.action_info()

    def action_up(self) -> None:
        if self._view is self._files and self._files.up():
            self._draw()
            self._show_search(False)

    def action_leave(self) -> None:
        """Leave what was searched for, or the files after a command."""
        if self._view.query or self.focused is not self._listing:
            self._view.search("")
            self._show_search(False)
            self._listing.focus()
        elif self._view is self._files:
            self._files.show_now()
        self._draw()

    def action_sort(self, key: str) -> None:
        if self._view.sort_by(key):
            self._draw()

    def action_change(self, what: str) -> None:
        """Change what the files are shown with."""
        if self._view is self._files:
            self._files.toggle(what)
            self._draw()

    def action_kind(self, step: int) -> None:
        if self._view is self._findings:
            self._findings.next_kind(step)
            self._draw()

    def action_counts_or_copy(self) -> None:
        """As in ncdu among the files; elsewhere copy, as in most programs."""
        if self._view is self._files:
            self.action_change("counts")
        else:
            self.action_copy()

    def action_copy(self) -> None:
        if command := self._view.command(self._view.chosen):
            self._copy(command)
            self._tell(f"Copied: {command}")

    def _copy(self, command: str) -> None:
        """To the clipboard of the terminal, if it has one; what would act on a shell's line is spelled out."""
        text = printable(command)
        self.copy_to_clipboard(text)
        self.copied = [*(one for one in self.copied if one != text), text]

    # ---- searching

    def action_find(self) -> None:
        if self._view.SEARCHES:
            self._show_search(True)
            self.query_one(SearchInput).focus()

    def _show_search(self, visible: bool) -> None:
        search = self.query_one(SearchInput)
        search.display = visible
        search.placeholder = f"find in {self._view.NAME.lower()}: all of these words"
        with search.prevent(Input.Changed):
            search.value = self._view.query

    def on_input_changed(self) -> None:
        """Search when nothing is typed for a moment."""
        if self._typed is not None:
            self._typed.stop()
        self._typed = self.set_timer(_PAUSE, self._search)

    def on_input_submitted(self) -> None:
        self.action_focus_list()

    def _search(self) -> None:
        if self._typed is not None:
            self._typed.stop()
        if self.query_one(SearchInput).display:
            self._view.search(self.query_one(SearchInput).value.strip())
            self._draw()

    def action_focus_list(self) -> None:
        """Choose from what was found; what was searched for stays to be seen."""
        self._search()
        self._listing.focus()
        self._show_search(bool(self._view.query))

    # ---- from one view to another

    def action_after(self) -> None:
        """The files after the chosen command, or after all; or again as they are."""
        if self._view is self._commands:
            self._show_after(self._commands.chosen)
        elif self._view is self._files:
            rows = [row for row in self._commands.rows if not row.is_pool]
            self._show_after(rows[-1] if rows and self._files.then is None else None)

    def _show_after(self, some: Some | None) -> None:
        if some is not None and some.is_pool:  # the files stay as they are
            self.action_info()
            return
        if some is not None:
            self._files.show_after(some.commands, some.name)
        elif self._view is self._files:
            self._files.show_now()
        self.action_show(0 if some is not None else self._views.index(self._view))

    def action_info(self) -> None:
        if details := self._view.details(self._view.chosen):
            self._inform(details)

    def _inform(self, details: Details, chosen: Place | None = None) -> None:
        def go(place: Place | None) -> None:
            if place is not None:
                self._back.append((self._view, self._files.mark(), details, place))
                self._files.go_to(place)
                self.action_show(0)
                self._tell("Here it is. b goes back.")

        self.push_screen(DetailsWindow(details, self._facts, self._copy, chosen), go)

    def action_return(self) -> None:
        """Return to where a copy was chosen, to choose another one."""
        if self._back:
            view, restore, details, place = self._back.pop()
            restore()
            self.action_show(self._views.index(view))
            self._inform(details, place)

    def action_help(self) -> None:
        self.push_screen(HelpWindow())
