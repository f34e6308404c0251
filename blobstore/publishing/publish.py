"""Publishing: files become a version of a pool, and an index that lists what they consist of.

    releases/
        pool.json, packs/, tables/      the pool: every content once, whatever releases have it
        files/SHA256                    lists of parts, forms that only the newest releases have, whole files (`plain`)
        assistant/1.4/index.json        an index
        assistant/1.4/ways.json.zst     in which forms its contents can be fetched; earlier.json.zst the same for devices that
                                        have much older ones, since-SHA256.json.zst what changed in a long list of parts
        assistant/latest/index.json     the newest of the indexes
        signatures/SHA256-of-an-index

Objects come first and indexes last, so that a copy of the folder, or a kill, never shows a release with a part missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from blobstore.core.constants import FOUNDATION_KEY
from blobstore.core.disk.kinds import check_folder_name
from blobstore.core.disk.locks import exclusive
from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.disk.recovery import recover
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import FileAccessError, InvalidFileError, ReleaseError
from blobstore.core.formats.opening import Format, detect_format
from blobstore.core.formats.ptd.reader import open_ptd
from blobstore.core.formats.pte.program import read_program
from blobstore.core.formats.sharded import with_shards
from blobstore.core.memory.digest import sha256
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths, leads_into, named, open_regular
from blobstore.core.programs.deployed import taken_by
from blobstore.core.reprs import count, line
from blobstore.core.text import size
from blobstore.pool import Pool
from blobstore.pool.collecting import UNUSED
from blobstore.pool.versions import Version, live_versions
from blobstore.publishing.beside import let_go
from blobstore.publishing.forms import Forms, parts_of_release
from blobstore.publishing.mending import mend, whole_release
from blobstore.publishing.predicting import predicted
from blobstore.publishing.released import (
    Released,
    lead_to_newest,
    released_before,
    store_pieces,
)
from blobstore.releases.index.changes import LONG, changes_between, changes_since
from blobstore.releases.index.index import (
    VERSION,
    File,
    Index,
    check_file_name,
    check_name,
    encode,
    encode_json,
    parse_index,
)
from blobstore.releases.index.needs import check_time
from blobstore.releases.index.parts import parse_parts
from blobstore.releases.index.ways import EARLIER, WAYS, encode_ways, parse_ways
from blobstore.releases.sources.caching import cache_control
from blobstore.releases.sources.source import FILES, INDEX, INDEXES, LATEST, SIGNATURES, pieces_of, sha256_of

__all__ = ["Published", "opened", "publish"]

_EXECUTORCH = "1.5"
_RESERVED = {FILES, SIGNATURES, INDEXES, "packs", "tables"}


@dataclass(frozen=True)
class Published:
    """What `publish` did. All sizes are in bytes.

    Attributes:
        index: where the index is: a path, or a URL.
        sha256: its digest, to pin it.
        name, version: of the release.
        files: the number of files.
        release_bytes: the size of all of them.
        new_bytes: of contents that the release folder did not have before.
        stored_bytes: what was written for the release.
        first_bytes: what a device without anything fetches, index and lists included, from a folder or a server that sends
            several ranges at a time. From others, it also fetches what lies between near ranges.
        update_bytes: the same of a device with the release before, and nothing else; None if there is none.
        signed: whether the index has a signature.
    """

    index: str
    sha256: str
    name: str
    version: str
    files: int
    release_bytes: int
    new_bytes: int
    stored_bytes: int
    first_bytes: int
    update_bytes: int | None
    signed: bool

    @property
    def path(self) -> Path:
        """The index in a folder."""
        return Path(self.index)

    def __repr__(self) -> str:
        files = f"{count(self.files, 'file')} of {size(self.release_bytes)}"
        travel = f"{size(self.new_bytes)} new", f"devices fetch {size(self.first_bytes)}"
        return line("Published", f"{self.name} {self.version}", files, *travel, "signed" if self.signed else "")


def publish(
    inputs: Paths,
    releases: str | os.PathLike[str],
    *,
    name: str,
    version: str,
    executorch: str = _EXECUTORCH,
    sign: str | os.PathLike[str] | None = None,
    plain: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Published:
    """Publish files as a release.

    The release folder is a pool: contents that it has, of whatever release and name, are not stored again. Differences to
    the releases of this name before it are stored beside them, for devices that have these.

    Args:
        inputs: files, and folders whose files keep their paths, without those whose names begin with a dot. `.ptd` files
            are data files. The release folder may lie below them; what is in it is left out.
        releases: the release folder, or the URL of one in a bucket (see `Pool`); it is made if it is missing.
        name, version: of the release; a version is published once.
        executorch: the first version of ExecuTorch that runs the programs.
        sign: the file of a private key.
        plain: also store every file whole, for clients that decode nothing.
        executor: does the work of storing new contents; its workers must see the same files. By default threads.
        progress: called with every step.

    Raises:
        FileAccessError, InvalidFileError: a file cannot be read or written, or is malformed.
        OutputPathError: the name of the release folder is that of a file.
        ReleaseError: a name is impossible or taken, an input lies in the release folder, or a link leads out of a folder, an
            input or the release folder itself.
        TransferError: the store refuses.
    """
    check_progress(progress)
    paths = as_paths(inputs)
    if not isinstance(executorch, str) or not re.match(VERSION, executorch):
        raise ReleaseError(f"{executorch!r} is not a version of ExecuTorch; expected one such as '1.5'")
    if sign is not None:
        from blobstore.releases.sources.trust import sign as sign_bytes

        sign_bytes(b"", sign)  # a key that cannot be used is found before any work
    with _entered(releases, name, version, paths) as pool:
        output = pool.objects.folder
        files = _listed(list(_expanded(paths, output)))
        if not files:
            raise ReleaseError(f"{name}:{version}: a release needs a file")
        added, new, stored = _in_pool(pool, files, name, version, executor, progress)
        return _Publisher(pool, files, added, plain, progress).finish(executorch, sign, new, stored)


@dataclass(frozen=True)
class _Input:
    """A file of the release.

    Attributes:
        path, name: where it is, and its name in the release.
        kind: as in the index.
        data: of a program, the names of the data files that it takes keys from.
    """

    path: Path
    name: str
    kind: str
    data: tuple[str, ...] = ()


@contextlib.contextmanager
def _entered(releases: str | os.PathLike[str], name: str, version: str, inputs: Sequence[Path] = ()) -> Iterator[Pool]:
    """The pool of a release folder, made if it is missing, and a folder locked against other publishers."""
    check_name(name, "name")
    check_name(version, "version")
    if version == LATEST or name in _RESERVED:
        raise ReleaseError(
            f"{name}:{version}: the names {LATEST!r} and {', '.join(sorted(map(repr, _RESERVED)))} are taken for other folders"
        )
    if not _is_url(releases):
        _check_outside(inputs, as_path(releases))
    with opened(releases, name, version, create=True) as pool:
        place = f"{name}/{version}/{INDEX}"
        if pool.objects.get(place) is not None:
            raise ReleaseError(f"{pool.objects.name(place)}: this version was published already; versions never change")
        pool.objects.create(UNUSED, b'{"unused": {}}\n')
        yield pool


@contextlib.contextmanager
def opened(releases: str | os.PathLike[str], *inside: str, create: bool = False) -> Iterator[Pool]:
    """The pool of a release folder; a folder is locked against other publishers.

    Args:
        releases: the folder, or its URL.
        inside: the name and the version of a release that is written.
        create: make the folder if it is missing.

    Raises:
        ReleaseError: the folder is one of a device, or a copy of releases without their pool, or a link leads out of it.
        PoolError: it is no release folder.
    """
    if _is_url(releases):
        with Pool(os.fspath(releases), create=create) as pool:
            yield pool
        return
    root = as_path(releases)
    check_folder_name(root)
    with named(root):
        pulled = (root / INDEXES).exists()
        without_pool = not (root / "pool.json").exists() and any(root.glob(f"*/{LATEST}/{INDEX}"))
        if not create and not root.exists():
            raise ReleaseError(f"{root}: there is no release folder here")
    if pulled:
        raise ReleaseError(f"{root}: releases are pulled into this folder; publish them in another one")
    if without_pool:
        raise ReleaseError(
            f"{root}: there are releases here, and no pool.json; publish in the folder that they were published in"
        )
    folders = [root / name for name in (FILES, SIGNATURES, "packs", "tables")]
    if inside:
        name, version = inside
        folders += [root / name / version, root / name / LATEST]
    with named(root):
        for made in (FILES, SIGNATURES):
            (root / made).mkdir(parents=True, exist_ok=True)
        for folder in folders:
            _check_inside(folder, root)
    # Two publishers of one folder would each write `latest`, and the older one could be the last.
    with exclusive(root):
        for folder in folders:
            if folder.is_dir():
                recover(folder)
        with Pool(root, create=create) as pool:
            yield pool


def _is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a release folder is in a bucket."""
    return isinstance(place, str) and "://" in place


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


def _expanded(paths: Sequence[Path], root: Path | None) -> Iterator[tuple[Path, str]]:
    """The input files with their names in the release."""
    output = "" if root is None else os.path.realpath(root)
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
        folders[:] = _walked_into(Path(folder), folders, output)
        for file in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            if output and leads_into(file, output):
                continue
            empty = False
            _check_inside(file, path)
            yield file, file.relative_to(path).as_posix()
    if empty:
        raise FileAccessError(path, "there are no files in this folder")


def _walked_into(folder: Path, names: Iterable[str], output: str) -> list[str]:
    """The folders in a folder, in order, without hidden ones and the release folder."""
    inside = [folder / name for name in sorted(names) if not name.startswith(".")]
    for one in inside:
        if one.is_symlink():  # it could lead to itself, or to a secret
            raise ReleaseError(f"{one}: links to folders are not followed; give that folder itself")
    return [one.name for one in inside if os.path.realpath(one) != output]


def _listed(inputs: Sequence[tuple[Path, str]]) -> list[_Input]:
    """The files of a release, checked."""
    files: dict[str, _Input] = {}
    for path, name in inputs:
        check_file_name(name)
        if name in files:
            raise ReleaseError(f"{path}: two files of the release would be called {name!r}")
        files[name] = _Input(path, name, _kind(path))
    keys = {name: set(open_ptd(file.path)) for name, file in files.items() if file.kind == "data"}
    every = set().union(*keys.values())
    for name, file in files.items():
        if file.kind == "program":
            taken = taken_by(read_program(file.path), every)
            files[name] = replace(file, data=tuple(data for data, has in keys.items() if has & taken))
    return list(files.values())


def _kind(path: Path) -> str:
    """What an index calls a file."""
    try:
        kind = detect_format(path)
    except InvalidFileError:  # it is empty
        return "other"
    if kind is not Format.PTD:
        return "program" if kind is Format.PTE else "other"
    # A damaged blob would get a digest of its own here, and every device would accept it.
    return "adapter" if FOUNDATION_KEY in open_ptd(path, verify=True).metadata else "data"


def _in_pool(
    pool: Pool,
    files: Sequence[_Input],
    name: str,
    version: str,
    executor: Executor | None,
    progress: Progress | None,
) -> tuple[Version, int, int]:
    """The version of the pool with these files, and the bytes of its new contents, and of what they take.

    If it is there already, a publisher was killed, or the files were added before; this goes on then.
    """
    found = live_versions(pool.tables, name, version)
    if not found:
        added = pool.add_files([(str(file.path), file.name) for file in files], name, version, executor, progress)
        return added.version, added.new_bytes, added.stored_bytes
    [there] = found
    given = sorted((file.name, file.path.stat().st_size, sha256_of(file.path)) for file in files)
    if sorted((file.name, file.size, file.sha256) for file in there.files) != given:
        raise ReleaseError(
            f"{pool.url}: {name}@{version} is in the pool with other files; drop it (`blobstore pool drop`), or publish another "
            "version"
        )
    return there, 0, 0


class _Publisher:
    """One release on its way from a pool into the world."""

    def __init__(
        self, pool: Pool, files: Sequence[_Input], version: Version, plain: bool, progress: Progress | None
    ) -> None:
        self._pool, self._objects, self._version = pool, pool.objects, version
        self._inputs, self._plain, self._progress = files, plain, progress

    def finish(self, executorch: str, key: str | os.PathLike[str] | None, new: int, stored: int) -> Published:
        """Write the forms, the index, its signature, and the newest index."""
        version, objects = self._version, self._objects
        in_pool = {file.name: file for file in version.files}
        files = tuple(
            File(file.name, file.kind, in_pool[file.name].sha256, in_pool[file.name].size, file.data)  # type: ignore[arg-type]
            for file in self._inputs
        )
        if self._plain:
            for file, source in zip(files, self._inputs, strict=True):
                self._store_whole(file, source.path)
        before = (whole_release(self._pool, one) for one in released_before(self._pool, version))
        previous = [release for release in before if release is not None]
        parts = parts_of_release(self._pool, version, files)
        encoded_parts = encode_json(parts)
        index = Index(
            format="blobstore.release.1",
            name=version.name,
            version=version.version,
            published=self._time(previous),
            executorch=executorch,
            files=files,
            parts=store_pieces(objects, [encoded_parts]),
            plain=self._plain,
        )
        data = encode(index)
        digest = sha256(data)
        sources = {file.name: file.path for file in self._inputs}
        forms = Forms(self._pool, version, parts, previous, sources, self._progress)
        ways, earlier = forms.ways(digest)
        place = f"{version.name}/{version.version}"
        # what is published can be pulled
        parse_parts(encoded_parts, parse_index(data, objects.name(f"{place}/{INDEX}")), objects.name("parts"))
        lists = {name: encode_ways(some) for name, some in ((WAYS, ways), (EARLIER, earlier)) if some is not None}
        for name, some in lists.items():
            parse_ways(some, digest, parts, objects.name(f"{place}/{name}"))
        lists |= _changes(previous, index, encoded_parts)
        signature = None
        if key is not None:
            from blobstore.releases.sources.trust import sign

            signature = sign(data, key)
        self._write(place, data, lists, digest, signature)
        let_go(self._pool, previous)
        return Published(
            index=objects.name(f"{place}/{INDEX}"),
            sha256=digest,
            name=version.name,
            version=version.version,
            files=len(files),
            release_bytes=index.size,
            new_bytes=new,
            stored_bytes=stored + forms.written + sum(map(len, lists.values())),
            first_bytes=predicted(data, encoded_parts, lists, None),
            update_bytes=predicted(data, encoded_parts, lists, previous[0]) if previous else None,
            signed=signature is not None,
        )

    def _store_whole(self, file: File, path: Path) -> None:
        if not file.size:
            return
        if self._objects.size(f"{FILES}/{file.sha256}") == file.size:
            return
        with open_regular(path) as descriptor:
            stored = store_pieces(self._objects, pieces_of(descriptor, 0, file.size))
        if stored != file.object:
            raise ReleaseError(f"{path}: the file changed while it was published")

    def _write(self, place: str, index: bytes, lists: Mapping[str, bytes], digest: str, signature: str | None) -> None:
        """Write what makes the release appear."""
        written: dict[str, bytes] = {} if signature is None else {f"{SIGNATURES}/{digest}": signature.encode()}
        written |= {f"{place}/{name}": some for name, some in lists.items()}
        folder = self._objects.folder
        if folder is None:
            for path, contents in written.items():
                self._objects.put(path, contents, cached=cache_control(path))
            is_first = self._objects.create(f"{place}/{INDEX}", index, cached=cache_control(f"{place}/{INDEX}"))
            mend(self._pool, self._version)
            # somebody else may have published one at the same time
            lead_to_newest(self._pool, self._version)
            if not is_first:
                raise ReleaseError(
                    f"{self._objects.name(place)}: another process published this version at the same time"
                )
            return
        written |= {f"{place}/{INDEX}": index, f"{self._version.name}/{LATEST}/{INDEX}": index}
        with named(folder):
            for path in written:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with Staging(force=True, follow=False) as staging:
            for path, contents in written.items():
                with staging.open(folder / path, len(contents)) as file:
                    file.write(contents)
        mend(self._pool, self._version)

    def _time(self, previous: Sequence[Released]) -> int:
        """Now, or later than all other releases of this name."""
        latest = f"{self._version.name}/{LATEST}/{INDEX}"
        data = self._objects.get(latest)
        others = [one.index.published for one in previous]
        if data is not None:
            others.append(parse_index(data, self._objects.name(latest)).published)
        given = os.environ.get("SOURCE_DATE_EPOCH", "")
        now = int(given) if re.fullmatch(r"[0-9]{1,11}", given) else int(time.time())
        moment = max([now, *(n + 1 for n in others)])
        try:
            check_time(moment, f"{self._version.name}:{self._version.version}")
        except ReleaseError as error:
            raise ReleaseError(
                f"{error}, and it must follow the newest release. If that is from the future, remove "
                f"{self._objects.name(latest)}, and drop its version; devices refuse such releases"
            ) from None
        return moment


def _changes(previous: Iterable[Released], index: Index, parts: bytes) -> dict[str, bytes]:
    """What changed in a long list of parts since those of earlier releases, by the names of these lists."""
    others = [one for one in previous if len(parts) > LONG and one.index.parts != index.parts]
    return {changes_since(one.index.parts): changes_between(one.parts, parts) for one in others}
