"""The command `blobstore`, whose commands are imported when they are run."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from blobstore.cli.output import out
from blobstore.core.version import __version__

__all__ = ["COMMANDS", "app"]

COMMANDS = {
    "dedup": ("programs", "Move the weights of programs into one shared data file, each distinct blob once."),
    "fuse": ("programs", "Make one program of several, each blob once, for clients that take one path."),
    "run": ("run", "Run a program without torch, and print its outputs, times and memory."),
    "inspect": ("files", "List what files hold, and which keys programs take from data files."),
    "verify": ("files", "Check the structure of files, and the digests of those that have them."),
    "diff": ("files", "Compare two files or folders: their blobs key by key, and everything else."),
    "convert": ("files", "Convert .safetensors to .ptd, and .ptd to .safetensors."),
    "delta": ("files", "Write of each file only the tensors that differ from a base."),
    "report": ("report", "Find where a set of models wastes bytes."),
    "publish": ("releases", "Publish files as a release: contents that the release folder lacks, and an index."),
    "push": (
        "releases",
        "Copy a release into a registry or an image layout of OCI; files that it already has are not sent.",
    ),
    "pull": ("releases", "Make a release the current one of a folder, and fetch only what the folder lacks."),
    "gc": ("releases", "Remove what is no longer needed."),
    "pool": ("pool", "Keep every version of every model in a folder or a bucket, each content once."),
    "adapters": ("adapters", "List and check LoRA adapters, import and export those of PEFT, and combine several."),
    "packed": ("packed", "Look at, check, and clean up a folder of packed weights."),
}
"""The module of each command, and the sentence that `blobstore --help` says about it."""


class _LazyCommands(typer.core.TyperGroup):
    """A group whose commands are in the modules that `COMMANDS` names."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        group = typer.main.get_group(import_module(f"blobstore.cli.{COMMANDS[cmd_name][0]}").app)
        return group.commands.get(cmd_name, group)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # among these, typer looks for what was meant
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands without their modules, which would import every part of the package."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


app = typer.Typer(
    name="blobstore",
    cls=_LazyCommands,
    help="Content-addressed weights for ExecuTorch. Exit codes: 0 done, 1 the answer is no, 2 usage, 3 error, 130 Ctrl-C, 141 closed pipe.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        out.print(f"blobstore {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
