"""Does the work on any executor of `concurrent.futures`, and remembers the results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from blobstore.core.errors import BlobStoreError, InvalidFileError
from blobstore.core.regions.reading import read_regions
from blobstore.core.regions.region import Region
from blobstore.core.regions.source import Identity, identify, open_source
from blobstore.reporting.model import FileReport, Problem
from blobstore.reporting.read.cache import Cache
from blobstore.reporting.read.fingerprint import Fingerprint, Wanted, fingerprint

__all__ = ["Engine", "Prints", "Read", "default_executor"]

Found = TypeVar("Found")
Progress = Callable[[str, int, int], None]

Prints = Sequence["Fingerprint | None"]
"""The fingerprint of each region of a file; None for what is no blob."""

_BATCH_BYTES = 1 << 26
_BATCH_BLOBS = 256


@dataclass(frozen=True)
class Read:
    """Files that were read.

    Attributes:
        files: those that could be.
        prints: of each of them the fingerprints.
        problems: why others could not.
    """

    files: list[FileReport]
    prints: list[Prints]
    problems: list[Problem]


@dataclass(frozen=True)
class Scanned:
    """A file whose structure was read.

    Attributes:
        path: as it was asked for.
        identity: for the cache.
        format, size, regions, alignment: as in `FileReport`, without digests.
    """

    path: str
    identity: Identity | None
    format: str
    size: int
    regions: tuple[Region, ...]
    alignment: int

    def report(self, prints: Prints) -> FileReport:
        """The file with its digests."""
        regions = (
            region if known is None else _with_digest(region, known.digest)
            for region, known in zip(self.regions, prints, strict=True)
        )
        return FileReport(self.path, self.format, self.size, tuple(regions), alignment=self.alignment)


def _with_digest(region: Region, digest: str) -> Region:
    # `dataclasses.replace` takes three times as long
    return Region(
        region.kind, region.start, region.stop, region.keys, region.methods, region.layout, region.dtype, digest
    )


@contextlib.contextmanager
def default_executor(executor: Executor | None) -> Iterator[Executor]:
    """The caller's executor, or threads for the duration of the report, since hashing and comparing release the GIL."""
    if executor is not None:
        yield executor
        return
    with ThreadPoolExecutor(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ) as own:
        yield own


class Engine:
    """Runs the steps of a report.

    Args:
        executor: does the work; it is not shut down. Its workers must see the same files under the same paths.
        cache: holds what is known already, and takes the results.
        progress: called with what is being done, how many bytes of it are done, and how many there are.
    """

    def __init__(self, executor: Executor, cache: Cache, progress: Progress | None = None) -> None:
        self._executor = executor
        self._cache = cache
        self._progress = progress or (lambda what, done, total: None)

    def read(
        self, paths: Sequence[str], alike: bool, wanted: Callable[[Sequence[Region]], bool] = lambda regions: True
    ) -> Read:
        """Read files.

        Args:
            paths: the files, each once.
            alike: whether more than equality will be looked for.
            wanted: which of them are to be read, by their structure.
        """
        scanned, unread = _divided(self._scan(paths))
        scanned = [file for file in scanned if wanted(file.regions)]
        pairs, damaged = _divided(self._fingerprint(scanned, alike))
        return Read([file.report(prints) for file, prints in pairs], [prints for _, prints in pairs], unread + damaged)

    def _scan(self, paths: Sequence[str]) -> list[Scanned | Problem]:
        """The structure of each file, or why it cannot be read."""
        by_path: dict[str, Scanned | Problem] = {}
        missing = []
        for path in paths:
            identity = identify(path)
            known = self._cache.regions(identity)
            if known is not None and identity is not None:
                by_path[path] = Scanned(path, identity, known[0], identity.size, tuple(known[1]), known[2])
            else:
                missing.append(path)
        for path, result in self._run(_scan, [(path, (path,)) for path in missing]):
            by_path[path] = result
            if isinstance(result, Scanned):
                self._cache.set_regions(result.identity, result.format, result.regions, result.alignment)
        return [by_path[path] for path in paths]

    def _fingerprint(self, files: Sequence[Scanned], alike: bool) -> Iterator[tuple[Scanned, Prints] | Problem]:
        """Each file with its fingerprints; or why it could not be read, or that it is damaged."""
        of_files = [[_Batch(file, regions) for regions in _batches(file.regions)] for file in files]
        batches = [batch for of_file in of_files for batch in of_file]
        found = self._remembered(batches, alike)
        done, total = sum(batch.nbytes for batch in found), sum(batch.nbytes for batch in batches)
        missing = [batch for batch in batches if batch not in found]
        missing.sort(key=lambda batch: -batch.nbytes)  # large ones first, so that none is left for the end
        tasks = [(batch, (batch.file.path, batch.file.identity, batch.wanted(alike))) for batch in missing]
        for batch, result in self._run(_fingerprint, tasks):
            found[batch] = result
            if not isinstance(result, Problem):
                self._cache.set_fingerprints(batch.file.identity, batch.start, batch.stop, alike, result)
            done += batch.nbytes
            self._progress("reading", done, total)
        return (_whole(file, of_file, found) for file, of_file in zip(files, of_files, strict=True))

    def _remembered(self, batches: Iterable[_Batch], alike: bool) -> dict[_Batch, Sequence[Fingerprint] | Problem]:
        found: dict[_Batch, Sequence[Fingerprint] | Problem] = {}
        for batch in batches:
            known = self._cache.fingerprints(batch.file.identity, batch.start, batch.stop, alike)
            if known is not None and len(known) == len(batch.regions):
                found[batch] = known
        return found

    def prove(self, function: Callable[..., Any], tasks: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Call `function` for each (key, arguments), except where the cache has a result under the key.

        The result is None if the task's file can no longer be read.
        """
        results: dict[str, Any] = {}
        missing: dict[str, tuple[Any, ...]] = {}
        for key, arguments in tasks:
            known = self._cache.proof(key)
            if known is not None:
                results[key] = known[0]
            else:
                missing[key] = (function, *arguments)
        for number, (key, result) in enumerate(self._run(_prove, missing.items()), 1):
            if not isinstance(result, Problem):
                results[key] = result
                self._cache.set_proof(key, result)
            self._progress("comparing", number, len(missing))
        return [results.get(key) for key, _ in tasks]

    def _run(
        self, function: Callable[..., Any], tasks: Iterable[tuple[Found, tuple[Any, ...]]]
    ) -> Iterator[tuple[Found, Any]]:
        """Call `function` for each (what it is about, arguments), and say of each what it is about, with the result, as they
        come. Tasks that have not begun when the caller stops are cancelled."""
        futures = {self._executor.submit(function, *arguments): about for about, arguments in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            # The caller may stop at the first problem; what is running ends by itself.
            for future in futures:
                future.cancel()


def _divided(results: Iterable[Found | Problem]) -> tuple[list[Found], list[Problem]]:
    found: list[Found] = []
    problems: list[Problem] = []
    for result in results:
        if isinstance(result, Problem):
            problems.append(result)
        else:
            found.append(result)
    return found, problems


@dataclass(frozen=True, eq=False)
class _Batch:
    """Some blobs of a file, which are read in one go; the same for the same file, so that they can be found in the cache.

    Attributes:
        file: the file.
        regions: indices of the blobs.
    """

    file: Scanned
    regions: Sequence[int]

    @property
    def start(self) -> int:
        return self.file.regions[self.regions[0]].start

    @property
    def stop(self) -> int:
        return self.file.regions[self.regions[-1]].stop

    @cached_property
    def nbytes(self) -> int:
        return sum(self.file.regions[r].nbytes for r in self.regions)

    def wanted(self, alike: bool) -> tuple[Wanted, ...]:
        return tuple(_wanted(self.file.regions[r], alike) for r in self.regions)


def _batches(regions: Sequence[Region]) -> Iterator[list[int]]:
    batch: list[int] = []
    nbytes = 0
    for r, region in enumerate(regions):
        if not region.kind.is_blob:
            continue
        if batch and (nbytes + region.nbytes > _BATCH_BYTES or len(batch) == _BATCH_BLOBS):
            yield batch
            batch, nbytes = [], 0
        batch.append(r)
        nbytes += region.nbytes
    if batch:
        yield batch


def _wanted(region: Region, alike: bool) -> Wanted:
    scalar_type = None if region.layout is None else int(region.layout.scalar_type)
    return Wanted(region.start, region.stop, scalar_type, alike)


def _whole(
    file: Scanned, batches: Iterable[_Batch], found: Mapping[_Batch, Sequence[Fingerprint] | Problem]
) -> tuple[Scanned, Prints] | Problem:
    """A file with what was found in its batches, or its problem."""
    prints: list[Fingerprint | None] = [None] * len(file.regions)
    for batch in batches:
        result = found[batch]
        if isinstance(result, Problem):
            return result
        for r, known in zip(batch.regions, result, strict=True):
            prints[r] = known
    # A file whose bytes are not what it says they are must not make another file look redundant.
    return _damage(file, prints) or (file, prints)


def _damage(file: Scanned, prints: Prints) -> Problem | None:
    """What is damaged in a file that records digests; None if nothing is."""
    damaged = [
        (region, known.digest)
        for region, known in zip(file.regions, prints, strict=True)
        if known is not None and region.recorded not in {"", known.digest}
    ]
    if not damaged:
        return None
    region, found = damaged[0]
    more = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return Problem(
        file.path,
        f"the bytes of {region.name!r} are damaged: expected xxh3-128 {region.recorded}, found {found}{more}",
    )


# What workers run. Errors come back as Problem, because exceptions do not survive the way between processes.


def _scan(path: str) -> Scanned | Problem:
    try:
        with open_source(path) as source:
            file_format, regions, alignment = read_regions(source)
            # Structure of one version with bytes of the next would be a finding about neither.
            source.check_unchanged()
            return Scanned(path, source.identity, file_format, source.size, tuple(regions), alignment)
    except (BlobStoreError, OSError) as error:
        return Problem(path, _reason(path, error))


def _fingerprint(path: str, identity: Identity | None, wanted: Sequence[Wanted]) -> list[Fingerprint] | Problem:
    try:
        with open_source(path) as source:
            if source.identity != identity:
                return Problem(path, "the file changed while it was read")
            fingerprints = [fingerprint(source, item) for item in wanted]
            source.check_unchanged()
            return fingerprints
    except (BlobStoreError, OSError) as error:
        return Problem(path, _reason(path, error))


def _prove(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (BlobStoreError, OSError) as error:
        return Problem("", str(error))


def _reason(path: str, error: Exception) -> str:
    """The reason, without the path, which is printed beside it."""
    if isinstance(error, InvalidFileError):
        return error.reason
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return str(error).removeprefix(f"{path}: ")
