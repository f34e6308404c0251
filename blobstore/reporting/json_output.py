"""The report as JSON, and back. The schema is `schema.json` beside this file; docs/report-internals.md explains it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast, get_args

from blobstore.core.errors import FileAccessError, InvalidFileError, LayoutError
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.regions.region import Region, RegionKind
from blobstore.reporting.checked import MalformedError, boolean, hexadecimal, integer, items, member, share, text, texts
from blobstore.reporting.find import Cause, Changes
from blobstore.reporting.model import Claim, FileReport, Finding, FindingKind, PoolAdvice, Problem, Work
from blobstore.reporting.view import Report

__all__ = ["SCHEMA", "VERSION", "from_json", "load_report", "to_json"]

VERSION = 1
"""Grows when a field changes its meaning or goes; new fields do not change it."""

SCHEMA = Path(__file__).with_name("schema.json")


def to_json(report: Report, changes: Changes | None = None) -> dict[str, Any]:
    """A report as what `json.dump` takes, as `schema.json` describes it."""
    plain: dict[str, Any] = {
        "schema": "blobstore-report",
        "version": VERSION,
        "total_bytes": report.total_bytes,
        "total_saves": report.total_saves,
        "command_saves": report.command_saves,
        "files": [_file(file, saves) for file, saves in zip(report.files, report.saves_of, strict=True)],
        "folders": [
            {"path": folder.path, "files": folder.files, "bytes": folder.bytes, "saves": folder.saves}
            for folder in report.folders
        ],
        "findings": [_finding(finding) for finding in report.findings],
        "problems": [{"path": problem.path, "reason": problem.reason} for problem in report.problems],
        "notes": list(report.notes),
        "pool": None if report.pool is None else asdict(report.pool),
    }
    if changes is not None:
        plain["changes"] = {
            "bytes": changes.bytes,
            "saves": changes.saves,
            "added": list(changes.added),
            "removed": list(changes.removed),
            "resized": [{"path": path, "bytes": nbytes} for path, nbytes in changes.resized],
            "new": _sums(changes.new),
            "gone": _sums(changes.gone),
            "lost": [_cause(cause) for cause in changes.lost],
            "gained": [_cause(cause) for cause in changes.gained],
        }
    return plain


def _sums(sums: dict[FindingKind, tuple[int, int]]) -> list[dict[str, Any]]:
    return [{"kind": kind.value, "findings": number, "bytes": nbytes} for kind, (number, nbytes) in sums.items()]


def _cause(cause: Cause) -> dict[str, Any]:
    def places(of: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        return [{"path": path, "key": key} for path, key in of]

    return {
        "kind": cause.kind.value,
        "bytes": cause.bytes,
        "saves": cause.saves,
        "before": places(cause.before),
        "after": places(cause.after),
        "detail": cause.detail,
    }


def _file(file: FileReport, saves: int) -> dict[str, Any]:
    return {
        "path": file.path,
        "format": file.format,
        "size": file.size,
        "saves": saves,
        "parameters": file.parameters,
        "alignment": file.alignment,
        "already_shared": file.already_shared,
        "aliases": list(file.aliases),
        "regions": [_region(region) for region in file.regions],
    }


def _region(region: Region) -> dict[str, Any]:
    layout = region.layout
    return {
        "kind": region.kind.value,
        "start": region.start,
        "stop": region.stop,
        "keys": list(region.keys),
        "methods": list(region.methods),
        "layout": None
        if layout is None
        else {
            "scalar_type": layout.scalar_type.name,
            "sizes": list(layout.sizes),
            "dim_order": list(layout.dim_order),
        },
        "dtype": region.dtype,
        "digest": region.digest,
        "tensor": region.tensor,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind.value,
        "saves": finding.saves,
        "counted": finding.counted,
        "detail": finding.detail,
        "command": finding.command,
        "work": finding.work,
        "advice": finding.advice,
        "share": finding.share,
        "places": [{"file": f, "region": r} for f, r in finding.places],
        "claims": [{"file": c.file, "region": c.region, "start": c.start, "stop": c.stop} for c in finding.claims],
    }


def from_json(plain: Any) -> Report:
    """The report from which `to_json` made this.

    Raises:
        MalformedError: it is not such a report, has another version, or contradicts itself.
    """
    if member(plain, "schema") != "blobstore-report" or member(plain, "version") != VERSION:
        raise MalformedError(f"expected a blobstore-report of version {VERSION}")
    files = tuple(_read_file(file) for file in items(member(plain, "files")))
    findings = tuple(_read_finding(finding, files) for finding in items(member(plain, "findings")))
    problems = tuple(
        Problem(text(member(problem, "path")), text(member(problem, "reason")))
        for problem in items(member(plain, "problems"))
    )
    return Report(files, findings, problems, texts(member(plain, "notes")), _read_pool(member(plain, "pool")))


def _read_pool(plain: Any) -> PoolAdvice | None:
    if plain is None:
        return None
    return PoolAdvice(
        text(member(plain, "command")), integer(member(plain, "bytes")), boolean(member(plain, "is_bound"))
    )


def _read_file(plain: Any) -> FileReport:
    path, size = text(member(plain, "path")), integer(member(plain, "size"))
    regions = tuple(_read_region(region) for region in items(member(plain, "regions")))
    position = 0
    for region in regions:
        if region.start != position or region.stop <= position:
            raise MalformedError(
                f"{path}: a region from {region.start} to {region.stop} does not follow byte {position}"
            )
        position = region.stop
    if position != size:
        raise MalformedError(f"{path}: its regions have {position} bytes, not {size}")
    alignment = max(integer(member(plain, "alignment")), 1)
    return FileReport(path, text(member(plain, "format")), size, regions, texts(member(plain, "aliases")), alignment)


def _read_region(plain: Any) -> Region:
    return Region(
        RegionKind(text(member(plain, "kind"), [kind.value for kind in RegionKind])),
        integer(member(plain, "start")),
        integer(member(plain, "stop")),
        texts(member(plain, "keys")),
        texts(member(plain, "methods")),
        _read_layout(member(plain, "layout")),
        text(member(plain, "dtype")),
        hexadecimal(member(plain, "digest"), 0, 32),
        text(member(plain, "tensor")),
    )


def _read_layout(plain: Any) -> TensorLayout | None:
    if plain is None:
        return None
    scalar_type = ScalarType[text(member(plain, "scalar_type"), ScalarType.__members__)]
    sizes = tuple(integer(size) for size in items(member(plain, "sizes")))
    dim_order = tuple(integer(dim) for dim in items(member(plain, "dim_order")))
    try:
        return TensorLayout(scalar_type, sizes, dim_order)
    except LayoutError as error:
        raise MalformedError(str(error)) from None


def _read_finding(plain: Any, files: Sequence[FileReport]) -> Finding:
    def region(place: Any) -> tuple[int, int]:
        file = integer(member(place, "file"), len(files) - 1)
        return file, integer(member(place, "region"), len(files[file].regions) - 1)

    claims = []
    for claim in items(member(plain, "claims")):
        file, number = region(claim)
        stop = integer(member(claim, "stop"), files[file].regions[number].nbytes)
        claims.append(Claim(file, number, integer(member(claim, "start"), stop), stop))
    command, work, saves = member(plain, "command"), member(plain, "work"), integer(member(plain, "saves"))
    return Finding(
        FindingKind(text(member(plain, "kind"), [kind.value for kind in FindingKind])),
        tuple(region(place) for place in items(member(plain, "places"))),
        tuple(claims),
        saves,
        text(member(plain, "detail")),
        None if command is None else text(command),
        text(member(plain, "advice")),
        share(member(plain, "share")),
        integer(member(plain, "counted"), saves),
        None if work is None else cast("Work", text(work, get_args(Work))),
    )


def load_report(path: str | os.PathLike[str]) -> Report:
    """Read what `blobstore report --json` wrote.

    Raises:
        FileAccessError: it cannot be read.
        InvalidFileError: it is not a report, or was changed.
    """
    path = as_path(path)
    try:
        return from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise FileAccessError(path, error) from None
    except MalformedError as error:
        raise InvalidFileError(path, f"not a report of blobstore: {error}") from None
    except UnicodeDecodeError:
        raise InvalidFileError(path, "not a report of blobstore: not JSON") from None
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(path, f"not a report of blobstore: not JSON ({error})") from None
