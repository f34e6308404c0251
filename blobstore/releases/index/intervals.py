"""Sets of bytes, as ranges."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

__all__ = ["Intervals", "coalesced"]


class Intervals:
    """Ranges of bytes that do not touch each other, in order.

    Args:
        ranges: first byte of each, and first byte behind it; in any order, and overlapping if need be.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in ranges:
            self.add(start, stop)

    def add(self, start: int, stop: int) -> None:
        """Add the bytes from `start` up to `stop`."""
        if start >= stop:
            return
        first = bisect.bisect_left(self._stops, start)
        last = bisect.bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def remove(self, start: int, stop: int) -> None:
        """Remove the bytes from `start` up to `stop`."""
        kept = [pair for old in self for pair in ((old[0], min(old[1], start)), (max(old[0], stop), old[1]))]
        self._starts, self._stops = [], []
        for pair in kept:
            self.add(*pair)

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The ranges between `start` and `stop` that are not in the set."""
        gaps = []
        for old_start, old_stop in self._from(start):
            if old_start >= stop:
                break
            if old_start > start:
                gaps.append((start, old_start))
            start = old_stop
        if start < stop:
            gaps.append((start, stop))
        return gaps

    def end_from(self, start: int) -> int:
        """The first byte from `start` on that is not in the set."""
        at = bisect.bisect_right(self._starts, start) - 1
        return max(start, self._stops[at]) if at >= 0 else start

    def _from(self, start: int) -> Iterator[tuple[int, int]]:
        at = bisect.bisect_right(self._stops, start)
        return zip(self._starts[at:], self._stops[at:], strict=True)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._stops, strict=True)))

    @property
    def total(self) -> int:
        """The number of bytes."""
        return sum(self._stops) - sum(self._starts)


def coalesced(ranges: Iterable[tuple[int, int]], gap: int, longest: int) -> list[tuple[int, int]]:
    """The requests for some ranges: near ones in one, long ones cut.

    Args:
        ranges: first byte of each, and first byte behind it.
        gap: ranges with at most this many bytes between them become one.
        longest: the largest request, in bytes.
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return [(at, min(at + longest, stop)) for start, stop in merged for at in range(start, stop, longest)]
