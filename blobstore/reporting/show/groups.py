"""Which files have most of their contents in common, so that a page shows families and not a wall of pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from blobstore.core.regions.region import RegionKind
from blobstore.reporting.model import FindingKind
from blobstore.reporting.overlap import Overlap
from blobstore.reporting.report_data import ReportData

__all__ = ["Group", "common_bytes", "find_groups"]

_Content = tuple[str, int]
"""A digest and a length."""


@dataclass(frozen=True)
class Group:
    """A file and those of which it holds at least half.

    Attributes:
        files: indices into `Report.files`; the file that holds half of each other one comes first.
        bytes: of all blobs of all these files.
        once: of their distinct contents.
    """

    files: tuple[int, ...]
    bytes: int
    once: int


def find_groups(report: ReportData) -> list[Group]:
    """Every file in one group, alone if need be; groups with most copies come first.

    The largest file of a group stands for it, so a chain of files that each resemble the next is no group.
    """
    contents = _contents(report)
    sizes = [{content: content[1] for content in of_file} for of_file in contents]
    held = [sum(of_file.values()) for of_file in sizes]
    firsts: Overlap[_Content] = Overlap()
    members: list[list[int]] = []
    for f in sorted(range(len(contents)), key=lambda f: (-held[f], f)):
        shared = firsts.shared(sizes[f])
        best = max(shared, key=lambda group: (shared[group], -group), default=None)
        if best is not None and shared[best] * 2 >= held[f]:
            members[best].append(f)
        else:
            firsts.add(len(members), sizes[f])
            members.append([f])
    groups = [_group(files, contents) for files in members]
    return sorted(groups, key=lambda group: (group.once - group.bytes, group.files))


def _group(files: Sequence[int], contents: Sequence[Mapping[_Content, int]]) -> Group:
    every = sum(nbytes * number for f in files for (_, nbytes), number in contents[f].items())
    once = sum(nbytes for _, nbytes in set().union(*(contents[f] for f in files)))
    return Group(tuple(files), every, once)


def common_bytes(report: ReportData, sets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Bytes of the distinct contents that each two sets of files have in common; of one set with itself all it has."""
    contents = _contents(report, {f for files in sets for f in files})
    where: dict[_Content, set[int]] = defaultdict(set)
    for s, files in enumerate(sets):
        for f in files:
            for content in contents[f]:
                where[content].add(s)
    common = [[0] * len(sets) for _ in sets]
    for (_, nbytes), holders in where.items():
        for one in holders:
            for other in holders:
                common[one][other] += nbytes
    return common


def _contents(report: ReportData, of: Collection[int] | None = None) -> list[dict[_Content, int]]:
    """How often each file (of those in `of`) has each content that tells something about its family.

    Payloads of delegates are opaque, and tensors of one value are equal without being related.
    """
    constant = {place for f in report.findings if f.kind is FindingKind.CONSTANT for place in f.places}
    contents: list[dict[_Content, int]] = []
    for f, file in enumerate(report.files):
        counts: dict[_Content, int] = defaultdict(int)
        for r, region in enumerate(file.regions if of is None or f in of else ()):
            if region.kind.is_blob and region.kind is not RegionKind.PAYLOAD and (f, r) not in constant:
                counts[region.digest, region.nbytes] += 1
        contents.append(counts)
    return contents
