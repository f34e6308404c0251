"""What is no longer shared without being waste: what was one content and is several that do not follow from each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from blobstore.core.groups import Groups
from blobstore.core.regions.region import Region
from blobstore.reporting.find.causes import Cause, Compared
from blobstore.reporting.find.matching import Content, content_of, names_of_region
from blobstore.reporting.model import CauseKind, FindingKind, Place
from blobstore.reporting.report_data import ReportData

__all__ = ["explain_unshared"]

_RELATED = {
    FindingKind.OTHER_LAYOUT,
    FindingKind.OTHER_DTYPE,
    FindingKind.NEAR_DUPLICATE,
    FindingKind.CONTAINED,
}


def explain_unshared(two: Compared) -> list[Cause]:
    """Causes that cost bytes of which nothing can be saved by storing something once."""
    related = {place for finding in two.new.findings if finding.kind in _RELATED for place in finding.places}
    parted = dict(_parted(two, related))
    return [*parted.values(), *_wider(two, {*related, *parted})]


# ------------------------------------------------------------------------------------ one content then, several now


def _parted(two: Compared, related: set[Place]) -> Iterator[tuple[Place, Cause]]:
    """Names that had one content, and have several now; of these the former stays, or else what has most places."""
    named = _Named(two.old)
    for root, contents in named.now(two).items():
        if len(named.contents.get(root, ())) != 1:
            continue
        [(former, before)] = named.contents[root].items()
        stays = max(contents, key=lambda content: (content == former, len(contents[content])))
        for content, places in contents.items():
            if content != stays and related.isdisjoint(places):
                yield places[0], _parting(two, before, places[0])


def _parting(two: Compared, before: Place, after: Place) -> Cause:
    old, new = two.old.region(before), two.new.region(after)
    kind, detail = CauseKind.VALUES, "other values"
    if old.element_type != new.element_type:
        kind, detail = CauseKind.DTYPE, _types(old, new)
    elif old.shape != new.shape:
        kind, detail = CauseKind.LAYOUT, f"{old.shape or 'opaque'} before, {new.shape or 'opaque'} now"
    return two.cause(kind, new.nbytes, saves=0, before=[before], after=[after], detail=detail)


def _types(old: Region, new: Region) -> str:
    return f"{old.element_type or 'opaque'} before, {new.element_type or 'opaque'} now"


class _Named:
    """The names of an earlier report that some blob has together, in groups that each have a root.

    Attributes:
        contents: by the root of a group, its contents, with a place of each.
    """

    def __init__(self, report: ReportData) -> None:
        self._groups: Groups[str] = Groups()
        for _, region in report.blobs():
            self._groups.join(names_of_region(region))
        self.contents: dict[str, dict[Content, Place]] = defaultdict(dict)
        for place, region in report.blobs():
            for root in self._roots(region):
                self.contents[root].setdefault(content_of(region), place)

    def now(self, two: Compared) -> dict[str, dict[Content, list[Place]]]:
        """By the root of a group, its contents in the newer report, in files that the older one has, too."""
        contents: dict[str, dict[Content, list[Place]]] = defaultdict(lambda: defaultdict(list))
        for place, region in two.new.blobs():
            for root in self._roots(region) if place[0] in two.files else ():
                contents[root][content_of(region)].append(place)
        return contents

    def _roots(self, region: Region) -> set[str]:
        return {self._groups.root(name) for name in names_of_region(region)}


# ---------------------------------------------------------------------------------------------------- wider elements


def _wider(two: Compared, explained: Collection[Place]) -> Iterator[Cause]:
    """Tensors of the same sizes whose elements take more bytes than before, such as weights that are no longer quantized."""
    for f, g in two.files.items():
        former = {key: (g, r) for r, region in enumerate(two.old.files[g].regions) for key in _tensor_keys(region)}
        for r, region in enumerate(two.new.files[f].regions):
            before = next((former[key] for key in _tensor_keys(region) if key in former), None)
            if before is not None and (f, r) not in explained:
                yield from _widened(two, before, (f, r))


def _widened(two: Compared, before: Place, after: Place) -> Iterator[Cause]:
    old, new = two.old.region(before), two.new.region(after)
    grown = new.nbytes - old.nbytes
    if grown > 0 and old.element_type != new.element_type:
        detail = _types(old, new)
        yield two.cause(CauseKind.DTYPE, grown, saves=0, before=[before], after=[after], detail=detail)


def _tensor_keys(region: Region) -> list[tuple[str, tuple[int, ...]]]:
    """Keys of a tensor, with its sizes: a key that is a position does not mean the same tensor if the sizes differ."""
    return [] if region.layout is None else [(key, region.layout.sizes) for key in region.keys]
