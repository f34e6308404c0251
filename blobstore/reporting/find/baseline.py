"""What changed since an earlier report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blobstore.core.reprs import fields_line
from blobstore.reporting.find.causes import Cause, Compared, explain_waste
from blobstore.reporting.find.unshared import explain_unshared
from blobstore.reporting.model import Finding, FindingKind
from blobstore.reporting.report_data import ReportData

__all__ = ["Changes", "compare_reports", "finding_identity"]


@dataclass(frozen=True)
class Changes:
    """Differences, from the older report to the newer.

    Files are compared under their paths; if the reports have no path in common, under their paths below the folder that
    holds all of a report's files; and if each report has one file, these two are compared.

    Attributes:
        bytes: by how much the files grew together.
        saves: by how much what can be saved grew.
        added, removed: paths.
        resized: paths of files with another size, and by how much it grew.
        new, gone: findings of the newer or of the older report only, by kind: how many, and the bytes that they add to
            the total.
        lost: why bytes are no longer shared, or are wasted since; what cost most comes first.
        gained: why less is wasted. The `saves` of `lost` minus those of `gained` are `saves`.
    """

    __repr__ = fields_line

    bytes: int
    saves: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    resized: tuple[tuple[str, int], ...]
    new: dict[FindingKind, tuple[int, int]]
    gone: dict[FindingKind, tuple[int, int]]
    lost: tuple[Cause, ...] = ()
    gained: tuple[Cause, ...] = ()


def finding_identity(report: ReportData, finding: Finding, names: Sequence[str] | None = None) -> tuple[object, ...]:
    """What identifies a finding in two reports: its kind, and the contents and keys that it is about.

    Args:
        report: the report of the finding.
        finding: the finding.
        names: what the files of the report are called in both reports; left out, their paths.
    """
    places = frozenset(
        (
            names[place[0]] if names else report.files[place[0]].path,
            report.region(place).keys[:1],
            report.region(place).digest,
        )
        for place in finding.places
    )
    return finding.kind, places


def compare_reports(old: ReportData, new: ReportData) -> Changes:
    """What changed from one report to another, and why."""
    two = Compared(old, new)
    names = [old.files[two.files[f]].path if f in two.files else file.path for f, file in enumerate(new.files)]
    known_before = {finding_identity(old, finding) for finding in old.findings}
    known_after = {finding_identity(new, finding, names) for finding in new.findings}
    grown = [
        (file.path, file.size - old.files[two.files[f]].size) for f, file in enumerate(new.files) if f in two.files
    ]
    still = set(two.files.values())
    lost, gained = explain_waste(two)
    return Changes(
        bytes=new.total_bytes - old.total_bytes,
        saves=new.total_saves - old.total_saves,
        added=tuple(file.path for f, file in enumerate(new.files) if f not in two.files),
        removed=tuple(file.path for f, file in enumerate(old.files) if f not in still),
        resized=tuple((path, more) for path, more in grown if more),
        new=_sums(f for f in new.findings if finding_identity(new, f, names) not in known_before),
        gone=_sums(f for f in old.findings if finding_identity(old, f) not in known_after),
        lost=_largest_first([*lost, *explain_unshared(two)]),
        gained=_largest_first(gained),
    )


def _largest_first(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    return tuple(sorted(causes, key=lambda cause: -cause.bytes))


def _sums(findings: Iterable[Finding]) -> dict[FindingKind, tuple[int, int]]:
    sums: dict[FindingKind, tuple[int, int]] = {}
    for finding in findings:
        number, nbytes = sums.get(finding.kind, (0, 0))
        sums[finding.kind] = (number + 1, nbytes + finding.counted)
    return sums
