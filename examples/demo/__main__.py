"""`python -m examples.demo [DIRECTORY]`, which `make demo` runs."""

from pathlib import Path
from typing import Annotated

import typer

from blobstore.cli import exits
from blobstore.cli.output import out
from examples.demo import run_demo


@exits.handled
def demo(
    directory: Annotated[Path, typer.Argument(help="Where to write the programs.", readable=False)] = Path(
        "demo-output"
    ),
    force: Annotated[
        bool, typer.Option("--force", help="Lower the models again, even if an earlier run left the programs.")
    ] = False,
) -> None:
    """Lower a trained model for three input lengths, deduplicate the programs, run them in the stock runtime, and compare."""
    run_demo(directory, out, force=force)


if __name__ == "__main__":
    typer.run(demo)
