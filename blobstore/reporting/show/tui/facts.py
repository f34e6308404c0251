"""What there is to say of blobs and findings, and which findings a blob is in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from rich.text import Text

from blobstore.core.regions.region import Region
from blobstore.core.text import printable, size
from blobstore.reporting.model import Finding, Place
from blobstore.reporting.paths import short_paths
from blobstore.reporting.report_data import ReportData
from blobstore.reporting.show.tree import Kinds
from blobstore.reporting.show.tui.cells import FAINT, fit, shown, wastes
from blobstore.reporting.show.tui.view import Details
from blobstore.reporting.show.words import FINDINGS, REGIONS, region_name, short_hashes

__all__ = ["Facts", "typed", "waste"]

_KEYS = 20
_NAMED = 3
_COMMAND = 160


class Facts:
    """A report and what views look up in it."""

    def __init__(self, report: ReportData) -> None:
        self.report = report
        self.names = [printable(name) for name in short_paths([file.path for file in report.files])]
        self.numbers = {command: number for number, command in enumerate(report.commands, 1)}

    @cached_property
    def _findings(self) -> dict[Place, list[Finding]]:
        index: dict[Place, list[Finding]] = defaultdict(list)
        for finding in self.report.findings:
            for place in finding.places:
                index[place].append(finding)
        return index

    def findings(self, place: Place) -> Sequence[Finding]:
        """The findings that a region is in."""
        return self._findings.get(place, ())

    def related(self, place: Place) -> list[Place]:
        """The regions that findings name together with this one."""
        found = dict.fromkeys(other for finding in self.findings(place) for other in finding.places)
        found.pop(place, None)
        return list(found)

    def where(self, place: Place) -> str:
        """The file of a region and its name in it."""
        return f"{self.names[place[0]]}: {short_hashes(region_name(self.report.region(place)))}"

    def goes_with(self, place: Place) -> str:
        """Where else a blob is, in a few words."""
        name = region_name(self.report.region(place))
        others: dict[str, None] = {}
        for other in self.related(place):
            file, label = self.names[other[0]], region_name(self.report.region(other))
            others[label if other[0] == place[0] else file if label == name else f"{file}: {label}"] = None
        texts = [fit(text, 60) for text in list(others)[:_NAMED]]
        more = f" and {len(others) - _NAMED:,} more" if len(others) > _NAMED else ""
        return f"goes with {', '.join(texts)}{more}" if texts else ""

    def to_do(self, finding: Finding) -> str:
        """What to do about a finding; a command by its number and its ends."""
        if finding.command is None:
            return shown(finding.advice)
        number = self.numbers.get(finding.command)
        return f"run command {number}: {fit(finding.command, _COMMAND)}" if number else fit(finding.command, _COMMAND)

    def of_blob(self, place: Place) -> Details:
        """Everything about a blob of the files as they are now."""
        report, region = self.report, self.report.region(place)
        file, findings = report.files[place[0]], self.findings(place)
        facts = [
            _fact("File", f"{shown(file.path)} ({file.format})"),
            _fact("What", f"{REGIONS[region.kind]} {typed(region)}".strip()),
            _fact("Size", f"{size(region.nbytes)} ({region.nbytes:,} bytes), from byte {region.start:,} on"),
        ]
        if region.keys and (len(region.keys) > 1 or region.name != region.keys[0]):
            more = f" and {len(region.keys) - _KEYS:,} more" if len(region.keys) > _KEYS else ""
            facts.append(_fact("Keys", ", ".join(map(shown, region.keys[:_KEYS])) + more))
        if region.methods:
            facts.append(_fact("Methods", ", ".join(map(shown, region.methods))))
        if region.digest:
            facts.append(_fact("Digest", f"xxh3-128 {region.digest}"))
        facts += [Text.assemble(("Can go  ", FAINT), words) for words in wastes(report.goes.get(place, {}))]
        facts += self._advice(findings)
        command = next((finding.command for finding in findings if finding.command), None)
        return Details(
            region_name(region), facts, self.related(place), "The same, or what follows from it, is in", command
        )

    def of_finding(self, finding: Finding) -> Details:
        region = self.report.region(finding.places[0])
        facts = [
            _fact("Adds", f"{size(finding.counted)} ({finding.counted:,} bytes) to what can be saved in all"),
            _fact("Saves", f"{size(finding.saves)} ({finding.saves:,} bytes) if nothing else is done"),
        ]
        facts += [_fact("What", typed(region))] if region.element_type else []
        facts += [_fact("Detail", shown(finding.detail))] if finding.detail else []
        facts += self._advice([finding])
        heading = "Where it is; the first one stays" if len(finding.places) > 1 else "Where it is"
        return Details(FINDINGS[finding.kind], facts, finding.places, heading, finding.command)

    def _advice(self, findings: Iterable[Finding]) -> Iterable[Text]:
        return (_fact("To do", words) for words in dict.fromkeys(map(self.to_do, findings)) if words)


def typed(region: Region) -> str:
    return printable(f"{region.element_type} {region.shape}".strip())


def waste(goes: Kinds) -> Text:
    return Text("  ").join(wastes(goes)) if goes else Text("all of it stays")


def _fact(what: str, text: str) -> Text:
    return Text.assemble((f"{what}  ", FAINT), text)
