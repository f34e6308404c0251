"""Text for people: names of kinds, the answer in a sentence, and folders that divide the files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from blobstore.core.regions.region import Region, RegionKind
from blobstore.core.text import amount, printable, size
from blobstore.reporting.model import CauseKind, FileReport, FindingKind, PoolAdvice
from blobstore.reporting.report_data import Folder, ReportData

__all__ = [
    "CAUSES",
    "COLORS",
    "FINDINGS",
    "REGIONS",
    "branches",
    "by_hand",
    "headline",
    "in_pool",
    "inputs",
    "nested",
    "parameters",
    "region_name",
    "short_hashes",
]

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

COLORS = {
    FindingKind.DUPLICATE_FILES: "#d55e00",
    FindingKind.DUPLICATE_METHODS: "#e69f00",
    FindingKind.DUPLICATE_TIED: "#cc79a7",
    FindingKind.DUPLICATE_PAYLOAD: "#a3472a",
    FindingKind.OTHER_LAYOUT: "#0072b2",
    FindingKind.OTHER_DTYPE: "#56b4e9",
    FindingKind.CONSTANT: "#009e73",
    FindingKind.CONTAINED: "#8f6bc9",
    FindingKind.NEAR_DUPLICATE: "#e3d33b",
    FindingKind.PADDING: "#8c8c8c",
    FindingKind.UNREFERENCED: "#6b6b6b",
}
"""A kind has this color wherever it is shown, so that pages and runs can be compared by eye."""

REGIONS = {
    RegionKind.TENSOR: "tensors",
    RegionKind.CONSTANT: "constants",
    RegionKind.STATE: "mutable state",
    RegionKind.NAMED_DATA: "named data",
    RegionKind.METADATA: "metadata",
    RegionKind.PAYLOAD: "payloads",
    RegionKind.STRUCTURE: "structure",
    RegionKind.PADDING: "padding",
    RegionKind.UNREFERENCED: "unreferenced",
}

_WEIGHT = 4096  # opaque bytes that are hardly anything else
_HASH = re.compile(r"[0-9a-f]{32,}")


CAUSES = {
    CauseKind.KEY: "equal bytes under a new key",
    CauseKind.COPIES: "stored once before, now for each use",
    CauseKind.DATA_FILE: "no longer shared in a data file",
    CauseKind.ADDED_FILE: "a new file does not share",
    CauseKind.DTYPE: "other type now",
    CauseKind.LAYOUT: "other layout now",
    CauseKind.VALUES: "other values now",
    CauseKind.PAYLOAD: "inside a payload now",
    CauseKind.LOWERED_TWICE: "lowered more than once",
    CauseKind.CONSTANT: "one value repeated now",
    CauseKind.PADDING: "more padding",
    CauseKind.UNREFERENCED: "nothing refers to it now",
    CauseKind.EQUAL: "became equal, and could be shared",
    CauseKind.ADDED: "new, and stored more than once",
    CauseKind.SHARED: "stored once now",
    CauseKind.CHANGED: "has other bytes now",
    CauseKind.REMOVED: "no longer there",
}


def headline(report: ReportData) -> str:
    """The answer in a sentence."""
    if not report.files:
        return "No file could be read." if report.problems else "There are no files."
    total = f"{size(report.total_bytes)} in {len(report.files)} file{'s' * (len(report.files) != 1)}"
    if not report.total_saves:
        return f"{total}: nothing is wasted."
    return f"{size(report.total_saves)} of {total} can be saved: {report.total_saves / report.total_bytes:.1%}."


def by_hand(report: ReportData) -> str:
    """How to save what no command saves: programs are lowered again, other files saved again."""
    return "by lowering or exporting again" if report.needs_lowering else "by saving the files in another way"


def inputs(command: str) -> int:
    """How many files a command reads: all its words but its name, -o and what it writes."""
    words = shlex.split(command)
    return 1 if words[1] == "convert" else len(words) - 4


def in_pool(pool: PoolAdvice) -> str:
    """What a pool takes, as "about 16.6 MB in a pool"."""
    return f"{'at most' if pool.is_bound else 'about'} {size(pool.bytes)} in a pool"


def parameters(file: FileReport) -> str:
    """How many parameters a file has, as "22.7M parameters"; with a plus, if opaque weights are not counted; or empty."""
    opaque = any(r.kind is RegionKind.NAMED_DATA and not r.elements and r.nbytes >= _WEIGHT for r in file.regions)
    return f"{amount(file.parameters)}{'+' * opaque} parameters" if file.parameters else ""


def region_name(region: Region) -> str:
    """What a region is called, or else what it is."""
    return printable(region.name if region.keys else REGIONS[region.kind])


def short_hashes(text: str) -> str:
    """A text in which digests keep their ends only."""
    return _HASH.sub(lambda match: f"{match[0][:10]}…{match[0][-6:]}", text)


def branches(folders: Sequence[Folder]) -> list[Folder]:
    """The folders that divide the files, with paths below the one that holds all; empty if nothing is divided.

    Of folders that have the same files, the innermost counts.
    """
    if not folders:
        return []
    every = folders[0].path
    dividing: list[Folder] = []
    for one, following in zip(folders, [*folders[1:], None], strict=True):
        divides = following is None or following.files < one.files or not following.path.startswith(one.path)
        if divides and one.files < folders[0].files:
            below = one.path[len(every) :].removeprefix("/") if one.path.startswith(every) else one.path
            dividing.append(replace(one, path=below))
    return dividing


def nested(folders: Iterable[Folder]) -> Iterator[tuple[int, str, Folder]]:
    """Folders in the order of their paths, each with how many of them it is in, and its name in the innermost of these."""
    outer: list[str] = []
    for folder in folders:
        while outer and not folder.path.startswith(f"{outer[-1]}/"):
            outer.pop()
        yield len(outer), folder.path[len(outer[-1]) + 1 :] if outer else folder.path, folder
        outer.append(folder.path)
