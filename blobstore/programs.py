"""The main job: several programs that carry the same weights become slim programs and one shared data file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.data_map import MergedDataMap, NamedDataMap
from blobstore.digest import Digest
from blobstore.errors import FileAccessError, KeyConflictError, OutputPathError, UnsupportedDataError
from blobstore.formats import Format, detect_format
from blobstore.layout import TensorLayout
from blobstore.mapped_file import Paths, as_path, as_paths, map_file
from blobstore.ptd.reader import open_ptd
from blobstore.pte.program import Movable, ProgramFile, read_program
from blobstore.pte.rewrite import Rewrite
from blobstore.staging import Progress, Staging, named, refuse_inputs
from blobstore.store import BlobStore, check_tag, file_name

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager

__all__ = ["DATA_NAME", "DedupResult", "ProgramResult", "dedup_programs", "save_programs"]

DATA_NAME = "shared.ptd"


@dataclass(frozen=True)
class ProgramResult:
    """What became of one program.

    Attributes:
        source: the program as it was given.
        path: the slim program.
        bytes_before, bytes_after: sizes of the two files.
        moved: number of tensors and blobs that left it.
        moved_bytes: their bytes.
        missing: keys that it asks for and that none of the data files of this run has; they are in a file that was
            not among the inputs, and the program goes on needing that file.
    """

    source: Path
    path: Path
    bytes_before: int
    bytes_after: int
    moved: int
    moved_bytes: int
    missing: tuple[str, ...]


@dataclass(frozen=True)
class DedupResult:
    """What a run did.

    Attributes:
        programs: one entry a program, in the order in which they were given.
        data_files: the data files that were written; none if nothing was moved.
        bytes_before: bytes of all inputs.
        bytes_after: bytes of all outputs.
    """

    programs: list[ProgramResult]
    data_files: list[Path]
    bytes_before: int
    bytes_after: int


def dedup_programs(
    inputs: Paths,
    directory: str | os.PathLike[str],
    *,
    data_name: str = DATA_NAME,
    keep_small: int = 0,
    names: NamedDataMap | None = None,
    progress: Progress | None = None,
) -> DedupResult:
    """Move the weights of programs to one data file, each distinct blob once.

    The stock runtime loads `directory/A.pte` with `directory/shared.ptd` as its data file, and computes what it did.

    Args:
        inputs: one file or several: `.pte` files, and `.ptd` files that some of them need; the latter end in the shared file.
        directory: where the outputs go; made if it is missing. Each program keeps its file name.
        data_name: file name of the shared data.
        keep_small: what has fewer bytes than this stays in its program. A blob in a data file takes a multiple of 128
            bytes and a key.
        names: tensors by name, from a checkpoint. A moved tensor that is one of them, and no other of them, to the
            byte gets its name as key. All others are named after their content.
        progress: told of every step forward.

    Returns:
        What was done.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: an input cannot be read, is malformed or damaged; or an
            output cannot be written.
        UnsupportedDataError: an input is neither a program nor a data file.
        UnsupportedProgramError: a program holds something that the rewrite would lose.
        KeyConflictError: two inputs have different contents under a key that delegates look up.
        OutputPathError: an output would overwrite an input, or two inputs have one file name.
        InvalidTagError: `data_name` is not a file name.
        In every case the directory is as it was.
    """
    check_tag(data_name)
    sources = as_paths(inputs)
    kinds = [detect_format(path) for path in sources]
    for path, kind in zip(sources, kinds, strict=True):
        if kind not in {Format.PTE, Format.PTD}:
            raise UnsupportedDataError(f"{path}: expected a .pte or a .ptd, found {kind.value}")
    programs = [read_program(path) for path, kind in zip(sources, kinds, strict=True) if kind is Format.PTE]
    data = [open_ptd(path, verify=True) for path, kind in zip(sources, kinds, strict=True) if kind is Format.PTD]
    store = BlobStore()
    for data_map in data:
        store.merge(data_map)
    return _write(
        [(program, program.path.name, store) for program in programs],
        store,
        as_path(directory),
        inputs=sources,
        data_name=data_name,
        keep_small=keep_small,
        names=names,
        progress=progress,
    )


def save_programs(
    programs: Mapping[str, ExecutorchProgramManager],
    directory: str | os.PathLike[str],
    *,
    data_name: str = DATA_NAME,
    keep_small: int = 0,
    names: NamedDataMap | None = None,
    progress: Progress | None = None,
) -> DedupResult:
    """Save freshly lowered programs with their weights in shared data files.

    Keys are unique among the files that programs share. Programs that were lowered with tags of their own, such as an
    encoder and a decoder, can have the same keys for different contents; then no cache takes the files of both.

    Args:
        programs: what `to_executorch()` gave, by the name of the file to write, with or without `.pte`.
        directory: where the outputs go; made if it is missing.
        data_name: file name of the shared data. Data that was tagged for a file of its own while it was lowered goes
            to the file of that tag, which all programs share as well.
        keep_small, names, progress: as in `dedup_programs`.

    Returns:
        What was done; `source` of a program is its name, and what ExecuTorch would have written counts as before.

    Raises:
        As `dedup_programs`.
    """
    directory = as_path(directory)
    check_tag(data_name)
    if not isinstance(programs, Mapping):
        raise UnsupportedDataError(f"expected programs by name, found a {type(programs).__qualname__}")
    for name, manager in programs.items():
        check_tag(name)
        if not hasattr(manager, "write_to_file") or not hasattr(manager, "write_tensor_data_to_file"):
            raise UnsupportedDataError(
                f"{name}: expected an ExecutorchProgramManager, which to_executorch() gives, found a "
                f"{type(manager).__qualname__}"
            )
    file_names = {name: name if name.endswith(".pte") else f"{name}.pte" for name in programs}
    made = _make(directory)
    try:
        with named(directory), tempfile.TemporaryDirectory(prefix=".lowered-", dir=directory) as folder:
            data: dict[str, list[Path]] = {}
            inputs: list[Path] = []
            opened: list[ProgramFile] = []
            for name, manager in programs.items():
                own = Path(folder) / str(len(opened))
                own.mkdir()
                with (own / file_names[name]).open("wb") as file:
                    manager.write_to_file(file)
                manager.write_tensor_data_to_file(str(own))
                inputs += sorted(own.iterdir())
                opened.append(read_program(own / file_names[name]))
                data[name] = sorted(own.glob("*.ptd"))
                _check_methods(name, manager, data[name])
            stores = _stores(data)
            distinct = list({id(store): store for store in stores.values()}.values())
            sole = distinct[0] if len(distinct) == 1 else BlobStore()
            shared = next((store for store in distinct if file_name(data_name) in store.tags), sole)
            result = _write(
                [(one, file_names[name], stores[name]) for one, name in zip(opened, programs, strict=True)],
                shared,
                directory,
                inputs=inputs,
                data_name=data_name,
                keep_small=keep_small,
                names=names,
                progress=progress,
            )
            results = [replace(one, source=Path(name)) for one, name in zip(result.programs, programs, strict=True)]
            return replace(result, programs=results)
    except BaseException:
        _remove(made)
        raise


def _check_methods(name: str, manager: Any, data: Sequence[Path]) -> None:
    """Refuse a program whose methods call different tensors by one name, so that its data files have or show only one.

    Raises:
        KeyConflictError: there are such tensors.
    """
    if len(manager.methods) > 1:
        from blobstore.lowering.methods import check_constants
        from blobstore.lowering.updates import LogicalTensors

        check_constants({method: manager.exported_program(method) for method in sorted(manager.methods)}, name)
        LogicalTensors(MergedDataMap([open_ptd(path) for path in data])).check_stored(name)


def _stores(data: Mapping[str, Sequence[Path]]) -> dict[str, BlobStore]:
    """The store of each program, with its data: one for all, if they do not contradict each other; otherwise one for
    those that have data files in common.

    Raises:
        KeyConflictError: programs that have data files in common contradict each other.
    """
    try:
        return dict.fromkeys(data, _merge(data, list(data)))
    except KeyConflictError:
        groups: list[list[str]] = []
        for name, paths in data.items():
            files = {path.name for path in paths}
            related = [group for group in groups if files & {path.name for other in group for path in data[other]}]
            groups = [group for group in groups if group not in related]
            groups.append([other for group in related for other in group] + [name])
        return {name: store for group in groups for store in [_merge(data, group)] for name in group}


def _merge(data: Mapping[str, Sequence[Path]], programs: Sequence[str]) -> BlobStore:
    store = BlobStore()
    for name in programs:
        for path in data[name]:
            try:
                store.merge(open_ptd(path), tag=path.name)
            except KeyConflictError as error:
                raise KeyConflictError(
                    f"{name}: {path.name}: {error}; tensors of different programs that have one name need data files of "
                    "their own: lower these programs with different tags"
                ) from None
    return store


def _write(
    programs: Sequence[tuple[ProgramFile, str, BlobStore]],
    shared: BlobStore,
    directory: Path,
    *,
    inputs: Sequence[Path],
    data_name: str,
    keep_small: int,
    names: NamedDataMap | None,
    progress: Progress | None,
) -> DedupResult:
    """Move what leaves the programs to where its key is, in a program's own store, or else to the shared one, whose
    untagged blobs go to `data_name`; then write the stores and the programs."""
    outputs = [directory / name for _, name, _ in programs]
    if len(set(outputs)) != len(outputs):
        twice = next(path for path in outputs if outputs.count(path) > 1)
        raise OutputPathError(f"{twice}: two of the programs have this file name; rename one of them")
    if names is not None and not isinstance(names, NamedDataMap):
        raise UnsupportedDataError(f"names: expected an opened file (open_any), found a {type(names).__qualname__}")
    data_name = file_name(data_name)
    refuse_inputs([*outputs, directory / data_name], [*inputs, *(names.sources if names is not None else ())])
    bytes_before = sum(len(map_file(path)) for path in inputs)
    by_content = _by_content(names) if names is not None else {}
    taken = frozenset(blob.key for program, _, _ in programs for blob in program.named_data)
    plans = [_plan(program, [own, shared], keep_small, by_content, taken, progress) for program, _, own in programs]
    rewrites = [Rewrite(program, moves) for (program, _, _), moves in zip(programs, plans, strict=True)]
    stores = {id(store): store for store in (*(own for _, _, own in programs), shared)}
    made = _make(directory)
    try:
        with Staging(progress) as staging:
            paths: dict[str, Path] = {}
            for store in stores.values():
                paths.update(store.stage(staging, directory, default_tag=data_name))
            for rewrite, output in zip(rewrites, outputs, strict=True):
                with staging.open(output, rewrite.nbytes) as file:
                    rewrite.write(file)
    except BaseException:
        _remove(made)
        raise
    results = [
        ProgramResult(
            source=program.path,
            path=output,
            bytes_before=len(program.data),
            bytes_after=rewrite.nbytes,
            moved=len(moves),
            moved_bytes=sum(len(item.data) for item in moves),
            missing=tuple(sorted({external.key for external in program.externals} - set(own) - set(shared))),
        )
        for (program, _, own), output, moves, rewrite in zip(programs, outputs, plans, rewrites, strict=True)
    ]
    data_files = list(paths.values())
    return DedupResult(
        programs=results,
        data_files=data_files,
        bytes_before=bytes_before,
        bytes_after=sum(path.stat().st_size for path in [*outputs, *data_files]),
    )


def _plan(
    program: ProgramFile,
    stores: Sequence[BlobStore],
    keep_small: int,
    by_content: Mapping[Digest, tuple[str, TensorLayout | None]],
    taken: Collection[str],
    progress: Progress | None,
) -> dict[Movable, str]:
    """Put into the stores what is to leave the program; the key of each thing that leaves."""
    items = list(program.movable())
    total, done = sum(len(item.data) for item in items), 0
    moves: dict[Movable, str] = {}
    for item in items:
        # A blob that a data file has may not stay: the runtime refuses a key that it finds in two places.
        elsewhere = item.kind == "named_data" and any(item.name in store for store in stores)
        if len(item.data) >= keep_small or elsewhere:
            key = _add(stores, item, by_content, taken)
            if key is not None:
                moves[item] = key
        done += len(item.data)
        if progress:
            progress(f"reading {program.path.name}", done, total)
    return moves


def _add(
    stores: Sequence[BlobStore],
    item: Movable,
    by_content: Mapping[Digest, tuple[str, TensorLayout | None]],
    taken: Collection[str],
) -> str | None:
    """Add something to the store that has its key, else to the last; its key, or None if it has to stay where it is."""
    for key in _candidates(item, by_content):
        if key in taken and item.kind != "named_data":
            continue  # a delegate's, in one of the programs
        store = next((store for store in stores if key in store), stores[-1])
        try:
            tag = store.tag(key) if key in store else None
            store.add(key, item.data, alignment=item.alignment, layout=item.layout, tag=tag)
        except KeyConflictError as error:
            if item.kind == "named_data":
                raise KeyConflictError(
                    f"{item.program.path}: {error}; its delegate looks for this key, so this program cannot share a "
                    "data file with the others"
                ) from None
        else:
            return key
    return None


def _candidates(item: Movable, by_content: Mapping[Digest, tuple[str, TensorLayout | None]]) -> Iterable[str]:
    """Keys to try, best first."""
    if item.name is not None:
        # A tensor with a recorded name has it as its only key; where another program's tensor has it, this one stays.
        yield item.name
        return
    name, layout = by_content.get(item.digest, (None, None))
    if name is not None and layout == item.layout:
        yield name
    yield item.key
    for number in range(2, 100):  # two contents with one digest: never seen, but then each still gets a key
        yield f"{item.key}.{number}"


def _by_content(names: NamedDataMap) -> dict[Digest, tuple[str, TensorLayout | None]]:
    """The tensors of a checkpoint by content, where only one of them has it."""
    found: dict[Digest, list[str]] = {}
    for key in names:
        found.setdefault(names.digest(key), []).append(key)
    return {address: (keys[0], names.get_tensor_layout(keys[0])) for address, keys in found.items() if len(keys) == 1}


def _make(directory: Path) -> list[Path]:
    """Make a directory; those that were made, outermost first."""
    made: list[Path] = []
    try:
        for folder in [*reversed(directory.parents), directory]:
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        if not directory.is_dir():
            raise NotADirectoryError(20, os.strerror(20))
    except OSError as error:
        _remove(made)
        raise FileAccessError(directory, error) from None
    return made


def _remove(made: Sequence[Path]) -> None:
    for folder in reversed(made):
        try:
            folder.rmdir()
        except OSError:
            return
