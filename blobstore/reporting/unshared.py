"""What is no longer shared without being waste: what was one content and is several that do not follow from each other."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from blobstore.core.groups import Groups
from blobstore.reporting.causes import Cause, Compared, Place
from blobstore.reporting.matching import Content, content_of, names_of_region
from blobstore.reporting.model import CauseKind, FindingKind, Region, RegionKind
from blobstore.reporting.report_data import ReportData

__all__ = ["explain_unshared"]

_LEAST = 4096
"""Fewer bytes than this are there by accident."""

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
    return [*parted.values(), *_wider(two, {*related, *parted}), *_into_payloads(two), *_apart(two)]


# ------------------------------------------------------------------------------------ one content then, several now


def _parted(two: Compared, related: Collection[Place]) -> Iterator[tuple[Place, Cause]]:
    """Names that had one content, and have several now; of these the former stays, or else what has most places."""
    groups, formers = _named_contents(two.old)
    now: dict[str, dict[Content, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for place, region in _blobs(two.new):
        if place[0] in two.files:
            for root in {groups.root(name) for name in names_of_region(region)}:
                now[root][content_of(region)].append(place)
    for root, contents in now.items():
        if len(formers.get(root, ())) != 1:
            continue
        [(former, before)] = formers[root].items()
        stays = max(contents, key=lambda content: (content == former, len(contents[content])))
        for content, there in contents.items():
            if content != stays and not any(place in related for place in there):
                yield there[0], _parting(two, before, there[0])


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


def _named_contents(report: ReportData) -> tuple[Groups[str], Mapping[str, Mapping[Content, Place]]]:
    """Names that some blob has together; and by the root of such a group, its contents with a place of each."""
    groups: Groups[str] = Groups()
    for _, region in _blobs(report):
        groups.join(names_of_region(region))
    contents: dict[str, dict[Content, Place]] = defaultdict(dict)
    for place, region in _blobs(report):
        for name in names_of_region(region)[:1]:
            contents[groups.root(name)].setdefault(content_of(region), place)
    return groups, contents


def _blobs(report: ReportData) -> Iterator[tuple[Place, Region]]:
    for f, file in enumerate(report.files):
        for r, region in enumerate(file.regions):
            if region.kind.is_blob:
                yield (f, r), region


# ---------------------------------------------------------------------------------------------------- wider elements


def _wider(two: Compared, explained: Collection[Place]) -> Iterator[Cause]:
    """Tensors of the same sizes whose elements take more bytes than before, such as weights that are no longer quantized."""
    for f, g in two.files.items():
        former = {key: (g, r) for r, region in enumerate(two.old.files[g].regions) for key in _tensor_keys(region)}
        for r, region in enumerate(two.new.files[f].regions):
            before = next((former[key] for key in _tensor_keys(region) if key in former), None)
            if before is None or (f, r) in explained:
                continue
            old = two.old.region(before)
            grown = region.nbytes - old.nbytes
            if grown > 0 and old.element_type != region.element_type:
                after = [(f, r)]
                yield two.cause(
                    CauseKind.DTYPE, grown, saves=0, before=[before], after=after, detail=_types(old, region)
                )


def _tensor_keys(region: Region) -> list[tuple[str, tuple[int, ...]]]:
    """Keys of a tensor, with its sizes: a key that is a position does not mean the same tensor if the sizes differ."""
    return [] if region.layout is None else [(key, region.layout.sizes) for key in region.keys]


# --------------------------------------------------------------------------------------------------- inside payloads


def _into_payloads(two: Compared) -> Iterator[Cause]:
    """Programs whose payloads grew by about what was stored under keys and is gone from all files.

    The reports have digests and not bytes, so this is as much as they know.
    """
    gone = {
        content: places[0]
        for content, places in two.before.items()
        if content not in two.after and two.old.region(places[0]).kind is not RegionKind.PAYLOAD
    }
    lost = sum(nbytes for _, nbytes in gone)
    grown: dict[int, int] = {}
    for f, g in two.files.items():
        more = _payloads(two.new, f) - _payloads(two.old, g)
        contained = sum(
            two.new.goes.get((f, r), {}).get(FindingKind.CONTAINED, 0) for r in _payload_regions(two.new, f)
        )
        if more - contained > 0:
            grown[f] = more - contained
    if lost < _LEAST or 10 * sum(grown.values()) < 9 * lost:
        return
    for f, nbytes in grown.items():
        before = [
            place for place in gone.values() if place[0] == two.files[f] or two.old.files[place[0]].format == "ptd"
        ]
        after = [(f, r) for r in _payload_regions(two.new, f)]
        detail = f"{lost:,} bytes are no longer stored under keys, and payloads grew by {sum(grown.values()):,}"
        yield two.cause(CauseKind.PAYLOAD, nbytes, saves=0, before=before, after=after, detail=detail)


def _payload_regions(report: ReportData, f: int) -> list[int]:
    return [r for r, region in enumerate(report.files[f].regions) if region.kind is RegionKind.PAYLOAD]


def _payloads(report: ReportData, f: int) -> int:
    return report.files[f].by_kind.get(RegionKind.PAYLOAD, 0)


# ---------------------------------------------------------------------------------------------------- files apart


def _apart(two: Compared) -> Iterator[Cause]:
    """Files that were added and have nothing in common with any other, although files beside them share."""
    report = two.new
    together = [files for finding in report.findings if finding.saves >= _LEAST for files in [_files(finding.places)]]
    connected = {f for files in together if len(files) > 1 for f in files}
    weights = [sum(region.nbytes for region in file.regions if region.kind.is_blob) for file in report.files]
    beside: dict[str, list[int]] = defaultdict(list)
    for f, file in enumerate(report.files):
        beside[posixpath.dirname(file.path)].append(f)
    for f, file in enumerate(report.files):
        places = [(f, r) for r, region in enumerate(file.regions) if region.kind.is_blob]
        is_known = any(content_of(report.region(place)) in two.before for place in places)
        if f in two.files or f in connected or is_known or weights[f] < _LEAST:
            continue
        siblings = beside[posixpath.dirname(file.path)]
        sharing = sum(other in connected for other in siblings)
        if file.format == "pte":
            largest = max((weights[other] for other in siblings if report.files[other].format == "ptd"), default=0)
            slim = [other for other in siblings if report.files[other].format == "pte" and weights[other] < largest]
            sharing += 0 if f in slim else len(set(slim) - connected)
        if sharing:
            detail = f"nothing in common with {sharing} file{'s' * (sharing != 1)} beside it that share"
            yield two.cause(CauseKind.ADDED_FILE, weights[f], saves=0, before=[], after=places, detail=detail)


def _files(places: Collection[Place]) -> set[int]:
    return {f for f, _ in places}
