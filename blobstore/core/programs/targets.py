"""Where the contents of a run go: its data files, and the programs whose weights move there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.ptd.writer import BlobEntry
from blobstore.core.formats.pte.program import Movable, ProgramFile
from blobstore.core.programs.conflicts import ClashError
from blobstore.core.programs.deployed import taken_by
from blobstore.core.programs.options import Options
from blobstore.core.programs.series import Series
from blobstore.core.store import BlobStore, file_name

__all__ = ["Given", "ProgramJob", "Slim", "Targets"]


@dataclass(frozen=True)
class ProgramJob:
    """A program of a run: as it is, the path of the slim one, and the store of its namespace."""

    program: ProgramFile
    output: Path
    own: BlobStore

    @property
    def externals(self) -> set[str]:
        """The keys of the tensors that it takes from data files already."""
        return {external.key for external in self.program.externals}


@dataclass(frozen=True)
class Slim:
    """A program with what leaves it, and the keys under which that does."""

    job: ProgramJob
    moves: Mapping[Movable, str]

    @property
    def asked(self) -> set[str]:
        """The keys of the tensors that it will take from data files."""
        return {*self.moves.values(), *self.job.externals}

    def takes_any_of(self, keys: Set[str]) -> bool:
        """Whether it will look up one of these keys."""
        return not keys.isdisjoint(self.asked) or bool(taken_by(self.job.program, keys))


@dataclass(frozen=True)
class Given:
    """A data file that the programs take already, with the tag or the name of the file that it goes to, and the store of its
    namespace."""

    data_map: PtdDataMap
    tag: str
    store: BlobStore


@dataclass(frozen=True)
class Targets:
    """Where the contents of a run go.

    What leaves a program goes to `data_name`. `home` has the store of each data file that may be written; files of one
    namespace have one store. `earlier` has, for each key of the data files that the run leaves as they are, its file.
    """

    directory: Path
    data_name: str
    given: Sequence[Given]
    home: Mapping[str, BlobStore]
    earlier: Mapping[str, PtdDataMap]

    @classmethod
    def of(cls, jobs: Sequence[ProgramJob], given: Sequence[Given], directory: Path, options: Options) -> Targets:
        """Those of a run."""
        data_name, earlier = file_name(options.data_name), dict[str, PtdDataMap]()
        if options.append:
            series = Series(directory, data_name, force=options.force)
            earlier, data_name = series.by_key(), series.next_name()
        given = [replace(one, tag=data_name if one.tag == options.data_name else file_name(one.tag)) for one in given]
        home = {one.tag: one.store for one in given}
        # Programs of one namespace can find a key in any of their files, so one store keeps each blob of them once.
        # With several, what is shared belongs to none of them.
        stores = {id(store): store for store in [*(job.own for job in jobs), *home.values()]}
        home.setdefault(data_name, stores.popitem()[1] if len(stores) == 1 else BlobStore())
        return cls(directory, data_name, given, home, earlier)

    @property
    def shared(self) -> BlobStore:
        """The store for what leaves a program."""
        return self.home[self.data_name]

    @property
    def tags(self) -> list[str]:
        """The file names, that of the shared data first."""
        return list(dict.fromkeys([self.data_name, *self.home]))

    def stores(self) -> list[BlobStore]:
        """The stores, each once."""
        return list({id(store): store for store in self.home.values()}.values())

    def others_with(self, clash: ClashError) -> list[tuple[Path, list[str]]]:
        """The other given data files that have the key of a clash with other bytes, each with all keys of which that holds."""
        sources = [one.data_map for one in self.given if one.data_map.path == clash.source]
        return [
            (other.data_map.path, differing)
            for source in sources
            for other in self.given
            if clash.key in (differing := _differing(source, other.data_map))
        ]

    def contents(
        self, old: Mapping[str, PtdDataMap], pruned: Mapping[str, BlobStore] | None = None
    ) -> dict[str, list[BlobEntry]]:
        """The contents of each data file, with what it will lose if `pruned` has that. Keys that a file has already keep
        their order; new ones follow."""
        files: dict[str, list[BlobEntry]] = {tag: [] for tag in old}
        for store in self.stores():
            for entry in store.entries():
                files.setdefault(store.tag(entry.key) or "", []).append(entry)
        for tag, dropped in (pruned or {}).items():
            files[tag] += [entry._replace(blob=-1 - entry.blob) for entry in dropped.entries()]  # of another store
        for tag, data_map in old.items():
            # Without this, a second run with the same inputs would write other bytes.
            order = {key: number for number, key in enumerate(data_map)}
            files[tag].sort(key=lambda entry: order.get(entry.key, len(order)))
        return files


def _differing(one: PtdDataMap, other: PtdDataMap) -> list[str]:
    """The keys that two data files have with different bytes or layouts."""
    return [
        key
        for key in one
        if key in other
        and (one.digest(key), one.get_tensor_layout(key)) != (other.digest(key), other.get_tensor_layout(key))
    ]
