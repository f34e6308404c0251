"""How commands print: tables for people, JSON for programs, progress on standard error."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from blobstore.disk.staging import Progress as Callback
from blobstore.memory.layout import TensorLayout

__all__ = ["err", "out", "print_json", "print_table", "printable", "progress_bar", "size", "tell"]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would leave with the code of an answer


out = _Console(highlight=False, soft_wrap=False)
err = _Console(stderr=True, highlight=False)


_MOST_ROWS = 1000
"""Laying out a table takes longer than making what is in it."""


def tell(error: object) -> None:
    """Print an error on standard error, in one line."""
    err.print(printable(f"blobstore: {error}"), soft_wrap=True)


def printable(text: object) -> Text:
    """Text from a file, so that neither markup nor control characters in it do anything."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text)))


def size(nbytes: int) -> str:
    """Bytes for people, with three digits."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: str = "") -> None:
    """Print a table; `right` names the columns with numbers, one letter each by its position (a is the first)."""
    table = Table(title=printable(title), title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        number = chr(ord("a") + i) in right
        table.add_column(column, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows[:_MOST_ROWS]:
        table.add_row(*(printable(cell) for cell in row))
    out.print(table)
    if len(rows) > _MOST_ROWS:
        out.print(f"{len(rows) - _MOST_ROWS:,} more rows; --json has all {len(rows):,}.")


def print_json(value: object) -> None:
    """Print JSON, whole and never wrapped."""
    json.dump(_plain(value), sys.stdout, indent=2, ensure_ascii=True)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, TensorLayout):
        return {
            "scalar_type": value.scalar_type.name,
            "sizes": list(value.sizes),
            "dim_order": list(value.dim_order),
        }
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@contextlib.contextmanager
def progress_bar(*, hidden: bool = False) -> Iterator[Callback]:
    """A progress bar a task on standard error; it is gone when the work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=err, transient=True, disable=hidden or not err.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def step(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(printable(what).plain.replace("[", r"\["), total=total)
            bars.update(tasks[what], completed=done)

        yield step
