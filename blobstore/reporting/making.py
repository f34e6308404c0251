"""Making a report: read the structure, then each blob once, then compare what looks alike; with a cache, what changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

import xxhash

from blobstore.core.disk.progress import check_progress
from blobstore.core.errors import InputError, UnsupportedDataError
from blobstore.core.formats.opening import Names, open_names
from blobstore.core.memory.mapped_file import Paths
from blobstore.core.version import __version__
from blobstore.reporting.cache import Cache
from blobstore.reporting.engine import Engine, default_executor
from blobstore.reporting.listing import list_files, names_of_paths
from blobstore.reporting.named import names_of
from blobstore.reporting.parts import Options
from blobstore.reporting.summary import Summary
from blobstore.reporting.survey import Made, Survey
from blobstore.reporting.view import Report

__all__ = ["NEAR", "report", "summary"]

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
        paths: one or several: `.pte`, `.ptd`, `.ptn`, `.safetensors` and `.gguf` files, folders that are searched for such files, and URLs of
            either that fsspec can open.
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
    return _make(Survey.report, paths, exact_only, near, names, executor, cache, progress)


def summary(
    paths: Paths,
    *,
    top: int,
    exact_only: bool = False,
    near: float = NEAR,
    names: Names | None = None,
    executor: Executor | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Summary:
    """The same in short, with the `top` largest groups of findings: it takes memory and time for what changed since the
    cache was written, and little for each file."""
    return _make(lambda survey: survey.summary(top), paths, exact_only, near, names, executor, cache, progress)


def _make(
    make: Callable[[Survey], Made],
    paths: Paths,
    exact_only: bool,
    near: float,
    names: Names | None,
    executor: Executor | None,
    cache: str | os.PathLike[str] | None,
    progress: Callable[[str, int, int], None] | None,
) -> Made:
    if not isinstance(near, int | float) or not 0 <= near <= 0.25:
        raise InputError(f"near must be a share from 0 to 0.25, not {near!r}")
    if executor is not None and not isinstance(executor, Executor):
        raise UnsupportedDataError(f"expected an executor of concurrent.futures, found a {type(executor).__qualname__}")
    checkpoints = open_names(names)
    check_progress(progress)
    asked = names_of_paths(paths)
    listing = list_files(asked, remote_stamps=cache is not None)
    options = Options(exact_only, float(near), names_of(checkpoints) if checkpoints else None)
    scope = None if checkpoints else _scope(asked, options)
    notes: list[str] = []
    with Cache(cache) as known, default_executor(executor) as workers:
        survey = Survey(listing, Engine(workers, known, progress), known, scope, options)
        made = make(survey)
        if checkpoints and not survey.used_names:
            given = ", ".join(one.name for one in checkpoints)
            notes.append(f"nothing got a name from {given}: nothing without a name equals exactly one of its tensors")
    if known.trouble is not None:
        notes.append(known.trouble)
    return replace(made, notes=tuple(notes))


def _scope(asked: list[str], options: Options) -> str:
    """Tells reports apart whose parts may differ."""
    facts = [__version__, os.getcwd(), asked, options.exact_only, options.near]  # noqa: PTH109 - text stays text
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())
