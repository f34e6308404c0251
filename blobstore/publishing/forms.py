"""The forms in which the contents of a release can be fetched: those that the pool has, and what is added for devices.

A device without anything gets every content whole, or the whole base that the pool has and a difference to it, as far as that
makes its pull hardly longer. What the pool has only as a difference is written whole beside it otherwise. A device with an
earlier release needs differences to what that had. What is beside the pool goes when the release is no longer the newest one;
the pool has every content anyway.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from blobstore.core.codec.blobs import DecodeError, check_encoding, decode, encode
from blobstore.core.codec.choosing import best_difference, best_planes
from blobstore.core.disk.progress import Progress
from blobstore.core.errors import DataChangedError, PoolError
from blobstore.core.memory.mapped_file import map_file
from blobstore.pool import Pool
from blobstore.pool.contents import Blobs, parts_of
from blobstore.pool.packs import Stored, pack_path
from blobstore.pool.relations import stored_rows
from blobstore.pool.versions import Version
from blobstore.publishing.released import Released, store_pieces
from blobstore.releases.index.index import File, Object
from blobstore.releases.index.parts import Part, Parts
from blobstore.releases.index.ways import Way, Ways
from blobstore.storage.objects import Objects

__all__ = ["Form", "Forms", "Packs", "forms_of", "numbered", "parts_of_release", "proven", "store_forms"]

_MOST_OBJECTS = 16
"""A new device fetches from so many objects at most; above that, contents of the smallest ones are brought together."""

_BROUGHT_TOGETHER = 8

_SMALLEST = 64
"""A content with fewer bytes has no differences: a frame of zstd alone takes about 20."""

_WORTH = 0.8
"""A difference with more than this share of the bytes of the whole form is not stored."""

_FURTHER = 0.048
"""By this share of the fewest bytes, at most, a device with nothing fetches more, because whole bases are in the pool already. With
the index and longer lists, it is a twentieth."""

_LARGE = 1 << 14
"""A smaller content has a whole form: two steps instead of one cost a request and a file."""

_Encoded = tuple[str, str, bytes | memoryview, str | None]
"""A form that is to be written: digest, encoding, bytes and base."""


def parts_of_release(pool: Pool, version: Version, files: Sequence[File]) -> Parts:
    """What the files of a release consist of, which is a version of a pool."""
    listed: dict[str, dict[int, Part]] = {file.name: {} for file in files}
    for part in parts_of(pool.tables, version):
        if part.size:
            listed[part.file][part.offset] = Part(part.offset, part.size, part.digest.hex())
    contents = {file.sha256: tuple(listed[file.name].values()) for file in files}
    return Parts("blobstore.parts.1", tuple(contents.values()))


@dataclass(frozen=True)
class _Content:
    """A content of the new release: where its bytes are, and what it is called."""

    digest: str
    path: Path
    start: int
    stop: int
    dtype: str
    keys: tuple[tuple[str, str], ...]

    @property
    def size(self) -> int:
        return self.stop - self.start

    def view(self) -> memoryview:
        return map_file(self.path)[self.start : self.stop]


@dataclass(frozen=True)
class Form:
    """A way in which the object and the base are not numbered yet."""

    encoding: str
    object: Object
    at: int
    stored: int
    base: str | None = None


def forms_of(release: Released) -> list[list[Form]]:
    """The ways of a release as forms: to each of its contents, then to each further base."""
    ways = release.ways
    digests = [*release.parts.contents, *(digest for digest, _ in ways.bases)]
    return [
        [
            Form(
                way.encoding, ways.objects[way.object], way.at, way.stored, digests[way.base] if way.base >= 0 else None
            )
            for way in listed
        ]
        for listed in ways.ways
    ]


class Packs:
    """The packs of a pool as objects of releases."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._known: dict[bytes, Object] = {}

    def form(self, row: Stored) -> Form:
        """The form in which the pool has a content.

        Raises:
            PoolError: its pack is missing.
        """
        if row.pack not in self._known:
            path = pack_path(row.pack)
            nbytes = self._objects.size(path)
            if nbytes is None:
                raise PoolError(f"{self._objects.name(path)}: the pack is missing")
            self._known[row.pack] = Object(row.pack.hex(), nbytes, "packs")
        base = None if row.base is None else row.base.hex()
        return Form(row.encoding, self._known[row.pack], row.offset, row.length, base)


class Forms:
    """The forms of the contents of a release.

    Args:
        pool: has its version.
        version: of the pool.
        parts: of the release.
        previous: releases to which differences are stored, the newest first.
        sources: the files, by their names in the release.
        progress: called with bytes.

    Attributes:
        written: bytes of objects that were made.
    """

    def __init__(
        self,
        pool: Pool,
        version: Version,
        parts: Parts,
        previous: Sequence[Released],
        sources: Mapping[str, Path],
        progress: Progress | None,
    ) -> None:
        self._pool, self._objects, self._tables = pool, pool.objects, pool.tables
        self._parts, self._previous, self._progress = parts, previous, progress
        self._contents = self._located(version, sources)
        self._packs = Packs(pool.objects)
        self._done = self._total = 0
        self.written = 0

    def _located(self, version: Version, sources: Mapping[str, Path]) -> dict[str, _Content]:
        contents: dict[str, _Content] = {}
        for part in parts_of(self._tables, version):
            digest = part.digest.hex()
            old = contents.get(digest)
            keys = (*(old.keys if old is not None else ()), _key(part.file, part.tensor, part.offset))
            path, stop = sources[part.file], part.offset + part.size
            contents[digest] = (
                replace(old, keys=keys)
                if old is not None
                else _Content(digest, path, part.offset, stop, part.dtype, keys)
            )
        return contents

    def ways(self, index_sha256: str) -> tuple[Ways, Ways | None]:
        """Make what is missing, and list everything: for devices with a release of those before, or with nothing; and for those
        with still earlier ones, if there are such.

        Raises:
            DataChangedError: a file changed since it was added to the pool.
            PoolError, FileAccessError, TransferError: a content cannot be read, or an object not be written.
        """
        rows = stored_rows(self._tables, [bytes.fromhex(digest) for digest in self._parts.contents])
        known = self._known(rows)
        least = {digest: self._least(content, known, rows) for digest, content in self._contents.items()}
        forms: dict[str, list[Form]] = defaultdict(list)
        for digest, form in self._differences(least, rows):
            forms[digest].append(form)
        earlier = self._earlier({form.base for listed in forms.values() for form in listed if form.base is not None})
        steps = self._in_two_steps(known, least, forms)
        for digest, form in self._in_one_step(known, steps).items():
            forms[digest].insert(0, form)
        bases = {form.base: [known[form.base]] for form in steps.values() if form.base is not None}
        ways = numbered(index_sha256, self._parts, forms, bases)
        if not any(earlier.values()):
            return ways, None
        further = {base: [*earlier.get(base, ()), *bases.get(base, ())] for base in [*earlier, *bases]}
        return ways, numbered(index_sha256, self._parts, forms, further)

    # ----------------------------------------------------------------------------------- for devices with nothing

    def _known(self, rows: Mapping[bytes, Stored]) -> dict[str, Form]:
        """Forms that need nothing else, of contents and of bases."""
        known: dict[str, Form] = {}
        for release in reversed(self._previous):
            digests = [*release.parts.contents, *(digest for digest, _ in release.ways.bases)]
            for digest, listed in zip(digests, forms_of(release), strict=True):
                known.update((digest, form) for form in listed if form.base is None)
        for row in rows.values():
            if row.base is None and check_encoding(row.encoding):
                known[row.digest.hex()] = self._packs.form(row)
        return known

    def _least(self, content: _Content, known: Mapping[str, Form], rows: Mapping[bytes, Stored]) -> int:
        """About how many bytes a whole form takes: as many as that of a content with similar values."""
        base = rows[bytes.fromhex(content.digest)].base
        for digest in (content.digest, "" if base is None else base.hex()):
            if digest in known:
                return known[digest].stored
        return max(1, int(best_planes(content.view(), content.dtype)[1] * content.size))

    def _in_two_steps(
        self, known: Mapping[str, Form], least: Mapping[str, int], forms: Mapping[str, list[Form]]
    ) -> dict[str, Form]:
        """Differences to whole bases in the pool, where a device with nothing fetches both: those that cost it least, in all
        at most `_FURTHER`."""
        possible = [
            (form.stored / least[digest], digest, form)
            for digest, content in self._contents.items()
            if digest not in known and content.size >= _LARGE
            for form in forms[digest]
            if form.base is not None and form.base in known and known[form.base].object.folder == "packs"
        ]
        allowed = _FURTHER * sum(least.values())
        taken: dict[str, Form] = {}
        for _, digest, form in sorted(possible, key=lambda one: one[:2]):
            if digest not in taken and form.stored <= allowed:
                allowed -= form.stored
                taken[digest] = form
        return taken

    def _in_one_step(self, known: Mapping[str, Form], steps: dict[str, Form]) -> dict[str, Form]:
        """The whole forms, made where there are none. What is in few objects is brought together; it needs one step, too."""
        there = {digest: known[digest] for digest in self._contents if digest in known}
        few = _left([*there.values(), *steps.values(), *(known[form.base or ""] for form in steps.values())])
        for digest, form in list(steps.items()):
            if form.object in few or known[form.base or ""].object in few:
                del steps[digest]
        copied = [(self._contents[digest], form) for digest, form in there.items() if form.object in few]
        made = there.keys() | steps.keys()
        lacking = [content for digest, content in self._contents.items() if digest not in made]
        encoded: Iterator[_Encoded] = itertools.chain(
            (self._copied(content, form) for content, form in copied), map(_planes, lacking)
        )
        return {**there, **dict(self._write(encoded))}

    def _copied(self, content: _Content, form: Form) -> _Encoded:
        """A whole form as another object has it, or made anew if that is gone or damaged."""
        data = self._objects.read(form.object.path, form.at, form.stored)
        if data is not None and _gives(content.digest, content.size, form.encoding, data, None):
            return content.digest, form.encoding, data, None
        return _planes(content)

    # ------------------------------------------------------------------------------------------------- differences

    def _differences(self, least: Mapping[str, int], rows: Mapping[bytes, Stored]) -> Iterator[tuple[str, Form]]:
        """Forms for devices that have an earlier release, if they take less than whole ones."""
        tasks = self._tasks()
        bases = {base for _, listed in tasks for base in listed}
        for digest in self._contents:
            row = rows[bytes.fromhex(digest)]
            if row.base is not None and check_encoding(row.encoding):
                yield digest, self._packs.form(row)
        blobs = Blobs(self._objects, self._tables, [bytes.fromhex(base) for base in sorted(bases)])
        jobs = _jobs(tasks, rows)
        self._done, self._total = 0, sum(content.size for some in jobs.values() for content, _ in some)
        for _, some in sorted(jobs.items()):
            yield from self._write(self._encoded(some, least, blobs))

    def _encoded(
        self, jobs: Sequence[tuple[_Content, str]], least: Mapping[str, int], blobs: Blobs
    ) -> Iterator[_Encoded]:
        """Those differences that are worth it."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            made = threads.map(lambda job: _difference(job[0], job[1], blobs), jobs)
            for (content, base), difference in zip(jobs, made, strict=True):
                self._done += content.size
                if self._progress:
                    self._progress("encoding", self._done, self._total)
                if difference is not None and len(difference[1]) < _WORTH * least[content.digest]:
                    yield content.digest, *difference, base

    def _tasks(self) -> list[tuple[_Content, dict[str, int]]]:
        """The contents that are not in every earlier release, what these had in their place, and which of them was the last."""
        had = [(release, self._named(release)) for release in self._previous]
        tasks = []
        for content in self._contents.values():
            bases: dict[str, int] = {}
            for back, (release, named) in enumerate(had):
                base = _had_before(content, release, named)
                if base is not None:
                    bases.setdefault(base, back)
            if bases:
                tasks.append((content, bases))
        return tasks

    def _named(self, release: Released) -> dict[tuple[str, str], str]:
        """The contents of an earlier release by their names, with and without that of the file."""
        named: dict[tuple[str, str], str] = {}
        for part in parts_of(self._tables, release.version):
            if part.digest.hex() in release.parts.contents:
                file, key = _key(part.file, part.tensor, part.offset)
                named[file, key] = part.digest.hex()
                if part.tensor:
                    named.setdefault(("", key), part.digest.hex())
        return named

    def _earlier(self, bases: set[str]) -> dict[str, list[Form]]:
        """How devices with still earlier releases get contents that others are differences to: as the release before had
        them, which keeps its differences."""
        forms: dict[str, list[Form]] = {base: [] for base in sorted(bases)}
        for release in self._previous[:1]:
            for digest, listed in zip(release.parts.contents, forms_of(release), strict=False):
                if digest in bases and not forms[digest]:
                    forms[digest] = [form for form in listed if form.base is not None]
        return forms

    # ----------------------------------------------------------------------------------------------------- writing

    def _write(self, encoded: Iterable[_Encoded]) -> list[tuple[str, Form]]:
        """Write forms into one object."""
        made = store_forms(self._objects, encoded)
        self.written += made[0][1].object.size if made else 0
        return made


def _left(forms: Sequence[Form]) -> set[Object]:
    """The objects that are not used for these forms, so that a device does not need a request for each release before, nor
    a release an object for a few bytes of it."""
    needed: dict[Object, int] = defaultdict(int)
    for form in forms:
        needed[form.object] += form.stored
    left = {one for one, nbytes in needed.items() if one.folder == "files" and 2 * nbytes < one.size}
    if len(needed) > _MOST_OBJECTS:
        left |= set(sorted(needed, key=lambda one: needed[one])[: len(needed) - _BROUGHT_TOGETHER])
    return left


def store_forms(objects: Objects, encoded: Iterable[_Encoded]) -> list[tuple[str, Form]]:
    """Write forms into one object, in the order in which they come; none of them makes no object."""
    placed: list[tuple[str, str, int, int, str | None]] = []

    def pieces() -> Iterator[bytes | memoryview]:
        at = 0
        for digest, encoding, data, base in encoded:
            placed.append((digest, encoding, at, len(data), base))
            at += len(data)
            yield data

    stream = pieces()
    first = next(stream, None)
    if first is None:
        return []
    done = store_pieces(objects, itertools.chain([first], stream))
    return [(digest, Form(encoding, done, at, stored, base)) for digest, encoding, at, stored, base in placed]


def _jobs(
    tasks: Sequence[tuple[_Content, dict[str, int]]], rows: Mapping[bytes, Stored]
) -> dict[int, list[tuple[_Content, str]]]:
    """The differences that the pool does not have, by release: one object for each, so that what a device needs lies together."""
    jobs: dict[int, list[tuple[_Content, str]]] = defaultdict(list)
    for content, listed in tasks:
        row = rows[bytes.fromhex(content.digest)]
        for base, back in listed.items():
            # a recipe of the pool is nothing that devices can read
            if row.base is None or row.base.hex() != base or not check_encoding(row.encoding):
                jobs[back].append((content, base))
    return jobs


def _key(file: str, tensor: str, offset: int) -> tuple[str, str]:
    return file, tensor or f"at {offset}"


def _had_before(content: _Content, release: Released, named: Mapping[tuple[str, str], str]) -> str | None:
    """What an earlier release had under a name of a content, with as many bytes; None if it had the content itself, too."""
    if content.size < _SMALLEST or content.digest in release.parts.contents:
        return None
    possible = (named.get(key) or named.get(("", key[1])) for key in content.keys)
    sizes = release.parts.contents
    return next((base for base in possible if base is not None and sizes[base] == content.size), None)


def _planes(content: _Content) -> _Encoded:
    data = content.view()
    encoding, _ = best_planes(data, content.dtype)
    return content.digest, encoding, proven(str(content.path), content.digest, data, encoding), None


def _difference(content: _Content, base: str, blobs: Blobs) -> tuple[str, bytes] | None:
    """A content as the difference to another one; None if that saves nothing."""
    other = blobs.read(bytes.fromhex(base))
    data = content.view()
    encoding, share = best_difference(data, content.dtype, other)
    if encoding == "raw" or share >= _WORTH:
        return None
    return encoding, proven(str(content.path), content.digest, data, encoding, other)


def proven(where: str, digest: str, data: memoryview, encoding: str, base: memoryview | None = None) -> bytes:
    """What is stored for a content, after it gave that content again.

    Args:
        where: the data are, for the error.
        digest: of the content.
        data: its bytes, unless they changed.
        encoding, base: how it is stored.

    Raises:
        DataChangedError: the data are not the content any more.
    """
    stored = b"".join(encode(data, encoding, base))
    if not _gives(digest, len(data), encoding, memoryview(stored), base):
        raise DataChangedError(f"{where}: the file changed while it was published")
    return stored


def _gives(digest: str, size: int, encoding: str, stored: memoryview, base: memoryview | None) -> bool:
    """Whether a form is that of a content."""
    hasher = hashlib.sha256()
    try:
        for piece in decode(encoding, size, stored, base):
            hasher.update(piece)
    except DecodeError:
        return False
    return hasher.hexdigest() == digest


def numbered(
    index_sha256: str, parts: Parts, forms: Mapping[str, Sequence[Form]], earlier: Mapping[str, Sequence[Form]]
) -> Ways:
    """The ways, with numbers instead of objects and digests."""
    contents = dict(parts.contents)
    named = {form.base for form in itertools.chain(*forms.values(), *earlier.values()) if form.base is not None}
    further = sorted({*named, *earlier} - contents.keys())
    every = {**{digest: forms[digest] for digest in contents}, **{base: earlier.get(base, ()) for base in further}}
    numbers = {digest: number for number, digest in enumerate(every)}
    used = dict.fromkeys(form.object for form in itertools.chain(*every.values()))
    objects = {one: number for number, one in enumerate(used)}
    sizes = _sizes(contents, every)

    def way(form: Form) -> Way:
        base = -1 if form.base is None else numbers[form.base]
        return Way(form.encoding, objects[form.object], form.at, form.stored, base)

    return Ways(
        "blobstore.ways.1",
        index_sha256,
        tuple(objects),
        tuple((base, sizes[base]) for base in further),
        tuple(tuple(map(way, listed)) for listed in every.values()),
    )


def _sizes(contents: Mapping[str, int], every: Mapping[str, Sequence[Form]]) -> Mapping[str, int]:
    """The sizes of contents and of all bases: a difference has as many bytes as its base.

    Raises:
        PoolError: nothing leads to a base.
    """
    pairs = [(digest, form.base) for digest, listed in every.items() for form in listed if form.base is not None]
    sizes = contents
    while len(sizes) < len(every):
        found = {base: sizes[digest] for digest, base in pairs if digest in sizes}
        if found.keys() <= sizes.keys():
            raise PoolError("a base of no known size")
        sizes = {**found, **sizes}
    return sizes
