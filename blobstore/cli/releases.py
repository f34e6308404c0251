"""The commands on releases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from blobstore.cli import exits
from blobstore.cli.options import AsJson, file_argument, file_option
from blobstore.cli.output import counted, print_error, print_json, progress_bar, say
from blobstore.core.errors import ServerBusyError
from blobstore.core.text import size

__all__ = ["app"]

app = typer.Typer()

Releases = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="DIR|URL", help="The release folder, or s3://…; an existing one is extended."
    ),
]
Name = Annotated[str, typer.Option(help="Name of the product.")]
Version = Annotated[str, typer.Option(help="Version of the release; each is published once.")]
Sign = Annotated[
    Path | None, file_option(metavar="KEY", help="Sign the index with this private key (PEM, or cosign.key).")
]

Plain = Annotated[bool, typer.Option("--plain", help="Decode nothing, and fetch whole files.")]


@app.command()
@exits.handled
def publish(
    inputs: Annotated[
        list[Path],
        file_argument("Files, and folders whose files keep their paths; names that begin with a dot are left out."),
    ],
    output: Releases,
    name: Name,
    version: Version,
    executorch: Annotated[str, typer.Option(help="The first version of ExecuTorch that runs the programs.")] = "1.5",
    sign: Sign = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Also store every file whole, for clients that decode nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Publish files as a release: contents that the release folder lacks, and an index."""
    from blobstore.releases import publish as run

    with progress_bar(hidden=as_json) as progress:
        done = run(
            inputs,
            output,
            name=name,
            version=version,
            executorch=executorch,
            sign=sign,
            plain=plain,
            progress=progress,
        )
    if as_json:
        print_json(done)
        return
    say(
        f"{done.index}: {counted(done.files, 'file')} with {size(done.release_bytes)}, {size(done.new_bytes)} of them new, "
        f"stored in {size(done.stored_bytes)}"
    )
    say(f"A new device fetches {size(done.first_bytes)}.")
    if done.update_bytes is not None:
        say(f"A device with the release before fetches {size(done.update_bytes)}.")
    say(f"Index: sha256:{done.sha256}" + (", signed" if done.signed else ""))


@app.command()
@exits.handled
def push(
    reference: Annotated[str, typer.Argument(metavar="REF", help="registry/name:tag, or oci:DIR:tag.")],
    release: Annotated[Path, file_argument("The index of a release, or the folder that it is in.")],
    as_json: AsJson = False,
) -> None:
    """Copy a release into a registry or an image layout of OCI; files that it already has are not sent."""
    from blobstore.releases import Patience
    from blobstore.releases import push as run
    from blobstore.releases.sources.patience import Notice

    with progress_bar(hidden=as_json) as progress:
        done = run(reference, release, patience=Patience(notice=Notice(print_error)), progress=progress)
    if as_json:
        print_json(done)
    else:
        say(f"{done.reference}: {counted(done.layers, 'object')}; sent {size(done.sent_bytes)} of {size(done.bytes)}")


@app.command()
@exits.handled
def pull(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="registry/name:tag, https://host/…/index.json, oci:DIR:tag, or a path; with @sha256:…"
        ),
    ],
    directory: Annotated[Path, file_argument("The folder of the device.")],
    key: Annotated[
        Path | None, file_option(metavar="PUB", help="The public key (PEM) that must have signed the release.")
    ] = None,
    allow_rollback: Annotated[
        bool, typer.Option("--allow-rollback", help="Accept a release that is older than the installed one.")
    ] = False,
    plain: Plain = False,
    executorch: Annotated[
        str | None, typer.Option(metavar="VERSION", help="The ExecuTorch of the device; default: the installed one.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare every installed file with its digest; fetch damaged ones again.")
    ] = False,
    patience: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to try while a server is away or busy.")
    ] = 3600,
    as_json: AsJson = False,
) -> None:
    """Make a release the current one of a folder, and fetch only what the folder lacks.

    DIRECTORY/current has the old release or the new one at every moment. A pull that was interrupted goes on. While a server
    is away or busy, it is asked again for an hour. If it asks to come back later, the exit code is 75.
    """
    from blobstore import releases
    from blobstore.releases.sources.patience import Notice

    with _later(as_json), progress_bar(hidden=as_json) as progress:
        done = releases.pull(
            reference,
            directory,
            key=key,
            allow_rollback=allow_rollback,
            plain=plain,
            executorch=executorch,
            verify=verify,
            patience=releases.Patience(seconds=patience, notice=Notice(print_error)),
            progress=progress,
        )
    if as_json:
        print_json(done)
        return
    if done.stale is not None:
        say(f"{reference}: a cache still has {done.name} {done.stale}; what is installed is newer, and stays.")
    what = "is now" if done.changed else "was already"
    say(f"{directory / 'current'}: {what} {done.name} {done.version}, sha256:{done.sha256}")
    say(f"Fetched {size(done.fetched_bytes)} for a release of {size(done.release_bytes)}.")


@contextlib.contextmanager
def _later(as_json: bool) -> Iterator[None]:
    """Print when to come back, for programs."""
    try:
        yield
    except ServerBusyError as error:
        if as_json:
            print_json({"error": str(error), "retry_after": error.retry_after})
        raise


@app.command()
@exits.handled
def gc(
    directory: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="The folder of a device, or a release folder, also in a bucket.")
    ],
    keep: Annotated[int, typer.Option(help="How many releases stay on a device, with the current one.")] = 1,
    hours: Annotated[
        float, typer.Option(help="How long a release folder keeps what nothing refers to any more, for devices.")
    ] = 24,
    as_json: AsJson = False,
) -> None:
    """Remove what is no longer needed.

    On a device, that is what neither the newest releases nor a living process needs. In a release folder, it is what no release
    needs (drop versions with `blobstore pool drop`), and forms that only an older release had.
    """
    if "://" in directory or Path(directory, "pool.json").exists():
        _sweep(directory, hours, as_json)
        return
    from blobstore.releases import gc as run

    done = run(directory, keep=keep)
    if as_json:
        print_json(done)
        return
    say(f"Removed {counted(done.releases, 'release')} and {counted(done.files, 'file')} with {size(done.nbytes)}.")
    if done.in_use:
        say(f"Kept {counted(done.in_use, 'older release')} that a process uses.")


def _sweep(releases: str, hours: float, as_json: bool) -> None:
    from blobstore.releases import sweep

    done = sweep(releases, keep=hours * 3600)
    if as_json:
        print_json(done)
        return
    removed = counted(done.objects + done.pool.packs, "object")
    say(f"Removed {removed} with {size(done.freed + done.pool.freed)}; {done.waiting + done.pool.waiting} wait.")
    if done.withdrawn:
        say(f"Withdrew {counted(done.withdrawn, 'release')} whose version was dropped.")
