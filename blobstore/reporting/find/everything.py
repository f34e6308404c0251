"""All findings in a set of files, and the names of their blobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blobstore.core.programs.inputs import checkpoints_beside
from blobstore.core.regions.source import is_url
from blobstore.reporting.find.catalog import Catalog
from blobstore.reporting.find.commands import unite
from blobstore.reporting.find.kinds import constants, contained, dtypes, duplicates, layouts, leftovers, near
from blobstore.reporting.find.kinds.kept import Kept
from blobstore.reporting.find.named import (
    NamesByContent,
    can_name,
    is_nameless,
    name_related,
    name_tensors,
    nameless_folders,
    names_in,
)
from blobstore.reporting.find.pooling import advise_pool
from blobstore.reporting.model import FileReport, Finding, FindingKind, PoolAdvice
from blobstore.reporting.read import Engine, Prints
from blobstore.reporting.savings import count

__all__ = ["AllFound", "ReportOptions", "find_all"]

_SAME_VALUES = {FindingKind.OTHER_LAYOUT, FindingKind.OTHER_DTYPE}


@dataclass(frozen=True)
class ReportOptions:
    """What the caller of a report asked for, see `making.report`; `paths` are as they were given."""

    paths: Sequence[str]
    exact_only: bool
    near: float
    names: NamesByContent | None = None


class AllFound(NamedTuple):
    """What was found in some files.

    Attributes:
        files: with the names of their blobs.
        findings: as `savings.count` orders them.
        used_names: whether `ReportOptions.names` had a name for something.
        pool: as in `ReportData`.
    """

    files: list[FileReport]
    findings: list[Finding]
    used_names: bool
    pool: PoolAdvice | None


def find_all(files: Sequence[FileReport], prints: Sequence[Prints], engine: Engine, options: ReportOptions) -> AllFound:
    """Find all that is to be found in some files.

    Args:
        files: the files.
        prints: for each file, the fingerprint of each of its regions, None for what is no blob.
        engine: compares blobs.
        options: what to look for.
    """
    catalog = Catalog(files, prints)
    findings = count(unite(files, _find(catalog, engine, options)))
    pool = advise_pool(options.paths, catalog, findings, engine, exact_only=options.exact_only)
    named = list(files) if options.names is None else name_tensors(files, options.names)
    used_names = any(region.tensor for file in named for region in file.regions)
    named = name_tensors(named, names_in(named))
    named = name_related(named, [finding.places for finding in findings if finding.kind in _SAME_VALUES])
    return AllFound(_named_from_beside(named, prints, engine, options), findings, used_names, pool)


def _find(catalog: Catalog, engine: Engine, options: ReportOptions) -> list[Finding]:
    findings = [*duplicates.find(catalog), *leftovers.find(catalog)]
    if options.exact_only:
        return findings
    kept = Kept(catalog.contents)
    same_values = dtypes.relate(catalog)
    same_elements = layouts.relate(catalog, engine)
    for pair in [*(found[:2] for found in same_values), *(found[:2] for found in same_elements)]:
        kept.join(pair)
    findings += constants.find(catalog)
    findings += dtypes.find(catalog, same_values, kept)
    findings += layouts.find(catalog, same_elements, kept)
    findings += contained.find(catalog, engine)
    findings += near.find(catalog, engine, kept, options.near)
    return findings


def _named_from_beside(
    files: list[FileReport], prints: Sequence[Prints], engine: Engine, options: ReportOptions
) -> list[FileReport]:
    """The files with the names that checkpoints beside them have for their tensors, also in another type or layout."""
    folders = nameless_folders(files)
    if not folders:
        return files
    known = {os.path.realpath(file.path) for file in files if not is_url(file.path)}
    beside = map(os.fspath, checkpoints_beside(map(Path, folders), known))
    # what cannot be read gives no names
    others = engine.read(list(beside), not options.exact_only, lambda regions: can_name(regions, files))
    if not others.files:
        return files
    files = name_tensors(files, names_in(others.files))
    nameless = [
        [known if is_nameless(region) else None for region, known in zip(file.regions, of_file, strict=True)]
        for file, of_file in zip(files, prints, strict=True)
    ]
    together = [*files, *others.files]
    catalog = Catalog(together, [*nameless, *others.prints])
    pairs = [(wide, narrow) for wide, narrow, _ in dtypes.relate(catalog)]
    pairs += [(tensor, other) for tensor, other, _, _ in layouts.relate(catalog, engine)]
    return name_related(together, [catalog.places(pair) for pair in pairs])[: len(files)]
