"""Why more bytes are wasted, or fewer, than in an earlier report.

Waste is compared content by content. What grew is lost sharing, what shrank is sharing gained, and each has a cause; the
difference of the two is by how much the total of the reports changed. What is no longer shared without being waste, such
as weights that were quantized again, is in `unshared.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from blobstore.core.regions.region import RegionKind
from blobstore.core.reprs import fields_line
from blobstore.reporting.find.matching import Content, content_of, match_contents, match_files, names_of_region
from blobstore.reporting.model import DUPLICATES, CauseKind, Finding, FindingKind, Place
from blobstore.reporting.report_data import ReportData

__all__ = ["Cause", "Compared", "explain_waste", "grouped"]

_RELATED = {
    FindingKind.OTHER_LAYOUT: CauseKind.LAYOUT,
    FindingKind.OTHER_DTYPE: CauseKind.DTYPE,
    FindingKind.NEAR_DUPLICATE: CauseKind.VALUES,
    FindingKind.CONTAINED: CauseKind.PAYLOAD,
    FindingKind.CONSTANT: CauseKind.CONSTANT,
}
_OF_FILES = {FindingKind.PADDING: CauseKind.PADDING, FindingKind.UNREFERENCED: CauseKind.UNREFERENCED}


@dataclass(frozen=True)
class Cause:
    """Why bytes are no longer shared, or are shared now.

    Attributes:
        kind: the cause.
        bytes: what it cost or, of sharing that was gained, what it frees.
        saves: the part of it that can be saved, and so is in the totals of the reports; 0 or all of it.
        before: where these bytes were in the earlier report: (path, key); empty if they were not there.
        after: where they are now.
        detail: what is special about it, in a few words.
    """

    __repr__ = fields_line

    kind: CauseKind
    bytes: int
    saves: int
    before: tuple[tuple[str, str], ...] = ()
    after: tuple[tuple[str, str], ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Compared:
    """Two reports, with what of the newer is what of the older."""

    old: ReportData
    new: ReportData

    @cached_property
    def files(self) -> dict[int, int]:
        """For each file of the newer report its index in the older."""
        return match_files(self.old, self.new)

    @cached_property
    def follows(self) -> dict[Content, Content]:
        """The contents of the older report in whose place one of the newer is."""
        return match_contents(self.old, self.new, self.files)

    @cached_property
    def before(self) -> dict[Content, list[Place]]:
        """Where each content of the older report is."""
        return _where(self.old, {})

    @cached_property
    def after(self) -> dict[Content, list[Place]]:
        """Where each content of the newer report is, under the content of the older in whose place it is."""
        return _where(self.new, self.follows)

    @cached_property
    def still_there(self) -> set[tuple[int, Content, tuple[str, ...]]]:
        """Contents, or what is in their place, that the newer report has in the same file under the same first key."""
        return {
            (self.files[f], content, self.new.region((f, r)).keys[:1])
            for content, places in self.after.items()
            for f, r in places
            if f in self.files
        }

    @cached_property
    def _names_before(self) -> set[tuple[int, str]]:
        return {(g, name) for (g, _), region in self.old.blobs() for name in names_of_region(region)}

    def had(self, g: int | None, name: str) -> bool:
        """Whether a file of the older report had something under a name."""
        return (g, name) in self._names_before

    @cached_property
    def named_after(self) -> dict[tuple[int, str], set[Content]]:
        """The contents that a file of the older report has under a name in the newer."""
        named: dict[tuple[int, str], set[Content]] = defaultdict(set)
        for f, g in self.files.items():
            for region in self.new.files[f].regions:
                for name in names_of_region(region):
                    content = content_of(region)
                    named[g, name].add(self.follows.get(content, content))
        return named

    def cause(
        self,
        kind: CauseKind,
        nbytes: int,
        *,
        saves: int,
        before: Iterable[Place],
        after: Iterable[Place],
        detail: str = "",
    ) -> Cause:
        return Cause(kind, nbytes, saves, _named(self.old, before), _named(self.new, after), detail)


def _where(report: ReportData, follows: Mapping[Content, Content]) -> dict[Content, list[Place]]:
    where: dict[Content, list[Place]] = defaultdict(list)
    for place, region in report.blobs():
        content = content_of(region)
        where[follows.get(content, content)].append(place)
    return where


def _named(report: ReportData, places: Iterable[Place]) -> tuple[tuple[str, str], ...]:
    """Path and key of places. A blob with several keys has each of them."""
    named: dict[tuple[str, str], None] = {}
    for place in places:
        region, path = report.region(place), report.files[place[0]].path
        named.update(((path, key), None) for key in ([region.tensor] if region.tensor else region.keys) or [""])
    return tuple(named)


@dataclass
class _Waste:
    """What can be saved of some contents, or of a file, in one report.

    Attributes:
        counted: bytes, as the total counts them.
        findings: what says so.
    """

    counted: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def places(self) -> list[Place]:
        """All that the findings are about, each once."""
        return list(dict.fromkeys(place for finding in self.findings for place in finding.places))


def grouped(causes: Sequence[Cause]) -> list[list[Cause]]:
    """Causes of one kind in the same files together, what costs most first."""
    groups: dict[tuple[object, ...], list[Cause]] = {}
    for cause in causes:
        files = [frozenset(path for path, _ in places) for places in (cause.before, cause.after)]
        groups.setdefault((cause.kind, *files), []).append(cause)
    return sorted(groups.values(), key=lambda group: -sum(cause.bytes for cause in group))


def explain_waste(two: Compared) -> tuple[list[Cause], list[Cause]]:
    """Why more is wasted, and why less; the `saves` of the first minus those of the second are what the total grew by."""
    before = _wastes(two.old, {}, {f: f for f in range(len(two.old.files))})
    after = _wastes(two.new, two.follows, two.files)
    lost: list[Cause] = []
    gained: list[Cause] = []
    for subject in dict.fromkeys([*after, *before]):
        was, now = before.get(subject, _Waste()), after.get(subject, _Waste())
        grown = now.counted - was.counted
        kind = (now.findings or was.findings)[0].kind
        if grown > 0:
            lost += _lost(two, kind, was, now, grown)
        elif grown < 0:
            gained.append(_gained(two, kind, was, -grown))
    return lost, gained


def _wastes(report: ReportData, follows: Mapping[Content, Content], files: Mapping[int, int]) -> dict[Hashable, _Waste]:
    """Waste by what it is about: contents and how they are related, or a file and what it has too much of."""
    wastes: dict[Hashable, _Waste] = defaultdict(_Waste)

    def subject(finding: Finding) -> Hashable:
        if finding.kind in _OF_FILES:
            return finding.kind, frozenset(files.get(f, report.files[f].path) for f, _ in finding.places)
        contents = (content_of(report.region(place)) for place in finding.places)
        kind: Hashable = "equal" if finding.kind in DUPLICATES else finding.kind
        return kind, frozenset(follows.get(content, content) for content in contents)

    for finding in report.findings:
        if finding.places:  # a finding of a report that was read may have none
            waste = wastes[subject(finding)]
            waste.counted += finding.counted
            waste.findings.append(finding)
    return wastes


# ------------------------------------------------------------------------------------------------------ lost sharing


def _lost(two: Compared, kind: FindingKind, was: _Waste, now: _Waste, grown: int) -> Iterator[Cause]:
    if kind in DUPLICATES:
        yield from _copies(two, now, grown)
    elif kind in _OF_FILES:
        yield two.cause(
            _OF_FILES[kind],
            grown,
            saves=grown,
            before=was.places[:1],
            after=now.places[:1],
            detail=_alignments(two, now) if kind is FindingKind.PADDING else now.findings[0].detail,
        )
    else:
        contents = _contents(two, now)
        before = [place for content in contents for place in two.before.get(content, ())]
        detail = now.findings[0].detail
        yield two.cause(_RELATED[kind], grown, saves=grown, before=before, after=now.places, detail=detail)


def _contents(two: Compared, waste: _Waste) -> list[Content]:
    """What findings of the newer report are about, under the contents of the older in whose place it is."""
    contents = (content_of(two.new.region(place)) for place in waste.places)
    return list(dict.fromkeys(two.follows.get(content, content) for content in contents))


def _alignments(two: Compared, now: _Waste) -> str:
    f = now.places[0][0]
    starts = f"blobs start at multiples of {_alignment(two.new, f)}"
    return f"{starts}, before of {_alignment(two.old, two.files[f])}" if f in two.files else starts


def _alignment(report: ReportData, f: int) -> int:
    """The largest power of two that all blobs of a file start at multiples of."""
    starts = 0
    for region in report.files[f].regions:
        starts |= region.start if region.kind.is_blob else 0
    return starts & -starts or 1


def _copies(two: Compared, now: _Waste, grown: int) -> Iterator[Cause]:
    """Why one content is stored more often: each additional copy has a cause."""
    content, after = _contents(two, now)[0], now.places
    before = two.before.get(content, [])
    nbytes = two.new.region(after[0]).nbytes
    additional = _additional(two, before, after)[-max(-(-grown // nbytes), 1) :]
    former = _Former(two, content, before)
    kinds: dict[CauseKind, list[Place]] = defaultdict(list)
    for place in additional or after[-1:]:
        kinds[former.why_copied(place)].append(place)
    left = grown
    for number, (kind, places) in enumerate(kinds.items(), 1):
        cost = left if number == len(kinds) else min(left, nbytes * len(places))
        left -= cost
        yield two.cause(
            kind, cost, saves=cost, before=before, after=after, detail=_times(two, kind, before, after, places)
        )


def _times(
    two: Compared, kind: CauseKind, before: Sequence[Place], after: Sequence[Place], additional: Sequence[Place]
) -> str:
    """How often the content is there, and for which methods it was there once."""
    if kind is CauseKind.ADDED_FILE:
        paths = dict.fromkeys(two.new.files[f].path for f, _ in additional)
        return f"{len(paths)} new file{'s' * (len(paths) != 1)}"
    detail = f"{len(before)} before, {len(after)} now" if before else f"{len(after)} times"
    methods = dict.fromkeys(method for place in before for method in two.old.region(place).methods)
    return f"{detail}; used by {', '.join(methods)}" if kind is CauseKind.COPIES and len(methods) > 1 else detail


def _additional(two: Compared, before: Sequence[Place], after: Sequence[Place]) -> list[Place]:
    """The places of a content that it had not before: what is in the same file under the same key is no news."""
    of_file: dict[int | None, list[Place]] = defaultdict(list)
    for place in after:
        of_file[two.files.get(place[0])].append(place)
    for g, r in before:
        keys, there = set(two.old.region((g, r)).keys), of_file[g]
        same = next((place for place in there if keys & set(two.new.region(place).keys)), None)
        if there:
            there.remove(same or there[0])
    left = {place for places in of_file.values() for place in places}
    return [place for place in after if place in left]


class _Former:
    """Where a content was in the older report."""

    def __init__(self, two: Compared, content: Content, before: Sequence[Place]) -> None:
        self._two = two
        self._names: dict[int, set[str]] = defaultdict(set)
        for g, r in before:
            self._names[g].update(names_of_region(two.old.region((g, r))))
        data_files = {g for g in self._names if two.old.files[g].format == "ptd"}
        self._was_in_data_file = bool(data_files)
        self._left_data_files = data_files.isdisjoint(two.files.get(f) for f, _ in two.after[content])

    def why_copied(self, place: Place) -> CauseKind:
        """Why the content is at a place where it was not before."""
        region, g = self._two.new.region(place), self._two.files.get(place[0])
        names = names_of_region(region)
        if region.kind is RegionKind.PAYLOAD and g is not None:
            return CauseKind.LOWERED_TWICE
        if g in self._names:
            return CauseKind.KEY if names and self._names[g].isdisjoint(names) else CauseKind.COPIES
        if any(self._two.had(g, name) for name in names):
            return CauseKind.EQUAL
        if self._was_in_data_file and (g is not None or self._left_data_files):
            return CauseKind.DATA_FILE
        if g is None:
            return CauseKind.ADDED_FILE
        return CauseKind.EQUAL if self._names else CauseKind.ADDED


# ---------------------------------------------------------------------------------------------------- gained sharing


def _gained(two: Compared, kind: FindingKind, was: _Waste, freed: int) -> Cause:
    before = was.places[:1] if kind in _OF_FILES else was.places
    after = [] if kind in _OF_FILES else [p for c in _contents_before(two, was) for p in two.after.get(c, ())]
    why = CauseKind.REMOVED if kind in _OF_FILES else _why_gained(two, was)
    return two.cause(why, freed, saves=freed, before=before, after=after)


def _contents_before(two: Compared, waste: _Waste) -> list[Content]:
    return list(dict.fromkeys(content_of(two.old.region(place)) for place in waste.places))


def _why_gained(two: Compared, was: _Waste) -> CauseKind:
    """What became of the places that are no longer waste."""
    stay = set(two.files.values())
    gone = [
        place
        for place in was.places
        if (place[0], content_of(region := two.old.region(place)), region.keys[:1]) not in two.still_there
    ]
    if gone and not any(f in stay for f, _ in gone):
        return CauseKind.REMOVED
    contents = set(_contents_before(two, was))
    for place in gone:
        now_there = {
            content
            for name in names_of_region(two.old.region(place))
            for content in two.named_after.get((place[0], name), ())
        }
        if now_there - contents:
            return CauseKind.CHANGED
    if not any(content in two.after for content in contents):
        return CauseKind.REMOVED
    return CauseKind.SHARED if gone else CauseKind.CHANGED
