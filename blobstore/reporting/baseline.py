"""What changed since an earlier report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from blobstore.reporting.model import Finding, FindingKind
from blobstore.reporting.report_data import ReportData

__all__ = ["Changes", "compare_reports", "finding_identity"]


@dataclass(frozen=True)
class Changes:
    """Differences, from the older report to the newer; files are compared under their paths.

    Attributes:
        bytes: by how much the files grew together.
        saves: by how much what can be saved grew.
        added, removed: paths.
        resized: paths of files with another size, and by how much it grew.
        new, gone: findings of the newer or of the older report only, by kind: how many, and the bytes that they add to
            the total.
    """

    bytes: int
    saves: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    resized: tuple[tuple[str, int], ...]
    new: dict[FindingKind, tuple[int, int]]
    gone: dict[FindingKind, tuple[int, int]]


def finding_identity(report: ReportData, finding: Finding) -> tuple[object, ...]:
    """What identifies a finding in two reports: its kind, and the contents and keys that it is about."""
    places = frozenset(
        (report.files[place[0]].path, report.region(place).keys[:1], report.region(place).digest)
        for place in finding.places
    )
    return finding.kind, places


def compare_reports(old: ReportData, new: ReportData) -> Changes:
    """What changed from one report to another."""
    before = {file.path: file.size for file in old.files}
    after = {file.path: file.size for file in new.files}
    known_before = {finding_identity(old, finding) for finding in old.findings}
    known_after = {finding_identity(new, finding) for finding in new.findings}
    return Changes(
        bytes=new.total_bytes - old.total_bytes,
        saves=new.total_saves - old.total_saves,
        added=tuple(path for path in after if path not in before),
        removed=tuple(path for path in before if path not in after),
        resized=tuple((path, n - before[path]) for path, n in after.items() if before.get(path, n) != n),
        new=_sums(f for f in new.findings if finding_identity(new, f) not in known_before),
        gone=_sums(f for f in old.findings if finding_identity(old, f) not in known_after),
    )


def _sums(findings: Iterable[Finding]) -> dict[FindingKind, tuple[int, int]]:
    sums: dict[FindingKind, tuple[int, int]] = {}
    for finding in findings:
        number, nbytes = sums.get(finding.kind, (0, 0))
        sums[finding.kind] = (number + 1, nbytes + finding.counted)
    return sums
