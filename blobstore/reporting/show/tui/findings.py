"""The findings: sorted, of one kind or all, with what has the words that were searched for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rich.text import Text

from blobstore.core.text import size
from blobstore.reporting.model import Finding, FindingKind
from blobstore.reporting.show.tui.cells import FAINT, STRONG, column, fit, kind_words
from blobstore.reporting.show.tui.facts import Facts, typed
from blobstore.reporting.show.tui.view import Details, View, matches
from blobstore.reporting.show.words import FINDINGS, region_name, short_hashes

__all__ = ["Findings"]

_SIZE = 8
_KIND = max(map(len, FINDINGS.values())) + 2
_TYPE = 24
_WIDE = 110
"""Cells from which there is room for what a finding saves alone, its type and its shape."""


class Findings(View):
    """All findings, or some of them."""

    NAME = "Findings"
    KEYS = "enter details  s w n sort  f kind  / find  y copy command  ? help  q quit"
    SEARCHES = True
    SORTS: ClassVar[Mapping[str, bool]] = {"size": True, "waste": True, "name": False}

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts
        self._kind: FindingKind | None = None
        self._said: dict[int, str] = {}
        self._keys: dict[str, Callable[[Finding], Any]] = {
            "size": lambda finding: finding.counted,
            "waste": lambda finding: finding.saves,
            "name": lambda finding: self._where(finding).lower(),
        }
        self.fill()

    def fill(self) -> None:
        """Those of the kind that have all words, in their order."""
        has = matches(self.query)
        findings = self._facts.report.findings
        rows = [
            finding
            for number, finding in enumerate(findings)
            if self._kind in {None, finding.kind} and (not self.query or has(self._says(number, finding)))
        ]
        key, descending = self.sort
        self.rows = sorted(rows, key=self._keys[key], reverse=descending)
        self.cursor = 0

    def next_kind(self, step: int) -> None:
        """Show the findings of the next kind that there is, or after the last all."""
        kinds = [None, *self._facts.report.by_kind]
        self._kind = kinds[(kinds.index(self._kind) + step) % len(kinds)]
        self.fill()

    def _says(self, number: int, finding: Finding) -> str:
        """What a search looks at: the words of the page's table, and all places."""
        if number not in self._said:
            region = self._facts.report.region(finding.places[0])
            places = {text for f, r in finding.places for text in (self._facts.names[f], self._key(f, r))}
            facts = [FINDINGS[finding.kind], finding.detail, typed(region), self._facts.to_do(finding)]
            self._said[number] = "\n".join([*facts, *places]).lower()
        return self._said[number]

    def _key(self, f: int, r: int) -> str:
        return region_name(self._facts.report.files[f].regions[r])

    def _where(self, finding: Finding) -> str:
        """The name of what was found, and the file that it is in, or how many."""
        files = len({f for f, _ in finding.places})
        where = f"{files:,} files" if files > 1 else self._facts.names[finding.places[0][0]]
        return f"{short_hashes(self._key(*finding.places[0]))} in {where}"

    def heading(self) -> Text:
        """Which findings these are, and what they come to."""
        counted = sum(finding.counted for finding in self.rows)
        text = Text(f"{len(self.rows):,} of {len(self._facts.report.findings):,} findings, {size(counted)}")
        return text.append(" ─ ").append(kind_words(self._kind) if self._kind else "all kinds")

    def columns(self, width: int) -> Text:
        text = f"{'adds':>{_SIZE + 1}}" + (f"{'alone':>{_SIZE + 2}}" if width >= _WIDE else "")
        text += f"  {'finding':{_KIND}}  " + (f"{'type and shape':{_TYPE}}  " if width >= _WIDE else "")
        by = {"size": "what it adds", "waste": "what it saves alone", "name": "name"}[self.sort[0]]
        return Text(f"{text}where (by {by})", FAINT)

    def line(self, row: Finding, width: int) -> Text:
        """What it adds, what it saves alone, its kind, and where it is."""
        text = Text(f"{size(row.counted):>{_SIZE + 1}}")
        text.append(f"{size(row.saves):>{_SIZE + 2}}" if width >= _WIDE else "").append("  ")
        text.append(kind_words(row.kind)).append(" " * (_KIND - 2 - len(FINDINGS[row.kind]))).append("  ")
        if width >= _WIDE:
            text.append(f"{column(typed(self._facts.report.region(row.places[0])), _TYPE)}  ", FAINT)
        return text.append(fit(self._where(row), width - text.cell_len))

    def about(self, row: Finding | None, width: int, lines: int) -> Text:
        """What it is, and what to do about it."""
        if row is None:
            return Text("Nothing is found." if self.query or self._kind else "Nothing is wasted.")
        region = self._facts.report.region(row.places[0])
        text = Text.assemble(
            (fit(self._where(row), 2 * width // 3), STRONG), f"; {size(row.saves)} if nothing else is done"
        )
        for fact in filter(None, (typed(region), row.detail)):
            text.append(f"; {fit(fact, width // 2)}")
        return text.append(f". To do: {fit(self._facts.to_do(row), width)}")

    def details(self, row: Finding | None) -> Details | None:
        return self._facts.of_finding(row) if row is not None else None

    def command(self, row: Finding | None) -> str | None:
        return row.command if row is not None else None
