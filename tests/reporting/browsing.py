"""The report's browser without a terminal: keys are pressed, and the screen is read from Textual's drawing of it.

`python -m tests.reporting.browsing docs/img/report-tui.svg` draws the picture of docs/report.md.
"""

import asyncio
import html
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from textual.pilot import Pilot

import blobstore
from blobstore.reporting import Report
from blobstore.reporting.show.tui.app import Browser
from tests.helpers import waiting
from tests.reporting.zoo import write_zoo

_TEXT = re.compile(r'<text class="[\w-]+" x="([\d.]+)" [^>]*?clip-path="url\(#[\w-]+-line-(\d+)\)">(.*?)</text>')
_CELL = 12.2
"""The width of a cell in a drawing."""

PICTURE = ((100, 18), ("w", "end", "up", "enter"))
"""The size and the keys of the picture in the documentation."""


class Drawing:
    """A screen that Textual drew.

    Attributes:
        svg: the drawing.
        lines: its text.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg
        self.lines: list[str] = []
        for x, line, text in _TEXT.findall(svg):
            self.lines += [""] * (int(line) + 1 - len(self.lines))
            before = self.lines[int(line)].ljust(round(float(x) / _CELL))
            self.lines[int(line)] = before + html.unescape(text).replace("\xa0", " ")
        self.lines = [line.rstrip() for line in self.lines]
        self.text = "\n".join(self.lines)

    @property
    def heading(self) -> str:
        """What the list is of."""
        return self.lines[2].strip("─ ")

    @property
    def rows(self) -> list[str]:
        """The lines of the list, which is between the names of its columns and a rule."""
        rows = [line.rstrip("▁▂▃▄▅▆▇█ ") for line in self.lines[4 : self._rule]]
        return [row for row in rows if row]

    @property
    def about(self) -> str:
        """What is said below the list."""
        return " ".join(" ".join(self.lines[self._rule + 1 : -1]).split())

    @property
    def _rule(self) -> int:
        return max(number for number, line in enumerate(self.lines) if line.startswith(" ──"))


class Screen:
    """A browser that runs."""

    def __init__(self, app: Browser, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> Drawing:
        """Press keys; the screen once they had their effect."""
        await self.pilot.press(*keys)
        await self.pilot.pause()
        return self.see()

    async def type(self, text: str) -> Drawing:
        """Press the keys of a text."""
        return await self.press(*({" ": "space", ".": "full_stop"}.get(c, c) for c in text))

    async def until(self, heading: str) -> None:
        """Wait until the list's heading starts with a text.

        Raises:
            TimeoutError: it did not in a minute.
        """
        end = time.monotonic() + waiting.SECONDS
        while not self.see().heading.startswith(heading):
            if time.monotonic() > end:
                raise TimeoutError(f"expected {heading!r}, found {self.see().heading!r}")
            await self.pilot.pause(0.01)

    def see(self) -> Drawing:
        """The screen as it is now."""
        return Drawing(self.app.export_screenshot(title="blobstore report models --tui"))


@asynccontextmanager
async def browsing(report: Report, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Screen]:
    """A browser of a report that runs in this block."""
    app = Browser(report)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield Screen(app, pilot)


async def after_keys(report: Report, keys: Sequence[str] = (), size: tuple[int, int] = (80, 24)) -> Drawing:
    """The screen after some keys."""
    async with browsing(report, size) as screen:
        return await screen.press(*keys)


def picture(report: Report) -> str:
    """The picture of the documentation, which needs no font from another host."""
    size, keys = PICTURE
    drawing = asyncio.run(after_keys(report, keys, size)).svg
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->\s*", "", drawing, flags=re.DOTALL)


def main(target: Path) -> None:
    """Draw the picture of the zoo."""
    with tempfile.TemporaryDirectory() as folder:
        names = write_zoo(Path(folder) / "models")
        target.write_text(picture(blobstore.report(Path(folder) / "models", names=names)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
