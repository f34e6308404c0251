"""What leaves the programs of a run, and under which key."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blobstore.core.disk.progress import Progress
from blobstore.core.errors import IntegrityError, KeyConflictError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.keys import is_content_key
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.pte.program import Movable, ProgramFile
from blobstore.core.memory.digest import Digest, digest
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.programs.conflicts import ClashError
from blobstore.core.programs.deployed import weights_among
from blobstore.core.store import BlobStore

__all__ = ["MovePlan", "NamesByContent", "clash_with", "has", "names_by_content"]


class Name(NamedTuple):
    """A name of a content, with the layout of its tensor and the checkpoint that has it."""

    key: str
    layout: TensorLayout | None
    checkpoint: str


NamesByContent = Mapping[Digest, Name]


def names_by_content(names: Iterable[NamedDataMap], sizes: Collection[int]) -> NamesByContent:
    """The name of each content in checkpoints, if it has only one. Contents of other sizes than these are not read."""
    names_of: dict[Digest, dict[tuple[str, TensorLayout | None], Name]] = {}
    for checkpoint in names:
        for key, data in checkpoint.views():
            if len(data) in sizes and not is_content_key(key):
                name = Name(key, checkpoint.get_tensor_layout(key), checkpoint.name)
                # computed, because a recorded digest may be wrong
                names_of.setdefault(digest(data), {}).setdefault(name[:2], name)
    return {address: next(iter(found.values())) for address, found in names_of.items() if len(found) == 1}


@dataclass(frozen=True)
class MovePlan:
    """What leaves the programs of a run, and under which key.

    Attributes:
        shared: the store for what leaves, unless the program's own store has the key.
        data_name: the file name for what goes to `shared`.
        keep_small: what has fewer bytes stays in its program.
        by_content: names to use as keys.
        reserved: keys that no tensor may get, because delegates look them up or because they are `inside`.
        earlier: for each key of the data files that stay as they are, its file.
        inside: keys that other programs of the folder have in themselves, so that no data file may have them.
        leaving: keys of named data that leave a program of the run, and so every program that has them.
        progress: called with every step.
    """

    shared: BlobStore
    data_name: str
    keep_small: int
    by_content: NamesByContent
    earlier: Mapping[str, PtdDataMap]
    reserved: Collection[str]
    inside: Collection[str]
    leaving: Collection[str]
    progress: Progress | None

    def moves(self, program: ProgramFile, own: BlobStore) -> dict[Movable, str]:
        """Put what leaves a program into a store, `own` if its namespace has the key there, and return the key of each
        item.

        Raises:
            ClashError: a delegate looks up a key that has other bytes in the store.
            KeyConflictError: the application's own data has such a key.
        """
        items = list(program.movable())
        total, done = sum(len(item.data) for item in items), 0
        moves: dict[Movable, str] = {}
        for item in items:
            if item.kind == "named_data":
                # a blob that is in a data file must not stay: the runtime refuses a key that it finds in two places
                leaves = any(item.name in keys for keys in (self.leaving, own, self.shared, self.earlier))
            else:
                leaves = len(item.data) >= self.keep_small
            if leaves:
                key = self._add(item, own)
                if key is not None:
                    moves[item] = key
            done += len(item.data)
            if self.progress:
                self.progress(f"reading {program.path.name}", done, total)
        return moves

    def _add(self, item: Movable, own: BlobStore) -> str | None:
        """Add an item to a store and return its key; None if it must stay in its program."""
        for key in _candidates(item, self.by_content):
            if key in (self.inside if item.kind == "named_data" else self.reserved):
                continue
            try:
                self._add_as(key, item, own)
            except ClashError as clash:
                # A tensor can have another key. What a delegate looks up cannot.
                if item.kind == "named_data":
                    raise _of_program(item, clash) from None
            else:
                return key
        return None

    def _add_as(self, key: str, item: Movable, own: BlobStore) -> None:
        """Put an item under a key, unless a data file that stays has it; ClashError if the key has other bytes."""
        if key in self.earlier:
            if not has(self.earlier[key], key, item.data, item.layout, item.alignment):
                raise clash_with(self.earlier[key], key, item.program.path, delegate=True)
            return
        store = own if key in own else self.shared
        tag = store.tag(key) if key in store else self.data_name
        try:
            store.add(key, item.data, alignment=item.alignment, layout=item.layout, tag=tag)
        except KeyConflictError as error:
            raise ClashError(key, item.program.path, error, delegate=True) from None


def has(data_map: PtdDataMap, key: str, data: memoryview, layout: TensorLayout | None, alignment: int) -> bool:
    """Whether a data file can stand for these bytes under its key, compared by digest.

    Raises:
        IntegrityError: it would, but its bytes are damaged.
    """
    wanted = digest(data)
    if (
        data_map.digest(key) != wanted
        or data_map.get_tensor_layout(key) != layout
        or data_map.byte_range(key)[0] % alignment
    ):
        return False
    if (actual := digest(data_map.get_data(key))) != wanted:
        raise IntegrityError(data_map.path, f"the bytes of {key!r} are damaged: expected {wanted}, found {actual}")
    return True


def clash_with(data_map: PtdDataMap, key: str, source: Path, *, delegate: bool) -> ClashError:
    """The error for a program or a data file that has other bytes for a key than a data file that stays as it is."""
    return ClashError(
        key, source, KeyConflictError(f"key {key!r} has other bytes in {data_map.path}"), delegate=delegate
    )


def _of_program(item: Movable, clash: ClashError) -> KeyConflictError:
    """The error for named data of a program, which a delegate looks up or only the application."""
    if clash.key in weights_among(item.program):
        return clash
    return KeyConflictError(
        f"{clash}; no delegate of this program looks for the key, so it would stay inside, but the runtime refuses a key that "
        "it finds in two places. Write to another folder, or give the program another key"
    )


def _candidates(item: Movable, by_content: NamesByContent) -> Iterable[str]:
    """The keys to try, best first."""
    if item.name is not None:
        # the program looks up this name, so there is no other candidate; if the name is taken, the item stays
        yield item.name
        return
    name = by_content.get(item.digest)
    if name is not None and name.layout == item.layout:
        yield name.key
    yield item.key
    for number in range(2, 100):  # two contents with one digest have never been seen, but each would get a key
        yield f"{item.key}.{number}"
