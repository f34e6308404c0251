"""What people are told: names of kinds, sizes, and paths without what they have in common."""

from __future__ import annotations

import os
from collections.abc import Sequence

from blobstore.reporting.model import FindingKind, RegionKind, Report
from blobstore.reporting.source import is_url

__all__ = ["FINDINGS", "REGIONS", "headline", "printable", "short_paths", "size"]

FINDINGS = {
    FindingKind.DUPLICATE_FILES: "equal bytes in several files",
    FindingKind.DUPLICATE_METHODS: "equal bytes of several methods",
    FindingKind.DUPLICATE_TIED: "tied weight, written twice",
    FindingKind.DUPLICATE_PAYLOAD: "equal payloads of delegates",
    FindingKind.OTHER_LAYOUT: "same values, other layout",
    FindingKind.OTHER_DTYPE: "same values, other type",
    FindingKind.CONSTANT: "one value repeated",
    FindingKind.CONTAINED: "tensor inside a payload",
    FindingKind.NEAR_DUPLICATE: "few elements differ",
    FindingKind.PADDING: "too much padding",
    FindingKind.UNREFERENCED: "nothing refers to it",
}

REGIONS = {
    RegionKind.TENSOR: "tensors",
    RegionKind.CONSTANT: "constants",
    RegionKind.STATE: "mutable state",
    RegionKind.NAMED_DATA: "named data",
    RegionKind.PAYLOAD: "payloads",
    RegionKind.STRUCTURE: "structure",
    RegionKind.PADDING: "padding",
    RegionKind.UNREFERENCED: "unreferenced",
}


def printable(text: str) -> str:
    """Text from a file with control characters spelled out, so that they do nothing to a terminal or a page."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def size(nbytes: int) -> str:
    """Bytes for people: three digits, and units of a thousand."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:#.3g} {unit}".replace(". ", " ")
        value /= 1000
    return f"{value:.3g} TB"


def headline(report: Report) -> str:
    """The answer in a sentence."""
    total = f"{size(report.total_bytes)} in {len(report.files)} file{'s' * (len(report.files) != 1)}"
    if not report.total_saves:
        return f"{total}: nothing is wasted."
    return f"{size(report.total_saves)} of {total} can be saved: {report.total_saves / report.total_bytes:.1%}."


def short_paths(paths: Sequence[str]) -> list[str]:
    """The paths without the folder that all of them are in."""
    local = [os.path.dirname(path) for path in paths if not is_url(path)]  # noqa: PTH120 - text stays text
    if len(local) != len(paths) or not paths:
        return list(paths)
    try:
        common = os.path.commonpath(local) if any(local) else ""
    except ValueError:  # absolute ones and relative ones
        return list(paths)
    return [os.path.relpath(path, common) if common else path for path in paths]
