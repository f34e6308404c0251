"""Making a report: read the structure, then each blob once, then compare what looks alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from blobstore.core.disk.kinds import Format, by_name
from blobstore.core.disk.progress import check_progress
from blobstore.core.distribution import install
from blobstore.core.errors import (
    BlobStoreError,
    FileAccessError,
    InputError,
    MissingDependencyError,
    UnsupportedDataError,
)
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.opening import Names, open_names
from blobstore.core.formats.sharded import with_shards
from blobstore.core.memory.mapped_file import Paths, as_path, listed
from blobstore.reporting.cache import Cache
from blobstore.reporting.catalog import Catalog
from blobstore.reporting.commands import unite
from blobstore.reporting.engine import Engine, Scanned, default_executor
from blobstore.reporting.findings import constants, contained, dtypes, duplicates, layouts, leftovers, near
from blobstore.reporting.findings.kept import Kept
from blobstore.reporting.fingerprint import Fingerprint
from blobstore.reporting.model import FileReport, Finding, FindingKind, Problem
from blobstore.reporting.named import (
    can_name,
    checkpoints_beside,
    is_nameless,
    name_related,
    name_tensors,
    names_in,
    names_of,
)
from blobstore.reporting.regions import SUFFIXES
from blobstore.reporting.savings import count
from blobstore.reporting.source import is_url, needs_package
from blobstore.reporting.view import Report

__all__ = ["NEAR", "report"]

NEAR = 0.1
"""Blobs that differ in more than this share of their elements are different blobs."""

_SAME_VALUES = {FindingKind.OTHER_LAYOUT, FindingKind.OTHER_DTYPE}


def report(
    paths: Paths,
    *,
    exact_only: bool = False,
    near: float = NEAR,
    names: Names | None = None,
    executor: Executor | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Report:
    """Find where a set of models wastes bytes, and what to do about it.

    Nothing is written but the cache. A file that cannot be read is listed in `Report.problems` and does not stop the
    rest; a cache that cannot be read or written is one of `Report.notes`.

    Args:
        paths: one or several: `.pte`, `.ptd`, `.ptn`, `.safetensors` and `.gguf` files, folders that are searched for such files, and URLs of
            either that fsspec can open.
        exact_only: look for equal bytes only; blobs are hashed and nothing else is computed.
        near: the share of elements in which near duplicates may differ, from 0 to 0.25.
        names: tensors by name, a checkpoint or its path. What equals exactly one of them to the byte, and has
            no name but a key made of its contents, is shown under that name. Other files of the report give names, too,
            and so do checkpoints in the folder of a file and in the one above, which are not reported on: to what is
            equal to exactly one tensor, or has its values in another type or layout.
        executor: where to work, for example a process pool or the executor of a cluster's client; workers must see the
            same files under the same names. It is not shut down. Left out, threads are used.
        cache: a file that remembers what was found; made if it is missing or damaged. Left out, nothing is
            remembered.
        progress: called with what is being done, how much of it is done, and how much there is.

    Returns:
        The report.

    Raises:
        FileAccessError: something among `paths` is not a path, or `cache` is another kind of file.
        InputError: `near` is not a number from 0 to 0.25.
        UnsupportedDataError: `names`, `executor` or `progress` is something else.
    """
    if not isinstance(near, int | float) or not 0 <= near <= 0.25:
        raise InputError(f"near must be a share from 0 to 0.25, not {near!r}")
    if executor is not None and not isinstance(executor, Executor):
        raise UnsupportedDataError(f"expected an executor of concurrent.futures, found a {type(executor).__qualname__}")
    checkpoint = open_names(names)
    check_progress(progress)
    asked, aliases, problems = _expand(_names(paths))
    notes: list[str] = []
    with Cache(cache) as known, default_executor(executor) as workers:
        engine = Engine(workers, known, progress)
        files: list[FileReport] = []
        prints: list[Sequence[Fingerprint | None]] = []
        scanned: list[Scanned] = []
        for result in engine.scan(asked):
            if isinstance(result, Problem):
                problems.append(result)
            else:
                scanned.append(result)
        for file, of_file in zip(scanned, engine.fingerprint(scanned, not exact_only), strict=True):
            if isinstance(of_file, Problem):
                problems.append(of_file)
            else:
                files.append(replace(file.report(of_file), aliases=tuple(aliases.get(file.path, ()))))
                prints.append(of_file)
        catalog = Catalog(files, prints)
        findings = count(unite(files, _find(catalog, engine, near, exact_only)))
        if checkpoint is not None:
            files = name_tensors(files, names_of(checkpoint))
            if not any(region.tensor for file in files for region in file.regions):
                given = "names" if isinstance(names, NamedDataMap) else names
                notes.append(
                    f"nothing got a name from {given}: nothing without a name equals exactly one of its tensors"
                )
        files = name_tensors(files, names_in(files))
        files = name_related(files, [finding.places for finding in findings if finding.kind in _SAME_VALUES])
        files = _name_from_beside(files, prints, engine, exact_only)
    if known.trouble is not None:
        notes.append(known.trouble)
    return Report(tuple(files), tuple(findings), tuple(problems), tuple(notes))


def _name_from_beside(
    files: list[FileReport], prints: Sequence[Sequence[Fingerprint | None]], engine: Engine, exact_only: bool
) -> list[FileReport]:
    """The files with the names that checkpoints beside them have for their tensors, also in another type or layout."""
    scanned = [
        file
        for file in engine.scan(checkpoints_beside(files))
        if isinstance(file, Scanned) and can_name(file.regions, files)
    ]
    beside: list[FileReport] = []
    beside_prints: list[Sequence[Fingerprint | None]] = []
    for file, of_file in zip(scanned, engine.fingerprint(scanned, not exact_only), strict=True):
        if not isinstance(of_file, Problem):  # what cannot be read gives no names
            beside.append(file.report(of_file))
            beside_prints.append(of_file)
    if not beside:
        return files
    files = name_tensors(files, names_in(beside))
    nameless = [
        [known if is_nameless(region) else None for region, known in zip(file.regions, of_file, strict=True)]
        for file, of_file in zip(files, prints, strict=True)
    ]
    together = [*files, *beside]
    catalog = Catalog(together, [*nameless, *beside_prints])
    pairs = [(wide, narrow) for wide, narrow, _ in dtypes.relate(catalog)]
    pairs += [(tensor, other) for tensor, other, _, _ in layouts.relate(catalog, engine)]
    return name_related(together, [catalog.places(pair) for pair in pairs])[: len(files)]


def _find(catalog: Catalog, engine: Engine, near_limit: float, exact_only: bool) -> list[Finding]:
    findings = [*duplicates.find(catalog), *leftovers.find(catalog)]
    if exact_only:
        return findings
    kept = Kept(catalog.contents)
    same_values = dtypes.relate(catalog)
    same_elements = layouts.relate(catalog, engine)
    for one, other in [*((a, b) for a, b, _ in same_values), *((a, b) for a, b, _, _ in same_elements)]:
        kept.join(one, other)
    findings += constants.find(catalog)
    findings += dtypes.find(catalog, same_values, kept)
    findings += layouts.find(catalog, same_elements, kept)
    findings += contained.find(catalog, engine)
    findings += near.find(catalog, engine, kept, near_limit)
    return findings


def _names(paths: Paths) -> list[str]:
    """The paths and URLs as text, each as it was given."""
    names = []
    for path in listed(paths):
        if not (isinstance(path, str) and is_url(path)):
            as_path(path)  # raises if it is not a path
        names.append(os.fsdecode(path))
    return names


def _expand(
    paths: Sequence[str],
) -> tuple[list[str], dict[str, list[str]], list[Problem]]:
    """Each file once, the other names of each, and what names no file."""
    problems: list[Problem] = []
    files: list[str] = []
    for path in paths:
        try:
            files += _remote(path) if is_url(path) else _local(path)
        except (BlobStoreError, OSError) as error:
            problems.append(Problem(path, str(error)))
    first: dict[object, str] = {}
    aliases: dict[str, list[str]] = {}
    for path in dict.fromkeys(files):
        identity: object = path
        if not is_url(path):
            try:
                status = Path(path).stat()
                identity = (status.st_dev, status.st_ino)
            except OSError:
                pass  # opening it raises an error that says what is wrong
        if first.setdefault(identity, path) != path:
            aliases.setdefault(first[identity], []).append(path)
    return list(first.values()), aliases, problems


def _local(path: str) -> list[str]:
    if not os.path.isdir(path):  # noqa: PTH112
        return [str(file) for file in with_shards(Path(path))[1:]] if by_name(path) is Format.SHARDS else [path]
    files = []
    for folder, folders, names in os.walk(path, onerror=_raise):
        folders.sort()
        files += [os.path.join(folder, name) for name in sorted(names) if name.endswith(SUFFIXES)]  # noqa: PTH118
    return files


def _raise(error: OSError) -> None:
    raise error


def _remote(path: str) -> list[str]:
    try:
        import fsspec
    except ImportError:
        raise MissingDependencyError(f"a URL needs fsspec: {install('report')}") from None
    try:
        system, inside = fsspec.core.url_to_fs(path)
        if not system.isdir(inside):
            return [path]
        names = sorted(name for name in system.find(inside) if name.endswith(SUFFIXES))
    except ImportError as error:
        raise needs_package(path, error) from None
    except Exception as error:  # each protocol's package raises errors of its own
        raise FileAccessError(path, error if isinstance(error, OSError) else str(error)) from None
    return [str(system.unstrip_protocol(name)) for name in names]
