"""A report as text, as a page, in a notebook and on the terminal. Each is imported when it is used: text needs no page."""

from __future__ import annotations

from blobstore.core.lazy import lazily

TYPE_CHECKING = False  # see blobstore/__init__.py
if TYPE_CHECKING:
    from blobstore.reporting.show.html import to_html
    from blobstore.reporting.show.notebook import summary
    from blobstore.reporting.show.terminal import print_changes, print_report
    from blobstore.reporting.show.tui.app import Browser
    from blobstore.reporting.show.words import headline

__all__ = ["Browser", "headline", "print_changes", "print_report", "summary", "to_html"]

_HOME = {
    "html": ("to_html",),
    "notebook": ("summary",),
    "terminal": ("print_changes", "print_report"),
    "tui.app": ("Browser",),
    "words": ("headline",),
}


if not TYPE_CHECKING:  # so that type checkers know which names there are

    def __getattr__(name: str) -> object:
        return lazily(__name__, _HOME, name)
