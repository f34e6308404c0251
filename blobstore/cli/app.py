"""The commands.

Exit codes: 0 done and nothing to object to; 1 the answer is no (`diff` found differences, `verify` found damage);
2 the command line is wrong; 3 an error, which is told on standard error in one line; 130 interrupted by Ctrl-C; 141
the reader of the output closed the pipe. Where several files have different fates, the largest code counts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer

from blobstore.adapters import AdapterInfo, FoundationInfo, NamedTensor, inspect_adapters
from blobstore.cli import ERROR, INTERRUPTED, PIPE_CLOSED
from blobstore.cli.output import err, out, print_json, print_table, printable, progress_bar, size, tell
from blobstore.cli.report import report
from blobstore.errors import BlobStoreError, InvalidFileError
from blobstore.formats.opening import Format, detect_format, open_any
from blobstore.formats.ptd.reader import open_ptd
from blobstore.programs import DATA_NAME, dedup_programs
from blobstore.tools.compare import compare_files
from blobstore.tools.convert import convert as convert_file
from blobstore.tools.inspection import FileInfo, inspect_file
from blobstore.version import __version__

__all__ = ["app"]

NO = 1
_LONGEST = 400  # characters of a difference in a table; --json has them all

app = typer.Typer(
    name="blobstore",
    help="Content-addressed weights for ExecuTorch. Exit codes: 0 done, 1 the answer is no, 2 usage, 3 error, 130 Ctrl-C, 141 closed pipe.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
P = ParamSpec("P")
R = TypeVar("R")


def _told(command: Callable[P, R]) -> Callable[P, R]:
    """Tell one of our errors in a line and leave with ERROR; anything else is a defect and keeps its traceback.

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
            tell(error)
            raise typer.Exit(ERROR) from None
        except BrokenPipeError:
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:  # of standard output, as files' own errors are ours
            err.print(printable(f"blobstore: cannot print: {error}"), soft_wrap=True)
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
@_told
def dedup(
    inputs: Annotated[
        list[Path], typer.Argument(help="Programs (.pte), data files (.ptd) that they need, and folders with such.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Folder for the slim programs and the data file; what it has already is extended."
        ),
    ],
    data_name: Annotated[str, typer.Option(help="File name of the shared data.")] = DATA_NAME,
    keep_small: Annotated[
        int, typer.Option(min=0, metavar="BYTES", help="Leave what has fewer bytes in its program.")
    ] = 0,
    names: Annotated[
        Path | None, typer.Option(help="A .safetensors or .ptd: moved tensors get the name of the one they equal.")
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Drop data that no program in the folder takes any more.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace inputs and files of other formats; extend foreign data files.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Move the weights of programs into one shared data file, each distinct blob once.

    Programs of an earlier run stay in the folder and keep what they take; one of equal name is replaced. A folder as
    input keeps its structure.
    """
    with progress_bar(hidden=as_json) as progress:
        result = dedup_programs(
            inputs,
            output,
            data_name=data_name,
            keep_small=keep_small,
            names=open_any(names) if names else None,
            prune=prune,
            force=force,
            progress=progress,
        )
    if as_json:
        print_json(result)
        return
    rows: list[tuple[object, ...]] = [
        (
            p.path,
            "replaced" if p.path in result.replaced else "new",
            f"{p.bytes_before:,}",
            f"{p.bytes_after:,}",
            p.moved,
        )
        for p in result.programs
    ]
    rows += [(path, "kept", "", f"{path.stat().st_size:,}", "") for path in result.kept]
    rows += [(path, "data", "", f"{path.stat().st_size:,}", "") for path in result.data_files]
    rows.append(("together, without kept", "", f"{result.bytes_before:,}", f"{result.bytes_after:,}", ""))
    print_table("Deduplicated", ("file", "", "bytes before", "bytes after", "moved"), rows, right="cde")
    saved = result.bytes_before - result.bytes_after
    out.print(f"{size(saved)} saved, {saved / max(result.bytes_before, 1):.1%} of what there was.")
    if result.replaced_keys:
        out.print(f"{len(result.replaced_keys)} keys of an earlier run were replaced.")
    if result.pruned_keys:
        out.print(f"{len(result.pruned_keys)} keys that no program in the folder takes were dropped.")
    if result.unused_keys:
        out.print(f"{len(result.unused_keys)} keys are taken by no program in the folder; --prune drops old ones.")
    for program in result.programs:
        if program.missing:
            out.print(
                printable(
                    f"{program.path} also needs a data file that was not among the inputs: it asks for "
                    f"{len(program.missing)} keys that none of them has, {program.missing[0]!r} first."
                )
            )


@app.command()
@_told
def inspect(
    files: Annotated[list[Path], typer.Argument(help=".pte, .ptd or .safetensors files.")], as_json: AsJson = False
) -> None:
    """List what files hold. Exit code 3 if one cannot be read; the others are listed all the same."""
    found: list[Any] = []
    code = 0
    for path in files:
        try:
            found.append(inspect_file(path))
        except BlobStoreError as error:
            tell(error)
            found.append({"path": str(path), "error": str(error)})
            code = ERROR
    if as_json:
        print_json(found)
    else:
        _list([file for file in found if isinstance(file, FileInfo)])
    if code:
        raise typer.Exit(code)


def _list(files: list[FileInfo]) -> None:
    for file in files:
        out.print(printable(f"{file.path}: {file.format}, {file.size:,} bytes"), soft_wrap=True)
        for fact, value in file.facts.items():
            out.print(printable(f"  {fact}: {value}"), soft_wrap=True)
        rows = [
            (b.key, b.kind, b.layout if b.layout is not None else "opaque", f"{b.nbytes:,}", b.alignment, b.shared)
            for b in file.blobs
        ]
        print_table("", ("key", "kind", "layout", "bytes", "align", "same as"), rows, right="de")


@app.command()
@_told
def verify(
    files: Annotated[list[Path], typer.Argument(help=".pte, .ptd or .safetensors files.")], as_json: AsJson = False
) -> None:
    """Check the structure of files, and the digests of those that carry some.

    Exit code 1 if one is damaged, 3 if one cannot be read at all; the others are checked all the same.
    """
    rows: list[dict[str, Any]] = []
    code = 0
    with progress_bar(hidden=as_json) as progress:
        for path in files:
            row: dict[str, Any] = {"path": str(path), "ok": True, "digests": False, "reason": None}
            try:
                if detect_format(path) is Format.PTD:
                    with open_ptd(path) as data_map:
                        row["digests"] = data_map.verify(progress=progress)
                else:
                    len(open_any(path))
            except InvalidFileError as error:
                row.update(ok=False, reason=error.reason)
                code = max(code, NO)
            except BlobStoreError as error:
                row.update(ok=False, reason=str(error).removeprefix(f"{path}: "))
                code = ERROR
            rows.append(row)
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            checked = "structure and all digests" if row["digests"] else "structure; the file carries no digests"
            verdict = f"ok: {checked}" if row["ok"] else f"NOT OK: {row['reason']}"
            out.print(printable(f"{row['path']}: {verdict}"), soft_wrap=True)
    if code:
        raise typer.Exit(code)


@app.command()
@_told
def diff(
    left: Annotated[Path, typer.Argument(help="The older file.")],
    right: Annotated[Path, typer.Argument(help="The newer file.")],
    as_json: AsJson = False,
) -> None:
    """Compare two files: their blobs key by key, and everything else. Exit code 0 only if they are equal, 1 if not."""
    with progress_bar(hidden=as_json) as progress:
        result = compare_files(left, right, progress=progress)
    if as_json:
        print_json(result)
    else:
        rows = [
            (
                change.key if change.other is None else f"{change.key} -> {change.other}",
                change.kind,
                "" if change.kind == "added" else change.left or "opaque",
                "" if change.kind == "removed" else change.right or "opaque",
                f"{change.left_bytes:,}",
                f"{change.right_bytes:,}",
            )
            for change in result.changes
        ]
        if rows:
            columns = ("key", "what", "left", "right", "left bytes", "right bytes")
            print_table(f"{left} -> {right}", columns, rows, right="ef")
        other = [(item.what, _short(item.left), _short(item.right)) for item in result.differences]
        if other:
            print_table("Beside the blobs", ("what", "left", "right"), other)
        number = len(rows) + len(other)
        out.print(f"{number} differences; {result.same} keys of {result.same_bytes:,} bytes are the same.")
    if not result.equal:
        raise typer.Exit(NO)


@app.command()
@_told
def convert(
    source: Annotated[Path, typer.Argument(help="A .safetensors or a .ptd.")],
    target: Annotated[Path, typer.Argument(help="The file to write, of the other kind.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file of any format.")] = False,
) -> None:
    """Convert .safetensors to .ptd, or .ptd to .safetensors."""
    with progress_bar() as progress:
        convert_file(source, target, progress=progress, force=force)
    out.print(printable(f"{target}: {target.stat().st_size:,} bytes"), soft_wrap=True)


@app.command()
@_told
def adapters(
    foundation: Annotated[Path, typer.Argument(help="The data file (.ptd) of the foundation.")],
    files: Annotated[list[Path], typer.Argument(metavar="ADAPTER", help="Data files (.ptd) of adapters.")],
    as_json: AsJson = False,
) -> None:
    """List what a foundation and its LoRA adapters hold, and check that they fit. Exit code 1 if one does not.

    An adapter fits if its pairs are complete and finite, their modules are in the foundation and of the same shapes,
    and it was made for this foundation. One that does not record that is called not bound, and may fit.
    """
    found = inspect_adapters(foundation, files)
    if as_json:
        print_json(found)
    else:
        base = found.foundation
        _say(f"{foundation}: foundation {base.fingerprint}, {base.keys} keys, {base.nbytes:,} bytes")
        columns = ("tensor", "dtype", "shape", "bytes", "rank")
        print_table("", columns[:-1], [_tensor_row(tensor) for tensor in base.tensors], right="d")
        for adapter in found.adapters:
            out.print()
            scale = "not recorded" if adapter.scale is None else f"{adapter.scale:g}"
            _say(f"{adapter.path}: adapter of {len(adapter.pairs)} modules, {adapter.nbytes:,} bytes, scale {scale}")
            ranks = {name: pair.rank for pair in adapter.pairs for name in (pair.a, pair.b)}
            rows = [(*_tensor_row(tensor), ranks.get(tensor.name, "")) for tensor in adapter.tensors]
            print_table("", columns, rows, right="de")
            _say(f"{'fits' if adapter.fits else 'DOES NOT FIT'}; {_made_for(adapter, base)}")
            for problem in adapter.problems:
                _say(f"  {problem}")
    if not all(adapter.fits for adapter in found.adapters):
        raise typer.Exit(NO)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _say(line: str) -> None:
    out.print(printable(line), soft_wrap=True)


def _tensor_row(tensor: NamedTensor) -> tuple[str, str, str, str]:
    shape = " x ".join(map(str, tensor.sizes)) or "scalar"
    return tensor.name, tensor.scalar_type.name.lower(), shape, f"{tensor.nbytes:,}"


def _made_for(adapter: AdapterInfo, base: FoundationInfo) -> str:
    if adapter.foundation is None:
        return "not bound: nothing is recorded of the foundation that it was made for"
    return "made for this foundation" if adapter.foundation == base.fingerprint else "made for another foundation"


app.command()(_told(report))


@app.command()
@_told
def demo(
    directory: Annotated[Path, typer.Argument(help="Where to write the programs.")] = Path("demo-output"),
    force: Annotated[bool, typer.Option("--force", help="Lower again what an earlier run left.")] = False,
) -> None:
    """Lower two real models, deduplicate them, run them in the stock runtime, and compare."""
    from blobstore.demo import run_demo

    run_demo(directory, out, force=force)
