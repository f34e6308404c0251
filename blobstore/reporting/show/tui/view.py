"""What the browser needs of a list that it shows, and how rows are sorted and searched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text

from blobstore.reporting.model import Place

__all__ = ["Details", "View", "matches"]


@dataclass(frozen=True)
class Details:
    """Everything about a row.

    Attributes:
        title: what it is about.
        facts: a paragraph each.
        places: where else it is; one of them can be gone to.
        heading: what these places are.
        command: what can be copied.
    """

    title: str
    facts: Sequence[Text]
    places: Sequence[Place] = ()
    heading: str = ""
    command: str | None = None


class View(ABC):
    """Rows, one of which is chosen, and what is said of them; no widget.

    Attributes:
        rows: those that are shown, in their order.
        cursor: the index of the chosen one.
        sort: what they are sorted by, and whether the largest come first.
        query: what was searched for.
    """

    NAME: ClassVar[str]
    KEYS: ClassVar[str]
    """A line that says what keys do."""
    SEARCHES: ClassVar[bool] = False
    SORTS: ClassVar[Mapping[str, bool]] = {}
    """What rows can be sorted by, and whether the largest come first to begin with."""
    ABOUT: ClassVar[int] = 3
    """Lines below the list."""

    def __init__(self) -> None:
        self.rows: Sequence[Any] = ()
        self.cursor = 0
        self.query = ""
        first = next(iter(self.SORTS), "")
        self.sort = (first, self.SORTS.get(first, False))

    @property
    def chosen(self) -> Any:
        return self.rows[self.cursor] if self.cursor < len(self.rows) else None

    def sort_by(self, key: str) -> bool:
        """Sort by something else; by the same again in the other direction. False if there is nothing to sort by it."""
        if key not in self.SORTS:
            return False
        self.sort = (key, not self.sort[1] if self.sort[0] == key else self.SORTS[key])
        self.fill()
        return True

    def search(self, query: str) -> None:
        """Show what has all words of a text."""
        if query != self.query:
            self.query = query
            self.cursor = 0
            self.fill()

    def details(self, row: Any) -> Details | None:
        """Everything about a row, if there is more than `about` says."""
        return None

    def command(self, row: Any) -> str | None:
        return None

    @abstractmethod
    def fill(self) -> None:
        """Set `rows`."""

    @abstractmethod
    def heading(self) -> Text:
        """Where this is."""

    @abstractmethod
    def columns(self, width: int) -> Text:
        """The names of the columns."""

    @abstractmethod
    def line(self, row: Any, width: int) -> Text:
        """A row in so many cells."""

    @abstractmethod
    def about(self, row: Any, width: int, lines: int) -> Text:
        """A row in a few sentences that fit into lines; of nothing, why there is no row."""


def matches(query: str) -> Callable[[str], bool]:
    """Whether a text, in lower case, has all words of a query."""
    words = query.lower().split()
    return lambda text: all(word in text for word in words)
