"""The commands that write programs: `dedup` and `fuse`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from blobstore.cli import exits
from blobstore.cli.options import AsJson, DryRun, file_argument, file_option, nbytes
from blobstore.cli.output import (
    counted,
    out,
    plain,
    print_error,
    print_json,
    print_table,
    progress_bar,
    say,
)
from blobstore.core.programs import DATA_NAME, DataResult, DedupResult, dedup_programs
from blobstore.core.programs.deployed import data_files_of
from blobstore.core.programs.fuse import fuse_programs
from blobstore.core.text import quoted, saving

__all__ = ["app"]

app = typer.Typer()

_DATA_FILES = 10
"""More data files than this have no line each."""


@app.command()
@exits.handled
def dedup(
    inputs: Annotated[
        list[Path], file_argument("Programs (.pte), data files (.ptd) that they need, and folders of both.")
    ],
    output: Annotated[
        Path,
        file_option(
            "--output", "-o", help="Folder for the slim programs and the data file; an existing one is extended."
        ),
    ],
    data_name: Annotated[str, typer.Option(help="File name of the shared data.")] = DATA_NAME,
    keep_small: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Leave blobs with fewer bytes (1024, 10kB, 1.5MiB) in their program."),
    ] = "0",
    names: Annotated[
        list[Path] | None,
        file_option(
            help="A .safetensors or .ptd, or several: a moved tensor gets the name of the equal one in it. By default those "
            "beside the programs and in the folders above."
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Drop data that no program in the folder uses any more.")
    ] = False,
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            help="Write what is new to a data file of its own; no other program is read, no other file written.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace inputs and files of other formats; extend data files written by something else."
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Move the weights of programs into one shared data file, each distinct blob once.

    Programs of an earlier run stay in the folder and keep the data that they use; one with the same name is replaced.
    The structure of an input folder is kept.
    """
    small = nbytes("--keep-small", keep_small)
    with progress_bar(hidden=as_json) as progress:
        result = dedup_programs(
            inputs,
            output,
            data_name=data_name,
            keep_small=small,
            names=names or None,
            names_beside=not names,
            prune=prune,
            append=append,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        print_json(result)
    else:
        _print_dedup(result)
        if dry_run:
            out.print("Nothing was written: this was a dry run.")
        elif append:
            _print_data_of_each(result, output)
    if names and not result.named and not dry_run:
        given = ", ".join(map(str, names))
        print_error(f"note: no moved tensor got a name from {given}: none equals exactly one of its tensors")


def _print_data_of_each(result: DedupResult, output: Path) -> None:
    """Which data files a program takes, if it takes several."""
    for path, files in data_files_of([program.path for program in result.programs], output).items():
        if len(files) > 1:
            say(f"Load {path} with {', '.join(map(str, files))}.")


def _print_dedup(result: DedupResult) -> None:
    rows: list[tuple[object, ...]] = [
        (p.path, "replaced" if p.path in result.replaced else "new", p.bytes_before, p.bytes_after, p.moved)
        for p in result.programs
    ]
    rows += [(path, "kept", "", path.stat().st_size, "") for path in result.kept]
    data = result.bytes_after - sum(program.bytes_after for program in result.programs)
    rows += [(path, "data", "", data, "") for path in result.data_files]
    rows.append(("total (kept not counted)", "", result.bytes_before, result.bytes_after, ""))
    print_table("Deduplicated", ("file", "", "bytes before", "bytes after", "moved"), rows)
    if number := sum(result.named.values()):
        say(f"Named {counted(number, 'moved tensor')} after {', '.join(result.named)}.")
    say(saving(result.bytes_before, result.bytes_after))
    if result.bytes_after > result.bytes_before and result.programs:
        say("The metadata takes more than what is shared; --keep-small leaves small blobs alone.")
    _print_keys(result)
    for program in result.programs:
        if program.inside:
            say(
                f"{program.path} has {program.inside:,} bytes of these tensors inside payloads of "
                f"{', '.join(program.inside_of)}; lowering through BlobStorePartitioner would share them."
            )
        if program.missing:
            out.print(
                plain(
                    f"{program.path} also needs a data file that was not among the inputs, for {program.missing[0]!r}"
                    + (f" and {counted(len(program.missing) - 1, 'more key')}." if len(program.missing) > 1 else ".")
                )
            )


def _print_keys(result: DedupResult) -> None:
    """What became of keys: of data files that were given, and of earlier runs."""
    for one in result.data_inputs[:_DATA_FILES]:
        _print_data_file(one, result.data_files)
    if len(result.data_inputs) > _DATA_FILES:
        say(f"{len(result.data_inputs) - _DATA_FILES:,} more data files; --json has the keys of all.")
    if result.replaced_keys:
        say(
            f"Replaced {counted(result.replaced_keys, 'key')} of an earlier run: {quoted(result.replaced_keys, most=3)}."
        )
    if result.pruned_keys:
        say(f"Dropped {counted(result.pruned_keys, 'key')} that no program in the folder uses.")
    if not result.programs and not result.kept:
        for path in result.data_files:
            say(
                f"Load it with blobstore.load_file({str(path)!r}); programs that took these files take it as their data file."
            )
    elif result.unused_keys:
        say(f"No program in the folder uses {counted(result.unused_keys, 'key')}; --prune drops old ones.")


def _print_data_file(one: DataResult, files: Sequence[Path]) -> None:
    """Where the keys of a data file are now, and what they were joined with."""
    homes = dict.fromkeys(str(key.path) for key in one.keys)
    parts = [f"its {counted(one.keys, 'key')} {'is' if len(one.keys) == 1 else 'are'} in {', '.join(homes)}"]
    merged: dict[Path, list[str]] = {}
    for key in one.keys:
        if key.merged_with is not None:
            merged.setdefault(key.merged_with, []).append(key.key)
    for path, keys in merged.items():
        them = "all of them" if len(keys) == len(one.keys) > 1 else quoted(keys, most=3)
        had = f"{path} has {them} with equal bytes, so each is stored once"
        parts.append(f"{path} had {them} already" if path in files else had)
    if same := [f"{key.key!r} shares the bytes of {key.same_as!r}" for key in one.keys if key.same_as is not None]:
        more = f" and {len(same) - 3:,} more" if len(same) > 3 else ""
        parts.append(f"{', '.join(same[:3])}{more}")
    if one.lost_metadata:
        parts.append(f"its metadata {quoted(one.lost_metadata, most=3)} is not kept")
    say(f"{one.source}: {'; '.join(parts)}." if one.keys else f"{one.source} has no keys.")


@app.command()
@exits.handled
def fuse(
    inputs: Annotated[list[Path], file_argument("Programs (.pte), and data files (.ptd) that they need.")],
    output: Annotated[Path, file_option("--output", "-o", help="The program to write.")],
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROGRAM[:METHOD]=NAME",
            help="Give a method of a program another name; without a name, leave it out. Without METHOD: its only one, or "
            "'forward'.",
        ),
    ] = None,
    named_data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROGRAM:KEY=NAME",
            help="Give what the application keeps in a program another key; without a name, leave it out.",
        ),
    ] = None,
    keep_external: Annotated[
        bool, typer.Option("--keep-external", help="Allow programs to need data files that are not given.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file of any format.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Make one program of several, each blob once, for clients that take one path.

    It has the methods of all, with identical outputs, and needs no data file. Equal methods of one name become one; of
    different ones, --method must give one another name.
    """
    with progress_bar(hidden=as_json) as progress:
        result = fuse_programs(
            inputs,
            output,
            methods=_new_names(method, "--method", "PROGRAM=NAME or PROGRAM:METHOD=NAME"),
            named_data=_new_names(named_data, "--named-data", "PROGRAM:KEY=NAME"),
            keep_external=keep_external,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        print_json(result)
        return
    rows = [(one.name, one.program, one.method, "") for one in result.methods]
    rows += [(one.name, one.program, one.method, "equal, stored once") for one in result.left_out]
    print_table(f"{result.path}", ("method", "program", "its name there", ""), rows)
    say(saving(result.bytes_before, result.bytes_after))
    if result.missing:
        say(f"It needs data files for {counted(result.missing, 'key')}, such as {result.missing[0]!r}.")
    if dry_run:
        out.print("Nothing was written: this was a dry run.")


def _new_names(given: list[str] | None, option: str, form: str) -> dict[str, str]:
    """What an option that can be repeated renames."""
    names = {}
    for one in given or []:
        what, equals, name = one.rpartition("=")
        if not equals or not what:
            raise typer.BadParameter(f"expected {form}, got {one!r}", param_hint=option)
        names[what] = name
    return names
