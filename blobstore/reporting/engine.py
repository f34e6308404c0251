"""Does the work on any executor of `concurrent.futures`, and remembers the results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from blobstore.core.errors import BlobStoreError, InvalidFileError
from blobstore.reporting.cache import Cache
from blobstore.reporting.fingerprint import Fingerprint, Wanted, fingerprint
from blobstore.reporting.model import FileReport, Problem, Region
from blobstore.reporting.regions import read_regions
from blobstore.reporting.source import Identity, identify, open_source

__all__ = ["Engine", "Scanned", "default_executor"]

Progress = Callable[[str, int, int], None]

_BATCH_BYTES = 1 << 26
_BATCH_BLOBS = 256


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

    def report(self, prints: Sequence[Fingerprint | None]) -> FileReport:
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

    def scan(self, paths: Sequence[str]) -> list[Scanned | Problem]:
        """The structure of each file, or why it cannot be read."""
        by_path: dict[str, Scanned | Problem] = {}
        missing = []
        # A path that is given twice is read once.
        for path in dict.fromkeys(paths):
            identity = identify(path)
            known = self._cache.regions(identity)
            if known is not None and identity is not None:
                by_path[path] = Scanned(path, identity, known[0], identity.size, tuple(known[1]), known[2])
            else:
                missing.append(path)
        for (path,), result in self._run(_scan, [(path,) for path in missing]):
            by_path[path] = result
            if isinstance(result, Scanned):
                self._cache.set_regions(result.identity, result.format, result.regions, result.alignment)
        return [by_path[path] for path in paths]

    def fingerprint(self, files: Sequence[Scanned], alike: bool) -> list[list[Fingerprint | None] | Problem]:
        """For each file the fingerprint of each region, None for what is not a blob.

        Or why the file could not be read, or that it is damaged: then its bytes are no reason to drop those of another.
        """
        results: list[list[Fingerprint | None] | Problem] = [[None] * len(file.regions) for file in files]
        tasks: list[tuple[int, list[int], int]] = []
        total = done = 0
        for f, file in enumerate(files):
            for batch in _batches(file.regions):
                start, stop = file.regions[batch[0]].start, file.regions[batch[-1]].stop
                nbytes = sum(file.regions[r].nbytes for r in batch)
                total += nbytes
                known = self._cache.fingerprints(file.identity, start, stop, alike)
                if known is not None and len(known) == len(batch):
                    _store(results, f, batch, known)
                    done += nbytes
                else:
                    tasks.append((f, batch, nbytes))
        tasks.sort(key=lambda task: -task[2])  # large ones first, so that none is left for the end
        arguments = [
            (files[f].path, files[f].identity, tuple(_wanted(files[f].regions[r], alike) for r in batch))
            for f, batch, _ in tasks
        ]
        todo = {id(argument): task for argument, task in zip(arguments, tasks, strict=True)}
        for argument, result in self._run(_fingerprint, arguments):
            f, batch, nbytes = todo[id(argument)]
            if isinstance(result, Problem):
                results[f] = result
            else:
                _store(results, f, batch, result)
                start, stop = files[f].regions[batch[0]].start, files[f].regions[batch[-1]].stop
                self._cache.set_fingerprints(files[f].identity, start, stop, alike, result)
            done += nbytes
            self._progress("reading", done, total)
        return [
            # A file whose bytes are not what it says they are must not make another file look redundant.
            prints if isinstance(prints, Problem) else _damage(file, prints) or prints
            for file, prints in zip(files, results, strict=True)
        ]

    def prove(self, function: Callable[..., Any], tasks: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Call `function` for each (key, arguments), except where the cache has a result under the key.

        The result is None if the task's file can no longer be read.
        """
        results: dict[str, Any] = {}
        missing: list[tuple[Any, ...]] = []
        keys: dict[int, str] = {}
        for key, arguments in tasks:
            known = self._cache.proof(key)
            if known is not None:
                results[key] = known[0]
            elif key not in results:
                results[key] = None
                missing.append((function, *arguments))
                keys[id(missing[-1])] = key
        for number, (arguments, result) in enumerate(self._run(_prove, missing), 1):
            if not isinstance(result, Problem):
                results[keys[id(arguments)]] = result
                self._cache.set_proof(keys[id(arguments)], result)
            self._progress("comparing", number, len(missing))
        return [results[key] for key, _ in tasks]

    def _run(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """The results as they come; tasks that have not begun when the caller stops are cancelled."""
        futures = {self._executor.submit(function, *task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            # The caller may stop at the first problem; what is running ends by itself.
            for future in futures:
                future.cancel()


def _batches(regions: Sequence[Region]) -> Iterator[list[int]]:
    """The blobs of a file in portions; the same for the same file, so that they can be found in the cache."""
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


def _store(
    results: list[list[Fingerprint | None] | Problem], f: int, batch: Sequence[int], fingerprints: Sequence[Fingerprint]
) -> None:
    of_file = results[f]
    if isinstance(of_file, list):
        for r, known in zip(batch, fingerprints, strict=True):
            of_file[r] = known


def _damage(file: Scanned, prints: Sequence[Fingerprint | None]) -> Problem | None:
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
