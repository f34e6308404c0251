"""What a device lacks of a release, and the cheapest way to get it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from blobstore.core.errors import BlobStoreError, FileAccessError, InvalidFileError, MissingDependencyError
from blobstore.core.memory.mapped_file import named, open_regular
from blobstore.releases.device.assembly import Recipe, Step
from blobstore.releases.device.installed import Installed, LocalBlob
from blobstore.releases.device.spool import Spool
from blobstore.releases.device.transfer import read_object
from blobstore.releases.index.index import TABLE_LIMIT, WORTH, File, Index, Object, Part, Table, Way, parse_table
from blobstore.releases.index.intervals import Intervals
from blobstore.releases.sources.source import Source, pieces_of, read_small

__all__ = ["Shopping"]

_TABLE_SHARE = (
    50  # a table with more than this fraction of its file is not fetched only to look for blobs that are here
)


class Shopping:
    """How to make the files that are missing.

    Args:
        installed: the folder of the device.
        source: where tables come from.
        place: the folder for what is fetched; see `Installed.fetching`.
        plain: use no encoded forms.
        verify: compare blobs that are here with their digests before anything relies on them. Otherwise a wrong one is
            found when it is used, and fetched instead.

    Attributes:
        recipes: one for each object, in order.
        ranges: what the recipes need of each spool.
        tables: the tables that were fetched, to be kept beside their files.
    """

    def __init__(self, installed: Installed, source: Source, place: Path, *, plain: bool, verify: bool = False) -> None:
        self._installed, self._source, self._verify, self._place = installed, source, verify, place
        self._checked: dict[str, LocalBlob | None] = {}
        self._plain = plain or not source.remote or not _can_decode()
        self.recipes: list[Recipe] = []
        self.ranges: dict[str, list[tuple[int, int]]] = {}
        self.tables: dict[str, bytes] = {}
        self._spools: dict[str, Spool] = {}
        self._sound: set[str] = set()

    def add(self, index: Index, files: Iterable[File], *, verify: bool = False) -> None:
        """Plan how to get those of some files of a release that are not here, or are damaged.

        Args:
            index: the release.
            files: of it.
            verify: compare all files that are here with their digests. Otherwise only those files of a data set are
                compared to which others are added, because a program reads them together.
        """
        files = list(files)
        wanted = {file.sha256: file for file in files if not self._installed.has(file.object)}
        lacking = {file.name for file in files if file.sha256 in wanted}
        # A program reads the files of a data set together: one that was damaged long ago would be blamed on the new release.
        extended = {name for data in index.data if lacking & set(data.files) for name in data.files}
        for file in files:
            if (verify or file.name in extended) and file.sha256 not in wanted:
                if file.sha256 not in self._sound and not self._installed.sound(file.object):
                    wanted[file.sha256] = file
                else:
                    self._sound.add(file.sha256)
        packed = self._in_packs(index, wanted)
        for file in wanted.values():
            if file.sha256 not in packed:
                self._add(file)

    def _in_packs(self, index: Index, wanted: Mapping[str, File]) -> set[str]:
        """Take small files from packs; the digests of these files."""
        taken: set[str] = set()
        by_name = {file.name: file for file in index.files}
        # Files of some hundred bytes cost a request each, so the publisher puts them into packs.
        for pack in index.packs:
            missing = {
                by_name[name].sha256: (by_name[name], at)
                for name, at in pack.files
                if by_name[name].sha256 in wanted and by_name[name].sha256 not in taken and by_name[name].size
            }
            if not missing:
                continue
            spool = self.spool(pack.object)
            for file, at in missing.values():
                step = Step(Part(0, file.size, file.sha256), None, spool, at)
                self._need(step)
                self.recipes.append(Recipe(file.object, self.spool(file.object), [step]))
            taken |= missing.keys()
        return taken

    def _add(self, file: File) -> None:
        plain = self.spool(file.object)
        table = self._table(file)
        if table is not None:
            steps = [self._cheapest(part, table, plain) for part in table.parts]
            cost = sum(stop - start for step in steps if step.fetched for start, stop in [step.fetched])
            # Steps cost requests, and a spool may have most of the plain file already, from a pull that was killed.
            if cost < WORTH * (file.size - plain.present):
                for step in steps:
                    self._need(step)
                self.recipes.append(Recipe(file.object, plain, steps))
                return
        self.ranges.setdefault(file.sha256, []).append((0, file.size))
        self.recipes.append(Recipe(file.object, plain))

    def _need(self, step: Step) -> None:
        if step.spool is not None and step.fetched is not None:
            self.ranges.setdefault(step.spool.wanted.sha256, []).append(step.fetched)

    @cached_property
    def _local(self) -> dict[str, LocalBlob]:
        return self._installed.blobs()

    def _table(self, file: File) -> Table | None:
        """The table of a file, if it can save anything."""
        if file.table is None:
            return None
        smaller = isinstance(file.travels, int) and file.travels < WORTH * file.size and not self._plain
        small = file.table.size * _TABLE_SHARE <= file.size
        if not smaller and not (file.kind == "data" and small and self._local):
            return None
        data = self.small(file.table)
        self.tables[file.table.sha256] = data
        return parse_table(data, file, f"{self._source.name} (the table of {file.name})")

    def small(self, wanted: Object) -> bytes:
        """A small object, in memory.

        Raises:
            InvalidFileError: it has another digest.
        """
        if wanted.size > TABLE_LIMIT:
            raise InvalidFileError(
                self._source.name, f"a table of {wanted.size} bytes; at most {TABLE_LIMIT} are possible"
            )
        with contextlib.suppress(BlobStoreError):
            if self._installed.has(wanted):
                data = read_small(self._installed.path(wanted.sha256), TABLE_LIMIT)
                if hashlib.sha256(data).hexdigest() == wanted.sha256:
                    return data
        # Once more, because a proxy may have answered with something else.
        for attempt in range(2):
            data = read_object(self._source, wanted)
            if hashlib.sha256(data).hexdigest() == wanted.sha256:
                break
            if attempt:
                raise InvalidFileError(self._source.name, f"what has the name {wanted.sha256} has another digest")
        return data

    def _cheapest(self, part: Part, table: Table, plain: Spool) -> Step:
        local = self._here(part.sha256, part.size)
        if local is not None:
            return Step(part, local)
        best, least = Step(part, None, plain, part.offset), part.size
        if self._plain:
            return best
        for way in part.ways:
            step = self._step(part, way, table)
            if step is not None and way.stored < least:
                best, least = step, way.stored
        return best

    def _here(self, digest: str, size: int) -> LocalBlob | None:
        """A blob that is here, None if it is not, or has another size, or was checked and is damaged."""
        local = self._local.get(digest)
        if local is None or local.size != size:
            return None
        if self._verify and digest not in self._checked:
            hasher = hashlib.sha256()
            with contextlib.suppress(OSError), open_regular(local.path) as descriptor:
                for piece in pieces_of(descriptor, local.offset, local.offset + local.size):
                    hasher.update(piece)
            self._checked[digest] = local if hasher.hexdigest() == digest else None
        return self._checked[digest] if self._verify else local

    def _step(self, part: Part, way: Way, table: Table) -> Step | None:
        if way.encoding == "copy":
            return None  # the blob is not here
        # A difference helps only a device that has the blob it was taken from.
        base = None
        if way.base:
            base = self._here(way.base, part.size)
            if base is None:
                return None
        return Step(part, base, self.spool(table.objects[way.object]), way.at, way)

    def spool(self, wanted: Object) -> Spool:
        """The spool of an object."""
        if wanted.sha256 not in self._spools:
            self._spools[wanted.sha256] = Spool(self._place, wanted)
        open_spool = self._spools[wanted.sha256]
        if open_spool.wanted != wanted:
            raise InvalidFileError(self._source.name, f"{wanted.sha256} occurs with two sizes")
        return open_spool

    @property
    def spools(self) -> list[Spool]:
        """All spools."""
        return list(self._spools.values())

    def check_room(self, folder: Path, further: int = 0) -> None:
        """Check that the files fit on the disk, before the first byte is written.

        Args:
            folder: where it goes.
            further: bytes that are made of the files, beside them.

        Raises:
            FileAccessError: there is less.
        """
        need, largest = further, Object("0" * 64, 0)
        for spool in self.spools:
            for start, stop in Intervals(self.ranges.get(spool.wanted.sha256, ())):
                need += sum(b - a for a, b in spool.missing(start, stop))
        for recipe in self.recipes:
            need += 0 if recipe.steps is None else recipe.wanted.size
            largest = max(largest, recipe.wanted, key=lambda one: one.size)
        with named(folder):
            disk = os.statvfs(folder)
        # Some file systems, such as those of networks, report no sizes at all: then nothing is refused.
        free = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and need > free:
            raise FileAccessError(
                folder / largest.sha256,
                OSError(
                    errno.ENOSPC,
                    f"the release needs {need} bytes, {largest.size} of them for this file, and {free} are available",
                ),
            )

    def discard(self) -> None:
        """Remove what was fetched and is no longer needed."""
        for spool in self._spools.values():
            spool.discard()


def _can_decode() -> bool:
    try:
        import blobstore.releases.index.encoding  # noqa: F401
    except MissingDependencyError:
        return False
    return True
