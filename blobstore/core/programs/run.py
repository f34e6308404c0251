"""One run over a folder: programs and data files are written together with what earlier runs left there."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from blobstore.core.disk.folders import folders
from blobstore.core.disk.kinds import Format
from blobstore.core.disk.staging import Staging, refuse_inputs
from blobstore.core.errors import IntegrityError, KeyConflictError, OutputPathError
from blobstore.core.formats.keys import OF_PROGRAMS
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.ptd.writer import Entry, write_ptd
from blobstore.core.formats.pte.program import Movable, ProgramFile
from blobstore.core.formats.pte.rewrite import Rewrite
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import map_file
from blobstore.core.programs.conflicts import ClashError
from blobstore.core.programs.deployed import (
    USERS,
    describing,
    old_data,
    old_programs,
    other_data,
    place_of,
    taken_by,
    taken_from,
    users_of,
    weights_among,
)
from blobstore.core.programs.inside import tensors_inside
from blobstore.core.programs.options import Options
from blobstore.core.programs.planning import Plan, clash_with, has, names_by_content
from blobstore.core.programs.results import DataResult, DedupResult, KeyResult, ProgramResult
from blobstore.core.programs.series import APPENDED_TO, Series
from blobstore.core.store import BlobStore, file_name, nbytes

__all__ = ["DataInput", "ProgramInput", "run"]


@dataclass(frozen=True)
class ProgramInput:
    """A program to write.

    Attributes:
        program: the program as it is.
        place: its path below the folder.
        namespace: the number of its namespace of keys.
    """

    program: ProgramFile
    place: Path
    namespace: int = 0


@dataclass(frozen=True)
class DataInput:
    """A data file that the programs take already.

    Attributes:
        data_map: the data file.
        tag: the file that its contents go to.
        namespace: the number of the namespace of its keys.
    """

    data_map: PtdDataMap
    tag: str
    namespace: int = 0


def run(
    programs: Sequence[ProgramInput],
    data: Sequence[DataInput],
    directory: Path,
    inputs: Sequence[Path],
    options: Options,
) -> DedupResult:
    """Write programs, and data files with what they take, into a folder that may have others already.

    What leaves a program goes to the file `options.data_name`, unless a file of the program's own namespace has its key.

    Args:
        programs: the programs.
        data: the data files that they take already.
        directory: the folder.
        inputs: the files that all these were read from.
        options: the user's options.

    Raises:
        As `dedup_programs`.
    """
    this = _Run(programs, data, directory, options)
    this.check_outputs(inputs)
    this.read_folder()
    bytes_before = sum(len(map_file(path)) for path in inputs) + this.bytes_of_others(inputs)
    try:
        this.keep_what_others_take()
        this.add_data()
        this.move_out()
    except ClashError as clash:
        raise clash.explained(this.takers, [job.program for job in this.jobs], this.others_with(clash)) from None
    this.keep_the_rest()
    replaced = [output for output in this.outputs if output.exists()]
    sizes = this.write()
    results = [this.result(job) for job in this.jobs]
    return DedupResult(
        programs=results,
        data_files=list(sizes),
        bytes_before=bytes_before,
        bytes_after=sum(sizes.values()) + sum(program.bytes_after for program in results),
        kept=[program.path for program in this.others],
        replaced=replaced,
        replaced_keys=this.replaced_keys,
        unused_keys=[key for store in this.stores() for key in store if key not in this.taken],
        pruned_keys=[key for dropped in this.pruned.values() for key in dropped],
        data_inputs=this.data_results(),
        named={checkpoint: len(names) for checkpoint, names in this.named.items()},
    )


@dataclass
class _Job:
    """A program of a run.

    Attributes:
        program: the program as it is.
        output: the path of the slim program.
        own: the store of its namespace.
        moves: what leaves it, with its keys.
        externals: the keys of the tensors that it takes from data files already.
        nbytes: bytes of the slim program, once it is written.
    """

    program: ProgramFile
    output: Path
    own: BlobStore
    moves: dict[Movable, str] = field(default_factory=dict)
    nbytes: int = 0

    def __post_init__(self) -> None:
        self.externals = {external.key for external in self.program.externals}


class _Run:
    """The state of a run. The methods that `run` calls are its steps, in order.

    Attributes:
        jobs: the programs.
        outputs: their paths.
        data: data files that they take, each with the name of the file that it goes to and the store of its namespace.
        home: the store of each data file that may be written, by file name. Files of one namespace have one store.
        shared: the store of the data file for what leaves a program.
        old: those of the data files that exist.
        earlier: for each key of the data files that this run leaves as they are, its file.
        neighbours: other data files in the folder that were written with programs.
        others: programs in the folder that stay, with the keys that they take from each of `old`.
        takers: for each such key, one of these programs.
        taken: keys that a program takes when the run is done.
        replaced_keys: keys whose old bytes are dropped.
        pruned: what is dropped from each data file.
        named: by checkpoint, the names that tensors got from it.
    """

    def __init__(
        self, programs: Sequence[ProgramInput], data: Sequence[DataInput], directory: Path, options: Options
    ) -> None:
        namespaces = [*(one.namespace for one in programs), *(one.namespace for one in data)]
        stores = {namespace: BlobStore() for namespace in namespaces}
        self.directory, self.options, self.data_name = directory, options, file_name(options.data_name)
        self.earlier: dict[str, PtdDataMap] = {}
        if options.append:
            series = Series(directory, self.data_name, force=options.force)
            self.earlier, self.data_name = series.by_key(), series.next_name()
        self.jobs = [_Job(one.program, directory / one.place, stores[one.namespace]) for one in programs]
        self.outputs = [job.output for job in self.jobs]
        self.data = [
            (
                one.data_map,
                self.data_name if one.tag == options.data_name else file_name(one.tag),
                stores[one.namespace],
            )
            for one in data
        ]
        self.home = {tag: store for _, tag, store in self.data}
        # Programs of one namespace can find a key in any of their files, so one store keeps each blob of them once.
        # With several, what is shared belongs to none of them.
        everywhere = next(iter(stores.values())) if len(stores) == 1 else BlobStore()
        self.shared = self.home.setdefault(self.data_name, everywhere)
        self.old: dict[str, PtdDataMap] = {}
        self.neighbours: dict[str, PtdDataMap] = {}
        self.others: dict[ProgramFile, dict[str, set[str]]] = {}
        self.takers: dict[str, Path] = {}
        self.taken: set[str] = set()
        self.replaced_keys: list[str] = []
        self.pruned: dict[str, BlobStore] = {}
        self.named: dict[str, set[str]] = {}

    def check_outputs(self, inputs: Sequence[Path]) -> None:
        """Check that no two programs have the same output, and that without `force` no input would be replaced.

        Raises:
            OutputPathError: one of these is the case.
        """
        if len(set(self.outputs)) != len(self.outputs):
            twice = Counter(self.outputs).most_common(1)[0][0]
            raise OutputPathError(f"{twice}: two of the programs have this file name; rename one of them")
        # A deduplicated program has lost its weights: written over its own source, they could not be told from it again.
        if not self.options.force:
            every_input = [*inputs, *(source for names in self.options.names for source in names.sources)]
            refuse_inputs([*self.outputs, *(self.directory / tag for tag in self.home)], every_input)

    def read_folder(self) -> None:
        """Find what earlier runs left."""
        for tag in () if self.options.append else self.home:
            Series(self.directory, tag, force=self.options.force).check_extensible()
        paths = [self.directory / tag for tag in dict.fromkeys([self.data_name, *self.home])]
        self.old = {data_map.path.name: data_map for data_map in old_data(paths, force=self.options.force)}
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

    def bytes_of_others(self, inputs: Collection[Path]) -> int:
        """The bytes that programs which stay take from the old data files. What only replaced programs took is not counted,
        because it is in the inputs, too: the same run a second time saves as much as the first."""
        return sum(
            len(data_map.get_data(key))
            for tag, data_map in self.old.items()
            if data_map.path not in inputs
            for key in {key for files in self.others.values() for key in files.get(tag, ())}
        )

    def keep_what_others_take(self) -> None:
        """Add what programs that stay take. It is added first because it must not change."""
        for tag, data_map in self.old.items():
            # Programs that are not part of this run cannot be rewritten, so their keys are fixed before any other is chosen.
            held = {key for files in self.others.values() for key in files.get(tag, ())}
            for key in data_map:
                if key in held:
                    _copy(self.home[tag], data_map, key, tag)

    def add_data(self) -> None:
        """Add the data files that the programs take already.

        Raises:
            ClashError: a key has other bytes in two of the files, or in one that a program which stays takes.
            KeyConflictError: a program that stays has one of the keys in itself.
        """
        inside = self._inside()
        for data_map, tag, store in self.data:
            for key in data_map:
                if key in inside:
                    raise KeyConflictError(
                        f"{data_map.path}: {inside[key]} has key {key!r} in itself, so no data file in the folder may have it"
                    )
                if key not in self.earlier:
                    _copy(store, data_map, key, tag)
                elif not has(self.earlier[key], key, *_entry(data_map, key)):
                    raise clash_with(self.earlier[key], key, data_map.path, delegate=False)

    def _inside(self) -> dict[str, Path]:
        """The keys that programs which stay have in themselves, each with one of these programs.

        The runtime refuses a key that it finds in two places.
        """
        return {blob.key: program.path for program in self.others for blob in program.named_data}

    def others_with(self, clash: ClashError) -> list[tuple[Path, list[str]]]:
        """The other data files of this run that have the key of a clash with other bytes, each with all keys of which that holds."""
        sources = [data_map for data_map, *_ in self.data if data_map.path == clash.source]
        return [
            (other.path, differing)
            for source in sources
            for other, *_ in self.data
            if clash.key in (differing := _differing(source, other))
        ]

    def move_out(self) -> None:
        """Move what is large enough out of the programs."""
        inside = frozenset(self._inside())
        sizes = {len(item.data) for job in self.jobs for item in job.program.movable() if item.name is None}
        by_content = names_by_content([*self.options.names, *self.options.names_beside], sizes)
        leaving: set[str] = set()
        for job in self.jobs:
            weights = weights_among(job.program)
            least = max(self.options.keep_small, 1)
            leaving.update(b.key for b in job.program.named_data if b.span.size >= least and b.key in weights)
        plan = Plan(
            shared=self.shared,
            data_name=self.data_name,
            keep_small=self.options.keep_small,
            by_content=by_content,
            earlier=self.earlier,
            # a tensor must not have a key that a delegate looks up, in whichever place
            reserved=inside.union(blob.key for job in self.jobs for blob in job.program.named_data),
            inside=inside,
            leaving=leaving,
            progress=self.options.progress,
        )
        for job in self.jobs:
            job.moves = plan.moves(job.program, job.own)
        for item, key in (one for job in self.jobs for one in job.moves.items()):
            if item.name is None and item.digest in by_content and by_content[item.digest].key == key:
                self.named.setdefault(by_content[item.digest].checkpoint, set()).add(key)

    def keep_the_rest(self) -> None:
        """Keep or drop what else the data files had."""
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
                    drop = self.options.prune and key not in self.taken
                    _copy(self.pruned.setdefault(tag, BlobStore()) if drop else self.home[tag], data_map, key, tag)

    def stores(self) -> list[BlobStore]:
        """The stores of the data files, each once."""
        return list({id(store): store for store in self.home.values()}.values())

    def files(self, *, unpruned: bool = False) -> dict[str, list[Entry]]:
        """The contents of each data file. Keys that a file has already keep their order; new ones follow.

        Args:
            unpruned: include what will be dropped.
        """
        files: dict[str, list[Entry]] = {tag: [] for tag in self.old}
        for store in self.stores():
            for entry in store.entries():
                files.setdefault(store.tag(entry.key) or "", []).append(entry)
        for tag, dropped in self.pruned.items() if unpruned else ():
            files[tag] += [replace(entry, blob=-1 - entry.blob) for entry in dropped.entries()]  # of another store
        for tag, data_map in self.old.items():
            # Without this, a second run with the same inputs would write other bytes.
            order = {key: number for number, key in enumerate(data_map)}
            files[tag].sort(key=lambda entry: order.get(entry.key, len(order)))
        return files

    def write(self) -> dict[Path, int]:
        """Write the data files and the programs.

        The renames are in an order in which every program has its keys at every moment. Data files come before programs,
        because programs that are in the folder can use the new data files, too. A program that is replaced may take keys
        that are pruned, so a data file has these until the programs are in place: then it is written twice.

        Returns:
            The size of each data file in bytes.
        """
        final = self.files()
        # Only a program that is replaced can take a key that is pruned; without one, nothing need be written twice.
        late = set(self.pruned) if any(output.exists() for output in self.outputs) else set()
        early = {**final, **{tag: entries for tag, entries in self.files(unpruned=True).items() if tag in late}}
        metadata = {tag: self._metadata(tag, final) for tag in final}
        changed = {tag for tag in final if not self._is_up_to_date(tag, early[tag], metadata[tag])}
        sizes = {self.directory / tag: len(map_file(self.old[tag].path)) for tag in final if tag not in changed}
        dry_run = self.options.dry_run
        with (
            folders([] if dry_run else [output.parent for output in self.outputs]),
            Staging(self.options.progress, force=self.options.force, folder=self.directory, dry_run=dry_run) as staging,
        ):

            def write_data(tag: str, entries: Sequence[Entry], *, again: bool = False) -> None:
                path = self.directory / tag
                with staging.open(path, nbytes(entries), kind=Format.PTD, again=again) as file:
                    sizes[path] = write_ptd(file, entries, metadata[tag])

            for tag in final:
                if tag in changed:
                    write_data(tag, early[tag])
            for job in self.jobs:
                rewrite = Rewrite(job.program, job.moves)
                job.nbytes = rewrite.nbytes
                with staging.open(job.output, rewrite.nbytes, kind=Format.PTE) as file:
                    rewrite.write(file)
            for tag in final:
                if tag in late:
                    write_data(tag, final[tag], again=tag in changed)
        return {self.directory / tag: sizes[self.directory / tag] for tag in final}

    def _metadata(self, tag: str, files: Mapping[str, Sequence[Entry]]) -> dict[str, str]:
        """The metadata of a data file. It lists the programs that take the file if other data files have some of its keys."""
        old = {**(self.old[tag].metadata if tag in self.old else {}), **self.options.metadata.get(tag, {})}
        if self.options.append and tag == self.data_name != self.options.data_name:
            old[APPENDED_TO] = self.options.data_name
        keys = _keys(files[tag])
        elsewhere = set(
            itertools.chain(*self.neighbours.values(), *(_keys(files[other]) for other in files if other != tag))
        )
        # Only keys that several files have are ambiguous.
        if USERS not in old and not keys & elsewhere:
            return {**old, **OF_PROGRAMS}
        replaced = {place_of(output, self.directory) for output in self.outputs}
        users = {user for user in users_of(old) if user not in replaced and (self.directory / user).exists()}
        for job in self.jobs:
            if self.home[tag] is job.own or self.home[tag] is self.shared:
                asks = {*job.moves.values(), *job.externals}
                if asks & keys or taken_by(job.program, keys):
                    users.add(place_of(job.output, self.directory))
        return {**old, **OF_PROGRAMS, USERS: json.dumps(sorted(users))}

    def _is_up_to_date(self, tag: str, entries: Sequence[Entry], metadata: Mapping[str, str]) -> bool:
        """Whether a data file exists and has these contents already."""
        data_map = self.old.get(tag)
        # A file without digests has to be read whole to be compared, which costs as much as writing it.
        if data_map is None or not data_map.has_digests or data_map.metadata != metadata:
            return False
        stored = [
            (key, data_map.digest(key), data_map.get_tensor_layout(key), data_map.alignment(key)) for key in data_map
        ]
        return stored == [(entry.key, entry.digest, entry.layout, entry.alignment) for entry in entries]

    def data_results(self) -> list[DataResult]:
        """What the run did with the data files that were given."""
        files = self.files()
        first = {tag: _first_keys(entries) for tag, entries in files.items()}
        staying = (data_map.metadata for data_map in {*self.earlier.values()})
        kept = {pair for one in (*staying, *(self._metadata(tag, files) for tag in files)) for pair in one.items()}
        had: dict[tuple[int, str], Path] = {}
        for tag, data_map in self.old.items():
            for key in data_map:
                if key in self.home[tag] and self.home[tag].digest(key) == data_map.digest(key):
                    had.setdefault((id(self.home[tag]), key), data_map.path)
        results = []
        for data_map, _, store in self.data:
            keys = []
            for key in data_map:
                if key in self.earlier:
                    keys.append(KeyResult(key, self.earlier[key].path, merged_with=self.earlier[key].path))
                    continue
                tag = store.tag(key) or ""
                same = first[tag][key]
                merged_with = had.setdefault((id(store), key), data_map.path)
                keys.append(
                    KeyResult(
                        key,
                        self.directory / tag,
                        None if merged_with == data_map.path else merged_with,
                        None if same == key else same,
                    )
                )
            lost = [pair for pair in data_map.metadata.items() if keys and pair not in kept]
            results.append(
                DataResult(data_map.path, tuple(keys), tuple(name for name, _ in lost if name != APPENDED_TO))
            )
        return results

    def result(self, job: _Job) -> ProgramResult:
        """What the run did to a program."""
        inside, inside_of = tensors_inside(job.program, self.options.names)
        return ProgramResult(
            source=job.program.path,
            path=job.output,
            bytes_before=len(job.program.data),
            bytes_after=job.nbytes,
            moved=len(job.moves),
            moved_bytes=sum(len(item.data) for item in job.moves),
            missing=tuple(sorted(job.externals - {*job.own, *self.shared} - self.earlier.keys())),
            inside=inside,
            inside_of=inside_of,
        )


def _first_keys(entries: Iterable[Entry]) -> dict[str, str]:
    """For each key of a data file the first one there that has the same bytes."""
    first: dict[int, str] = {}
    return {entry.key: first.setdefault(entry.blob, entry.key) for entry in entries}


def _differing(one: PtdDataMap, other: PtdDataMap) -> list[str]:
    """The keys that two data files have with different bytes or layouts."""
    return [
        key
        for key in one
        if key in other
        and (one.digest(key), one.get_tensor_layout(key)) != (other.digest(key), other.get_tensor_layout(key))
    ]


def _entry(data_map: PtdDataMap, key: str) -> tuple[memoryview, TensorLayout | None, int]:
    """Bytes, layout and alignment of a key."""
    return data_map.get_data(key), data_map.get_tensor_layout(key), data_map.alignment(key)


def _keys(entries: Iterable[Entry]) -> set[str]:
    return {entry.key for entry in entries}


def _copy(store: BlobStore, data_map: PtdDataMap, key: str, tag: str) -> None:
    """Add a blob of a data file to a store, for the file `tag` unless the store has it for another file already."""
    data, layout = data_map.get_data(key), data_map.get_tensor_layout(key)
    tag = (store.tag(key) if key in store else None) or tag
    try:
        address = store.add(key, data, alignment=data_map.alignment(key), tag=tag, layout=layout)
    except KeyConflictError as error:
        raise ClashError(key, data_map.path, error, delegate=False) from None
    if address != (recorded := data_map.digest(key)):
        raise IntegrityError(data_map.path, f"the bytes of {key!r} are damaged: expected {recorded}, found {address}")
