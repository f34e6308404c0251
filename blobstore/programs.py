"""The main job: several programs that carry the same weights become slim programs and one shared data file."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.data_map import MergedDataMap, NamedDataMap
from blobstore.deployed import MARK, describing, old_data, old_programs, taken_by, tree
from blobstore.digest import Digest
from blobstore.errors import (
    FileAccessError,
    IntegrityError,
    KeyConflictError,
    OutputPathError,
    UnsupportedDataError,
)
from blobstore.formats import Format, detect_format
from blobstore.layout import TensorLayout
from blobstore.mapped_file import Paths, as_path, as_paths, map_file
from blobstore.ptd.reader import PtdDataMap, open_ptd
from blobstore.ptd.writer import Entry, write_ptd
from blobstore.pte.program import Movable, ProgramFile, read_program
from blobstore.pte.rewrite import Rewrite
from blobstore.staging import Progress, ScratchFolder, Staging, exclusive, named, recover, refuse_inputs
from blobstore.store import BlobStore, check_tag, file_name, nbytes

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
        data_files: the data files of these programs, also one that had all it needs already; none if nothing was
            moved and there was none before.
        bytes_before: bytes of all inputs, and of the data files as they were.
        bytes_after: bytes of all outputs.
        kept: programs of earlier runs that take weights from these data files, and still can.
        replaced: those of the outputs that replaced a program of an earlier run.
        replaced_keys: keys of the data files that have other bytes now, or that a program has in itself now; no program
            takes the old ones.
        unused_keys: keys of the data files that no program in the folder takes.
        pruned_keys: such keys that were dropped.
    """

    programs: list[ProgramResult]
    data_files: list[Path]
    bytes_before: int
    bytes_after: int
    kept: list[Path]
    replaced: list[Path]
    replaced_keys: list[str]
    unused_keys: list[str]
    pruned_keys: list[str]


def dedup_programs(
    inputs: Paths,
    directory: str | os.PathLike[str],
    *,
    data_name: str = DATA_NAME,
    keep_small: int = 0,
    names: NamedDataMap | None = None,
    prune: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> DedupResult:
    """Move the weights of programs to one data file, each distinct blob once.

    The stock runtime loads `directory/A.pte` with `directory/shared.ptd` as its data file, and computes what it did.

    The folder is a set of programs on its data files, which another run extends: a program of equal name is replaced,
    the other programs in the folder and below it keep every key that they take. All files are the old ones or the new
    ones; whoever has an old one open keeps it. Other processes that write programs into the folder wait.

    Args:
        inputs: files and folders, one or several: `.pte` files, and `.ptd` files that some of them need; the latter end
            in the shared file. A folder stands for all such files in it and below it, except in `directory`.
        directory: where the outputs go; made if it is missing. Each program keeps its file name; one of a folder keeps its
            place below that folder. Two that would have one name keep as many of their parent folders as they need.
        data_name: file name of the shared data.
        keep_small: what has fewer bytes than this stays in its program. A blob in a data file takes a multiple of 128
            bytes and a key.
        names: tensors by name, from a checkpoint. A moved tensor that is one of them, and no other of them, to the
            byte gets its name as key. All others are named after their content.
        prune: drop the keys of an earlier run that no program in the folder takes any more.
        force: replace inputs, files of another format, and programs that cannot be read; and extend a data file of
            unknown origin.
        progress: told of every step forward.

    Returns:
        What was done.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: an input or what an earlier run left cannot be read, is
            malformed or damaged; or an output cannot be written.
        UnsupportedDataError: an input is neither a program nor a data file.
        UnsupportedProgramError: a program holds something that the rewrite would lose.
        KeyConflictError: two inputs have different contents under a key that delegates look up; or an input and a
            program in the folder do.
        OutputPathError: an output would replace an input, a file of another format, or a data file that was not
            written together with programs.
        InvalidTagError: `data_name` is not a file name.
        In every case the directory is as it was.
    """
    check_tag(data_name)
    directory = as_path(directory)
    found = _expand(as_paths(inputs), directory)
    kinds = [detect_format(path) for path, _ in found]
    for (path, _), kind in zip(found, kinds, strict=True):
        if kind not in {Format.PTE, Format.PTD}:
            raise UnsupportedDataError(f"{path}: expected a .pte or a .ptd, found {kind.value}")
    places = [(path, parts) for (path, parts), kind in zip(found, kinds, strict=True) if kind is Format.PTE]
    outputs = _apart(places)
    programs = [(read_program(path), output) for (path, _), output in zip(places, outputs, strict=True)]
    data = [open_ptd(path, verify=True) for (path, _), kind in zip(found, kinds, strict=True) if kind is Format.PTD]
    with _folder(directory):
        return _write(
            [(program, output, 0) for program, output in programs],
            [(data_map, data_name, 0) for data_map in data],
            directory,
            inputs=[path for path, _ in found],
            data_name=data_name,
            keep_small=keep_small,
            names=names,
            prune=prune,
            force=force,
            progress=progress,
        )


def save_programs(
    programs: Mapping[str, ExecutorchProgramManager],
    directory: str | os.PathLike[str],
    *,
    data_name: str = DATA_NAME,
    keep_small: int = 0,
    names: NamedDataMap | None = None,
    prune: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> DedupResult:
    """Save freshly lowered programs with their weights in shared data files.

    Keys are unique among the files that programs share. Programs that were lowered with tags of their own, such as an
    encoder and a decoder, can have the same keys for different contents; then no cache takes the files of both.

    Args:
        programs: what `to_executorch()` gave, by the name of the file to write, with or without `.pte`.
        directory: where the outputs go; made if it is missing. What an earlier run left there is extended, as by
            `dedup_programs`.
        data_name: file name of the shared data. Data that was tagged for a file of its own while it was lowered goes
            to the file of that tag, which all programs share as well.
        keep_small, names, prune, force, progress: as in `dedup_programs`.

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
    with _folder(directory), named(directory), ScratchFolder(directory) as folder:
        data: dict[str, list[PtdDataMap]] = {}
        inputs: list[Path] = []
        opened: list[ProgramFile] = []
        for name, manager in programs.items():
            own = folder / str(len(opened))
            own.mkdir()
            with (own / file_names[name]).open("wb") as file:
                manager.write_to_file(file)
            manager.write_tensor_data_to_file(str(own))
            inputs += sorted(own.iterdir())
            opened.append(read_program(own / file_names[name]))
            data[name] = [open_ptd(path) for path in sorted(own.glob("*.ptd"))]
            _check_methods(name, manager, data[name])
        group = _groups(data)
        result = _write(
            [(one, Path(file_names[name]), group[name]) for one, name in zip(opened, programs, strict=True)],
            [(data_map, data_map.path.name, group[name]) for name in programs for data_map in data[name]],
            directory,
            inputs=inputs,
            data_name=data_name,
            keep_small=keep_small,
            names=names,
            prune=prune,
            force=force,
            progress=progress,
        )
        results = [replace(one, source=Path(name)) for one, name in zip(result.programs, programs, strict=True)]
        return replace(result, programs=results)


def _check_methods(name: str, manager: Any, data: Sequence[PtdDataMap]) -> None:
    """Refuse a program whose methods call different tensors by one name, so that its data files have or show only one.

    Raises:
        KeyConflictError: there are such tensors.
    """
    if len(manager.methods) > 1:
        from blobstore.lowering.methods import check_constants
        from blobstore.lowering.updates import LogicalTensors

        check_constants({method: manager.exported_program(method) for method in sorted(manager.methods)}, name)
        LogicalTensors(MergedDataMap(data)).check_stored(name)


def _groups(data: Mapping[str, Sequence[PtdDataMap]]) -> dict[str, int]:
    """Which programs have a namespace of keys in common, by number.

    All have one, unless two of them have a key in different files or with different contents: then those do that have
    a file in common.
    """
    known: dict[str, tuple[str, Digest, TensorLayout | None]] = {}
    found = (
        (key, (data_map.path.name, data_map.digest(key), data_map.get_tensor_layout(key)))
        for maps in data.values()
        for data_map in maps
        for key in data_map
    )
    if all(known.setdefault(key, what) == what for key, what in found):
        return dict.fromkeys(data, 0)
    groups: list[list[str]] = []
    for name, maps in data.items():
        files = {data_map.path.name for data_map in maps}
        related = [group for group in groups if any(files & {m.path.name for m in data[other]} for other in group)]
        groups = [group for group in groups if group not in related]
        groups.append([other for group in related for other in group] + [name])
    return {name: number for number, group in enumerate(groups) for name in group}


def _write(
    programs: Sequence[tuple[ProgramFile, Path, int]],
    data: Sequence[tuple[PtdDataMap, str, int]],
    directory: Path,
    *,
    inputs: Sequence[Path],
    data_name: str,
    keep_small: int,
    names: NamedDataMap | None,
    prune: bool,
    force: bool,
    progress: Progress | None,
) -> DedupResult:
    """Write programs and what they take, with what the folder has already.

    Args:
        programs: each with its place below the folder and the number of its namespace of keys.
        data: what they take already, with the file that it goes to and the number of its namespace.
        directory, inputs, data_name, keep_small, names, prune, force, progress: as in `dedup_programs`; what leaves the
            programs goes to `data_name`, unless a file of the program's own namespace has its key.
    """
    outputs = [directory / name for _, name, _ in programs]
    if len(set(outputs)) != len(outputs):
        twice = next(path for path in outputs if outputs.count(path) > 1)
        raise OutputPathError(f"{twice}: two of the programs have this file name; rename one of them")
    if names is not None and not isinstance(names, NamedDataMap):
        raise UnsupportedDataError(f"names: expected an opened file (open_any), found a {type(names).__qualname__}")
    data_name = file_name(data_name)
    data = [(data_map, file_name(tag), group) for data_map, tag, group in data]
    tags = list(dict.fromkeys([data_name, *(tag for _, tag, _ in data)]))
    stores = {group: BlobStore() for group in [*(group for *_, group in programs), *(group for *_, group in data)]}
    home = {tag: stores[group] for _, tag, group in data}
    shared = home.setdefault(data_name, next(iter(stores.values())) if len(stores) == 1 else BlobStore())
    if not force:
        every_input = [*inputs, *(names.sources if names is not None else ())]
        refuse_inputs([*outputs, *(directory / tag for tag in tags)], every_input)
    old = {data_map.path.name: data_map for data_map in old_data([directory / tag for tag in tags], force=force)}
    sizes_before = [len(map_file(path)) for path in inputs]
    sizes_before += [data_map.path.stat().st_size for data_map in old.values() if data_map.path not in inputs]

    # What the other programs in the folder take comes first: it has to stay as it is.
    old_keys = [key for data_map in old.values() for key in data_map]
    others = {program: taken_by(program, old_keys) for program in old_programs(directory, outputs)} if old else {}
    others = {program: keys for program, keys in others.items() if keys}
    takers = {key: program.path for program, keys in others.items() for key in keys}
    for tag, data_map in old.items():
        for key in data_map:
            if key in takers:
                _copy(home[tag], data_map, key, tag)

    # A tensor may not have the key of what a delegate looks up, wherever that is, nor may a data file of what is in a
    # program: the runtime refuses a key that it finds in two places.
    inside = {blob.key: program.path for program in others for blob in program.named_data}
    reserved = frozenset([*(blob.key for program, *_ in programs for blob in program.named_data), *inside])
    try:
        for data_map, tag, group in data:
            for key in data_map:
                if key in inside:
                    raise KeyConflictError(
                        f"{data_map.path}: {inside[key]} has key {key!r} in itself, so no data file beside it may have it"
                    )
                _copy(stores[group], data_map, key, tag)
        by_content = _by_content(names) if names is not None else {}
        plan = _Plan(shared, data_name, keep_small, by_content, reserved, frozenset(inside), progress)
        plans = [plan.moves(program, stores[group]) for program, _, group in programs]
    except _ClashError as clash:
        raise clash.explained(takers, [program for program, *_ in programs]) from None
    rewrites = [Rewrite(program, moves) for (program, *_), moves in zip(programs, plans, strict=True)]

    # Whatever else the data files had.
    added = {tag: set(store) for tag, store in home.items()}
    staying = {item.key for program, *_ in programs for item in program.named_data} - {
        key for moves in plans for key in moves.values()
    }
    taken = {*takers, *(key for moves in plans for key in moves.values())}
    taken.update(external.key for program, *_ in programs for external in program.externals)
    for program, *_ in programs:
        taken |= taken_by(program, {*old_keys, *itertools.chain(*added.values())} - taken)
    for data_map in [*old.values(), *(data_map for data_map, *_ in data)]:
        taken |= describing(data_map, taken)
    replaced_keys, pruned_keys = [], []
    for tag, data_map in old.items():
        for key in data_map:
            if key in staying or (key in added[tag] and home[tag].digest(key) != data_map.digest(key)):
                replaced_keys.append(key)
            elif key in added[tag]:
                continue
            elif prune and key not in taken:
                pruned_keys.append(key)
            else:
                _copy(home[tag], data_map, key, tag)

    distinct = list({id(store): store for store in home.values()}.values())
    files = _files(distinct, old)
    paths = [directory / tag for tag in files]
    with _made([output.parent for output in outputs]), Staging(progress, force=force, folder=directory) as staging:
        for tag, entries in files.items():  # before the programs: those that are there can use the new ones, too
            if tag not in old or not _is_up_to_date(old[tag], entries):
                metadata = {**(old[tag].metadata if tag in old else {}), **MARK}
                with staging.open(directory / tag, nbytes(entries), kind=Format.PTD) as file:
                    write_ptd(file, entries, metadata)
        replaced = [output for output in outputs if output.exists()]
        for rewrite, output in zip(rewrites, outputs, strict=True):
            with staging.open(output, rewrite.nbytes, kind=Format.PTE) as file:
                rewrite.write(file)
    results = [
        ProgramResult(
            source=program.path,
            path=output,
            bytes_before=len(program.data),
            bytes_after=rewrite.nbytes,
            moved=len(moves),
            moved_bytes=sum(len(item.data) for item in moves),
            missing=tuple(sorted({external.key for external in program.externals} - {*stores[group], *shared})),
        )
        for (program, _, group), output, moves, rewrite in zip(programs, outputs, plans, rewrites, strict=True)
    ]
    return DedupResult(
        programs=results,
        data_files=paths,
        bytes_before=sum(sizes_before),
        bytes_after=sum(path.stat().st_size for path in [*outputs, *paths]),
        kept=[program.path for program in others],
        replaced=replaced,
        replaced_keys=replaced_keys,
        unused_keys=[key for store in distinct for key in store if key not in taken],
        pruned_keys=pruned_keys,
    )


class _ClashError(KeyConflictError):
    """A key for which a program or a data file of this run has other bytes than the store."""

    def __init__(self, key: str, source: Path, error: KeyConflictError, delegate: bool) -> None:
        super().__init__(f"{source}: {error}")
        self.key, self.source, self.error, self.delegate = key, source, error, delegate

    def explained(self, takers: Mapping[str, Path], programs: Sequence[ProgramFile]) -> KeyConflictError:
        """The error for the user, who thinks in programs."""
        why = ", its delegate looks for this key" if self.delegate else ""
        if self.key not in takers:
            return KeyConflictError(
                f"{self}{why}; so these files cannot share a data file: tensors of different programs that have one name "
                "need data files of their own, so lower these programs with different tags"
            )
        users = [program.path for program in programs if taken_by(program, [self.key])]
        who = self.source if self.delegate or not users else f"{users[0]}, which takes it from {self.source}"
        return KeyConflictError(
            f"{who}: {self.error}{why}; but {takers[self.key]}, which is in the folder, takes what is there. Replace that "
            "program, too, or write to another folder"
        )


def _copy(store: BlobStore, data_map: PtdDataMap, key: str, tag: str) -> None:
    """Add a blob of a data file to the store, where another data file does not have it already."""
    data, layout = data_map.get_data(key), data_map.get_tensor_layout(key)
    tag = (store.tag(key) if key in store else None) or tag
    try:
        address = store.add(key, data, alignment=data_map.alignment(key), tag=tag, layout=layout)
    except KeyConflictError as error:
        raise _ClashError(key, data_map.path, error, False) from None
    if address != (recorded := data_map.digest(key)):
        raise IntegrityError(data_map.path, f"the bytes of {key!r} are damaged: expected {recorded}, found {address}")


def _files(stores: Iterable[BlobStore], old: Mapping[str, PtdDataMap]) -> dict[str, list[Entry]]:
    """What each data file will hold; keys that one has already stay in their order, before new ones."""
    files: dict[str, list[Entry]] = {tag: [] for tag in old}
    for store in stores:
        for entry in store.entries():
            files.setdefault(store.tag(entry.key) or "", []).append(entry)
    for tag, data_map in old.items():
        order = {key: number for number, key in enumerate(data_map)}
        files[tag].sort(key=lambda entry: order.get(entry.key, len(order)))
    return files


def _is_up_to_date(data_map: PtdDataMap, entries: Sequence[Entry]) -> bool:
    found = [(key, data_map.digest(key), data_map.get_tensor_layout(key), data_map.alignment(key)) for key in data_map]
    wanted = [(entry.key, entry.digest, entry.layout, entry.alignment) for entry in entries]
    return data_map.has_digests and MARK.items() <= data_map.metadata.items() and found == wanted


@dataclass(frozen=True)
class _Plan:
    """What leaves the programs of a run, and under which key.

    Attributes:
        shared: where what leaves goes if the program's own store does not have its key.
        reserved: keys of delegates, which no tensor may get.
        inside: keys that other programs of the folder have in themselves, so that no data file may have them.
    """

    shared: BlobStore
    data_name: str
    keep_small: int
    by_content: Mapping[Digest, tuple[str, TensorLayout | None]]
    reserved: Collection[str]
    inside: Collection[str]
    progress: Progress | None

    def moves(self, program: ProgramFile, own: BlobStore) -> dict[Movable, str]:
        """Put into a store what must leave the program; the key of each thing that leaves."""
        items = list(program.movable())
        total, done = sum(len(item.data) for item in items), 0
        moves: dict[Movable, str] = {}
        for item in items:
            # A blob that a data file has may not stay: the runtime refuses a key that it finds in two places.
            elsewhere = item.kind == "named_data" and (item.name in own or item.name in self.shared)
            if len(item.data) >= self.keep_small or elsewhere:
                key = self._add(item, own)
                if key is not None:
                    moves[item] = key
            done += len(item.data)
            if self.progress:
                self.progress(f"reading {program.path.name}", done, total)
        return moves

    def _add(self, item: Movable, own: BlobStore) -> str | None:
        """Add something to a store and return its key; None if it has to stay where it is."""
        for key in _candidates(item, self.by_content):
            if key in (self.inside if item.kind == "named_data" else self.reserved):
                continue
            store = own if key in own else self.shared
            try:
                tag = store.tag(key) if key in store else self.data_name
                store.add(key, item.data, alignment=item.alignment, layout=item.layout, tag=tag)
            except KeyConflictError as error:
                if item.kind == "named_data":
                    raise _ClashError(key, item.program.path, error, True) from None
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


def _expand(paths: Sequence[Path], directory: Path) -> list[tuple[Path, Path]]:
    """The files that are meant, each with its place below a folder that was given; and each once."""
    output = os.path.realpath(directory)
    found: dict[str, tuple[Path, Path]] = {}
    for path in paths:
        if path.is_dir():
            inside = [(file, file.relative_to(path)) for file in tree(path, (".pte", ".ptd"))]
            new = [
                (file, place)
                for file, place in inside
                if output == os.path.realpath(path) or not Path(os.path.realpath(file)).is_relative_to(output)
            ]
            if not new:
                raise FileAccessError(path, "there is neither a .pte nor a .ptd in this folder")
        else:
            new = [(path, Path(path.name))]
        for file, place in new:
            found.setdefault(os.path.realpath(file), (file, place))
    return list(found.values())


def _apart(places: Sequence[tuple[Path, Path]]) -> list[Path]:
    """Where each program goes below the folder: with more of its parent folders where two would meet."""
    depths = [len(place.parts) for _, place in places]
    full = [Path(os.path.abspath(path)).parts[1:] for path, _ in places]  # noqa: PTH100 - links stay as they are
    while True:
        outputs = [Path(*parts[-depth:]) for parts, depth in zip(full, depths, strict=True)]
        meeting = [i for i, output in enumerate(outputs) if outputs.count(output) > 1 and depths[i] < len(full[i])]
        if not meeting:
            return outputs
        for i in meeting:
            depths[i] += 1


@contextlib.contextmanager
def _folder(directory: Path) -> Iterator[None]:
    """Make a folder, keep other writers of programs out, and finish what a killed one left; remove it after an error."""
    with _made([directory]), exclusive(directory):
        recover(directory)
        yield


@contextlib.contextmanager
def _made(folders: Iterable[Path]) -> Iterator[None]:
    """Make folders; those that were missing are removed again if an error comes out."""
    made: list[Path] = []
    try:
        for directory in folders:
            try:
                for folder in [*reversed(directory.parents), directory]:
                    if not folder.exists():
                        made.append(folder)
                        folder.mkdir(exist_ok=True)
                if not directory.is_dir():
                    raise NotADirectoryError(20, os.strerror(20))
            except OSError as error:
                raise FileAccessError(directory, error) from None
        yield
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
