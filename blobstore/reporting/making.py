"""Making a report: read the structure, then each blob once, then compare what looks alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

from blobstore.core.disk.progress import check_progress
from blobstore.core.errors import InputError, UnsupportedDataError
from blobstore.core.formats.opening import Names, open_names
from blobstore.core.memory.mapped_file import Paths
from blobstore.reporting.find import ReportOptions, find_all, names_of
from blobstore.reporting.read import Cache, Engine, default_executor, list_files, names_of_paths
from blobstore.reporting.view import Report

__all__ = ["NEAR", "report"]

NEAR = 0.1
"""Blobs that differ in more than this share of their elements are different blobs."""


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
        paths: one or several: `.pte`, `.ptd`, `.ptn`, `.safetensors` and `.gguf` files, those of `torch.save` (`.pt`, `.pth`, `.bin`),
            folders that are searched for such files, and URLs of either that fsspec can open.
        exact_only: look for equal bytes only; blobs are hashed and nothing else is computed.
        near: the share of elements in which near duplicates may differ, from 0 to 0.25.
        names: tensors by name: a checkpoint, or several, or their paths. What equals exactly one tensor to the byte, and
            has no name but a key made of its contents, is shown under that name. Other files of the report give names, too,
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
    checkpoints = open_names(names)
    check_progress(progress)
    given = names_of_paths(paths)
    options = ReportOptions(given, exact_only, float(near), names_of(checkpoints) if checkpoints else None)
    listing = list_files(given)
    notes: list[str] = []
    with Cache(cache) as known, default_executor(executor) as workers:
        engine = Engine(workers, known, progress)
        read = engine.read(listing.paths, not exact_only)
        found = find_all(read.files, read.prints, engine, options)
    if checkpoints and not found.used_names:
        names_from = ", ".join(one.name for one in checkpoints)
        notes.append(f"nothing got a name from {names_from}: nothing without a name equals exactly one of its tensors")
    if known.trouble is not None:
        notes.append(known.trouble)
    return Report(
        tuple(replace(file, aliases=tuple(listing.aliases.get(file.path, ()))) for file in found.files),
        tuple(found.findings),
        (*listing.problems, *read.problems),
        tuple(notes),
        found.pool,
    )
