"""The command line: `blobstore --help`. Needs the `cli` extra."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the `blobstore` command."""
    try:
        from blobstore.cli.app import app
    except ImportError as error:
        if error.name not in {"typer", "rich", "click"}:
            raise
        sys.exit("blobstore: the command line needs more packages: pip install 'blobstore[cli]'")
    app()
