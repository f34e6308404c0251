"""The dedup report: where a set of models wastes bytes, and what to do about it.

report = make_report(["models/"])
print(report.total_bytes, report.total_saves)
for finding in report.findings:
    print(finding.kind, finding.saves, list(report.names(finding)), finding.command)
"""

from blobstore.report.making import make_report
from blobstore.report.model import Claim, FileReport, Finding, FindingKind, Problem, Region, RegionKind, Report

__all__ = [
    "Claim",
    "FileReport",
    "Finding",
    "FindingKind",
    "Problem",
    "Region",
    "RegionKind",
    "Report",
    "make_report",
]
