"""A list of which only the lines on the screen are made, so that it may have any number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

__all__ = ["RowList"]

_CURSOR = Style(reverse=True)


class RowList(ScrollView, can_focus=True):
    """Rows of one line, one of which is chosen."""

    DEFAULT_CSS = """
    RowList { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "end(-1)", show=False),
        Binding("end", "end(1)", show=False),
    ]

    class Opened(Message):
        """The chosen row was clicked."""

    def __init__(self, line: Callable[[Any, int], Text], moved: Callable[[int], None] = lambda cursor: None) -> None:
        """`line` makes the text of a row for a number of cells; `moved` learns at once which row is chosen.

        A message would come after the next key, which acts on that row.
        """
        super().__init__()
        self.rows: Sequence[Any] = ()
        self.cursor = 0
        self._line = line
        self._moved = moved

    def show(self, rows: Sequence[Any], cursor: int = 0) -> None:
        self.rows = rows
        self.virtual_size = Size(0, len(rows))
        self.refresh()
        self.choose(cursor)

    def choose(self, cursor: int) -> None:
        """Choose a row and bring it on the screen."""
        self.cursor = max(min(cursor, len(self.rows) - 1), 0)
        height = self.scrollable_content_region.height
        first = min(max(self.scroll_offset.y, self.cursor - height + 1), self.cursor) if height else 0
        self.scroll_to(y=first, animate=False, immediate=True, force=True)
        self.refresh()
        self._moved(self.cursor)

    def on_resize(self) -> None:
        """Keep the chosen row on the screen."""
        self.choose(self.cursor)

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        number = y + self.scroll_offset.y
        if not 0 <= number < len(self.rows):
            return Strip.blank(width, self.rich_style)
        text = self._line(self.rows[number], width)
        text.end = ""
        strip = Strip(text.render(self.app.console)).adjust_cell_length(width)
        return strip.apply_style(self.rich_style + (_CURSOR if number == self.cursor else Style()))

    def action_move(self, step: int) -> None:
        self.choose(self.cursor + step)

    def action_page(self, step: int) -> None:
        self.choose(self.cursor + step * max(self.scrollable_content_region.height - 1, 1))

    def action_end(self, step: int) -> None:
        self.choose(len(self.rows) - 1 if step > 0 else 0)

    def on_click(self, event: events.Click) -> None:
        """Choose the row; a click on the one that is chosen opens it."""
        number = event.y + self.scroll_offset.y
        if number >= len(self.rows):
            return
        if number == self.cursor:
            self.post_message(self.Opened())
        else:
            self.choose(number)
