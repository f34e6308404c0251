"""Publishing: files become immutable objects in a release folder, and an index that names them.

    releases/
        files/SHA256                    every object, each once
        assistant/1.4/index.json        an index
        assistant/latest/index.json     the newest of them
        signatures/SHA256-of-an-index

Objects come first and indexes last, so that a copy of the folder, or a kill, never shows a release with a part missing.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from blobstore.core.constants import FOUNDATION_KEY
from blobstore.core.disk.kinds import check_folder_name
from blobstore.core.disk.locks import exclusive
from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.disk.recovery import recover
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import FileAccessError, InvalidFileError, ReleaseError
from blobstore.core.formats.alignment import align_up
from blobstore.core.formats.opening import Format, detect_format
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.formats.ptd.writer import Entry, write_ptd
from blobstore.core.formats.pte.program import read_program
from blobstore.core.formats.sharded import with_shards
from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.digest import sha256
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths, named
from blobstore.core.programs.deployed import taken_by
from blobstore.core.reprs import count, line
from blobstore.core.text import size
from blobstore.releases.index.contents import regions_of, size_of
from blobstore.releases.index.index import (
    INDEX_LIMIT,
    TABLE_LIMIT,
    VERSION,
    WORTH,
    DataSet,
    File,
    Index,
    Object,
    Pack,
    Program,
    Table,
    Way,
    check_file_name,
    check_name,
    encode,
    parse_index,
    parse_table,
)
from blobstore.releases.index.needs import check_time
from blobstore.releases.index.objects import ObjectWriter, store_bytes, store_file
from blobstore.releases.index.overlay import entries_of, newest_entries
from blobstore.releases.publishing.tables import NOTHING, BaseBlobs, make_table, travelling
from blobstore.releases.sources.source import FILES, INDEX, INDEXES, SIGNATURES, read_small

__all__ = ["LATEST", "Published", "compact", "publish", "published_index"]

LATEST = "latest"
"""The folder of the newest release of a name; no version can have this name."""

_EXECUTORCH = "1.5"
_PACKED = 1 << 16  # smaller files go into a pack
_FEWEST = 8  # of them; fewer are not worth it
_KEY_ROOM = 512  # bytes of a table of contents that a key may take, without its name


@dataclass(frozen=True)
class Published:
    """What `publish` did.

    Attributes:
        path: the index.
        sha256: its digest, to pin it.
        name, version: of the release.
        files: the number of files.
        release_bytes: the size of all of them.
        new_bytes: the size of those files that were not in the release folder before.
        travelling_bytes: what a device with the base fetches for the new files, by its smallest form, with tables.
        removed_keys: keys that the files no longer have, but that the older files referred to still hold.
        signed: whether the index has a signature.
    """

    path: Path
    sha256: str
    name: str
    version: str
    files: int
    release_bytes: int
    new_bytes: int
    travelling_bytes: int
    removed_keys: int
    signed: bool

    def __repr__(self) -> str:
        files = f"{count(self.files, 'file')} of {size(self.release_bytes)}"
        travel = f"{size(self.new_bytes)} new", f"devices fetch {size(self.travelling_bytes)}"
        return line("Published", f"{self.name} {self.version}", files, *travel, "signed" if self.signed else "")


@dataclass
class _Base:
    """A release that the new one adds to."""

    index: Index
    sets: dict[str, dict[str, PtdDataMap]] = field(default_factory=dict)  # of each data set: key → newest file with it
    newest: dict[str, PtdDataMap] = field(default_factory=dict)  # of each data set: its last file
    digests: dict[str, dict[tuple[int, int], str]] = field(default_factory=dict)  # of each file: extent → SHA-256
    ways: dict[str, tuple[Way, Object]] = field(default_factory=dict)  # of blobs: how they travelled


def publish(
    inputs: Paths,
    releases: str | os.PathLike[str],
    *,
    name: str,
    version: str,
    base: str | None = None,
    max_file: int | None = None,
    executorch: str = _EXECUTORCH,
    sign: str | os.PathLike[str] | None = None,
    encoded: bool = True,
    progress: Progress | None = None,
) -> Published:
    """Publish files as a release.

    Args:
        inputs: files, and folders whose files keep their paths, without those whose names begin with a dot. `.ptd` files
            are data sets. The release folder may lie below them; what is in it is left out.
        releases: the release folder; it is made if it is missing.
        name, version: of the release; a version is published once.
        base: the version that devices have, or NAME:VERSION of the same name: of a data file that it has too, only blobs
            that are new or changed are written, into a further file.
        max_file: the size in bytes above which data files are cut; the others must not be larger.
        executorch: the first version of ExecuTorch that runs the programs.
        sign: the file of a private key.
        encoded: also write forms that travel in fewer bytes.
        progress: called with every step.

    Raises:
        FileAccessError, InvalidFileError: a file cannot be read or written, or is malformed.
        OutputPathError: the name of the release folder is that of a file.
        ReleaseError: a name is impossible or taken, there is no such base, a file cannot be cut, an input lies in the release
            folder, or a link leads out of a folder, an input or the release folder itself.
    """
    check_progress(progress)
    root, paths = as_path(releases), as_paths(inputs)
    _check_outside(paths, root)
    with _entered(root, name, version) as _:
        made = _Publisher(root, name, version, base, max_file, executorch, encoded, progress)
        for path, place in _expanded(paths, root):
            made.add(path, place)
        return made.finish(sign)


def compact(
    releases: str | os.PathLike[str],
    *,
    name: str,
    version: str,
    base: str,
    max_file: int | None = None,
    sign: str | os.PathLike[str] | None = None,
    encoded: bool = True,
    progress: Progress | None = None,
) -> Published:
    """Publish a release with the contents of another one, in which every data set is one file again.

    A device that has the old files assembles the new ones from their blobs, and fetches little more than the index.

    Args, raises:
        As `publish`.
    """
    check_progress(progress)
    root = as_path(releases)
    if base is None:
        raise ReleaseError(f"{name}:{version}: compact needs a base, whose contents the release has")
    with _entered(root, name, version) as _:
        made = _Publisher(root, name, version, base, max_file, None, encoded, progress)
        made.add_compacted()
        return made.finish(sign)


def published_index(releases: Path, name: str, version: str) -> Index:
    """The index of a release in a release folder.

    Raises:
        FileAccessError, InvalidFileError: it is not there, or malformed.
    """
    path = releases / name / version / INDEX
    return parse_index(read_small(path, INDEX_LIMIT), str(path))


class _entered:  # noqa: N801 - used like a function
    """The release folder, made and locked against other publishers."""

    def __init__(self, root: Path, name: str, version: str) -> None:
        check_name(name, "name")
        check_name(version, "version")
        if version == LATEST or name in {FILES, SIGNATURES, INDEXES}:
            raise ReleaseError(
                f"{name}:{version}: the names {LATEST!r}, {FILES!r}, {SIGNATURES!r} and {INDEXES!r} are taken for other folders"
            )
        self._root, self._index = root, root / name / version / INDEX

    def __enter__(self) -> None:
        check_folder_name(self._root)
        with named(self._root):
            pulled = (self._root / INDEXES).exists()
        if pulled:
            raise ReleaseError(f"{self._root}: releases are pulled into this folder; publish them in another one")
        with named(self._root):
            (self._root / FILES).mkdir(parents=True, exist_ok=True)
            for folder in (FILES, SIGNATURES, self._index.parent, self._index.parent.parent / LATEST):
                _check_inside(self._root / folder, self._root)
        # Two publishers of one folder would each write `latest`, and the older one could be the last.
        self._lock = exclusive(self._root)
        self._lock.__enter__()
        try:
            for folder in (FILES, SIGNATURES, self._index.parent, self._index.parent.parent / LATEST):
                recover(self._root / folder)
            with named(self._index):
                published = self._index.exists()
            if published:
                raise ReleaseError(f"{self._index}: this version was published already; versions never change")
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise

    def __exit__(self, *exception: object) -> None:
        self._lock.__exit__(None, None, None)


def _check_outside(paths: Sequence[Path], root: Path) -> None:
    """Refuse inputs in the release folder: its objects and indexes would become files of the release."""
    output = Path(os.path.realpath(root))
    for path in paths:
        if Path(os.path.realpath(path)).is_relative_to(output):
            raise ReleaseError(f"{path}: this is in the release folder {root}; publish files of another folder")


def _check_inside(path: Path, folder: Path) -> None:
    """Raise ReleaseError if links lead from a path below a folder out of it."""
    place = Path(os.path.realpath(path))
    if not place.is_relative_to(os.path.realpath(folder)):
        raise ReleaseError(f"{path}: this leads out of {folder}, to {place}; links out of a folder are not followed")


def _expanded(paths: Sequence[Path], root: Path) -> Iterator[tuple[Path, str]]:
    """The input files with their names in the release."""
    output = os.path.realpath(root)
    for path in paths:
        with named(path):
            is_folder = path.is_dir()
        if is_folder:
            yield from _inside(path, output)
            continue
        for file in with_shards(path):
            if file == path or file not in paths:
                yield file, file.relative_to(path.parent).as_posix()


def _inside(path: Path, output: str) -> Iterator[tuple[Path, str]]:
    """The files in a folder and below it with their paths there, without the release folder `output`."""

    def fail(error: OSError) -> None:
        raise FileAccessError(error.filename, error)

    empty = True
    for folder, folders, names in os.walk(path, onerror=fail):
        # A link could lead to itself, or to a secret.
        for one in folders:
            if not one.startswith(".") and Path(folder, one).is_symlink():
                raise ReleaseError(f"{Path(folder, one)}: links to folders are not followed; give that folder itself")
        folders[:] = sorted(
            one for one in folders if not one.startswith(".") and os.path.realpath(Path(folder, one)) != output
        )
        for one in sorted(names):
            if not one.startswith("."):
                empty = False
                file = Path(folder, one)
                _check_inside(file, path)
                yield file, file.relative_to(path).as_posix()
    if empty:
        raise FileAccessError(path, "there are no files in this folder")


class _Publisher:
    """One release on its way into a release folder."""

    def __init__(
        self,
        root: Path,
        name: str,
        version: str,
        base: str | None,
        max_file: int | None,
        executorch: str | None,
        encoded: bool,
        progress: Progress | None,
    ) -> None:
        self._root, self._files = root, root / FILES
        self._name, self._version = name, version
        if max_file is not None and (isinstance(max_file, bool) or not isinstance(max_file, int) or max_file < 1):
            raise ReleaseError(f"max_file must be a number of bytes, not {max_file!r}")
        if executorch is not None and (not isinstance(executorch, str) or not re.match(VERSION, executorch)):
            raise ReleaseError(f"{executorch!r} is not a version of ExecuTorch; expected one such as '1.5'")
        self._max, self._encoded, self._progress = max_file, encoded, progress
        self._base = self._read_base(base) if base is not None else None
        self._executorch = executorch or (self._base.index.executorch if self._base else _EXECUTORCH)
        with named(self._files):
            self._had = set(os.listdir(self._files))
        self._listed: list[File] = []
        self._sets: list[DataSet] = []
        self._paths: dict[str, Path] = {}  # of programs
        self._keys: dict[str, set[str]] = {}  # of data sets
        self._removed = self._new = 0
        self._fetched: dict[str, int] = {}  # what a device fetches for each file, by its SHA-256

    # The base

    def _read_base(self, text: str) -> _Base:
        if not isinstance(text, str):
            raise ReleaseError(f"{text!r} is not the version of a base")
        name, _, version = text.rpartition(":")
        if name and name != self._name:
            raise ReleaseError(f"the base {text!r} has another name than the release, {self._name!r}")
        check_name(version, "version")
        base = _Base(published_index(self._root, self._name, version))
        for data in base.index.data:
            keys: dict[str, PtdDataMap] = {}
            # A device has the newest blob of each key, so differences are taken from that one.
            for file_name in data.files:  # the newest last
                file = base.index.file(file_name)
                data_map = open_ptd(self._files / file.sha256)
                keys.update(dict.fromkeys(data_map, data_map))
                if file.sha256 not in base.digests:
                    table = self._table_of(file)
                    base.digests[file.sha256] = {(p.offset, p.offset + p.size): p.sha256 for p in table.parts}
                    for part in table.parts:
                        for way in part.ways:
                            if not way.base:
                                base.ways[part.sha256] = (way, table.objects[way.object])
                base.newest[data.name] = data_map
            base.sets[data.name] = keys
        return base

    def _table_of(self, file: File) -> Table:
        if file.table is None:
            raise InvalidFileError(self._files / file.sha256, f"the index has no table of {file.name!r}")
        path = self._files / file.table.sha256
        return parse_table(read_small(path, TABLE_LIMIT), file, str(path))

    def _blobs_of_base(self, data_name: str) -> BaseBlobs:
        """What devices with the base have; blobs are found in a data set by their keys."""
        if self._base is None:
            return NOTHING
        base = self._base
        keys = base.sets.get(data_name, {})

        def find(key: str, size: int) -> tuple[str, memoryview] | None:
            data_map = keys.get(key)
            if data_map is None or len(data := data_map.get_data(key)) != size:
                return None
            digest = base.digests[data_map.path.name].get(data_map.byte_range(key))
            return None if digest is None else (digest, data)

        digests = frozenset(digest for of_file in base.digests.values() for digest in of_file.values())
        return BaseBlobs(digests, find, base.ways)

    # Adding files

    def add(self, path: Path, name: str) -> None:
        """Add an input file under a name."""
        check_file_name(name)
        if any(file.name == name for file in self._listed):
            raise ReleaseError(f"{path}: two files of the release would be called {name!r}")
        try:
            kind = detect_format(path)
        except InvalidFileError:  # it is empty
            kind = Format.UNKNOWN
        # A damaged blob would get a digest of its own here, and every device would accept it.
        if kind is Format.PTD:
            self._add_data(open_ptd(path, verify=True), path, name)
            return
        if self._max is not None and (found := size_of(path)) > self._max:
            raise ReleaseError(f"{path}: it has {found} bytes, {self._max} are allowed, and only data files can be cut")
        if kind is Format.PTE:
            self._paths[name] = path
        self._list(name, "program" if kind is Format.PTE else "other", store_file(self._files, path, self._progress))

    def _add_data(self, data_map: PtdDataMap, path: Path, name: str) -> None:
        files: list[str] = []
        adapter = FOUNDATION_KEY in data_map.metadata
        old = self._continued(name) if not adapter else None
        wanted = list(data_map)
        described = True  # whether a file has the metadata already
        if self._base is not None and old is not None:
            keys = self._base.sets[name]
            wanted = [key for key in data_map if not _in_base(key, data_map, keys)]
            for file_name in old.files:
                self._listed.append(self._base.index.file(file_name))
                files.append(file_name)
            self._removed += len(keys.keys() - set(data_map))
            described = self._base.newest[name].metadata == data_map.metadata
        # Without a base the file travels as it is, so that its SHA-256 is the one that others know.
        small = self._max is None or size_of(path) <= self._max
        if small and len(wanted) == len(data_map) and not files:
            stored = store_file(self._files, path, self._progress)
            files.append(self._list(name, "data", stored, name))
        elif wanted or not files or not described:
            files += self._write_data(entries_of(data_map, wanted), data_map.metadata, name, len(files))
        self._sets.append(DataSet(name, tuple(files), adapter))
        self._keys[name] = set(data_map)

    def _continued(self, name: str) -> DataSet | None:
        """The data set of the base that further files are added to. Adapters are not: they are loaded by their path."""
        sets = self._base.index.data if self._base is not None else ()
        return next((data for data in sets if data.name == name and not data.adapter), None)

    def add_compacted(self) -> None:
        """Add what the base has, each data set in as few files as possible."""
        assert self._base is not None  # noqa: S101 - the caller has one
        index = self._base.index
        in_sets = {name for data in index.data for name in data.files}
        self._listed += [file for file in index.files if file.name not in in_sets]
        for file in index.files:
            if file.kind == "program":
                self._paths[file.name] = self._files / file.sha256
        for data in index.data:
            keys = self._base.sets[data.name]
            if len(data.files) == 1:
                self._listed.append(index.file(data.files[0]))
                files: tuple[str, ...] = data.files
            else:
                maps = [open_ptd(self._files / index.file(name).sha256) for name in data.files]
                files = tuple(self._write_data(newest_entries(maps), maps[-1].metadata, data.name, 0))
            self._sets.append(DataSet(data.name, files, data.adapter))
            self._keys[data.name] = set(keys)

    def _write_data(self, entries: Sequence[Entry], metadata: Mapping[str, str], name: str, older: int) -> list[str]:
        """Write blobs into as many files as needed; their names."""
        names: list[str] = []
        for group in self._cut(entries, name, metadata):
            with ObjectWriter(self._files, f"writing {name}", sum(len(e.data) for e in group), self._progress) as file:
                write_ptd(cast(BinaryIO, file), group, metadata)
                stored = file.finish()
            if self._max is not None and stored.size > self._max:
                part = f"the part from {group[0].key!r} on" if group else "a file without blobs"
                raise ReleaseError(f"{name}: {part} has {stored.size} bytes, {self._max} are allowed")
            names.append(self._list(self._free_name(name, older + len(names)), "data", stored, name))
        return names

    def _cut(self, entries: Sequence[Entry], name: str, metadata: Mapping[str, str]) -> Iterator[list[Entry]]:
        """Groups of entries whose files have at most the allowed size; keys of one blob stay together."""
        if self._max is None:
            yield list(entries)
            return
        blobs: dict[int, list[Entry]] = {}
        for entry in entries:
            blobs.setdefault(entry.blob, []).append(entry)
        fixed = 4096 + sum(len(k.encode()) + len(v.encode()) + 64 for k, v in metadata.items())
        group: list[Entry] = []
        size = fixed
        for same in blobs.values():
            # An upper limit: how much padding a blob really needs depends on those before it.
            alignment = math.lcm(128, *(entry.alignment for entry in same))
            needed = align_up(len(same[0].data), alignment) + alignment
            needed += sum(_KEY_ROOM + len(e.key.encode()) + 16 * (len(e.layout.sizes) if e.layout else 0) for e in same)
            if fixed + needed > self._max:
                raise ReleaseError(
                    f"{name}: the blob of {same[0].key!r} has {len(same[0].data)} bytes, too many for files of {self._max}"
                )
            if group and size + needed > self._max:
                yield group
                group, size = [], fixed
            group += same
            size += needed
        yield group

    def _free_name(self, name: str, number: int) -> str:
        """A name for a further file of a data set."""
        taken = {file.name for file in self._listed} | set(self._keys)
        stem = name.removesuffix(".ptd")
        candidate = name if number == 0 else f"{stem}.{number}.ptd"
        while candidate in taken:
            number += 1
            candidate = f"{stem}.{number}.ptd"
        return candidate

    def _list(self, name: str, kind: str, stored: Object, data_name: str = "") -> str:
        """List a stored file with its table, unless the base has both."""
        table: Object | None = None
        travels = stored.size
        old = [file for file in self._base.index.files if file.sha256 == stored.sha256] if self._base else []
        if old:
            file = File(name, kind, stored.sha256, stored.size, old[0].table, old[0].travels)  # type: ignore[arg-type]
        else:
            if stored.size >= _PACKED or kind == "data":
                regions = regions_of(self._files / stored.sha256)
                made = make_table(
                    self._files,
                    stored,
                    regions,
                    self._blobs_of_base(data_name),
                    encoded=self._encoded,
                    progress=self._progress,
                )
                travels = travelling(made)
                if kind == "data" or travels < stored.size:
                    table = store_bytes(self._files, encode(made))
                fetched = sum(min([part.size, *(way.stored for way in part.ways)]) for part in made.parts)
                # As a device decides: a file whose parts save little is fetched as it is.
                if table is None or fetched >= WORTH * stored.size:
                    self._fetched[stored.sha256] = stored.size
                else:
                    self._fetched[stored.sha256] = fetched + table.size
            else:
                self._fetched[stored.sha256] = stored.size
            new = File(name, kind, stored.sha256, stored.size, table)  # type: ignore[arg-type]
            file = File(name, kind, stored.sha256, stored.size, table, travels) if travels < stored.size else new  # type: ignore[arg-type]
        if stored.sha256 not in self._had:
            self._new += stored.size
        self._listed.append(file)
        return name

    # The index

    def finish(self, key: str | os.PathLike[str] | None) -> Published:
        """Write the index, its signature, and the newest index."""
        if not self._listed:
            raise ReleaseError(f"{self._name}:{self._version}: a release needs a file")
        # Devices link files by these names.
        names = [file.name for file in self._listed]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ReleaseError(f"two files of the release would be called {twice!r}")
        place = self._root / self._name / self._version / INDEX
        index = Index(
            format="blobstore.release.1",
            name=self._name,
            version=self._version,
            published=self._time(),
            executorch=self._executorch,
            files=tuple(self._listed),
            base=self._base.index.version if self._base else None,
            data=tuple(self._sets),
            programs=tuple(self._programs()),
            packs=tuple(self._packs()),
        )
        data = encode(index)
        parse_index(data, str(place))  # what is published can be pulled
        digest = sha256(data)
        signature = None
        if key is not None:
            from blobstore.releases.sources.trust import sign

            signature = sign(data, key)
        with named(self._root):
            for folder in (place.parent, place.parent.parent / LATEST, self._root / SIGNATURES):
                folder.mkdir(parents=True, exist_ok=True)
        with Staging(force=True, follow=False) as staging:
            written = [(self._root / SIGNATURES / digest, signature.encode())] if signature is not None else []
            for path, contents in [*written, (place, data), (place.parent.parent / LATEST / INDEX, data)]:
                with staging.open(path, len(contents)) as file:
                    file.write(contents)
        return Published(
            path=place,
            sha256=digest,
            name=self._name,
            version=self._version,
            files=len(index.files),
            release_bytes=sum(file.size for file in index.files),
            new_bytes=self._new,
            travelling_bytes=sum(self._fetched.values()),
            removed_keys=self._removed,
            signed=signature is not None,
        )

    def _time(self) -> int:
        """Now, or later than all other releases of this name."""
        others = []
        latest = self._root / self._name / LATEST / INDEX
        with named(latest):
            has_latest = latest.exists()
        if has_latest:
            others.append(published_index(self._root, self._name, LATEST).published)
        if self._base is not None:
            others.append(self._base.index.published)
        given = os.environ.get("SOURCE_DATE_EPOCH", "")
        now = int(given) if re.fullmatch(r"[0-9]{1,11}", given) else int(time.time())
        moment = max([now, *(n + 1 for n in others)])
        try:
            check_time(moment, f"{self._name}:{self._version}")
        except ReleaseError as error:
            raise ReleaseError(
                f"{error}, and it must follow the newest release and its base. If one of these is from the future: remove "
                f"{latest}, or publish without this base; devices refuse such releases"
            ) from None
        return moment

    def _programs(self) -> Iterator[Program]:
        """Which program takes keys from which data sets."""
        every = set().union(*self._keys.values())
        adapters = {data.name for data in self._sets if data.adapter}
        for name, path in self._paths.items():
            taken = taken_by(read_program(path), every)
            yield Program(name, tuple(n for n, keys in self._keys.items() if n not in adapters and keys & taken))

    def _packs(self) -> Iterable[Pack]:
        """Packs of small files: those of the base as long as half of each is needed, and one of all other files."""
        small = {file.name: file for file in self._listed if file.size < _PACKED and file.table is None}
        for pack in self._base.index.packs if self._base is not None else ():
            assert self._base is not None  # noqa: S101 - it has packs
            older = {name: self._base.index.file(name).sha256 for name, _ in pack.files}
            same = [(name, at) for name, at in pack.files if name in small and small[name].sha256 == older[name]]
            if 2 * sum(small[name].size for name, _ in same) >= pack.size:
                yield Pack(pack.sha256, pack.size, tuple(same))
                for name, _ in same:
                    del small[name]
        if len(small) < _FEWEST:
            return
        places: list[tuple[str, int]] = []
        with ObjectWriter(self._files) as writer:
            for file in small.values():
                places.append((file.name, writer.size))
                writer.write(read_small(self._files / file.sha256, _PACKED))
            stored = writer.finish()
        yield Pack(stored.sha256, stored.size, tuple(places))


def _in_base(key: str, data_map: PtdDataMap, old: Mapping[str, PtdDataMap]) -> bool:
    """Whether the base gives what a key needs."""
    other = old.get(key)
    return (
        other is not None
        and other.get_tensor_layout(key) == data_map.get_tensor_layout(key)
        and other.alignment(key) % data_map.alignment(key) == 0
        and other.digest(key) == data_map.digest(key)
        and same_bytes(other.get_data(key), data_map.get_data(key))
    )
