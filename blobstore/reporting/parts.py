"""The findings in one part of the files, and the names of its blobs: from nothing but these files and what lies beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.programs.inputs import checkpoints_beside
from blobstore.reporting.cache import lasting_stamp
from blobstore.reporting.catalog import Catalog
from blobstore.reporting.commands import Output, unite
from blobstore.reporting.engine import Engine, Scanned
from blobstore.reporting.findings import constants, contained, dtypes, duplicates, layouts, leftovers, near
from blobstore.reporting.findings.kept import Kept
from blobstore.reporting.fingerprint import Fingerprint
from blobstore.reporting.model import Claim, FileReport, Finding, FindingKind, Problem
from blobstore.reporting.named import (
    NamesByContent,
    can_name,
    is_nameless,
    name_related,
    name_tensors,
    nameless_folders,
    names_in,
)
from blobstore.reporting.report_data import ReportData
from blobstore.reporting.savings import count
from blobstore.reporting.source import identify

__all__ = ["Options", "Part", "beside", "find_in", "folder_of", "named_again", "plain_findings", "read_findings"]

_SAME_VALUES = {FindingKind.OTHER_LAYOUT, FindingKind.OTHER_DTYPE}

Beside = list[list[Any]]
"""Paths of checkpoints, each with a stamp."""


@dataclass(frozen=True)
class Options:
    """What the caller of a report asked for, see `making.report`."""

    exact_only: bool
    near: float
    names: NamesByContent | None = None


@dataclass(frozen=True)
class Part:
    """A part of the files with all that was found in it.

    Attributes:
        data: its files and findings; the commands lack what they write.
        outputs: what they write.
        data_folders: of its data files, which are used in another way if a program is in the folder.
        nameless: folders of files with blobs that the part and `Options.names` have no name for.
        beside: the checkpoints that might have names.
        used_names: whether `Options.names` had a name for something.
    """

    data: ReportData
    outputs: list[Output]
    data_folders: list[str]
    nameless: list[str]
    beside: Beside
    used_names: bool


def folder_of(path: str) -> str:
    """The folder of a file, as its path begins."""
    return os.path.dirname(path)  # noqa: PTH120 - text stays text


def find_in(
    files: list[FileReport],
    prints: Sequence[Sequence[Fingerprint | None]],
    engine: Engine,
    options: Options,
    program_folders: Collection[str],
    known: Callable[[], Collection[str]],
) -> Part:
    """Find all that is to be found in files that have to do with no others.

    Args:
        files: the files.
        prints: for each file, the fingerprint of each of its regions, None for what is no blob.
        engine: compares blobs.
        options: what to look for.
        program_folders: every folder of the report that has a program.
        known: gives the paths of all files of the report, without links.
    """
    catalog = Catalog(files, prints)
    findings, outputs = unite(files, _find(catalog, engine, options), program_folders)
    findings = count(findings)
    used_names = False
    if options.names is not None:
        files = name_tensors(files, options.names)
        used_names = any(region.tensor for file in files for region in file.regions)
    files = name_tensors(files, names_in(files))
    files = name_related(files, [finding.places for finding in findings if finding.kind in _SAME_VALUES])
    nameless = nameless_folders(files)
    checkpoints = beside(nameless, known)
    if checkpoints:
        files = _name_from_beside(files, prints, [path for path, _ in checkpoints], engine, options)
    return Part(
        ReportData(tuple(files), tuple(findings)),
        outputs,
        sorted({folder_of(file.path) for file in files if file.format == "ptd"}),
        nameless,
        checkpoints,
        used_names,
    )


def beside(nameless: Sequence[str], known: Callable[[], Collection[str]]) -> Beside:
    """The checkpoints that are now in some folders, and in those above."""
    if not nameless:
        return []
    paths = map(os.fspath, checkpoints_beside(map(Path, nameless), known()))
    return [[path, lasting_stamp(identify(path), time.time_ns())] for path in paths]


def _find(catalog: Catalog, engine: Engine, options: Options) -> list[Finding]:
    findings = [*duplicates.find(catalog), *leftovers.find(catalog)]
    if options.exact_only:
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
    findings += near.find(catalog, engine, kept, options.near)
    return findings


def _name_from_beside(
    files: list[FileReport],
    prints: Sequence[Sequence[Fingerprint | None]],
    checkpoints: Sequence[str],
    engine: Engine,
    options: Options,
) -> list[FileReport]:
    """The files with the names that checkpoints have for their tensors, also in another type or layout."""
    scanned = [file for file in engine.scan(checkpoints) if isinstance(file, Scanned) and can_name(file.regions, files)]
    others: list[FileReport] = []
    other_prints: list[Sequence[Fingerprint | None]] = []
    for file, of_file in zip(scanned, engine.fingerprint(scanned, not options.exact_only), strict=True):
        if not isinstance(of_file, Problem):  # what cannot be read gives no names
            others.append(file.report(of_file))
            other_prints.append(of_file)
    if not others:
        return files
    files = name_tensors(files, names_in(others))
    nameless = [
        [known if is_nameless(region) else None for region, known in zip(file.regions, of_file, strict=True)]
        for file, of_file in zip(files, prints, strict=True)
    ]
    together = [*files, *others]
    catalog = Catalog(together, [*nameless, *other_prints])
    pairs = [(wide, narrow) for wide, narrow, _ in dtypes.relate(catalog)]
    pairs += [(tensor, other) for tensor, other, _, _ in layouts.relate(catalog, engine)]
    return name_related(together, [catalog.places(pair) for pair in pairs])[: len(files)]


# ----------------------------------------------------------------------------------------------------- as plain data


def plain_findings(data: ReportData) -> list[Any]:
    """The findings and the names that a part gave, as plain data."""
    named = [
        [
            f,
            r,
            region.tensor,
            None if region.layout is None else [int(region.layout.scalar_type), *_dims(region.layout)],
        ]
        for f, file in enumerate(data.files)
        for r, region in enumerate(file.regions)
        if region.tensor
    ]
    findings = [
        [
            finding.kind.value,
            finding.places,
            [[claim.file, claim.region, claim.start, claim.stop] for claim in finding.claims],
            finding.saves,
            finding.detail,
            finding.command,
            finding.advice,
            finding.share,
            finding.counted,
        ]
        for finding in data.findings
    ]
    return [findings, named]


def _dims(layout: TensorLayout) -> list[list[int]]:
    return [list(layout.sizes), list(layout.dim_order)]


def read_findings(plain: Any, number_of: Sequence[int]) -> list[Finding]:
    """The findings of a part whose files have these numbers in the report."""
    return [
        Finding(
            FindingKind(kind),
            tuple((number_of[f], r) for f, r in places),
            tuple(Claim(number_of[f], r, start, stop) for f, r, start, stop in claims),
            *rest,
        )
        for kind, places, claims, *rest in plain[0]
    ]


def named_again(files: Sequence[FileReport], plain: Any) -> list[FileReport]:
    """The files of a part with the names that it gave."""
    named: dict[int, dict[int, Any]] = {}
    for f, r, *given in plain[1]:
        named.setdefault(f, {})[r] = given
    result = list(files)
    for f, given_of in named.items():
        regions = list(files[f].regions)
        for r, (tensor, layout) in given_of.items():
            shape = None if layout is None else TensorLayout(ScalarType(layout[0]), *map(tuple, layout[1:]))
            regions[r] = replace(regions[r], tensor=tensor, layout=shape)
        result[f] = replace(files[f], regions=tuple(regions))
    return result
