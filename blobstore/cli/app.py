"""The commands.

Exit codes: 0 done; 1 the answer is no (`diff` found differences, `verify` found damage); 2 the command line is wrong;
3 an error, printed on standard error in one line; 130 interrupted by Ctrl-C; 141 the reader of the output closed the
pipe. If the files of one command have different outcomes, the largest code counts.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from blobstore.cli import ERROR, INTERRUPTED, PIPE_CLOSED, adapters, packed, releases
from blobstore.cli.output import (
    counted,
    err,
    on_terminal,
    out,
    plain,
    print_error,
    print_json,
    print_table,
    progress_bar,
    say,
)
from blobstore.cli.report import open_names, report
from blobstore.core.disk.progress import Progress
from blobstore.core.errors import BlobStoreError, InvalidFileError, UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.opening import Format, detect_format, open_any
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.formats.pte.program import read_program
from blobstore.core.memory.mapped_file import same_file
from blobstore.core.programs import DATA_NAME, DedupResult, dedup_programs
from blobstore.core.programs.fuse import fuse_programs
from blobstore.core.text import saving
from blobstore.core.tools.compare import Comparison, FolderComparison, compare_files, compare_folders
from blobstore.core.tools.convert import convert as convert_file
from blobstore.core.tools.convert import pairs as files_to_convert
from blobstore.core.tools.folders import files_of
from blobstore.core.tools.inspection import FileInfo, inspect_file
from blobstore.core.version import __version__
from blobstore.reporting.limits import parse_size

__all__ = ["app"]

NO = 1
_LONGEST = 120  # characters of a difference in a table; pipes and --json have all of it

app = typer.Typer(
    name="blobstore",
    help="Content-addressed weights for ExecuTorch. Exit codes: 0 done, 1 the answer is no, 2 usage, 3 error, 130 Ctrl-C, 141 closed pipe.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _bytes(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be written, and change nothing; the exit code is the same.")
]
Files = Annotated[
    list[Path], typer.Argument(help=".pte, .ptd and .safetensors files, and folders of them.", readable=False)
]
P = ParamSpec("P")
R = TypeVar("R")


def _with_exit_codes(command: Callable[P, R]) -> Callable[P, R]:
    """Print an error of this library in one line and exit with ERROR; any other is a defect and keeps its traceback.

    Ctrl-C and a closed pipe have their own exit codes.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return command(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BlobStoreError as error:
            print_error(error)
            raise typer.Exit(ERROR) from None
        except BrokenPipeError:
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:  # from standard output: errors on files are BlobStoreErrors
            err.print(plain(f"blobstore: cannot print: {error}"), soft_wrap=True)
            raise typer.Exit(ERROR) from None

    return wrapper


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


@app.command()
@_with_exit_codes
def dedup(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Programs (.pte), data files (.ptd) that they need, and folders of both.", readable=False),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Folder for the slim programs and the data file; an existing one is extended.",
            readable=False,
        ),
    ],
    data_name: Annotated[str, typer.Option(help="File name of the shared data.")] = DATA_NAME,
    keep_small: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Leave blobs with fewer bytes (1024, 10kB, 1.5MiB) in their program."),
    ] = "0",
    names: Annotated[
        Path | None,
        typer.Option(
            help="A .safetensors or .ptd: a moved tensor gets the name of the equal one in it.", readable=False
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Drop data that no program in the folder uses any more.")
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
    small = _bytes("--keep-small", keep_small)
    known = open_names(names)
    with progress_bar(hidden=as_json) as progress:
        result = dedup_programs(
            inputs,
            output,
            data_name=data_name,
            keep_small=small,
            names=known,
            prune=prune,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    number = None if known is None or dry_run else _named_by(known, result)
    if as_json:
        print_json(result)
    else:
        named = f"Named {counted(number, 'moved tensor')} after {names}." if number else ""
        _print_dedup(result, named)
        if dry_run:
            out.print("Nothing was written: this was a dry run.")
    if number == 0:
        print_error(f"note: no moved tensor got a name from {names}: none equals exactly one of its tensors")


def _named_by(names: NamedDataMap, result: DedupResult) -> int:
    """How many tensors that left the programs of a run have names of this file."""
    found: set[str] = set()
    for program in result.programs:
        taken = {one.key for one in read_program(program.path).externals}
        if not same_file(program.source, program.path):  # with --force a program can replace itself
            taken -= {one.key for one in read_program(program.source).externals}
        found |= taken
    return sum(key in names for key in found)


def _print_dedup(result: DedupResult, named: str) -> None:
    rows: list[tuple[object, ...]] = [
        (p.path, "replaced" if p.path in result.replaced else "new", p.bytes_before, p.bytes_after, p.moved)
        for p in result.programs
    ]
    rows += [(path, "kept", "", path.stat().st_size, "") for path in result.kept]
    data = result.bytes_after - sum(program.bytes_after for program in result.programs)
    rows += [(path, "data", "", data, "") for path in result.data_files]
    rows.append(("total (kept not counted)", "", result.bytes_before, result.bytes_after, ""))
    print_table("Deduplicated", ("file", "", "bytes before", "bytes after", "moved"), rows)
    if named:
        say(named)
    say(saving(result.bytes_before, result.bytes_after))
    if result.bytes_after > result.bytes_before:
        say("The metadata takes more than what is shared; --keep-small leaves small blobs alone.")
    if result.replaced_keys:
        say(f"Replaced {counted(result.replaced_keys, 'key')} of an earlier run.")
    if result.pruned_keys:
        say(f"Dropped {counted(result.pruned_keys, 'key')} that no program in the folder uses.")
    if result.unused_keys:
        say(f"No program in the folder uses {counted(result.unused_keys, 'key')}; --prune drops old ones.")
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


@app.command()
@_with_exit_codes
def fuse(
    inputs: Annotated[
        list[Path], typer.Argument(help="Programs (.pte), and data files (.ptd) that they need.", readable=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The program to write.", readable=False)],
    method: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROGRAM[:METHOD]=NAME",
            help="Give a method of a program another name; without a name, leave it out. Without METHOD: its only one, or "
            "'forward'.",
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
    methods = {}
    for one in method or []:
        what, equals, name = one.rpartition("=")
        if not equals or not what:
            raise typer.BadParameter(
                f"expected PROGRAM=NAME or PROGRAM:METHOD=NAME, got {one!r}", param_hint="--method"
            )
        methods[what] = name
    with progress_bar(hidden=as_json) as progress:
        result = fuse_programs(
            inputs,
            output,
            methods=methods,
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


@app.command()
@_with_exit_codes
def inspect(files: Files, as_json: AsJson = False) -> None:
    """List what files hold, and which keys programs take from data files.

    Exit code 3 if a file cannot be read; the others are listed anyway. In a pipe every key is one row: key, kind, dtype
    and shape, bytes, alignment, first key with the same bytes, file. Metadata and other facts are in --json.
    """
    found: list[Any] = []
    code = 0
    for path in _each_file(files):
        try:
            found.append(_readable(path, inspect_file))
        except BlobStoreError as error:
            print_error(error)
            found.append({"path": str(_path_of(path)), "error": str(error)})
            code = ERROR
    if as_json:
        print_json(found)
    else:
        _print_files([file for file in found if isinstance(file, FileInfo)])
    if code:
        raise typer.Exit(code)


def _each_file(paths: Sequence[Path]) -> Iterator[Path | BlobStoreError]:
    """The files of paths, each once; for a folder that has none, the error."""
    seen: set[str] = set()
    for path in paths:
        try:
            found = files_of(path)
        except BlobStoreError as error:
            yield error
            continue
        for file in found:
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file


def _print_files(files: list[FileInfo]) -> None:
    for file in files:
        rows: list[tuple[object, ...]] = [
            (b.key, b.kind, b.layout or "opaque", b.nbytes, b.alignment, b.shared) for b in file.blobs
        ]
        if not on_terminal():
            rows += [(e.key, e.kind, e.layout or "opaque", _known(e.nbytes), "", "") for e in file.externals]
            print_table("", (), [(*row, file.path) for row in rows])
            continue
        say(f"{file.path}: {file.format}, {file.size:,} bytes")
        for fact, value in file.facts.items():
            say(f"  {fact}: {value}")
        if rows or not file.externals:
            print_table("", ("key", "kind", "layout", "bytes", "align", "same as"), rows)
        if file.externals:
            columns = ("key", "kind", "layout", "bytes", "taken by", "found in")
            taken = [
                (e.key, e.kind, e.layout or "opaque", _known(e.nbytes), ", ".join(e.taken_by), e.found_in)
                for e in file.externals
            ]
            print_table("Taken from data files", columns, taken)


def _known(nbytes: int | None) -> int | str:
    return "?" if nbytes is None else nbytes


@app.command()
@_with_exit_codes
def verify(files: Files, as_json: AsJson = False) -> None:
    """Check the structure of files, and the digests of those that have them.

    Exit code 1 if a file is damaged, 3 if one cannot be read at all; the others are checked anyway.
    """
    with progress_bar(hidden=as_json) as progress:
        checked = [_check(path, progress) for path in _each_file(files)]
    rows = [row for row, _ in checked]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            what = "structure and all digests" if row["digests"] else "structure; the file has no digests"
            say(f"{row['path']}: " + (f"ok: {what}" if row["ok"] else f"NOT OK: {row['reason']}"))
    code = max(code for _, code in checked)
    if code:
        raise typer.Exit(code)


def _check(path: Path | BlobStoreError, progress: Progress) -> tuple[dict[str, Any], int]:
    """What `verify` says of a file, and its exit code."""
    row: dict[str, Any] = {"path": str(_path_of(path)), "ok": True, "digests": False, "reason": None}
    try:
        row["digests"] = _readable(path, functools.partial(_verified, progress=progress))
    except InvalidFileError as error:
        return {**row, "ok": False, "reason": error.reason}, NO
    except BlobStoreError as error:
        return {**row, "ok": False, "reason": str(error).removeprefix(f"{row['path']}: ")}, ERROR
    return row, 0


def _verified(path: Path, *, progress: Progress) -> bool:
    """Read a file completely; whether it has digests."""
    if detect_format(path) is Format.PTD:
        with open_ptd(path) as data_map:
            return data_map.verify(progress=progress)
    len(open_any(path))
    return False


def _readable(path: Path | BlobStoreError, read: Callable[[Path], R]) -> R:
    if isinstance(path, BlobStoreError):
        raise path
    return read(path)


def _path_of(path: Path | BlobStoreError) -> object:
    return getattr(path, "filename", path)


@app.command()
@_with_exit_codes
def diff(
    left: Annotated[Path, typer.Argument(help="The older file or folder.", readable=False)],
    right: Annotated[Path, typer.Argument(help="The newer file or folder.", readable=False)],
    as_json: AsJson = False,
) -> None:
    """Compare two files or folders: their blobs key by key, and everything else.

    Exit code 0 if they are equal, 1 if not. Of two folders, the files with the same path are compared; exit code 3 if
    one of them cannot be compared, and the others are compared anyway.
    """
    folders = [os.path.isdir(path) for path in (left, right)]  # noqa: PTH112 - raises nothing for a name that is too long
    if folders[0] != folders[1]:
        one, other = (left, right) if folders[0] else (right, left)
        raise UnsupportedDataError(f"{one} is a folder and {other} is not; compare two files or two folders")
    result: Comparison | FolderComparison
    with progress_bar(hidden=as_json) as progress:
        result = (compare_folders if folders[0] else compare_files)(left, right, progress=progress)
    if as_json:
        print_json(result)
    elif isinstance(result, Comparison):
        _print_comparison(f"{left} -> {right}", result)
    else:
        _print_folders(left, right, result)
    errors = [file.error for file in result.files if file.error] if isinstance(result, FolderComparison) else []
    for error in errors:
        print_error(error)
    if not result.equal:
        raise typer.Exit(ERROR if errors else NO)


def _print_folders(left: Path, right: Path, result: FolderComparison) -> None:
    for file in result.files:
        if file.kind == "changed" and file.comparison is not None:
            say(f"{left / file.path} -> {right / file.path}:")
            _print_comparison("", file.comparison)
        elif file.kind in ("added", "removed"):
            say(f"only in {left if file.kind == 'removed' else right}: {file.path}")
    counts = {kind: sum(file.kind == kind for file in result.files) for kind in ("changed", "removed", "added", "same")}
    say(
        f"Files: {counts['changed']} changed, {counts['removed']} only in {left}, {counts['added']} only in {right}, "
        f"{counts['same']} the same."
    )


def _print_comparison(title: str, result: Comparison) -> None:
    rows = [
        (
            change.key if change.other is None else f"{change.key} -> {change.other}",
            change.kind,
            "" if change.kind == "added" else change.left or "opaque",
            "" if change.kind == "removed" else change.right or "opaque",
            change.left_bytes,
            change.right_bytes,
        )
        for change in result.changes
    ]
    if rows:
        print_table(title, ("key", "what", "left", "right", "left bytes", "right bytes"), rows)
    other = [(item.what, _short(item.left), _short(item.right)) for item in result.differences]
    if other:
        print_table("Beside the blobs", ("what", "left", "right"), other)
    say(
        f"{counted(len(rows) + len(other), 'difference')}; the same: {counted(result.same, 'key')} with "
        f"{counted(result.same_bytes, 'byte')}."
    )


@app.command()
@_with_exit_codes
def convert(
    source: Annotated[Path, typer.Argument(help="A .safetensors or a .ptd, or a folder of them.", readable=False)],
    target: Annotated[
        Path, typer.Argument(help="The file to write, in the other format; or a folder.", readable=False)
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace files of any format.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Convert .safetensors to .ptd, and .ptd to .safetensors.

    The structure of a folder is kept. Exit code 3 if a file cannot be converted; the others are converted anyway.
    """
    code = 0
    whole = os.path.isdir(source)  # noqa: PTH112 - raises nothing for a name that is too long
    with progress_bar() as progress:
        for one, output in files_to_convert(source, target):
            try:
                nbytes = convert_file(one, output, progress=progress, force=force, parents=whole, dry_run=dry_run)
            except BlobStoreError as error:
                print_error(error)
                code = ERROR
            else:
                say(f"{output}: {'would have ' if dry_run else ''}{nbytes:,} bytes")
    if code:
        raise typer.Exit(code)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST or not on_terminal() else f"{text[: _LONGEST - 1]}…"


app.command()(_with_exit_codes(report))

_adapters = typer.Typer(
    name="adapters",
    cls=adapters.WithDefault,
    help=adapters.HELP,
    no_args_is_help=True,
    rich_markup_mode=None,
)
_adapters.command("list")(_with_exit_codes(adapters.listed))
_adapters.command("import")(_with_exit_codes(adapters.from_peft))
_adapters.command("export")(_with_exit_codes(adapters.to_peft))
_adapters.command()(_with_exit_codes(adapters.combine))
app.add_typer(_adapters)

_packed = typer.Typer(
    name="packed",
    help="Look at, check, and clean up a folder of packed weights.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_packed.command("list")(_with_exit_codes(packed.listed))
_packed.command()(_with_exit_codes(packed.verify))
_packed.command()(_with_exit_codes(packed.gc))
app.add_typer(_packed)

for _command in (releases.publish, releases.compact, releases.push, releases.pull, releases.gc):
    app.command()(_with_exit_codes(_command))


@app.command()
@_with_exit_codes
def demo(
    directory: Annotated[Path, typer.Argument(help="Where to write the programs.", readable=False)] = Path(
        "demo-output"
    ),
    force: Annotated[
        bool, typer.Option("--force", help="Lower the models again, even if an earlier run left the programs.")
    ] = False,
) -> None:
    """Lower two real models, deduplicate them, run them in the stock runtime, and compare."""
    from blobstore.demo import run_demo

    run_demo(directory, out, force=force)
