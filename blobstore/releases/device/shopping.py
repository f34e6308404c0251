"""What a device lacks of a release, and the cheapest way to get it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from blobstore.core.disk.folders import check_room
from blobstore.core.errors import (
    BlobStoreError,
    InvalidFileError,
    MissingDependencyError,
    ReleaseError,
)
from blobstore.core.memory.digest import sha256
from blobstore.releases.device.assembly import Assembly, Piece
from blobstore.releases.device.installed import Installed, LocalBlob
from blobstore.releases.device.spool import Spool
from blobstore.releases.device.transfer import read_object
from blobstore.releases.index.changes import LONG, changed_list, changes_since
from blobstore.releases.index.index import TABLE_LIMIT, Index, Object
from blobstore.releases.index.intervals import Intervals
from blobstore.releases.index.parts import Part, Parts, parse_parts
from blobstore.releases.index.ways import EARLIER, WAYS, Way, Ways, cheapest, parse_ways
from blobstore.releases.sources.source import Source, read_small, sha256_of

__all__ = ["Shopping"]

_HARDLY = 0.4
"""Of the bytes of what is missing: devices with a release of those before fetch less."""

_WORTH = 0.98
"""A file whose parts take more than this share of its bytes is fetched whole, if it is there whole: steps cost requests."""


class Shopping:
    """How to make the files that are missing.

    Args:
        installed: the folder of the device.
        source: where lists of parts and ways come from.
        place: the folder for what is fetched; see `Installed.fetching`.
        plain: decode nothing.
        fresh: let no cache answer with a list of ways.
        verify: compare contents that are here with their digests before anything relies on them. Otherwise a wrong one is
            found when it is used.

    Attributes:
        bases: contents that others are differences to and that must be made first, in this order; they are not kept.
        assemblies: one for each file that is missing.
        ranges: what the assemblies need of each spool.
        parts: the list of the parts of the release, to be kept beside its files; None if it is here, or none is needed.
        source_name: as messages call the source.
    """

    def __init__(
        self,
        installed: Installed,
        source: Source,
        place: Path,
        *,
        plain: bool,
        fresh: bool = False,
        verify: bool = False,
    ) -> None:
        self._installed, self._source, self._verify, self._place = installed, source, verify, place
        self._checked: dict[str, LocalBlob | None] = {}
        self._plain, self._fresh, self.source_name = plain, fresh, source.name
        self.bases: list[Assembly] = []
        self.assemblies: list[Assembly] = []
        self.ranges: dict[str, list[tuple[int, int]]] = {}
        self.parts: bytes | None = None
        self._spools: dict[str, Spool] = {}

    def add(self, index: Index, index_sha256: str, *, verify: bool = False) -> None:
        """Plan how to get those files of a release that are not here, or are damaged.

        Args:
            index, index_sha256: the release.
            verify: compare all files that are here with their digests.

        Raises:
            ReleaseError: nothing that can be decoded leads to a content.
            InvalidFileError: a list from the source is malformed.
        """
        here = self._installed.sound if verify else self._installed.has
        missing = {file.object for file in index.files if not here(file.object)}
        if not missing and self._installed.has(index.parts):
            return
        data = self._list(index)
        if not self._installed.has(index.parts):
            self.parts = data
        parts = parse_parts(data, index, f"{self._source.name} (the parts of {index.name} {index.version})")
        wanted = [(file, listed) for file, listed in parts.of(index) if file in missing]
        routes = self._routes(index, index_sha256, parts, {part.sha256 for _, listed in wanted for part in listed})
        for file, listed in wanted:
            self.assemblies.append(self._assembly(file, listed, routes, plain=index.plain))

    def _assembly(self, file: Object, listed: Sequence[Part], routes: _Routes, *, plain: bool) -> Assembly:
        """The cheaper one of two: the file is fetched whole, if that can be, or made of its parts."""
        if plain and file.size:
            spool = self.spool(file)
            if routes.cost(part.sha256 for part in listed) >= _WORTH * (file.size - spool.present):
                self.ranges.setdefault(file.sha256, []).append((0, file.size))
                return Assembly(file, spool, None)
        return Assembly(file, None, [routes.step(part) for part in listed])

    def _decodes(self, index: Index) -> bool:
        # bytes of a folder on this machine cost less than decoding them
        return not self._plain and (self._source.remote or not index.plain) and _can_decode()

    def _routes(self, index: Index, index_sha256: str, parts: Parts, needed: set[str]) -> _Routes:
        decode = self._decodes(index)
        lacking = any(self.here(digest, parts.contents[digest]) is None for digest in needed)
        ways = self._ways(index, index_sha256, parts) if lacking and (decode or not index.plain) else None
        routes = _Routes(self, parts, *_with_whole_files(index, parts, ways), decode=decode)
        # A device with something that saves hardly anything may have a much older release.
        total = sum(parts.contents[digest] for digest in needed)
        if ways is not None and self._local and routes.cost(needed) > _HARDLY * total:
            more = self._ways(index, index_sha256, parts, EARLIER)
            if more is not None:
                routes = _Routes(self, parts, *_with_whole_files(index, parts, more), decode=decode)
        return routes

    def _ways(self, index: Index, index_sha256: str, parts: Parts, name: str = WAYS) -> Ways | None:
        data = self._source.beside(index, name, fresh=self._fresh)
        if data is None:
            if index.plain or name == EARLIER:
                return None
            raise ReleaseError(
                f"{self._source.name}: {index.name} {index.version} has no list of ways to its contents, {WAYS}"
            )
        return parse_ways(data, index_sha256, parts, f"{self._source.name} (the ways of {index.name} {index.version})")

    def need(self, step: Piece) -> Piece:
        """Note the range that a step needs."""
        if step.spool is not None and step.fetched is not None:
            self.ranges.setdefault(step.spool.wanted.sha256, []).append(step.fetched)
        return step

    def made(self, sha256: str, size: int) -> LocalBlob:
        """Where a base that is made first will be."""
        return LocalBlob(self._installed.made(self._place) / sha256, 0, size)

    @cached_property
    def _local(self) -> dict[str, LocalBlob]:
        return self._installed.blobs()

    def _list(self, index: Index) -> bytes:
        """The list of the parts of a release.

        Raises:
            InvalidFileError: it has another digest.
        """
        wanted = index.parts
        with contextlib.suppress(BlobStoreError):
            if self._installed.has(wanted):
                data = read_small(self._installed.path(wanted.sha256), TABLE_LIMIT)
                if sha256(data) == wanted.sha256:
                    return data
        data = self._changed(index) if wanted.size > LONG and self._decodes(index) else b""
        if sha256(data) == wanted.sha256:
            return data
        # Once more, because a proxy may have answered with something else.
        for attempt in range(2):
            data = read_object(self._source, wanted)
            if sha256(data) == wanted.sha256:
                break
            if attempt:
                raise InvalidFileError(self._source.name, f"what has the name {wanted.sha256} has another digest")
        return data

    def _changed(self, index: Index) -> bytes:
        """The list as what changed since that of the current release; nothing if it cannot be made."""
        with contextlib.suppress(BlobStoreError):
            if (current := self._installed.current()) is not None:
                earlier, parts = current
                changes = self._source.beside(index, changes_since(earlier), fresh=self._fresh)
                return b"" if changes is None else changed_list(changes, parts, index.parts, self._source.name)
        return b""

    def here(self, digest: str, size: int) -> LocalBlob | None:
        """A content that is here, None if it is not, or has another size, or was checked and is damaged."""
        local = self._local.get(digest)
        if local is None or local.size != size:
            return None
        if self._verify and digest not in self._checked:
            self._checked[digest] = None
            with contextlib.suppress(OSError):
                if sha256_of(local.path, local.offset, local.offset + local.size) == digest:
                    self._checked[digest] = local
        return self._checked[digest] if self._verify else local

    def spool(self, wanted: Object) -> Spool:
        """The spool of an object."""
        if wanted.sha256 not in self._spools:
            self._spools[wanted.sha256] = Spool(self._place, wanted)
        open_spool = self._spools[wanted.sha256]
        if open_spool.wanted.size != wanted.size:
            raise InvalidFileError(self._source.name, f"{wanted.sha256} occurs with two sizes")
        return open_spool

    @property
    def spools(self) -> list[Spool]:
        """All spools."""
        return list(self._spools.values())

    def check_room(self, folder: Path) -> None:
        """Check that the files fit on the disk, before the first byte is written.

        Args:
            folder: where it goes.

        Raises:
            FileAccessError: there is less.
        """
        need, largest = 0, Object("0" * 64, 0)
        for spool in self.spools:
            for start, stop in Intervals(self.ranges.get(spool.wanted.sha256, ())):
                need += sum(b - a for a, b in spool.missing(start, stop))
        for assembly in [*self.bases, *self.assemblies]:
            need += 0 if assembly.steps is None else assembly.wanted.size
            largest = max(largest, assembly.wanted, key=lambda one: one.size)
        check_room(folder, need, folder / largest.sha256, largest.size, "the release")

    def discard(self) -> None:
        """Remove what was fetched and is no longer needed."""
        for spool in self._spools.values():
            spool.discard()


class _Routes:
    """The cheapest way to each content of a release, through others if that is cheaper."""

    def __init__(
        self,
        shopping: Shopping,
        parts: Parts,
        objects: Sequence[Object],
        bases: Sequence[tuple[str, int]],
        ways: Sequence[Sequence[Way]],
        *,
        decode: bool,
    ) -> None:
        self._shopping, self._objects = shopping, objects
        contents = [*parts.contents.items(), *bases]
        self._digests = [digest for digest, _ in contents]
        self._sizes = [size for _, size in contents]
        self._numbers = {digest: number for number, digest in reversed(list(enumerate(self._digests)))}
        self._local = [shopping.here(digest, size) for digest, size in contents]
        here = [local is not None for local in self._local]
        self._best = cheapest(ways, here, _readable if decode else lambda way: way.encoding == "raw" and way.base < 0)

    def cost(self, digests: Iterable[str]) -> int:
        """The bytes to fetch for some contents; those of what cannot be fetched count as they are."""
        total = 0
        for number in {self._numbers[digest] for digest in digests}:
            route = self._best[number]
            total += self._sizes[number] if route is None else route.cost
        return total

    def step(self, part: Part) -> Piece:
        """Where the bytes of a part come from."""
        return self._step(self._numbers[part.sha256], part)

    def _step(self, number: int, part: Part) -> Piece:
        route, shopping = self._best[number], self._shopping
        if route is None:
            raise ReleaseError(
                f"{shopping.source_name}: no form of the content {part.sha256} can be read; forms with fewer bytes need "
                "zstandard, and a release that was published with plain (--plain) has whole files"
            )
        if route.way is None:
            return Piece(part, self._local[number])
        base = self._base(route.way.base) if route.way.base >= 0 else None
        spool = shopping.spool(self._objects[route.way.object])
        return shopping.need(Piece(part, base, spool, route.way))

    def _base(self, number: int) -> LocalBlob:
        """A content that another one is a difference to: it is here, or is made first, and before it what it is made of."""
        chain: dict[int, None] = {}
        at = number
        while self._local[at] is None:
            route = self._best[at]
            if at in chain or route is None or route.way is None:
                raise ReleaseError(f"{self._shopping.source_name}: the ways to {self._digests[at]} lead in a circle")
            chain[at] = None
            if route.way.base < 0:
                break
            at = route.way.base
        for at in reversed(chain):
            digest, size = self._digests[at], self._sizes[at]
            step = self._step(at, Part(0, size, digest))
            self._local[at] = self._shopping.made(digest, size)
            self._shopping.bases.append(Assembly(Object(digest, size), None, [step]))
        made = self._local[number]
        assert made is not None  # noqa: S101 - it was here, or is in the chain
        return made


def _with_whole_files(
    index: Index, parts: Parts, ways: Ways | None
) -> tuple[list[Object], list[tuple[str, int]], list[list[Way]]]:
    """Objects, bases and ways, with those of whole files."""
    objects = list(ways.objects) if ways is not None else []
    bases = list(ways.bases) if ways is not None else []
    listed = [list(some) for some in ways.ways] if ways is not None else [[] for _ in parts.contents]
    if index.plain:
        numbers = {digest: number for number, digest in enumerate(parts.contents)}
        for whole, of_file in parts.of(index):
            objects.append(whole)
            for part in of_file:
                listed[numbers[part.sha256]].append(Way("raw", len(objects) - 1, part.offset, part.size))
    return objects, bases, listed


def _readable(way: Way) -> bool:
    """Whether this way can be decoded here, and its encoding fits to its base."""
    if way.encoding == "raw":
        return way.base < 0
    from blobstore.core.codec.blobs import check_encoding

    return check_encoding(way.encoding) and way.encoding.startswith("near") == (way.base >= 0)


def _can_decode() -> bool:
    try:
        import blobstore.core.codec.blobs  # noqa: F401
    except MissingDependencyError:
        return False
    return True
