"""A pool: every version of every model, each content once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from blobstore.core.disk.names import is_plain_path
from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.errors import BlobStoreError, FileAccessError, PoolError
from blobstore.core.formats.sharded import with_shards
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths, leads_into, listed, named
from blobstore.core.programs.deployed import tree
from blobstore.core.reprs import fields_line, line
from blobstore.pool.adding import Added, add_version, refuse_existing
from blobstore.pool.bases import KeptBases
from blobstore.pool.collecting import UNUSED, Collected, collect
from blobstore.pool.contents import Blobs, FilePart, PoolDataMap, files_of, parts_of, restore
from blobstore.pool.executors import batches, open_executor, run
from blobstore.pool.inputs import BucketFile, bucket_files, fetched, files_read_before, is_url
from blobstore.pool.promises import try_new
from blobstore.pool.scan import SKETCHED, ScannedFile
from blobstore.pool.tables import BLOBS, DESCRIPTION, EVENTS, MARKS, PARTS, Tables
from blobstore.pool.versions import Version, drop_version, find_version, live_versions, parse_reference
from blobstore.storage.objects import Objects

__all__ = ["Pool", "PoolStats", "Shared"]

_FORMAT = "blobstore.pool.1"
_DAY = 86_400.0
_TASKS, _SMALLEST_TASK = 64, 1 << 28  # of `verify`: how many, and bytes of files


@dataclass(frozen=True)
class PoolStats:
    """What a pool holds. All sizes are in bytes.

    Attributes:
        versions: how many.
        files_bytes: of all files of all versions.
        contents: how many distinct contents these need.
        contents_bytes: of these contents, each once.
        stored_bytes: what they take in packs, as they are stored.
        encodings: for each encoding, how many contents are stored in it, their bytes, and what they take.
    """

    __repr__ = fields_line

    versions: int
    files_bytes: int
    contents: int
    contents_bytes: int
    stored_bytes: int
    encodings: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Shared:
    """What two versions have in common, in bytes of distinct contents.

    Attributes:
        first, second: bytes of each.
        equal: of contents that both have.
        near: of contents of the second that are stored against one of the first, or the other way round, or both against
            the same base.
        apart: tensors of the same name that are neither equal nor near, with the reason: two types, two shapes, too few
            bytes, or values that differ too much.
    """

    __repr__ = fields_line

    first: int
    second: int
    equal: int
    near: int
    apart: Sequence[tuple[str, str]]


class Pool:
    """Versions of models in a folder or a bucket, each content stored once.

    A version is a set of files. It appears in one commit, whole or not at all, whoever adds, drops or collects meanwhile. Any
    number of processes may use one pool; a `Pool` is for one thread at a time.

    Args:
        url: a folder, or `s3://`, `gs://` or `az://` with a bucket and a path.
        create: make the pool if there is none.
        cache: where files of the tables of a bucket are kept; by default in the user's cache folder.
        **options: of the store, such as `aws_endpoint`, of its client, such as `allow_http` or `timeout`, and `max_retries`;
            the environment's count where they are left out.

    Attributes:
        objects, tables: what it consists of.

    Raises:
        PoolError: there is no pool, or something else, or one of a newer format; or the store does not keep what a pool needs,
            which is tried when one is made and before the first change, here and in any method.
        FileAccessError, TransferError: the store refuses, here and in any method.
        MissingDependencyError: the extra `pool` is not installed.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        create: bool = False,
        cache: str | os.PathLike[str] | None = None,
        **options: str,
    ) -> None:
        self.objects = Objects(url, options)
        self._cache = as_path(cache) if cache is not None else _default_cache()
        self.tables = Tables(self.objects, self._cache)
        self._bases = KeptBases()
        described = self._description()
        if described is None:
            if not create:
                raise PoolError(
                    f"{self.objects.url}: there is no pool here; `blobstore pool add` or create=True makes one"
                )
            self.objects.make()
            try_new(self.objects)
            self.tables.create()
            self.objects.create(DESCRIPTION, json.dumps({"format": _FORMAT}).encode() + b"\n")
            described = self._description()
        if described != _FORMAT:
            raise PoolError(f"{self.objects.name('pool.json')}: expected the format {_FORMAT}, found {described!r}")
        if self.objects.folder is None:
            self._look()  # each table takes requests
        else:
            self.tables.fresh()

    @property
    def url(self) -> str:
        """Where the pool is."""
        return self.objects.url

    def __repr__(self) -> str:
        return line("Pool", self.url, "closed" if self.tables.closed else "")

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory of queries. After this, every method is a ClosedError; data maps that were opened need it, too."""
        self.tables.close()
        self._bases = KeptBases()

    def add(
        self,
        paths: Paths,
        reference: str,
        *,
        executor: Executor | str | None = None,
        progress: Progress | None = None,
    ) -> Added:
        """Add files as a version.

        `.safetensors`, `.ptd`, `.pte`, `.ptn` and `.gguf` files, and those of `torch.save`, are taken apart into their tensors; of
        other files, 8 MiB at a time are a content. What the files have is read back from what was stored, and compared, before the version appears.

        Args:
            paths: files, which keep their names, and folders, whose files keep their paths below them. With the index of a
                sharded checkpoint, its shards are added. URLs (`s3://`, `gs://`, `az://`) are of objects, and of paths with objects
                below them. Of these, only those are read that no version has read with this ETag and size; they are fetched to
                the folder for temporary files, which the workers must see. The options are those of the pool.
            reference: `name@version`; a name may have parts with `/` between them.
            executor: does the work: one of `concurrent.futures`, `threads:N`, `processes:N`, or the scheduler of a Dask
                cluster, `dask://HOST:PORT`. Its workers must see the same files and the same pool. By default threads.
            progress: called with what is done, and bytes.

        Returns:
            What was new.

        Raises:
            PoolError: the version is there already, `reference` has another form, or there is no such executor, or it died.
            MissingDependencyError: a Dask cluster needs the extra `dask`.
            FileAccessError, DataChangedError, TransferError: reading or writing fails. The version is not there then, unless
                the message says that this is not known, because the store did not answer to the very last request.
        """
        name, version = parse_reference(reference)
        check_progress(progress)
        given = listed(paths)
        files = _expand(as_paths([path for path in given if not is_url(path)]), self.objects.folder)
        urls = [str(path) for path in given if is_url(path)]
        if not urls:
            if not files:
                raise PoolError(f"{', '.join(map(str, given))}: there are no files to add")
            return self.add_files(files, name, version, executor, progress)
        self.tables.fresh()
        refuse_existing(self.tables, name, version)
        given_twice = [file for url in urls for file in bucket_files(url, self.objects.options)]
        objects = list({(file.url, file.name): file for file in given_twice}.values())
        _check_names(files, objects)
        before = files_read_before(self.tables, objects)
        known = {file.name for file in before}
        with fetched([file for file in objects if file.name not in known], progress) as new:
            origins = {file.name: file.origin for file in objects}
            return self._add([*files, *new], name, version, executor, progress, before, origins)

    def add_files(
        self,
        files: Sequence[tuple[str, str]],
        name: str,
        version: str,
        executor: Executor | str | None = None,
        progress: Progress | None = None,
    ) -> Added:
        """As `add`, of files that have other names in the version: paths, and these names."""
        return self._add(files, name, version, executor, progress)

    def _add(
        self,
        files: Sequence[tuple[str, str]],
        name: str,
        version: str,
        executor: Executor | str | None,
        progress: Progress | None,
        before: Sequence[ScannedFile] = (),
        origins: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> Added:
        check_progress(progress)
        self.objects.reserve()  # versions never take the room with which others are freed
        with open_executor(executor) as workers:
            added = add_version(
                self.objects, self.tables, files, name, version, workers, progress, before=before, origins=origins
            )
        with contextlib.suppress(BlobStoreError):  # the version is there; the next one tidies
            self.tables.tidy()
        return added

    def versions(self) -> list[Version]:
        """The versions that are there, by name, the oldest first."""
        self._look()
        return live_versions(self.tables)

    def open(self, reference: str) -> PoolDataMap:
        """The tensors of a version as a data map. Bytes are read when they are asked for.

        Raises:
            PoolError: there is no such version.
        """
        return PoolDataMap(self.objects, self.tables, self._find(reference))

    def get(
        self,
        reference: str,
        directory: str | os.PathLike[str],
        *,
        force: bool = False,
        executor: Executor | str | None = None,
        progress: Progress | None = None,
    ) -> list[Path]:
        """Write the files of a version into a folder, all or none.

        Args:
            reference: `name@version`.
            directory: made if it is missing.
            force: also replace files of another format.
            executor: a `ThreadPoolExecutor` or `threads:N`, which decode while this thread writes and another one compares; by
                default as many threads as there are processors. They have about 25 MB ahead, and one content and its base where
                a recipe needs these whole. With `threads:1`, this thread does all. Bases that versions in a row need
                stay decoded, in at most 256 MB, until the pool is closed.
            progress: called with bytes.

        Returns:
            The paths of the files.

        Raises:
            PoolError: there is no such version, or the executor has no threads.
            IntegrityError: a file would not be the one that was added.
            OutputPathError: a file of another format is in the place of one, and `force` is not set.
        """
        check_progress(progress)
        version = self._find(reference)
        where = self.objects, self.tables, version, as_path(directory)
        if executor == "threads:1":
            return restore(*where, force=force, progress=progress, bases=self._bases, threads=None)
        with open_executor(executor, "nothing was written") as threads:
            if not isinstance(threads, ThreadPoolExecutor):
                raise PoolError(
                    f"{executor!r}: files are written by this process, with its threads: expected threads:N"
                )
            return restore(*where, force=force, progress=progress, bases=self._bases, threads=threads)

    def cat(self, reference: str, file: str) -> Iterator[memoryview]:
        """The bytes of one file of a version, piece by piece.

        Raises:
            PoolError: there is no such version, or no such file in it.
            IntegrityError: the bytes are not those that were added; what came before this error is to be thrown away.
        """
        version = self._find(reference)
        only = tuple(one for one in version.files if one.name == file)
        if not only:
            raise PoolError(
                f"{reference} has no file {file!r}; it has {', '.join(one.name for one in version.files[:5])}"
            )
        parts = [part for part in parts_of(self.tables, version) if part.file == file]
        for piece in self._bytes_of(replace(version, files=only), parts):
            yield memoryview(bytes(piece))  # which the caller may keep

    def drop(self, reference: str) -> Version:
        """Let a version disappear; `gc` frees what it alone needed.

        Raises:
            PoolError: there is no such version.
        """
        return self.objects.with_reserve(lambda: drop_version(self.tables, reference))

    def gc(self, *, grace: float = 7 * _DAY, keep: float = _DAY) -> Collected:
        """Free what no version needs. It is safe beside anything, and may be killed at any time.

        Args:
            grace: seconds after which a version that is being added is given up.
            keep: seconds for which packs stay for readers that looked them up before.

        Raises:
            PoolError: releases are published from this pool; `blobstore.releases.sweep` collects both.
        """
        if self.objects.get(UNUSED) is not None:
            raise PoolError(
                f"{self.url}: releases are published from this pool, and lead devices to its packs; `blobstore gc {self.url}` "
                "collects both"
            )
        collected = self.objects.with_reserve(lambda: collect(self.objects, self.tables, grace=grace, keep=keep))
        with contextlib.suppress(FileAccessError):  # if the disk is full, the next version waits for it
            self.objects.reserve()
        return collected

    def verify(
        self,
        reference: str | None = None,
        progress: Progress | None = None,
        *,
        executor: Executor | str | None = None,
    ) -> list[tuple[str, str]]:
        """Read everything that a version needs, or all versions, and compare it.

        Args:
            reference: only this version.
            progress: called with bytes.
            executor: does the work, many versions at a time, as in `add`; by default this thread does it. A worker needs memory
                for a content and its base where a recipe needs these whole, and some MB otherwise.

        Returns:
            What is damaged or missing: `name@version`, and what is wrong.

        Raises:
            PoolError: there is no such version, or executor, or it died.
        """
        check_progress(progress)
        self._bases.forget()  # of those that are kept, nothing would be read
        versions = [self._find(reference)] if reference is not None else self.versions()
        done, total = 0, sum(version.size for version in versions)
        problems: list[tuple[str, str]] = []

        def told(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress:
                progress("verifying", done, total)

        if executor is None:
            return [problem for version in versions for problem in self.problems_of(version, told)]
        enough = max(total // _TASKS, _SMALLEST_TASK)
        groups = batches(versions, lambda version: version.size, enough)
        tasks = [(self.url, self.objects.options, self._cache, some) for some in groups]
        with open_executor(executor, "not everything was verified") as workers:
            for nbytes, found in run(workers, _verified, tasks):
                problems += found
                told(nbytes)
        return sorted(problems)

    def stats(self) -> PoolStats:
        """How many versions and contents there are, and what they take."""
        versions = self.versions()
        rows = self.tables.query(
            """
            WITH chosen AS (
                SELECT any_value(size) AS size, arg_min(encoding, length) AS encoding, min(length) AS length FROM blobs
                WHERE digest IN (SELECT digest FROM parts SEMI JOIN live ON id = a) GROUP BY digest
            )
            SELECT regexp_replace(encoding, '^slice:[0-9:]*', 'slice') AS kind, count(*), sum(size)::BIGINT, sum(length)::BIGINT
            FROM chosen GROUP BY kind ORDER BY 3 DESC
            """,
            live=[(version.id,) for version in versions] or [("",)],
        )
        encodings = {encoding: (number, nbytes, stored) for encoding, number, nbytes, stored in rows}
        return PoolStats(
            len(versions),
            sum(version.size for version in versions),
            sum(number for number, _, _ in encodings.values()),
            sum(nbytes for _, nbytes, _ in encodings.values()),
            sum(stored for _, _, stored in encodings.values()),
            encodings,
        )

    def why(self, first: str, second: str) -> Shared:
        """What two versions share, and why not more.

        Raises:
            PoolError: there is no such version.
        """
        one, other = self._find(first), self._find(second)
        parts, others = parts_of(self.tables, one), parts_of(self.tables, other)
        blobs = Blobs(self.objects, self.tables, (part.digest for part in (*parts, *others)))
        roots, other_roots = (
            {part.digest: blobs.row(part.digest).base or part.digest for part in of} for of in (parts, others)
        )
        known = set(roots.values())
        equal = other_roots.keys() & roots.keys()
        near = {digest for digest, root in other_roots.items() if root in known} - equal
        sizes = {part.digest: part.size for part in (*parts, *others)}
        named = {part.tensor: part for part in parts if part.tensor}
        pairs = ((named[part.tensor], part) for part in others if part.tensor in named)
        apart = (
            (part.tensor, _why_apart(twin, part))
            for twin, part in pairs
            if part.digest != twin.digest and part.digest not in near
        )
        total, other_total, both, close = (
            sum(map(sizes.__getitem__, some)) for some in (roots, other_roots, equal, near)
        )
        return Shared(total, other_total, both, close, tuple(apart))

    def problems_of(self, version: Version, told: Callable[[int], None]) -> list[tuple[str, str]]:
        """As `verify`, of one version, in this thread; `told` is called with bytes."""
        try:
            for piece in self._bytes_of(version, parts_of(self.tables, version)):
                told(len(piece))
        except BlobStoreError as error:
            return [(f"{version.name}@{version.version}", str(error))]
        return []

    def _bytes_of(self, version: Version, parts: Sequence[FilePart]) -> Iterator[memoryview]:
        """The bytes of all files of a version; each piece is valid until the next one."""
        blobs = Blobs(self.objects, self.tables, (part.digest for part in parts), self._bases)
        for _, pieces in files_of(blobs, version, parts):
            yield from pieces

    def _look(self) -> None:
        """See the newest versions, and after that what they need, which was there before them."""
        self.tables.fresh(EVENTS)
        self.tables.later(PARTS, BLOBS, MARKS)

    def _find(self, reference: str) -> Version:
        parse_reference(reference)
        self._look()
        return find_version(self.tables, reference)

    def _description(self) -> str | None:
        if self.objects.folder is not None and not os.path.isdir(self.objects.folder):  # noqa: PTH112
            return None
        data = self.objects.get(DESCRIPTION)
        if data is None:
            return None
        try:
            described = json.loads(data)
            return str(described["format"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise PoolError(f"{self.objects.name('pool.json')}: this describes no pool") from None


def _verified(
    url: str, options: Mapping[str, Any], cache: Path, versions: Sequence[Version]
) -> tuple[int, list[tuple[str, str]]]:
    """Bytes of versions, and what is wrong with them: what a worker does."""
    with Pool(url, cache=cache, **options) as pool:
        problems = [problem for version in versions for problem in pool.problems_of(version, lambda _: None)]
    return sum(version.size for version in versions), problems


def _default_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")  # noqa: PTH111, PTH118
    return Path(home) / "blobstore" / "pool"


def _why_apart(one: FilePart, other: FilePart) -> str:
    """Why two tensors of one name are neither equal nor near."""
    if one.dtype != other.dtype:
        return f"{one.dtype} and {other.dtype}"
    if one.shape != other.shape:
        return f"{one.shape} and {other.shape}"
    return f"fewer than {SKETCHED} bytes" if other.size < SKETCHED else "values that differ too much"


def _expand(paths: Sequence[Path], pool: Path | None) -> list[tuple[str, str]]:
    """Files with their names in a version, without those of a local pool itself.

    Raises:
        FileAccessError: something is missing.
        InvalidFileError: a shard of an index is.
        PoolError: two files would have one name, or one a name that leads elsewhere; or a path is in the pool.
    """
    files: dict[str, str] = {}
    for path in paths:
        if pool is not None and leads_into(path, pool):
            raise PoolError(f"{path}: this is in the pool {pool} itself; add files of another folder")
        for file, name in _inside(path, pool):
            if not is_plain_path(name, anywhere=False):
                raise PoolError(f"{file}: {name!r} cannot be the name of a file of a version")
            if files.setdefault(name, os.path.abspath(file)) != os.path.abspath(file):  # noqa: PTH100
                raise PoolError(
                    f"{file}: another file of the version is called {name}, too; add a folder that has both"
                )
    return [(path, name) for name, path in sorted(files.items())]


def _inside(path: Path, pool: Path | None) -> Iterator[tuple[Path, str]]:
    """A file and its shards, or the files of a folder, with their names."""
    with named(path):
        is_folder = path.is_dir()
        if not (is_folder or path.exists()):
            raise FileAccessError(path, "there is no such file")
    if is_folder:
        files = tree(path, ("",))
        for file in files if pool is None else (file for file in files if not leads_into(file, pool)):
            yield file, file.relative_to(path).as_posix()
    else:
        yield from ((file, file.relative_to(path.parent).as_posix()) for file in with_shards(path))


def _check_names(files: Sequence[tuple[str, str]], objects: Sequence[BucketFile]) -> None:
    """Refuse two objects, or a file and an object, of one name."""
    names = {name: path for path, name in files}
    for one in objects:
        if names.setdefault(one.name, one.url) != one.url:
            raise PoolError(f"{one.url}: {names[one.name]} is called {one.name} in the version, too")
