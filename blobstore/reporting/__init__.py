"""The dedup report: where a set of models wastes bytes, and what to do about it.

found = report(["models/"])
print(found.total_bytes, found.total_saves)
for finding in found.findings:
    print(finding.kind, finding.saves, list(found.names(finding)), finding.command)
"""

from blobstore.core.regions.region import Region, RegionKind
from blobstore.reporting.find import Cause, Changes
from blobstore.reporting.json_output import load_report
from blobstore.reporting.making import report
from blobstore.reporting.model import CauseKind, Claim, FileReport, Finding, FindingKind, PoolAdvice, Problem
from blobstore.reporting.report_data import Folder
from blobstore.reporting.view import Report

__all__ = [
    "Cause",
    "CauseKind",
    "Changes",
    "Claim",
    "FileReport",
    "Finding",
    "FindingKind",
    "Folder",
    "PoolAdvice",
    "Problem",
    "Region",
    "RegionKind",
    "Report",
    "load_report",
    "report",
]


def __dir__() -> list[str]:
    return list(__all__)
