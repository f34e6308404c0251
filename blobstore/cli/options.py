"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

from blobstore.core.text import parse_size

__all__ = ["AsJson", "DryRun", "nbytes"]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be written, and change nothing; the exit code is the same.")
]


def nbytes(option: str, text: str) -> int:
    """The number of bytes that an option names; a wrong one is a wrong command line."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
