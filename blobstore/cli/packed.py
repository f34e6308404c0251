"""The commands on packed stores."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli import exits
from blobstore.cli.options import AsJson, file_argument, nbytes
from blobstore.cli.output import counted, on_terminal, print_error, print_json, print_table, say
from blobstore.core.errors import FileAccessError
from blobstore.core.text import size

if TYPE_CHECKING:
    from blobstore.runtime import PackedFile, PackedStore

__all__ = ["app"]

app = typer.Typer(
    name="packed",
    help="Look at, check, and clean up a folder of packed weights.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Folder = Annotated[Path, file_argument("The folder of a packed store.")]


@app.command("list")
@exits.handled
def listed(folder: Folder, as_json: AsJson = False) -> None:
    """List the files of a packed store, the most recently used first, and what is wrong with their tables."""
    files = _open(folder).list()
    _print(files, as_json)
    if not files and not as_json:
        print_error(_nothing_in(folder))


@app.command()
@exits.handled
def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Compare the files of a packed store with their digests. Exit code 1 if one is damaged, 3 without files.

    Nothing is removed; a program that finds damage builds the file again, and `gc` removes damaged files.
    """
    files = _open(folder).verify()
    if not files:
        raise _nothing_in(folder)
    if as_json:
        print_json(files)
    else:
        for file in files:
            ok = "ok: table and all digests"
            if file.unchecked:
                ok += f", with {file.unchecked} of {file.entries} entries not compared, as they are not up to date"
            say(f"{file.path}: " + (f"NOT OK: {file.problem}" if file.problem else ok))
    if any(file.problem for file in files):
        raise typer.Exit(exits.NO)


@app.command()
@exits.handled
def gc(
    folder: Folder,
    limit: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Also remove files until those that stay have no more (2GiB).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove damaged and replaced files, what killed processes left, and the least recently used files above a limit.

    Files that a living process uses stay.
    """
    store = _open(folder, None if limit is None else nbytes("--limit", limit))
    empty = not store.list()
    removed = store.gc()
    _print(removed, as_json)
    if as_json:
        return
    if empty and not removed:
        print_error(_nothing_in(folder))
    else:
        say(f"Removed {counted(removed, 'file')} with {size(sum(file.nbytes for file in removed))}.")


def _nothing_in(folder: Path) -> FileAccessError:
    return FileAccessError(folder, "there are no packed weights in this folder")


def _open(folder: Path, limit: int | None = None) -> PackedStore:
    """A store whose folder exists."""
    from blobstore.runtime import PackedStore  # needs the native package

    store = PackedStore(folder) if limit is None else PackedStore(folder, limit=limit)
    try:
        os.stat(folder)  # noqa: PTH116 - raises nothing for a name that is too long
    except OSError as error:
        raise FileAccessError(folder, error) from None
    return store


def _print(files: list[PackedFile], as_json: bool) -> None:
    if as_json:
        print_json(files)
        return
    people, now = on_terminal(), time.time()
    rows = [
        (
            file.path.name if people else file.path,
            size(file.nbytes) if people else file.nbytes,
            file.entries,
            _age(now - file.used) if people else file.used,
            "in use" if file.in_use else "",
            file.problem,
        )
        for file in files
    ]
    print_table("", ("file", "size", "entries", "last used", "state", "problem"), rows)


def _age(seconds: float) -> str:
    """How long ago something was, for people."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // length)
        if count >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "now"
