"""The report as JSON, and back. The schema is `schema.json` beside this file; docs/report.md explains it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from blobstore.errors import FileAccessError, InvalidFileError
from blobstore.layout import ScalarType, TensorLayout
from blobstore.reporting.baseline import Changes
from blobstore.reporting.model import Claim, FileReport, Finding, FindingKind, Problem, Region, RegionKind, Report

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
        "files": [_file(file) for file in report.files],
        "findings": [_finding(finding) for finding in report.findings],
        "problems": [{"path": problem.path, "reason": problem.reason} for problem in report.problems],
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
        }
    return plain


def _sums(sums: dict[FindingKind, tuple[int, int]]) -> list[dict[str, Any]]:
    return [{"kind": kind.value, "findings": number, "bytes": nbytes} for kind, (number, nbytes) in sums.items()]


def _file(file: FileReport) -> dict[str, Any]:
    return {
        "path": file.path,
        "format": file.format,
        "size": file.size,
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
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind.value,
        "saves": finding.saves,
        "counted": finding.counted,
        "detail": finding.detail,
        "command": finding.command,
        "advice": finding.advice,
        "share": finding.share,
        "places": [{"file": f, "region": r} for f, r in finding.places],
        "claims": [{"file": c.file, "region": c.region, "start": c.start, "stop": c.stop} for c in finding.claims],
    }


def from_json(plain: Any) -> Report:
    """The report that `to_json` was given.

    Raises:
        ValueError: it is not such a report, or one of another version.
    """
    try:
        if plain["schema"] != "blobstore-report" or plain["version"] != VERSION:
            raise ValueError(f"expected a blobstore-report of version {VERSION}")
        files = tuple(_read_file(file) for file in plain["files"])
        findings = tuple(_read_finding(finding) for finding in plain["findings"])
        for finding in findings:
            for f, r in finding.places:
                files[f].regions[r]
        problems = tuple(Problem(problem["path"], problem["reason"]) for problem in plain["problems"])
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not a blobstore-report: {error!r}") from None
    return Report(files, findings, problems)


def _read_file(plain: dict[str, Any]) -> FileReport:
    regions = tuple(_read_region(region) for region in plain["regions"])
    return FileReport(plain["path"], plain["format"], plain["size"], regions, tuple(plain["aliases"]))


def _read_region(plain: dict[str, Any]) -> Region:
    layout = plain["layout"]
    if layout is not None:
        scalar_type = ScalarType[layout["scalar_type"]]
        layout = TensorLayout(scalar_type, tuple(layout["sizes"]), tuple(layout["dim_order"]))
    keys, methods = tuple(plain["keys"]), tuple(plain["methods"])
    kind = RegionKind(plain["kind"])
    return Region(kind, plain["start"], plain["stop"], keys, methods, layout, plain["dtype"], plain["digest"])


def _read_finding(plain: dict[str, Any]) -> Finding:
    return Finding(
        FindingKind(plain["kind"]),
        tuple((place["file"], place["region"]) for place in plain["places"]),
        tuple(Claim(c["file"], c["region"], c["start"], c["stop"]) for c in plain["claims"]),
        plain["saves"],
        plain["detail"],
        plain["command"],
        plain["advice"],
        plain["share"],
        plain["counted"],
    )


def load_report(path: str | os.PathLike[str]) -> Report:
    """Read what `blobstore report --json` wrote.

    Raises:
        FileAccessError: it cannot be read.
        InvalidFileError: it is something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileAccessError(path, error) from None
    except UnicodeDecodeError as error:
        raise InvalidFileError(path, f"not a report: {error}") from None
    try:
        return from_json(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(path, str(error)) from None
