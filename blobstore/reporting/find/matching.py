"""What of a report is what of an earlier one: its files, and the contents that took another's place."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

from blobstore.core.regions.region import Region, RegionKind
from blobstore.reporting.paths import short_paths
from blobstore.reporting.report_data import ReportData

__all__ = ["Content", "content_of", "match_contents", "match_files", "names_of_region"]

Content = tuple[str, int]
"""A digest and a length."""
_Placed = tuple[Content, Hashable]
"""A content, and where to look for it in another report."""
_Shapes = Mapping[Hashable, Collection[Content]]
"""Contents by what they look like."""

_POSITION = re.compile(r"(constant|state)\[[^\]]*\]|[^/]+/[^/]+\[\d+\]")
"""What `regions` calls a constant without a name, or a payload: where it is, and no name of it."""


def content_of(region: Region) -> Content:
    """What identifies the bytes of a blob."""
    return region.digest, region.nbytes


def names_of_region(region: Region) -> list[str]:
    """The names that a blob has, in its file or in a checkpoint; none for what is only known by its position."""
    keys = [] if region.kind is RegionKind.PAYLOAD else [key for key in region.keys if not _POSITION.fullmatch(key)]
    return [*keys, *([region.tensor] if region.tensor else [])]


def match_files(old: ReportData, new: ReportData) -> dict[int, int]:
    """For each file of the newer report that the older has, too, its index there.

    Files are the same under the same path. If the reports have no path in common, then under the same path below the
    folder of each report; and if each report has one file, these two are compared whatever their names are.
    """
    before, after = ([file.path for file in report.files] for report in (old, new))
    for one, other in ((before, after), (short_paths(before), short_paths(after))):
        at = {path: f for f, path in enumerate(one)}
        if matched := {f: at[path] for f, path in enumerate(other) if path in at}:
            return matched
    return {0: 0} if len(before) == len(after) == 1 else {}


def match_contents(old: ReportData, new: ReportData, files: Mapping[int, int]) -> dict[Content, Content]:
    """For contents that only the newer report has, the one that was in their place in the older; each once.

    A place is a name in a file; for what has none, its position and shape. What is left is taken in the order of the
    file, if a file has as many contents of a kind, a size and a layout as before: the keys of delegates are digests, so
    they change with the bytes.

    Args:
        old, new: the reports.
        files: as `match_files` returns them.
    """
    following = _Following(_contents(old) & _contents(new))
    for f, g in files.items():
        following.by_place(_places(old, g), _places(new, f))
    for f, g in files.items():
        following.by_order(_by_shape(old, g), _by_shape(new, f))
    return following.formers


class _Following:
    """Which content of a newer report is in the place of which one of an older; each is in one such pair at most.

    Attributes:
        formers: by content of the newer report.
    """

    def __init__(self, kept: set[Content]) -> None:
        self._kept = kept
        self.formers: dict[Content, Content] = {}
        self._followers: dict[Content, Content] = {}

    def _is_old(self, content: Content) -> bool:
        return content not in self._kept and content not in self._followers

    def _is_new(self, content: Content) -> bool:
        return content not in self._kept and content not in self.formers

    def _pair(self, former: Content, content: Content) -> None:
        if self._followers.setdefault(former, content) == content:
            self.formers.setdefault(content, former)

    def by_place(self, before: Iterable[_Placed], after: Iterable[_Placed]) -> None:
        """Pair contents in equal places."""
        there = {place: content for content, place in before if content not in self._kept}
        for content, place in after:
            if place in there and self._is_new(content):
                self._pair(there[place], content)

    def by_order(self, before: _Shapes, after: _Shapes) -> None:
        """Pair contents of one look, if there are as many of them as before."""
        formers = {shape: list(filter(self._is_old, contents)) for shape, contents in before.items()}
        left = {shape: list(filter(self._is_new, contents)) for shape, contents in after.items()}
        for shape, some in formers.items():
            if len(some) == len(left.get(shape, ())):
                for former, content in zip(some, left.get(shape, ()), strict=True):
                    self._pair(former, content)


def _contents(report: ReportData) -> set[Content]:
    return {content_of(region) for _, region in report.blobs()}


def _places(report: ReportData, f: int) -> Iterator[_Placed]:
    """The blobs of a file, each with where to look for it in another report: its names, or its position and shape."""
    for region in report.files[f].regions:
        if region.kind.is_blob:
            content, names = content_of(region), names_of_region(region)
            yield from ((content, name) for name in names)
            if not names:
                yield from ((content, (key, region.nbytes, region.layout)) for key in region.keys)


def _by_shape(report: ReportData, f: int) -> _Shapes:
    """The contents of a file, each once and in their order, by what they look like."""
    shapes: dict[Hashable, dict[Content, None]] = defaultdict(dict)
    for region in report.files[f].regions:
        if region.kind.is_blob:
            shapes[region.kind, region.nbytes, region.layout][content_of(region)] = None
    return shapes
