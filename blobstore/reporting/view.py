"""A report that shows itself: in a notebook, and as a page."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from blobstore.core.disk.kinds import Format
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import UnsupportedDataError
from blobstore.core.memory.mapped_file import as_path
from blobstore.core.reprs import count, line
from blobstore.reporting import show
from blobstore.reporting.find import Changes, compare_reports
from blobstore.reporting.report_data import ReportData

__all__ = ["Report"]


@dataclass(frozen=True, repr=False)
class Report(ReportData):
    """All files that could be read, and all that was found in them. A notebook shows it as a summary.

    Attributes:
        files: in the order in which they were asked for.
        findings: by `FindingKind`, and the largest first within each.
        problems: files that could not be read, and why.
        notes: what did not go as requested, without making the report any less complete.
        pool: a pool that would take much less than the commands of the findings leave; None if none would.
    """

    def __repr__(self) -> str:
        unread = f"{len(self.problems):,} could not be read" if self.problems else ""
        return line("Report", "", show.headline(self).removesuffix("."), count(len(self.findings), "finding"), unread)

    def _repr_html_(self) -> str:
        return show.summary(self)

    def since(self, baseline: ReportData) -> Changes:
        """What changed from an earlier report to this one, and why.

        Args:
            baseline: the earlier report; `load_report` reads one from JSON.

        Raises:
            UnsupportedDataError: it is not a report.
        """
        if not isinstance(baseline, ReportData):
            raise UnsupportedDataError(f"baseline: expected a report, found a {type(baseline).__qualname__}")
        return compare_reports(baseline, self)

    def to_html(self, path: str | os.PathLike[str], *, baseline: ReportData | None = None, force: bool = False) -> Path:
        """Write the report as one page that needs nothing but a browser.

        Args:
            path: the file to write; an HTML page that is there is replaced.
            baseline: an earlier report; the page says what changed since, and why.
            force: also replace a file of another format.

        Returns:
            The path of the file.

        Raises:
            FileAccessError: the folder is missing or cannot be written, or the disk is full; nothing was changed.
            OutputPathError: a file of another format is there, and `force` is not set.
            UnsupportedDataError: `baseline` is not a report.
        """
        target = as_path(path)
        text = show.to_html(self, self.since(baseline) if baseline is not None else None).encode()
        with Staging(force=force) as staging, staging.open(target, kind=Format.HTML) as file:
            file.write(text)
        return target
