"""What is wasted among the blobs of files, the commands that act on it, and why it is more than in an earlier report."""

from blobstore.reporting.find.baseline import Changes, compare_reports
from blobstore.reporting.find.causes import Cause, grouped
from blobstore.reporting.find.commands import CONNECTING
from blobstore.reporting.find.everything import AllFound, ReportOptions, find_all
from blobstore.reporting.find.families import left_out
from blobstore.reporting.find.named import is_nameless, names_of

__all__ = [
    "CONNECTING",
    "AllFound",
    "Cause",
    "Changes",
    "ReportOptions",
    "compare_reports",
    "find_all",
    "grouped",
    "is_nameless",
    "left_out",
    "names_of",
]
