"""Adding savings up without counting a byte twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from blobstore.reporting.model import Claim, Finding, FindingKind

__all__ = ["attribute", "count", "in_order", "measure"]

_ORDER = {kind: i for i, kind in enumerate(FindingKind)}


def measure(claims: Iterable[Claim]) -> int:
    """Bytes that claims cover together."""
    covered = _Covered()
    return sum(covered.add(claim) for claim in claims)


def count(findings: Iterable[Finding]) -> list[Finding]:
    """Order findings, and compute what each adds to those before it.

    Equality comes first, because it is the easiest to act on, and then the largest. So if two copies of a tensor could
    be stored in half the width, that saving counts for the copy that stays.
    """
    ordered = sorted(findings, key=in_order)
    covered = _Covered()
    return [replace(finding, counted=sum(covered.add(claim) for claim in finding.claims)) for finding in ordered]


def in_order(finding: Finding) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """What findings are sorted by."""
    return _ORDER[finding.kind], -finding.saves, finding.places


def attribute(findings: Iterable[Finding]) -> dict[tuple[int, int], dict[FindingKind, int]]:
    """For each region, the bytes that can go by the kind of finding that they count for; findings as `count` orders them."""
    covered = _Covered()
    attributed: dict[tuple[int, int], dict[FindingKind, int]] = {}
    for finding in findings:
        for claim in finding.claims:
            if nbytes := covered.add(claim):
                kinds = attributed.setdefault((claim.file, claim.region), {})
                kinds[finding.kind] = kinds.get(finding.kind, 0) + nbytes
    return attributed


class _Covered:
    """Bytes of regions that are claimed."""

    def __init__(self) -> None:
        self._spans: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def add(self, claim: Claim) -> int:
        """Cover the bytes of a claim; how many of them were not covered."""
        if claim.start >= claim.stop:
            return 0
        place = (claim.file, claim.region)
        before = self._spans[place]
        after = _union([*before, (claim.start, claim.stop)])
        self._spans[place] = after
        return _length(after) - _length(before)


def _union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)
