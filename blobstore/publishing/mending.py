"""Keeping releases whole beside sweeps: what a release leads to is led around, or made again, where it is gone.

In a bucket nothing is locked, and an object beside the pool has its digest as a name: what a sweep removes as unused may be
what somebody publishes again at that moment. Two rules lose nothing, in any order of publishers and sweeps:

- Who publishes looks at everything that the release leads to after its index is there (`mend`), and makes again what is gone.
- A sweep reads all indexes, removes what none of them needs, and reads them again, until there was nothing to remove. What
  releases lack by then is made again, too.

If a sweep reads the indexes before a release appears and removes something of it, it finds the release when it reads them
again, or it did that before the index was there: then the publisher finds that it is gone. Who is killed in between leaves
it to the next sweep. Everything is made of the pool, which has all contents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence

from blobstore.core.codec.blobs import check_encoding
from blobstore.core.codec.choosing import best_planes
from blobstore.core.errors import InvalidFileError, PoolError
from blobstore.core.memory.digest import sha256
from blobstore.pool import Pool
from blobstore.pool.contents import Blobs
from blobstore.pool.packs import Stored
from blobstore.pool.relations import stored_rows
from blobstore.pool.versions import Version
from blobstore.publishing.forms import Form, Packs, forms_of, numbered, parts_of_release, proven, store_forms
from blobstore.publishing.released import Released, read_index, read_released, store_pieces
from blobstore.releases.index.index import File, Index, Object, encode_json
from blobstore.releases.index.parts import Parts
from blobstore.releases.index.ways import EARLIER, WAYS, Ways, encode_ways, parse_ways
from blobstore.releases.sources.caching import cache_control
from blobstore.storage.objects import Objects

__all__ = ["Renewal", "listed_ways", "mend", "whole_release"]


class Renewal:
    """New lists of ways, for releases that lead to what is gone, or to packs that a collection condemned."""

    def __init__(self, pool: Pool) -> None:
        self._objects, self._tables = pool.objects, pool.tables
        condemned = self._tables.query("SELECT DISTINCT pack FROM marks WHERE digest IS NULL")
        self._condemned = {pack.hex() for (pack,) in condemned}
        self._packs = Packs(pool.objects)

    def is_condemned(self, one: Object) -> bool:
        """Whether an object is a pack that will go."""
        return one.folder == "packs" and one.sha256 in self._condemned

    def gone(self, ways: Ways) -> set[Object]:
        """The objects that ways should not lead to: those that are not there, whole, and condemned packs."""
        return {one for one in ways.objects if self.is_condemned(one) or lacks(self._objects, one)}

    def ways(self, release: Released, gone: Iterable[Object] = (), *, behind: int = 0) -> Ways:
        """The ways to the contents of a release without those to condemned packs.

        Args:
            release: with the ways that it has.
            gone: further objects that are left out.
            behind: how many newer releases of its name there are. The newest keeps all forms, the one before it all
                differences, and others have what the pool has.

        Raises:
            PoolError: the pool lacks a content.
        """
        digests = [*release.parts.contents, *(digest for digest, _ in release.ways.bases)]
        rows = stored_rows(self._tables, map(bytes.fromhex, digests))
        earlier: dict[str, list[Form]] = defaultdict(list)
        lacking: list[str] = []
        there = dict(zip(digests, self._without(forms_of(release), set(gone)), strict=True))
        forms = _kept(there, release.parts.contents, behind)
        if not behind:
            earlier |= {base: listed for base, listed in there.items() if listed and base not in forms}
        for digest in _without_start(forms, earlier):
            # what the pool has as a recipe stays in the form that devices can read
            stored = self._stored(rows, digest, earlier) or list(filter(_is_whole, there[digest]))
            if not stored:
                lacking.append(digest)
            forms[digest] = list(dict.fromkeys([*forms[digest], *stored]))
        for digest, form in self._made(lacking, rows):
            forms[digest].append(form)
        return numbered(release.sha256, release.parts, forms, earlier)

    def _without(self, ways: Sequence[Sequence[Form]], gone: Container[Object]) -> list[list[Form]]:
        """Ways but for those to objects that are gone, or condemned."""
        return [
            [form for form in listed if form.object not in gone and not self.is_condemned(form.object)]
            for listed in ways
        ]

    def _stored(self, rows: dict[bytes, Stored], digest: str, earlier: dict[str, list[Form]]) -> list[Form]:
        """How the pool has a content: whole, or as a difference to one that it has whole."""
        row = rows.get(bytes.fromhex(digest))
        if row is None:
            raise PoolError(f"{self._objects.url}: the content {digest} is missing; a release needs it")
        if row.base is not None:
            if not check_encoding(row.encoding) or rows[row.base].base is not None:
                return []
            base = row.base.hex()
            earlier[base] = earlier[base] or [self._packs.form(rows[row.base])]
        return [self._packs.form(row)]

    def _made(self, digests: list[str], rows: dict[bytes, Stored]) -> list[tuple[str, Form]]:
        """New forms that devices can read."""
        blobs = Blobs(self._objects, self._tables, [bytes.fromhex(digest) for digest in digests])

        def encoded(digest: str) -> tuple[str, str, bytes, None]:
            data = blobs.read(bytes.fromhex(digest))
            encoding, _ = best_planes(data, rows[bytes.fromhex(digest)].dtype)
            return digest, encoding, proven(self._objects.url, digest, data, encoding), None

        return store_forms(self._objects, map(encoded, digests))


def _kept(there: Mapping[str, list[Form]], digests: Iterable[str], behind: int) -> dict[str, list[Form]]:
    """The forms of contents that a release keeps."""
    if behind == 1:
        return {digest: [form for form in there[digest] if not _is_whole(form)] for digest in digests}
    return {digest: [] if behind else there[digest] for digest in digests}


def _without_start(forms: Mapping[str, list[Form]], bases: Mapping[str, list[Form]]) -> list[str]:
    """The contents to which no form leads a device that has nothing."""
    starts = {digest for digest, listed in [*forms.items(), *bases.items()] if any(map(_is_whole, listed))}
    return [
        digest
        for digest, listed in forms.items()
        if digest not in starts and not any(form.base in starts for form in listed)
    ]


def _is_whole(form: Form) -> bool:
    return form.base is None


def lacks(objects: Objects, wanted: Object) -> bool:
    """Whether an object is not there, whole."""
    return objects.size(wanted.path) != wanted.size


def mend(pool: Pool, version: Version) -> bool:
    """Make again what a release leads to and what is gone; lead around what is going.

    Returns:
        Whether the version is released.

    Raises:
        PoolError: the pool lacks a content, or no longer has the version.
        InvalidFileError: its index is malformed.
        FileAccessError, TransferError: the store refuses.
    """
    pool.tables.fresh()
    objects = pool.objects
    read = read_index(objects, version)
    if read is None:
        return False
    data, index = read
    parts = parts_of_release(pool, version, index.files)
    if lacks(objects, index.parts):
        _check(version, store_pieces(objects, [encode_json(parts)]), index.parts)
    for file in index.files if index.plain else ():
        _mend_file(pool, version, file)
    digest, renewal = sha256(data), Renewal(pool)
    ways = listed_ways(objects, index, WAYS, digest, parts)
    # another publisher of this version may have replaced the list
    old = ways or Ways("blobstore.ways.1", digest, (), (), ((),) * len(parts.contents))
    gone = renewal.gone(old)
    if ways is None or gone:
        new = renewal.ways(Released(version, index, digest, parts, old), gone)
        place = f"{version.name}/{version.version}/{WAYS}"
        objects.put(place, encode_ways(new), cached=cache_control(place))
    earlier = listed_ways(objects, index, EARLIER, digest, parts)
    if earlier is None or renewal.gone(earlier):
        objects.delete(f"{version.name}/{version.version}/{EARLIER}")
    return True


def whole_release(pool: Pool, version: Version) -> Released | None:
    """A release, after it was mended if it needs that; None if the version is not released, perhaps no longer.

    Raises:
        As `mend`.
    """
    read = read_index(pool.objects, version)
    if read is None:
        return None
    try:
        return read_released(pool.objects, version, *read)
    except (PoolError, InvalidFileError):
        if not mend(pool, version):
            return None
    return read_released(pool.objects, version, *read)


def _mend_file(pool: Pool, version: Version, file: File) -> None:
    if file.size and lacks(pool.objects, file.object):
        pieces = pool.cat(f"{version.name}@{version.version}", file.name)
        _check(version, store_pieces(pool.objects, pieces), file.object)


def listed_ways(objects: Objects, index: Index, name: str, digest: str, parts: Parts) -> Ways | None:
    """A list of ways of a release; None if there is none, or one of another index."""
    place = f"{index.name}/{index.version}/{name}"
    data = objects.get(place)
    try:
        return None if data is None else parse_ways(data, digest, parts, objects.name(place))
    except InvalidFileError:
        return None


def _check(version: Version, made: Object, wanted: Object) -> None:
    if made != wanted:
        raise PoolError(
            f"{version.name}@{version.version}: expected the object {wanted.sha256}, the pool gives {made.sha256}"
        )
