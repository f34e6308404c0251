"""What lies beside the pool, and which of it goes: forms that only releases need which are not the newest ones.

The newest release of a name keeps all its forms. The one before keeps its differences, for devices that are led to it for a
while yet; it has no whole forms of its own any more. All older ones are led to what the pool has. What nothing refers to any
more is noted, and removed later, for devices that read an older list: whoever publishes lets go of the two releases before
(`let_go`) and, once something was noted for a day, looks at all releases (`remove_unused`), as `sweep` does.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from blobstore.core.errors import BlobStoreError, ReleaseError
from blobstore.core.memory.digest import sha256
from blobstore.pool import Pool
from blobstore.pool.collecting import UNUSED
from blobstore.pool.versions import Version, live_versions
from blobstore.publishing.mending import Renewal, listed_ways, mend, whole_release
from blobstore.publishing.released import Released, lead_to_newest, read_index
from blobstore.releases.index.index import Index
from blobstore.releases.index.ways import EARLIER, WAYS, Ways, encode_ways
from blobstore.releases.sources.caching import cache_control
from blobstore.releases.sources.source import FILES, INDEX, LATEST, SIGNATURES
from blobstore.storage.objects import Objects

__all__ = ["DAY", "let_go", "read_unused", "remove_unused"]

DAY = 86_400.0


def let_go(pool: Pool, previous: Sequence[Released]) -> None:
    """Let go of what only releases before a new one need, and remove what nothing needed for a day. The new release is
    there whatever happens here: the next publisher, or a sweep, goes on after an error.

    Args:
        previous: the releases before, the newest first.
    """
    with contextlib.suppress(BlobStoreError):
        noted, now = read_unused(pool.objects), int(time.time())
        if any(since <= now - DAY for since in noted.values()):
            remove_unused(pool, noted, DAY)
            return
        renewal = Renewal(pool)
        for behind, release in enumerate(previous[:2], 1):  # the second one, if somebody was killed before this
            ways = renewal.ways(release, behind=behind)
            _replace(pool.objects, release, ways)
            pool.objects.delete(f"{release.index.name}/{release.index.version}/{EARLIER}")
            if renewal.gone(ways):  # a sweep was there first
                mend(pool, release.version)
            noted |= dict.fromkeys(_beside(release.ways) - _beside(ways), now)
        _note(pool.objects, noted)


def remove_unused(pool: Pool, noted: Mapping[str, int], keep: float) -> list[Round]:
    """Look at all releases, and remove what was noted as unused for long, until there is nothing to remove: what was
    published meanwhile may need what is gone (see `mending`)."""
    rounds = [Round(pool, noted, keep)]
    while rounds[-1].changed:
        # since when is what the last round found: it may have led devices elsewhere just now
        noted = {digest: since for digest, since in rounds[-1].unused.items() if digest in noted}
        rounds.append(Round(pool, noted, keep))
    return rounds


def _beside(ways: Ways) -> set[str]:
    """The objects beside the pool to which ways lead."""
    return {one.sha256 for one in ways.objects if one.folder == "files"}


def _replace(objects: Objects, release: Released, ways: Ways) -> bool:
    """Write the ways of a release; whether they changed."""
    if ways == release.ways:
        return False
    place = f"{release.index.name}/{release.index.version}/{WAYS}"
    objects.put(place, encode_ways(ways), cached=cache_control(place))
    return True


def _note(objects: Objects, unused: Mapping[str, int]) -> None:
    objects.put(UNUSED, json.dumps({"unused": unused}).encode() + b"\n")


class Round:
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
        self._dropped: set[str] = set()
        self.unused: dict[str, int] = {}
        needed = dict(self._renewed(indexes, there))
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
        self, versions: Iterable[Version], there: Mapping[str, Mapping[str, set[str]]]
    ) -> Iterator[tuple[Version, set[str]]]:
        """Renew the ways of releases, the oldest first, and say which objects beside the pool each needs."""
        renewal = Renewal(self._pool)
        newer: Counter[str] = Counter()
        for version in reversed(list(versions)):
            release = whole_release(self._pool, version)
            if release is not None:
                behind = newer[version.name]
                newer[version.name] += 1
                needed = self._beside(release, renewal.ways(release, behind=behind))
                if EARLIER in there[version.name][version.version]:
                    needed |= self._earlier(release, renewal, behind)
                yield version, needed

    def _beside(self, release: Released, ways: Ways) -> set[str]:
        """The objects beside the pool that a release needs once it has new ways."""
        self.rewritten += _replace(self._objects, release, ways)
        self._dropped |= _beside(release.ways) - _beside(ways)
        plain = {file.sha256 for file in release.index.files if release.index.plain and file.size}
        return {release.index.parts.sha256, *_beside(ways), *plain}

    def _earlier(self, release: Released, renewal: Renewal, behind: int) -> set[str]:
        """The objects that the ways for much older releases need; only the newest one keeps these."""
        ways = None if behind else listed_ways(self._objects, release.index, EARLIER, release.sha256, release.parts)
        if ways is not None and not renewal.gone(ways):
            return _beside(ways)
        self._objects.delete(f"{release.index.name}/{release.index.version}/{EARLIER}")
        return set()

    def _remove(self, needed: Container[str], noted: Mapping[str, int], keep: float) -> set[str]:
        """Remove objects that were unused for long, and note others; the digests of those that were found."""
        now = time.time()
        found: set[str] = set()
        for entry in self._objects.list(FILES):
            digest = entry.path.rpartition("/")[2]
            found.add(digest)
            if digest in needed:
                continue
            # what a publisher stores again meanwhile is new, and to what a list led until now, devices are on their way
            since = int(now) if digest in self._dropped else max(noted.get(digest, int(now)), entry.stored)
            if digest in noted and since <= now - keep:
                self._objects.delete(entry.path)
                self.removed, self.freed = self.removed + 1, self.freed + entry.size
            else:
                self.unused[digest] = since
        _note(self._objects, self.unused)
        self.waiting = len(self.unused)
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
        (name, version, files)
        for name, listed in there.items()
        for version, files in listed.items()
        if INDEX in files and version != LATEST and (name, version) not in alive
    ]
    for name, version, files in gone:
        index = objects.get(f"{name}/{version}/{INDEX}")
        for file in sorted(files, key=lambda file: file != INDEX):
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


def read_unused(objects: Objects) -> dict[str, int]:
    """Which objects beside the pool were noted as unused, and since when.

    Raises:
        ReleaseError: the note is malformed.
    """
    data = objects.get(UNUSED)
    try:
        noted = json.loads(data or b'{"unused": {}}')["unused"]
        return {str(digest): int(since) for digest, since in noted.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ReleaseError(f"{objects.name(UNUSED)}: this does not say what is unused") from None
