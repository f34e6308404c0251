"""The main job: several programs that carry the same weights become slim programs and one shared data file."""

from __future__ import annotations

import contextlib
import itertools
import json
import operator
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.deployed import (
    MARK,
    USERS,
    describing,
    old_data,
    old_programs,
    other_data,
    place_of,
    taken_by,
    taken_from,
    tree,
    users_of,
)
from blobstore.disk.locks import exclusive
from blobstore.disk.progress import Progress, check_progress
from blobstore.disk.recovery import ScratchFolder, recover
from blobstore.disk.staging import Staging, refuse_inputs
from blobstore.errors import (
    FileAccessError,
    IntegrityError,
    KeyConflictError,
    OutputPathError,
    UnsupportedDataError,
)
from blobstore.formats.data_map import MergedDataMap, NamedDataMap
from blobstore.formats.opening import Format, detect_format
from blobstore.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.formats.ptd.writer import Entry, write_ptd
from blobstore.formats.pte.program import Movable, ProgramFile, read_program
from blobstore.formats.pte.rewrite import Rewrite
from blobstore.memory.digest import Digest
from blobstore.memory.layout import TensorLayout
from blobstore.memory.mapped_file import Paths, as_path, as_paths, map_file, named
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
    ones; a run that was killed between two renames is finished by the next one. A process that has an old file open keeps
    it. Other processes that write programs into the folder wait.

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
        UnsupportedDataError: an input is neither a program nor a data file, or `keep_small`, `names` or `progress` is of
            the wrong kind.
        UnsupportedProgramError: a program holds something that the rewrite would lose.
        KeyConflictError: two inputs have different contents under a key that delegates look up; or an input and a
            program in the folder do.
        OutputPathError: an output would replace an input, a file of another format, or a data file that was not
            written together with programs.
        InvalidTagError: `data_name` is not a file name.
        In every case the directory is as it was.
    """
    _check_options(data_name, keep_small, names, progress)
    directory = as_path(directory)
    sources = as_paths(inputs)
    with _folder(directory):
        found = _expand(sources, directory)
        kinds = [detect_format(path) for path, _ in found]
        for (path, _), kind in zip(found, kinds, strict=True):
            if kind not in {Format.PTE, Format.PTD}:
                raise UnsupportedDataError(f"{path}: expected a .pte or a .ptd, found {kind.value}")
        places = [(path, parts) for (path, parts), kind in zip(found, kinds, strict=True) if kind is Format.PTE]
        outputs = _apart(places)
        programs = [(read_program(path), output) for (path, _), output in zip(places, outputs, strict=True)]
        data = [open_ptd(path, verify=True) for (path, _), kind in zip(found, kinds, strict=True) if kind is Format.PTD]
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
    _check_options(data_name, keep_small, names, progress)
    directory = as_path(directory)
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
    with _folder(directory), ScratchFolder(directory) as folder:
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
        try:
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
        except KeyConflictError as error:  # the user knows the programs by name, not these files
            message = str(error)
            for number, name in enumerate(programs):
                message = message.replace(f"{folder / str(number)}{os.sep}", f"{name}: ")
            raise KeyConflictError(message) from None
        results = [replace(one, source=Path(name)) for one, name in zip(result.programs, programs, strict=True)]
        return replace(result, programs=results)


def _check_options(data_name: str, keep_small: int, names: NamedDataMap | None, progress: Progress | None) -> None:
    check_tag(data_name)
    try:
        operator.index(keep_small)
    except TypeError:
        raise UnsupportedDataError(f"keep_small must be an integer number of bytes, not {keep_small!r}") from None
    if names is not None and not isinstance(names, NamedDataMap):
        raise UnsupportedDataError(f"names: expected an opened file (open_any), found a {type(names).__qualname__}")
    check_progress(progress)


def _check_methods(name: str, manager: Any, data: Sequence[PtdDataMap]) -> None:
    """Refuse a program whose methods call different tensors by one name, so that its data files have or show only one.

    Raises:
        KeyConflictError: there are such tensors.
    """
    if len(manager.methods) > 1:
        from blobstore.logical.updates import LogicalTensors
        from blobstore.lowering.methods import check_constants

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
    run = _Run(programs, data, directory, file_name(data_name))
    if not force:
        every_input = [*inputs, *(names.sources if names is not None else ())]
        refuse_inputs([*run.outputs, *(directory / tag for tag in run.home)], every_input)
    run.read_folder(force)
    bytes_before = sum(len(map_file(path)) for path in inputs)
    bytes_before += sum(len(map_file(one.path)) for one in run.old.values() if one.path not in inputs)
    try:
        run.keep_what_others_take()
        run.add_data()
        run.move_out(keep_small, _by_content(names) if names is not None else {}, progress)
    except _ClashError as clash:
        raise clash.explained(run.takers, [job.program for job in run.jobs]) from None
    run.keep_the_rest(prune)
    replaced = [output for output in run.outputs if output.exists()]
    sizes = run.write(force, progress)
    results = [run.result(job) for job in run.jobs]
    return DedupResult(
        programs=results,
        data_files=list(sizes),
        bytes_before=bytes_before,
        bytes_after=sum(sizes.values()) + sum(program.bytes_after for program in results),
        kept=[program.path for program in run.others],
        replaced=replaced,
        replaced_keys=run.replaced_keys,
        unused_keys=[key for store in run.stores() for key in store if key not in run.taken],
        pruned_keys=[key for dropped in run.pruned.values() for key in dropped],
    )


@dataclass
class _Job:
    """A program of a run: where it goes, the store of its own namespace, and what leaves it under which key."""

    program: ProgramFile
    output: Path
    own: BlobStore
    moves: dict[Movable, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.externals = {external.key for external in self.program.externals}

    def rewrite(self) -> Rewrite:
        return Rewrite(self.program, self.moves)


class _Run:
    """One run over a folder. The methods are its steps, in order.

    Attributes:
        jobs: the programs.
        data: data files that they take, each with the file that it goes to and the store of its namespace.
        home: the store of each data file that may be written, by file name. Files of one namespace have one store.
        shared: the store of the data file for what leaves a program.
        old: those of the data files that are there.
        others: programs that are there and stay, with the keys that they take from each of `old`.
        takers: for each such key, one of these programs.
        taken: keys that some program takes when the run is done.
        replaced_keys: keys whose old bytes go.
        neighbours: other data files in the folder that were written with programs.
        pruned: what is dropped of each data file.
    """

    def __init__(
        self,
        programs: Sequence[tuple[ProgramFile, Path, int]],
        data: Sequence[tuple[PtdDataMap, str, int]],
        directory: Path,
        data_name: str,
    ) -> None:
        stores = {group: BlobStore() for group in [*(group for *_, group in programs), *(group for *_, group in data)]}
        self.directory, self.data_name = directory, data_name
        self.jobs = [_Job(program, directory / name, stores[group]) for program, name, group in programs]
        self.outputs = [job.output for job in self.jobs]
        if len(set(self.outputs)) != len(self.outputs):
            twice = next(path for path in self.outputs if self.outputs.count(path) > 1)
            raise OutputPathError(f"{twice}: two of the programs have this file name; rename one of them")
        self.data = [(data_map, file_name(tag), stores[group]) for data_map, tag, group in data]
        self.home = {tag: store for _, tag, store in self.data}
        self.shared = self.home.setdefault(data_name, next(iter(stores.values())) if len(stores) == 1 else BlobStore())
        self.old: dict[str, PtdDataMap] = {}
        self.neighbours: dict[str, PtdDataMap] = {}
        self.others: dict[ProgramFile, dict[str, set[str]]] = {}
        self.takers: dict[str, Path] = {}
        self.taken: set[str] = set()
        self.replaced_keys: list[str] = []
        self.pruned: dict[str, BlobStore] = {}

    def read_folder(self, force: bool) -> None:
        """Find what an earlier run left."""
        paths = [self.directory / tag for tag in dict.fromkeys([self.data_name, *self.home])]
        self.old = {data_map.path.name: data_map for data_map in old_data(paths, force=force)}
        self.neighbours = {data_map.path.name: data_map for data_map in other_data(self.directory, paths)}
        if self.old:
            files = {**self.neighbours, **self.old}
            for program in old_programs(self.directory, self.outputs):
                keys = {
                    tag: found for tag, found in taken_from(program, files, self.directory).items() if tag in self.old
                }
                if any(keys.values()):
                    self.others[program] = keys
        self.takers = {
            key: program.path for program, files in self.others.items() for keys in files.values() for key in keys
        }

    def keep_what_others_take(self) -> None:
        """It comes first, as it has to stay as it is."""
        for tag, data_map in self.old.items():
            held = {key for files in self.others.values() for key in files.get(tag, ())}
            for key in data_map:
                if key in held:
                    _copy(self.home[tag], data_map, key, tag)

    def add_data(self) -> None:
        """Add the data files that the programs take already.

        Raises:
            KeyConflictError: a program that stays has one of the keys in itself.
        """
        inside = self._inside()
        for data_map, tag, store in self.data:
            for key in data_map:
                if key in inside:
                    raise KeyConflictError(
                        f"{data_map.path}: {inside[key]} has key {key!r} in itself, so no data file beside it may have it"
                    )
                _copy(store, data_map, key, tag)

    def _inside(self) -> dict[str, Path]:
        """What the other programs have in themselves, with one of them: the runtime refuses a key in two places."""
        return {blob.key: program.path for program in self.others for blob in program.named_data}

    def move_out(
        self,
        keep_small: int,
        by_content: Mapping[Digest, tuple[str, TensorLayout | None]],
        progress: Progress | None,
    ) -> None:
        """Move what is large enough out of the programs."""
        inside = frozenset(self._inside())
        # A tensor may not have the key of what a delegate looks up, wherever that is.
        reserved = inside.union(blob.key for job in self.jobs for blob in job.program.named_data)
        plan = _Plan(self.shared, self.data_name, keep_small, by_content, reserved, inside, progress)
        for job in self.jobs:
            job.moves = plan.moves(job.program, job.own)

    def keep_the_rest(self, prune: bool) -> None:
        """Decide on whatever else the data files had."""
        added = {tag: set(store) for tag, store in self.home.items()}
        named = {item.key for job in self.jobs for item in job.program.named_data}
        moved = {key for job in self.jobs for key in job.moves.values()}
        staying = named - moved
        self.taken = {*self.takers, *moved}.union(*(job.externals for job in self.jobs))
        every_key = set(itertools.chain(*self.old.values(), *added.values()))
        for job in self.jobs:
            self.taken |= taken_by(job.program, every_key - self.taken)
        for data_map in [*self.old.values(), *(data_map for data_map, *_ in self.data)]:
            self.taken |= describing(data_map, self.taken)
        for tag, data_map in self.old.items():
            for key in data_map:
                if key in staying or (key in added[tag] and self.home[tag].digest(key) != data_map.digest(key)):
                    self.replaced_keys.append(key)
                elif key not in added[tag]:
                    drop = prune and key not in self.taken
                    _copy(self.pruned.setdefault(tag, BlobStore()) if drop else self.home[tag], data_map, key, tag)

    def stores(self) -> list[BlobStore]:
        """The stores of the data files, each once."""
        return list({id(store): store for store in self.home.values()}.values())

    def files(self, *, unpruned: bool = False) -> dict[str, list[Entry]]:
        """What each data file will hold; keys that one has already stay in their order, before new ones.

        Args:
            unpruned: with what is dropped in the end.
        """
        files: dict[str, list[Entry]] = {tag: [] for tag in self.old}
        for store in self.stores():
            for entry in store.entries():
                files.setdefault(store.tag(entry.key) or "", []).append(entry)
        for tag, dropped in self.pruned.items() if unpruned else ():
            files[tag] += [replace(entry, blob=-1 - entry.blob) for entry in dropped.entries()]  # of another store
        for tag, data_map in self.old.items():
            order = {key: number for number, key in enumerate(data_map)}
            files[tag].sort(key=lambda entry: order.get(entry.key, len(order)))
        return files

    def write(self, force: bool, progress: Progress | None) -> dict[Path, int]:
        """Write the data files and the programs; the data files with their sizes.

        The renames are in an order that leaves every program its keys all the time: data files come before programs, as
        programs that are there can use the new ones, too. A program that is replaced may take keys that are pruned: its
        data file has them until the programs are in place.
        """
        final, unpruned = self.files(), self.files(unpruned=True)
        late = set(self.pruned) if any(output.exists() for output in self.outputs) else set()
        metadata = {tag: self._metadata(tag, final) for tag in final}
        sizes: dict[Path, int] = {}
        with (
            _made([output.parent for output in self.outputs]),
            Staging(progress, force=force, folder=self.directory) as staging,
        ):

            def write_data(tag: str, entries: Sequence[Entry], *, again: bool = False) -> None:
                path = self.directory / tag
                with staging.open(path, nbytes(entries), kind=Format.PTD, again=again) as file:
                    sizes[path] = write_ptd(file, entries, metadata[tag])

            early = {tag: unpruned[tag] if tag in late else final[tag] for tag in final}
            changed = {tag for tag in final if not self._is_up_to_date(tag, early[tag], metadata[tag])}
            for tag in final:
                if tag in changed:
                    write_data(tag, early[tag])
                else:
                    sizes[self.directory / tag] = len(map_file(self.directory / tag))
            for job in self.jobs:
                rewrite = job.rewrite()
                with staging.open(job.output, rewrite.nbytes, kind=Format.PTE) as file:
                    rewrite.write(file)
            for tag in final:
                if tag in late:
                    write_data(tag, final[tag], again=tag in changed)
        return sizes

    def _metadata(self, tag: str, files: Mapping[str, Sequence[Entry]]) -> dict[str, str]:
        """The metadata of a data file. Where other data files have keys of its own, it lists the programs that take it."""
        old = dict(self.old[tag].metadata) if tag in self.old else {}
        keys = _keys(files[tag])
        elsewhere = set(
            itertools.chain(*self.neighbours.values(), *(_keys(files[other]) for other in files if other != tag))
        )
        if USERS not in old and not keys & elsewhere:
            return {**old, **MARK}
        replaced = {place_of(output, self.directory) for output in self.outputs}
        users = {user for user in users_of(old) if user not in replaced and (self.directory / user).exists()}
        for job in self.jobs:
            if self.home[tag] is job.own or self.home[tag] is self.shared:
                asks = {*job.moves.values(), *job.externals}
                if asks & keys or taken_by(job.program, keys):
                    users.add(place_of(job.output, self.directory))
        return {**old, **MARK, USERS: json.dumps(sorted(users))}

    def _is_up_to_date(self, tag: str, entries: Sequence[Entry], metadata: Mapping[str, str]) -> bool:
        data_map = self.old.get(tag)
        if data_map is None or not data_map.has_digests or data_map.metadata != metadata:
            return False
        found = [
            (key, data_map.digest(key), data_map.get_tensor_layout(key), data_map.alignment(key)) for key in data_map
        ]
        return found == [(entry.key, entry.digest, entry.layout, entry.alignment) for entry in entries]

    def result(self, job: _Job) -> ProgramResult:
        """What became of a program that is written."""
        return ProgramResult(
            source=job.program.path,
            path=job.output,
            bytes_before=len(job.program.data),
            bytes_after=job.rewrite().nbytes,
            moved=len(job.moves),
            moved_bytes=sum(len(item.data) for item in job.moves),
            missing=tuple(sorted(job.externals - {*job.own, *self.shared})),
        )


def _keys(entries: Iterable[Entry]) -> set[str]:
    return {entry.key for entry in entries}


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
        if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises an error for a name that is too long
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
    with named(directory), _made([directory]), exclusive(directory):
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
