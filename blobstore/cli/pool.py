"""The commands on pools."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli import exits
from blobstore.cli.options import AsJson, file_argument, file_option
from blobstore.cli.output import counted, on_terminal, print_json, print_table, progress_bar, say
from blobstore.core.text import size

if TYPE_CHECKING:
    from blobstore.pool import Pool

__all__ = ["app"]

app = typer.Typer(
    name="pool",
    help="Keep every version of every model in a folder or a bucket, each content once.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Where = Annotated[
    str, typer.Argument(metavar="POOL", help="A folder, or s3://, gs:// or az:// with a bucket and a path.")
]
Reference = Annotated[str, typer.Argument(metavar="NAME@VERSION", help="A version.")]
Workers = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="WORKERS",
        help="threads:N, processes:N, or dask://HOST:PORT, whose workers see the same files and the same pool.",
    ),
]
_DAYS = 86_400


@app.command()
@exits.handled
def add(
    pool: Where,
    inputs: Annotated[
        list[str], file_argument("Files, folders whose files keep their paths, and URLs of objects of a bucket.")
    ],
    reference: Annotated[str, typer.Option("--as", metavar="NAME@VERSION", help="What the version is called.")],
    executor: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Add files as a version; the first one makes the pool. Only contents that the pool lacks are stored."""
    with _open(pool, create=True) as opened, progress_bar(hidden=as_json) as progress:
        added = opened.add(inputs, reference, executor=executor, progress=progress)
    if as_json:
        print_json(added)
        return
    say(
        f"Added {reference}: {counted(added.version.files, 'file')}, {size(added.bytes)}; {counted(added.new, 'new content')} "
        f"of {size(added.new_bytes)}, stored in {size(added.stored_bytes)}."
    )


@app.command()
@exits.handled
def ls(
    pool: Where,
    name: Annotated[str | None, typer.Argument(help="Only versions of this name.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the versions."""
    with _open(pool) as opened:
        versions = [version for version in opened.versions() if name in {None, version.name}]
    if as_json:
        print_json(versions)
        return
    people = on_terminal()
    rows = [
        (
            f"{version.name}@{version.version}",
            len(version.files),
            size(version.size) if people else version.size,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(version.time)) if people else version.time,
        )
        for version in versions
    ]
    print_table("", ("version", "files", "size", "added"), rows)


@app.command()
@exits.handled
def get(
    pool: Where,
    reference: Reference,
    output: Annotated[Path, file_option("--output", "-o", help="The folder for the files.")],
    force: Annotated[bool, typer.Option("--force", help="Also replace files of another format.")] = False,
    executor: Annotated[
        str | None, typer.Option("--executor", metavar="threads:N", help="How many threads decode; by default all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the files of a version, all or none."""
    with _open(pool) as opened, progress_bar(hidden=as_json) as progress:
        paths = opened.get(reference, output, force=force, executor=executor, progress=progress)
    if as_json:
        print_json(paths)
    else:
        say(f"Wrote {counted(paths, 'file')} of {reference} to {output}.")


@app.command()
@exits.handled
def cat(pool: Where, reference: Reference, file: Annotated[str, typer.Argument(help="A file of the version.")]) -> None:
    """Write one file of a version to standard output."""
    with _open(pool) as opened:
        for piece in opened.cat(reference, file):
            sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


@app.command()
@exits.handled
def drop(pool: Where, reference: Reference) -> None:
    """Let a version disappear. `gc` frees what it alone needed."""
    with _open(pool) as opened:
        opened.drop(reference)
    say(f"Dropped {reference}.")


@app.command()
@exits.handled
def gc(
    pool: Where,
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="DAYS", help="After how many days a version that is being added is given up."),
    ] = 7.0,
    keep: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="For how many days packs stay for readers that looked them up.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Free what no version needs. It is safe beside anything else, and may be killed at any time."""
    with _open(pool) as opened:
        collected = opened.gc(grace=grace * _DAYS, keep=keep * _DAYS)
    if as_json:
        print_json(collected)
        return
    say(f"Deleted {counted(collected.packs, 'pack')} with {size(collected.freed)}; {collected.waiting:,} wait.")


@app.command()
@exits.handled
def verify(
    pool: Where,
    reference: Annotated[str | None, typer.Argument(metavar="[NAME@VERSION]", help="Only this version.")] = None,
    executor: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Read what versions need, and compare it with its digests. Exit code 1 if something is damaged or missing."""
    with _open(pool) as opened, progress_bar(hidden=as_json) as progress:
        problems = opened.verify(reference, progress=progress, executor=executor)
    if as_json:
        print_json([{"version": version, "problem": problem} for version, problem in problems])
    else:
        for version, problem in problems:
            say(f"{version}: NOT OK: {problem}")
        if not problems:
            say("ok: every file of every version" if reference is None else f"{reference}: ok")
    if problems:
        raise typer.Exit(exits.NO)


@app.command()
@exits.handled
def stats(pool: Where, as_json: AsJson = False) -> None:
    """Say what the pool holds, and what that takes."""
    with _open(pool) as opened:
        figures = opened.stats()
    if as_json:
        print_json(figures)
        return
    say(
        f"{counted(figures.versions, 'version')} with {size(figures.files_bytes)}: {counted(figures.contents, 'content')} of "
        f"{size(figures.contents_bytes)}, stored in {size(figures.stored_bytes)}."
    )
    people = on_terminal()
    rows = [
        (encoding, number, *((size(nbytes), size(stored)) if people else (nbytes, stored)))
        for encoding, (number, nbytes, stored) in figures.encodings.items()
    ]
    print_table("", ("stored as", "contents", "bytes", "stored"), rows)


@app.command()
@exits.handled
def why(
    pool: Where,
    first: Annotated[str, typer.Argument(metavar="NAME@VERSION")],
    second: Annotated[str, typer.Argument(metavar="NAME@VERSION")],
    as_json: AsJson = False,
) -> None:
    """Say what two versions share, and why not more."""
    with _open(pool) as opened:
        shared = opened.why(first, second)
    if as_json:
        print_json(shared)
        return
    say(
        f"Of {size(shared.second)} in {second}, {size(shared.equal)} are in {first}, too, and {size(shared.near)} are stored as "
        "differences to a base that both have."
    )
    print_table("", ("tensor", "not shared because of"), shared.apart)


def _open(where: str, *, create: bool = False) -> Pool:
    from blobstore.pool import Pool  # needs the extra

    return Pool(where, create=create)
