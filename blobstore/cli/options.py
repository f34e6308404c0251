"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from blobstore.cli.output import print_error
from blobstore.core.deprecation import FORM
from blobstore.core.text import parse_size

__all__ = ["AsJson", "DryRun", "deprecated_option", "nbytes"]

T = TypeVar("T")

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


def deprecated_option(message: str) -> Callable[[typer.Context, typer.CallbackParam, T], T]:
    """The callback of an option that is deprecated: where it is given, a line on standard error says what to use.

    The option is also `hidden=True`, so that `--help` does not offer it.

    Args:
        message: of the form `FORM` of `core/deprecation.py`.
    """
    if not FORM.fullmatch(message):
        raise ValueError(f"expected a message such as {FORM.pattern}, found {message!r}")

    def callback(context: typer.Context, parameter: typer.CallbackParam, value: T) -> T:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name != "DEFAULT":
            print_error(message)
        return value

    return callback
