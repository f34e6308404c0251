"""How commands print: lines and tables for people, rows and JSON for programs, progress and errors on standard error."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import sys
from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from blobstore.core.disk.progress import Progress as Callback
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.text import printable

__all__ = [
    "counted",
    "err",
    "on_terminal",
    "out",
    "plain",
    "print_error",
    "print_json",
    "print_table",
    "progress_bar",
    "say",
]


_WIDEST = 1 << 16
"""The width of lines in a pipe or a file: they never break."""


class _Console(Console):
    @property
    def size(self) -> ConsoleDimensions:
        terminal = super().size
        return terminal if on_terminal() else ConsoleDimensions(_WIDEST, terminal.height)

    @size.setter
    def size(self, size: tuple[int, int]) -> None:
        self._width, self._height = size

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1, the code for "no"


out = _Console(highlight=False, soft_wrap=False)
err = _Console(stderr=True, highlight=False)

_MOST_ROWS = 1000
"""Laying out a table takes longer than computing what it shows."""


def on_terminal() -> bool:
    """Whether people look at the output, and not a program."""
    return sys.stdout.isatty()


def counted(what: Sized | int, noun: str) -> str:
    """A number of things in words: "1 file", "2 files"."""
    number = what if isinstance(what, int) else len(what)
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_error(error: object) -> None:
    err.print(plain(f"blobstore: {error}"), soft_wrap=True)


def plain(text: object) -> Text:
    """Text that may come from a file: its markup and its control characters are shown and have no effect."""
    return Text(printable(text))


def say(line: object) -> None:
    """Print a line on standard output; a long one is not wrapped."""
    out.print(plain(line), soft_wrap=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on a terminal; anywhere else its rows alone, complete, with tabs between the cells.

    Args:
        title: above the table.
        columns: their headings.
        rows: the cells. Numbers have separators and are aligned on the right in a table, which has at most 1,000 rows.
    """
    if not on_terminal():
        sys.stdout.writelines("\t".join(map(printable, row)) + "\n" for row in rows)
        return
    table = Table(title=plain(title), title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        number = any(isinstance(row[i], int) for row in rows)
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows[:_MOST_ROWS]:
        table.add_row(*(plain(f"{cell:,}" if isinstance(cell, int) else cell) for cell in row))
    out.print(table)
    if len(rows) > _MOST_ROWS:
        out.print(f"{len(rows) - _MOST_ROWS:,} more rows; --json has all {len(rows):,}.")


def print_json(value: object) -> None:
    """Print JSON, complete and never wrapped."""
    json.dump(_jsonable(value), sys.stdout, indent=2, ensure_ascii=True)
    sys.stdout.write("\n")


def _jsonable(value: Any) -> Any:
    if isinstance(value, TensorLayout):
        return {
            "scalar_type": value.scalar_type.name,
            "sizes": list(value.sizes),
            "dim_order": list(value.dim_order),
        }
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


@contextlib.contextmanager
def progress_bar(*, hidden: bool = False) -> Iterator[Callback]:
    """A progress bar for each task, on standard error; a bar disappears when its task is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err, transient=True, disable=hidden or not err.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def step(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(printable(what).replace("[", r"\["), total=total)
            bars.update(tasks[what], completed=done, total=total, visible=done < total)

        yield step
