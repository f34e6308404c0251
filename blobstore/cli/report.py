"""The command `blobstore report`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blobstore.cli import ERROR, exits
from blobstore.cli.options import file_option
from blobstore.cli.output import out, print_error, progress_bar, say
from blobstore.core.disk.kinds import Format, check_replaceable
from blobstore.core.distribution import install
from blobstore.core.errors import FileAccessError, InputError, MissingDependencyError
from blobstore.core.regions.reading import SUFFIXES
from blobstore.core.text import size
from blobstore.reporting import making, show
from blobstore.reporting.find import Changes
from blobstore.reporting.json_output import load_report, to_json
from blobstore.reporting.limits import Limit
from blobstore.reporting.read import default_path, is_another_file
from blobstore.reporting.view import Report

if TYPE_CHECKING:
    from blobstore.reporting.show import Browser

__all__ = ["app"]

app = typer.Typer()

OVER = 1
"""The exit code if duplicates waste more than --fail-over allows."""


@app.command()
@exits.handled
def report(
    paths: Annotated[
        list[str],
        typer.Argument(
            help=".pte, .ptd, .ptn, .safetensors, .gguf and torch.save files, folders of them, or fsspec URLs."
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables (docs/report-internals.md).")
    ] = False,
    html: Annotated[Path | None, file_option(metavar="FILE", help="Also write a self-contained page.")] = None,
    baseline: Annotated[
        Path | None, file_option(metavar="FILE", help="Output of an earlier --json: report what changed since.")
    ] = None,
    fail_over: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES|PERCENT",
            help="Exit with 1 if more than this can be saved (10MB, 5%); with --baseline, more than this on top of it.",
        ),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Look for equal bytes only.")] = False,
    near: Annotated[
        float, typer.Option(min=0, max=0.25, help="Share of elements in which near duplicates may differ.")
    ] = making.NEAR,
    names: Annotated[
        list[Path] | None,
        file_option(
            metavar="FILE",
            help="A .safetensors or .ptd, or several: what equals one of its tensors is shown by its name.",
        ),
    ] = None,
    tui: Annotated[
        bool,
        typer.Option("--tui", help="Walk through the report on the terminal, with ncdu's keys; needs the extra 'tui'."),
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="How many findings to list.")] = 10,
    cache: Annotated[
        Path | None,
        file_option(metavar="FILE", help="Where fingerprints are kept; by default in the user's cache folder."),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do not keep fingerprints.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --html: replace a file that is not an HTML page.")
    ] = False,
) -> None:
    """Find where a set of models wastes bytes.

    Exit code 1 if --fail-over is exceeded; 3 if a file could not be read, or none was found.
    """
    limit = _limit(fail_over)
    browser = _browser(as_json) if tui else None
    if html:
        check_replaceable(html, Format.HTML, force=force)  # before all the work
    old = load_report(baseline) if baseline else None
    where = None if no_cache else cache or _usable(default_path())
    with progress_bar(hidden=as_json) as progress:
        made = making.report(
            paths,
            exact_only=exact,
            near=near,
            names=names,
            cache=where,
            progress=progress,
        )
    changes = made.since(old) if old else None
    if html:
        made.to_html(html, baseline=old, force=force)
    _print(made, changes, as_json=as_json, top=top, browser=browser)
    over = limit is not None and _is_over(limit, made, old)
    if not (made.files or made.problems):
        print_error(f"{', '.join(paths)}: no file to report on; folders are searched for {', '.join(SUFFIXES)}")
    if made.problems or not made.files:  # the report does not cover all paths
        raise typer.Exit(ERROR)
    if over:
        raise typer.Exit(OVER)


def _browser(as_json: bool) -> type[Browser]:
    """What shows a report for --tui; looked for before all the work."""
    if as_json:
        raise typer.BadParameter("--json is for programs; leave one of the two out", param_hint="--tui")
    try:
        browser = show.Browser
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise MissingDependencyError(f"--tui needs textual: {install('tui')}") from None
    # Textual reads the first and writes to the second
    streams = {"input": sys.__stdin__, "standard error": sys.__stderr__, "output": sys.stdout}
    without = [name for name, stream in streams.items() if stream is None or not stream.isatty()]
    if without or out.is_dumb_terminal:
        raise InputError(
            "--tui needs a terminal for input, output and standard error, on which it draws"
            f"{f'; {without[0]} is none' if without else ''}; leave it out for text, or use --json or --html FILE"
        )
    return browser


def _browse(browser: type[Browser], report: Report) -> None:
    """Show a report until the user leaves it, then print the commands that were copied, for terminals without a clipboard."""
    shown = browser(report)
    shown.run()
    if shown.interrupted:
        raise KeyboardInterrupt
    if shown.return_code:  # a defect, whose traceback Textual printed
        raise typer.Exit(ERROR)
    for command in shown.copied:
        say(command)


def _print(
    report: Report,
    changes: Changes | None,
    *,
    as_json: bool,
    top: int,
    browser: type[Browser] | None = None,
) -> None:
    if as_json:
        json.dump(to_json(report, changes), sys.stdout, indent=1)
        sys.stdout.write("\n")
    elif report.files and browser:
        _browse(browser, report)
    elif report.files:
        show.print_report(report, out, top=top)
    if changes and not as_json:
        out.print()
        show.print_changes(changes, out)
    if as_json or browser or not report.files:  # otherwise the report lists them
        for problem in report.problems:
            print_error(f"{problem.path}: {problem.reason}")
    for note in report.notes:
        print_error(f"note: {note}")


def _is_over(limit: Limit, report: Report, old: Report | None) -> bool:
    """Whether the report, or what grew since an old one, is above the limit; if so, say it."""
    wasted = report.total_saves - (old.total_saves if old else 0)
    over = limit.exceeded(wasted, report.total_bytes)
    if over is None:
        return False
    share = f" of {report.total_bytes:,} bytes" if limit.is_share else ""
    print_error(
        f"waste grew by {size(wasted)} ({wasted:,} bytes) since the baseline; the limit is {limit.text}{share}"
        if old
        else f"duplicates waste {over}"
    )
    return True


def _limit(text: str | None) -> Limit | None:
    try:
        return None if text is None else Limit.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--fail-over") from None


def _usable(path: Path) -> Path | None:
    """The default cache; None if its folder cannot be written, and the report then works without a cache."""
    with contextlib.suppress(OSError, FileAccessError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_another_file(path):  # only caches are written to this path, so it is a damaged one
            path.unlink()
        with path.open("ab"):
            return path
    return None
