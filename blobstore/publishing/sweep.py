"""Freeing what no release needs any more, and leading devices around what moved.

The pool is collected first (see `blobstore.pool.collecting`). That may condemn packs, which stay for a while. The ways of
each release are then written anew where they lead to such a pack. Forms beside the pool are only for the newest release
of each name; older ones are led to what the pool has. What nothing refers to any more is noted, and removed by a later call,
for devices that read an older list.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from blobstore.core.errors import FileAccessError, ReleaseError
from blobstore.core.memory.digest import sha256
from blobstore.core.reprs import fields_line
from blobstore.pool import Collected, Pool
from blobstore.pool.collecting import UNUSED, collect
from blobstore.pool.versions import Version, live_versions
from blobstore.publishing.mending import Renewal, mend, whole_release
from blobstore.publishing.publish import opened
from blobstore.publishing.released import Released, lead_to_newest, read_index
from blobstore.releases.index.index import Index
from blobstore.releases.index.ways import EARLIER, WAYS, Ways, encode_ways
from blobstore.releases.sources.caching import cache_control
from blobstore.releases.sources.source import FILES, INDEX, LATEST, SIGNATURES
from blobstore.storage.objects import Objects

__all__ = ["Swept", "sweep"]

_DAY = 86_400.0


@dataclass(frozen=True)
class Swept:
    """What `sweep` did.

    Attributes:
        withdrawn: releases whose version was dropped from the pool, and that are gone now.
        rewritten: releases whose ways were written anew.
        objects, freed: how many objects beside the pool were removed, and their bytes.
        waiting: objects that a later call will remove.
        pool: what was collected in the pool.
    """

    __repr__ = fields_line

    withdrawn: int
    rewritten: int
    objects: int
    freed: int
    waiting: int
    pool: Collected


def sweep(releases: str | os.PathLike[str], *, grace: float = 7 * _DAY, keep: float = _DAY) -> Swept:
    """Free what no release needs. It may be killed at any time; the next call goes on.

    Args:
        releases: the release folder, or its URL.
        grace: seconds after which a version that is being added to the pool is given up.
        keep: seconds for which what is no longer referred to stays, for devices that looked it up before. It must be longer
            than caches keep `ways.json.zst`, and than publishing takes.

    Raises:
        PoolError, ReleaseError: there is no release folder.
        FileAccessError, TransferError: the store refuses.
    """
    for name, seconds in (("grace", grace), ("keep", keep)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise ReleaseError(f"{name} must be a number of seconds, not {seconds!r}")
    with opened(releases) as pool:
        objects = pool.objects
        collected = objects.with_reserve(lambda: collect(objects, pool.tables, grace=grace, keep=keep))
        noted = _read_unused(objects)
        rounds = [_Round(pool, noted, keep)]
        while rounds[-1].changed:  # what was published meanwhile may need what is gone: see `mending`
            rounds.append(_Round(pool, noted, keep))
        with contextlib.suppress(FileAccessError):
            objects.reserve()
        return Swept(
            sum(one.withdrawn for one in rounds),
            sum(one.rewritten for one in rounds),
            sum(one.removed for one in rounds),
            sum(one.freed for one in rounds),
            rounds[-1].waiting,
            collected,
        )


class _Round:
    """Look at all releases, and remove what none of them needs."""

    def __init__(self, pool: Pool, noted: Mapping[str, int], keep: float) -> None:
        self._pool, self._objects = pool, pool.objects
        self.rewritten = self.removed = self.freed = self.waiting = 0
        dropped = pool.tables.query("SELECT DISTINCT name FROM events WHERE kind = 'drop'")
        names = {one.name for one in pool.versions()} | {name for (name,) in dropped}
        there = {name: _listed(self._objects, name) for name in sorted(names) if "/" not in name}
        # after that: what was published meanwhile is in the pool, too
        versions = pool.versions()
        self.withdrawn = _withdraw(self._objects, versions, there)
        indexes = _indexes(self._objects, versions, there)
        newest = {version.name: version for version in indexes}
        for version in indexes:
            if EARLIER in there[version.name][version.version]:
                # they lead from releases before to forms that go
                self._objects.delete(f"{version.name}/{version.version}/{EARLIER}")
        needed = dict(self._renewed(indexes, set(newest.values())))
        for name, listed in there.items():
            if LATEST in listed:
                _lead_to_newest(pool, name, newest.get(name), indexes)
        found = self._remove(set().union(*needed.values()), noted, keep)
        for version, digests in needed.items():
            if not digests <= found:
                mend(pool, version)

    @property
    def changed(self) -> bool:
        """Whether anything is gone."""
        return bool(self.withdrawn or self.removed)

    def _renewed(
        self, versions: Iterable[Version], every_form: Container[Version]
    ) -> Iterator[tuple[Version, set[str]]]:
        """Renew the ways of releases, and say which objects beside the pool each needs."""
        renewal = Renewal(self._pool)
        for version in versions:
            release = whole_release(self._pool, version)
            if release is not None:
                yield version, self._rewrite(release, renewal.ways(release, every_form=version in every_form))

    def _rewrite(self, release: Released, ways: Ways) -> set[str]:
        """Write the ways of a release, if they change; the objects beside the pool that it then needs."""
        index = release.index
        if ways != release.ways:
            place = f"{index.name}/{index.version}/{WAYS}"
            self._objects.put(place, encode_ways(ways), cached=cache_control(place))
            self.rewritten += 1
        needed = {index.parts.sha256, *(one.sha256 for one in ways.objects if one.folder == "files")}
        if index.plain:
            needed |= {file.sha256 for file in index.files if file.size}
        return needed

    def _remove(self, needed: Container[str], noted: Mapping[str, int], keep: float) -> set[str]:
        """Remove objects that were unused for long, and note others; the digests of those that were found."""
        now = time.time()
        unused: dict[str, int] = {}
        found: set[str] = set()
        for entry in self._objects.list(FILES):
            digest = entry.path.rpartition("/")[2]
            found.add(digest)
            if digest in needed:
                continue
            # what a publisher stores again meanwhile is new
            since = max(noted.get(digest, int(now)), entry.stored)
            if digest in noted and since <= now - keep:
                self._objects.delete(entry.path)
                self.removed, self.freed = self.removed + 1, self.freed + entry.size
            else:
                unused[digest] = since
        self._objects.put(UNUSED, json.dumps({"unused": unused}).encode() + b"\n")
        self.waiting = len(unused)
        return found


def _listed(objects: Objects, name: str) -> dict[str, set[str]]:
    """The files of each version of a name, and perhaps of "latest"."""
    listed: dict[str, set[str]] = defaultdict(set)
    for entry in objects.list(name):
        _, *inside = entry.path.split("/")
        if len(inside) == 2:
            listed[inside[0]].add(inside[1])
    return listed


def _indexes(
    objects: Objects, versions: Iterable[Version], there: Mapping[str, Mapping[str, set[str]]]
) -> dict[Version, tuple[bytes, Index]]:
    """The indexes of all releases, the oldest first."""
    published = [one for one in versions if INDEX in there.get(one.name, {}).get(one.version, ())]
    read = ((one, read_index(objects, one)) for one in published)
    found = [(version, index) for version, index in read if index is not None]
    return dict(sorted(found, key=lambda one: one[1][1].published))


def _withdraw(objects: Objects, versions: Sequence[Version], there: Mapping[str, Mapping[str, set[str]]]) -> int:
    """Remove the indexes of versions that the pool no longer has."""
    alive = {(one.name, one.version) for one in versions}
    gone = [
        (name, version)
        for name, listed in there.items()
        for version, files in listed.items()
        if INDEX in files and version != LATEST and (name, version) not in alive
    ]
    for name, version in gone:
        index = objects.get(f"{name}/{version}/{INDEX}")
        for file in (INDEX, WAYS, EARLIER):
            objects.delete(f"{name}/{version}/{file}")
        if index is not None:
            objects.delete(f"{SIGNATURES}/{sha256(index)}")
    return len(gone)


def _lead_to_newest(
    pool: Pool, name: str, newest: Version | None, indexes: Mapping[Version, tuple[bytes, Index]]
) -> None:
    """Let "latest" be the newest release, if it was withdrawn; others may publish one meanwhile."""
    place = f"{name}/{LATEST}/{INDEX}"
    if newest is not None and pool.objects.get(place) == indexes[newest][0]:
        return
    if newest is None:
        pool.objects.delete(place)
        pool.tables.fresh()
        newest = next(iter(live_versions(pool.tables, name, newest=1)), None)
    if newest is not None:
        lead_to_newest(pool, newest)


def _read_unused(objects: Objects) -> dict[str, int]:
    data = objects.get(UNUSED)
    try:
        noted = json.loads(data or b'{"unused": {}}')["unused"]
        return {str(digest): int(since) for digest, since in noted.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ReleaseError(f"{objects.name(UNUSED)}: this does not say what is unused") from None
