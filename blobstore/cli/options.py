"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from blobstore.core.text import parse_size

__all__ = ["AsJson", "DryRun", "file_argument", "file_option", "nbytes"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be written, and change nothing; the exit code is the same.")
]


def file_argument(words: str, **more: Any) -> Any:
    """An argument that is a path, which the command itself opens: typer's own check would call a file that cannot be read a
    mistake in the command line."""
    return typer.Argument(help=words, readable=False, **more)


def file_option(*names: str, **more: Any) -> Any:
    """The same for an option."""
    return typer.Option(*names, readable=False, **more)


def nbytes(option: str, text: str) -> int:
    """The number of bytes that an option names; a wrong one is a wrong command line."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
