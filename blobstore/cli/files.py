"""The commands on files of every format: `inspect`, `verify`, `diff`, `convert` and `delta`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from blobstore.cli import ERROR, exits
from blobstore.cli.options import AsJson, DryRun, file_argument, file_option
from blobstore.cli.output import (
    counted,
    on_terminal,
    print_error,
    print_json,
    print_table,
    progress_bar,
    say,
)
from blobstore.core.disk.progress import Progress
from blobstore.core.errors import BlobStoreError, InvalidFileError, UnsupportedDataError
from blobstore.core.formats.opening import Format, detect_format, open_any
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.text import saving
from blobstore.core.tools.compare import Comparison, FolderComparison, compare_files, compare_folders
from blobstore.core.tools.convert import convert as convert_file
from blobstore.core.tools.convert import pairs as files_to_convert
from blobstore.core.tools.delta import write_deltas
from blobstore.core.tools.folders import files_of
from blobstore.core.tools.inspection import BlobInfo, ExternalInfo, FileInfo, inspect_file

__all__ = ["app"]

_LONGEST = 120  # characters of a difference in a table; pipes and --json have all of it

app = typer.Typer()

Files = Annotated[list[Path], file_argument(".pte, .ptd and .safetensors files, and folders of them.")]
R = TypeVar("R")


@app.command()
@exits.handled
def inspect(files: Files, as_json: AsJson = False) -> None:
    """List what files hold, and which keys programs take from data files.

    Exit code 3 if a file cannot be read; the others are listed anyway. In a pipe every key is one row: key, kind, dtype
    and shape, bytes, alignment, first key with the same bytes, file. Metadata and other facts are in --json.
    """
    infos: list[Any] = []
    code = 0
    for path in _each_file(files):
        try:
            infos.append(_readable(path, inspect_file))
        except BlobStoreError as error:
            print_error(error)
            infos.append({"path": str(_path_of(path)), "error": str(error)})
            code = ERROR
    if as_json:
        print_json(infos)
    else:
        _print_files([file for file in infos if isinstance(file, FileInfo)])
    if code:
        raise typer.Exit(code)


def _each_file(paths: Sequence[Path]) -> Iterator[Path | BlobStoreError]:
    """The files of paths, each once; for a folder that has none, the error."""
    seen: set[str] = set()
    for path in paths:
        try:
            files = files_of(path)
        except BlobStoreError as error:
            yield error
            continue
        for file in files:
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file


def _print_files(files: list[FileInfo]) -> None:
    for file in files:
        blobs = [(*_what(one), one.nbytes, one.alignment, one.shared) for one in file.blobs]
        taken = [(*_what(one), "?" if one.nbytes is None else one.nbytes) for one in file.externals]
        if on_terminal():
            _print_file(file, blobs, taken)
        else:
            rows: list[Sequence[object]] = [*blobs, *((*row, "", "") for row in taken)]
            print_table("", (), [(*row, file.path) for row in rows])


def _what(one: BlobInfo | ExternalInfo) -> tuple[object, ...]:
    return one.key, one.kind, one.layout or "opaque"


def _print_file(file: FileInfo, blobs: Sequence[Sequence[object]], taken: Sequence[Sequence[object]]) -> None:
    say(f"{file.path}: {file.format}, {file.size:,} bytes")
    for line in _facts(file):
        say(f"  {line}")
    if blobs or not taken:
        print_table("", ("key", "kind", "layout", "bytes", "align", "same as"), blobs)
    if taken:
        columns = ("key", "kind", "layout", "bytes", "taken by", "found in")
        by = [(", ".join(one.taken_by), one.found_in) for one in file.externals]
        print_table("Taken from data files", columns, [(*row, *more) for row, more in zip(taken, by, strict=True)])


def _facts(file: FileInfo) -> Iterator[str]:
    if file.parameters:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in file.parameters.items())
        yield f"parameters: {kinds}"
    if file.has_digests is not None:
        yield f"digests: {'yes' if file.has_digests else 'no'}"
    if file.methods:
        yield f"methods: {', '.join(file.methods)}"
    if file.flatbuffer_bytes is not None:
        yield f"flatbuffer: {file.flatbuffer_bytes:,} bytes"
    for one in file.delegates:
        yield f"delegate {one.method}/{one.index}: {one.backend}, payload of {one.payload_bytes:,} bytes"
    if tensors := sum(external.kind == "external" for external in file.externals):
        yield f"external tensors: {tensors}"
    for key, value in file.metadata.items():
        yield f"metadata {key}: {value}"


@app.command()
@exits.handled
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
        return {**row, "ok": False, "reason": error.reason}, exits.NO
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
@exits.handled
def diff(
    left: Annotated[Path, file_argument("The older file or folder.")],
    right: Annotated[Path, file_argument("The newer file or folder.")],
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
        raise typer.Exit(ERROR if errors else exits.NO)


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
@exits.handled
def convert(
    source: Annotated[Path, file_argument("A .safetensors or a .ptd, or a folder of them.")],
    target: Annotated[Path, file_argument("The file to write, in the other format; or a folder.")],
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


@app.command()
@exits.handled
def delta(
    base: Annotated[Path, file_argument("A .ptd or .safetensors; it stays as it is.")],
    inputs: Annotated[list[Path], file_argument("The .ptd and .safetensors files that are compared with it.")],
    output: Annotated[Path, file_option("--output", "-o", help="Folder for what differs.")],
    force: Annotated[bool, typer.Option("--force", help="Replace files of any format.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Write of each file only the tensors that differ from a base.

    That is what fine-tuning changed, for example. Tensors are equal if key, dtype, shape and bytes are. All tensors of a file are those of the base, replaced and completed
    by those of its delta.
    """
    with progress_bar(hidden=as_json) as progress:
        results = write_deltas(base, inputs, output, force=force, dry_run=dry_run, progress=progress)
    if as_json:
        print_json(results)
        return
    columns = ("file", "bytes before", "bytes after", "tensors", "as in the base")
    rows = [(one.path, one.bytes_before, one.bytes_after, one.keys, one.left_out) for one in results]
    print_table(f"What differs from {base}", columns, rows)
    say(saving(sum(one.bytes_before for one in results), sum(one.bytes_after for one in results)))
    first, load = results[0].path, "blobstore.load_file"
    say(f"All tensors of a file: {{**{load}({str(base)!r}), **{load}({str(first)!r})}}.")
    if dry_run:
        say("Nothing was written: this was a dry run.")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST or not on_terminal() else f"{text[: _LONGEST - 1]}…"
