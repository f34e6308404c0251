"""One run over a folder: programs and data files are written together with what earlier runs left there."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.disk.folders import folders
from blobstore.core.disk.kinds import Format
from blobstore.core.disk.staging import Staging, refuse_inputs
from blobstore.core.errors import IntegrityError, KeyConflictError, OutputPathError
from blobstore.core.formats.keys import OF_PROGRAMS
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.ptd.writer import BlobEntry, write_ptd
from blobstore.core.formats.pte.rewrite import Rewrite
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import give_back, map_file
from blobstore.core.programs.conflicts import ClashError
from blobstore.core.programs.deployed import USERS, describing, place_of, taken_by, users_of, weights_among
from blobstore.core.programs.found import Earlier, find
from blobstore.core.programs.inside import tensors_inside
from blobstore.core.programs.options import Options
from blobstore.core.programs.planning import MovePlan, NamesByContent, clash_with, has, names_by_content
from blobstore.core.programs.results import DataResult, DedupResult, KeyResult, ProgramResult
from blobstore.core.programs.series import APPENDED_TO, Series
from blobstore.core.programs.targets import Given, ProgramJob, Slim, Targets
from blobstore.core.store import BlobStore, nbytes

__all__ = ["run"]


def run(
    jobs: Sequence[ProgramJob],
    given: Sequence[Given],
    directory: Path,
    inputs: Sequence[Path],
    options: Options,
) -> DedupResult:
    """Write programs, and data files with what they take, into a folder that may have others already.

    What leaves a program goes to the file `options.data_name`, unless a file of the program's own namespace has its key.

    Args:
        jobs: the programs.
        given: the data files that they take already.
        directory: the folder.
        inputs: the files that all these were read from.
        options: the user's options.

    Raises:
        As `dedup_programs`.
    """
    targets = Targets.of(jobs, given, directory, options)
    outputs = [job.output for job in jobs]
    _check_outputs(outputs, targets, inputs, options)
    found = find(directory, targets.tags, outputs, force=options.force)
    bytes_before = sum(len(map_file(path)) for path in inputs) + found.bytes_held(inputs)
    try:
        _keep_what_others_take(targets, found)  # first, because it must not change
        _add_data(targets, found)
        by_content = _names(jobs, options)
        slim = _move_out(jobs, targets, found, by_content, options)
    except ClashError as clash:
        raise clash.explained(found.takers, [job.program for job in jobs], targets.others_with(clash)) from None
    rest = _keep_the_rest(slim, targets, found, prune=options.prune)
    contents = targets.contents(found.old)
    metadata = {tag: _metadata(tag, contents, slim, targets, found, options) for tag in contents}
    replaced = [output for output in outputs if output.exists()]
    early = targets.contents(found.old, rest.pruned) if replaced else contents
    sizes, results = _write(slim, _Files(contents, early, metadata, found.old), targets, options)
    return DedupResult(
        programs=results,
        data_files=list(sizes),
        bytes_before=bytes_before,
        bytes_after=sum(sizes.values()) + sum(program.bytes_after for program in results),
        kept=[program.path for program in found.staying],
        replaced=replaced,
        replaced_keys=rest.replaced_keys,
        unused_keys=[key for store in targets.stores() for key in store if key not in rest.taken],
        pruned_keys=[key for dropped in rest.pruned.values() for key in dropped],
        data_inputs=_data_results(targets, found, contents, metadata),
        named=_named(slim, by_content),
    )


def _check_outputs(outputs: Sequence[Path], targets: Targets, inputs: Sequence[Path], options: Options) -> None:
    """Raise OutputPathError if two programs have the same output; without `force`, if an input would be replaced; and if
    the folder was appended to, and this run would extend its first data file."""
    if len(set(outputs)) != len(outputs):
        twice = Counter(outputs).most_common(1)[0][0]
        raise OutputPathError(f"{twice}: two of the programs have this file name; rename one of them")
    # A deduplicated program has lost its weights: written over its own source, they could not be told from it again.
    if not options.force:
        every_input = [*inputs, *(source for names in options.names for source in names.sources)]
        refuse_inputs([*outputs, *(targets.directory / tag for tag in targets.home)], every_input)
    if not options.append:
        for tag in targets.home:
            Series(targets.directory, tag, force=options.force).check_extensible()


def _keep_what_others_take(targets: Targets, found: Earlier) -> None:
    """Add what programs take that stay."""
    for tag, data_map in found.old.items():
        held = found.held(tag)
        for key in data_map:
            if key in held:
                _copy(targets.home[tag], data_map, key, tag)


def _add_data(targets: Targets, found: Earlier) -> None:
    """Add the data files that the programs take already, whose keys no program that stays may have in itself."""
    for one in targets.given:
        for key in one.data_map:
            if key in found.inside:
                raise KeyConflictError(
                    f"{one.data_map.path}: {found.inside[key]} has key {key!r} in itself, so no data file in the folder may "
                    "have it"
                )
            if key not in targets.earlier:
                _copy(one.store, one.data_map, key, one.tag)
            elif not has(targets.earlier[key], key, *_entry(one.data_map, key)):
                raise clash_with(targets.earlier[key], key, one.data_map.path, delegate=False)


def _names(jobs: Sequence[ProgramJob], options: Options) -> NamesByContent:
    """The names that checkpoints give to what may leave the programs."""
    sizes = {len(item.data) for job in jobs for item in job.program.movable() if item.name is None}
    return names_by_content([*options.names, *options.names_beside], sizes)


def _move_out(
    jobs: Sequence[ProgramJob], targets: Targets, found: Earlier, by_content: NamesByContent, options: Options
) -> list[Slim]:
    """Move what is large enough out of the programs."""
    leaving: set[str] = set()
    for job in jobs:
        weights = weights_among(job.program)
        least = max(options.keep_small, 1)
        leaving.update(b.key for b in job.program.named_data if b.span.size >= least and b.key in weights)
    plan = MovePlan(
        shared=targets.shared,
        data_name=targets.data_name,
        keep_small=options.keep_small,
        by_content=by_content,
        earlier=targets.earlier,
        # a tensor must not have a key that a delegate looks up, in whichever place
        reserved=found.inside.keys() | {blob.key for job in jobs for blob in job.program.named_data},
        inside=found.inside.keys(),
        leaving=leaving,
        progress=options.progress,
    )
    return [Slim(job, plan.moves(job.program, job.own)) for job in jobs]


def _named(slim: Sequence[Slim], by_content: NamesByContent) -> dict[str, int]:
    """By checkpoint, how many tensors got their names from it."""
    keys: dict[str, set[str]] = {}
    for item, key in (move for one in slim for move in one.moves.items()):
        if item.name is None and item.digest in by_content and by_content[item.digest].key == key:
            keys.setdefault(by_content[item.digest].checkpoint, set()).add(key)
    return {checkpoint: len(named) for checkpoint, named in keys.items()}


@dataclass(frozen=True)
class _Rest:
    """What became of the other keys of the old data files: those that a program takes when the run is done, of whichever
    file; those whose old bytes are dropped; and what is dropped from each file."""

    taken: set[str]
    replaced_keys: list[str]
    pruned: dict[str, BlobStore]


def _keep_the_rest(slim: Sequence[Slim], targets: Targets, found: Earlier, *, prune: bool) -> _Rest:
    """Keep or drop what else the data files had."""
    # Before anything is kept here: files of one namespace have one store, where a key may come from another file.
    added = {tag: set(store) for tag, store in targets.home.items()}
    taken = _taken(slim, targets, found)
    named = {item.key for one in slim for item in one.job.program.named_data}
    in_programs = named.difference(*(one.moves.values() for one in slim))
    rest = _Rest(taken, [], {tag: BlobStore() for tag in found.old})
    for tag, data_map in found.old.items():
        home = targets.home[tag]
        homes = dict.fromkeys(set(data_map) - taken, rest.pruned[tag]) if prune else {}
        for key in data_map:
            if key in in_programs or (key in added[tag] and home.digest(key) != data_map.digest(key)):
                rest.replaced_keys.append(key)
            elif key not in added[tag]:
                _copy(homes.get(key, home), data_map, key, tag)
    return rest


def _taken(slim: Sequence[Slim], targets: Targets, found: Earlier) -> set[str]:
    """The keys that a program takes when the run is done, and those of records that describe one of them."""
    taken = set(found.takers).union(*(one.asked for one in slim))
    every_key = set(itertools.chain(*found.old.values(), *targets.stores()))
    for one in slim:
        taken |= taken_by(one.job.program, every_key - taken)
    for data_map in [*found.old.values(), *(one.data_map for one in targets.given)]:
        taken |= describing(data_map, taken)
    return taken


def _metadata(
    tag: str,
    contents: Mapping[str, Sequence[BlobEntry]],
    slim: Sequence[Slim],
    targets: Targets,
    found: Earlier,
    options: Options,
) -> dict[str, str]:
    """The metadata of a data file. It lists the programs that take the file if other data files have some of its keys."""
    old = {**(found.old[tag].metadata if tag in found.old else {}), **options.metadata.get(tag, {})}
    if options.append and tag == targets.data_name != options.data_name:
        old[APPENDED_TO] = options.data_name
    keys = _keys(contents[tag])
    others = [_keys(entries) for other, entries in contents.items() if other != tag]
    # Only keys that several files have are ambiguous.
    if USERS not in old and keys.isdisjoint(itertools.chain(*found.neighbours.values(), *others)):
        return {**old, **OF_PROGRAMS}
    places = {place_of(one.job.output, targets.directory): one for one in slim}
    users = {user for user in users_of(old) if user not in places and (targets.directory / user).exists()}
    for place, one in places.items():
        # Of a namespace with a file of its own, programs take nothing from those of others.
        if targets.home[tag] in (one.job.own, targets.shared) and one.takes_any_of(keys):
            users.add(place)
    return {**old, **OF_PROGRAMS, USERS: json.dumps(sorted(users))}


@dataclass(frozen=True)
class _Files:
    """The data files that a run writes, and the `old` ones that are there. Until all programs are in place, they have their
    `early` contents: a program that is replaced may take keys that are pruned."""

    contents: Mapping[str, Sequence[BlobEntry]]
    early: Mapping[str, Sequence[BlobEntry]]
    metadata: Mapping[str, Mapping[str, str]]
    old: Mapping[str, PtdDataMap]

    def is_up_to_date(self, tag: str) -> bool:
        """Whether a data file exists and has its early contents already."""
        data_map = self.old.get(tag)
        # A file without digests has to be read whole to be compared, which costs as much as writing it.
        if data_map is None or not data_map.has_digests or data_map.metadata != self.metadata[tag]:
            return False
        stored = [
            (key, data_map.digest(key), data_map.get_tensor_layout(key), data_map.alignment(key)) for key in data_map
        ]
        return stored == [(entry.key, entry.digest, entry.layout, entry.alignment) for entry in self.early[tag]]


def _write(
    slim: Sequence[Slim], files: _Files, targets: Targets, options: Options
) -> tuple[dict[Path, int], list[ProgramResult]]:
    """Write the data files and the programs, and return the sizes of the former and what became of the latter.

    The renames are in an order in which every program has its keys at every moment. Data files come before programs,
    because programs that are in the folder can use the new data files, too. One that loses keys is written again after
    them.
    """
    changed = [tag for tag in files.contents if not files.is_up_to_date(tag)]
    late = [tag for tag in files.contents if len(files.contents[tag]) < len(files.early[tag])]
    sizes = {tag: len(map_file(files.old[tag].path)) for tag in files.contents if tag not in changed}
    results = []
    with (
        folders([] if options.dry_run else [one.job.output.parent for one in slim]),
        Staging(options.progress, force=options.force, folder=targets.directory, dry_run=options.dry_run) as staging,
    ):

        def write_data(tag: str, entries: Sequence[BlobEntry], *, again: bool = False) -> None:
            with staging.open(targets.directory / tag, nbytes(entries), kind=Format.PTD, again=again) as file:
                sizes[tag] = write_ptd(file, entries, files.metadata[tag])

        for tag in changed:
            write_data(tag, files.early[tag])
        for one in slim:
            rewrite = Rewrite(one.job.program, one.moves)
            with staging.open(one.job.output, rewrite.nbytes, kind=Format.PTE) as file:
                rewrite.write(file)
            results.append(_program_result(one, rewrite.nbytes, targets, options))
        for tag in late:
            write_data(tag, files.contents[tag], again=tag in changed)
    return {targets.directory / tag: sizes[tag] for tag in files.contents}, results


def _program_result(slim: Slim, size: int, targets: Targets, options: Options) -> ProgramResult:
    """What the run did to a program."""
    program = slim.job.program
    inside, inside_of = tensors_inside(program, options.names)
    return ProgramResult(
        source=program.path,
        path=slim.job.output,
        bytes_before=len(program.data),
        bytes_after=size,
        moved=len(slim.moves),
        moved_bytes=sum(len(item.data) for item in slim.moves),
        missing=tuple(sorted(slim.job.externals.difference(slim.job.own, targets.shared, targets.earlier))),
        inside=inside,
        inside_of=inside_of,
    )


def _data_results(
    targets: Targets,
    found: Earlier,
    contents: Mapping[str, Sequence[BlobEntry]],
    metadata: Mapping[str, Mapping[str, str]],
) -> list[DataResult]:
    """What the run did with the data files that were given."""
    whereabouts = _Whereabouts(
        targets, _first_files(targets, found), {tag: _first_keys(entries) for tag, entries in contents.items()}
    )
    files = {id(data_map): data_map for data_map in targets.earlier.values()}.values()
    every_metadata = [*(data_map.metadata for data_map in files), *metadata.values()]
    kept = {pair for one in every_metadata for pair in one.items()}
    results = []
    for one in targets.given:
        keys = tuple(whereabouts.of(key, one) for key in one.data_map)
        lost = [pair for pair in one.data_map.metadata.items() if keys and pair not in kept]
        results.append(DataResult(one.data_map.path, keys, tuple(name for name, _ in lost if name != APPENDED_TO)))
    return results


@dataclass(frozen=True)
class _Whereabouts:
    """Where the keys of the data files that were given are now, by `_first_files` and, for each data file, `_first_keys`."""

    targets: Targets
    files: Mapping[tuple[int, str], Path]
    keys: Mapping[str, Mapping[str, str]]

    def of(self, key: str, given: Given) -> KeyResult:
        """What became of a key of such a file."""
        if (earlier := self.targets.earlier.get(key)) is not None:
            return KeyResult(key, earlier.path, merged_with=earlier.path)
        tag = given.store.tag(key) or ""
        file, first = self.files[id(given.store), key], self.keys[tag][key]
        merged_with = None if file == given.data_map.path else file
        return KeyResult(key, self.targets.directory / tag, merged_with, None if first == key else first)


def _first_files(targets: Targets, found: Earlier) -> dict[tuple[int, str], Path]:
    """For each key of a store the file that had it first, with the bytes that it has now: of the folder, then of the inputs."""
    firsts: dict[tuple[int, str], Path] = {}
    for tag, data_map in found.old.items():
        store = targets.home[tag]
        for key in data_map:
            if key in store and store.digest(key) == data_map.digest(key):
                firsts.setdefault((id(store), key), data_map.path)
    for one in targets.given:
        for key in one.data_map:
            firsts.setdefault((id(one.store), key), one.data_map.path)
    return firsts


def _first_keys(entries: Iterable[BlobEntry]) -> dict[str, str]:
    """For each key of a data file the first one there that has the same bytes."""
    first: dict[int, str] = {}
    return {entry.key: first.setdefault(entry.blob, entry.key) for entry in entries}


def _entry(data_map: PtdDataMap, key: str) -> tuple[memoryview, TensorLayout | None, int]:
    """Bytes, layout and alignment of a key."""
    return data_map.get_data(key), data_map.get_tensor_layout(key), data_map.alignment(key)


def _keys(entries: Iterable[BlobEntry]) -> set[str]:
    return {entry.key for entry in entries}


def _copy(store: BlobStore, data_map: PtdDataMap, key: str, tag: str) -> None:
    """Add a blob of a data file to a store, for the file `tag` unless the store has it for another file already."""
    data, layout, alignment = _entry(data_map, key)
    tag = (store.tag(key) if key in store else None) or tag
    try:
        address = store.add(key, data, alignment=alignment, tag=tag, layout=layout)
    except KeyConflictError as error:
        raise ClashError(key, data_map.path, error, delegate=False) from None
    if address != (recorded := data_map.digest(key)):
        raise IntegrityError(data_map.path, f"the bytes of {key!r} are damaged: expected {recorded}, found {address}")
    give_back(data)  # the system copies it from file to file
