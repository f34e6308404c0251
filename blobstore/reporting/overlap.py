"""Which of some sets have most bytes in common with another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

__all__ = ["Overlap"]

Content = TypeVar("Content", bound=Hashable)


class Overlap(Generic[Content]):
    """Sets of contents, each under a number. They are found by what they have in common with another set, so the work
    grows with the number of contents and not with that of pairs."""

    def __init__(self) -> None:
        self._numbers: dict[Content, list[int]] = defaultdict(list)

    def add(self, number: int, contents: Mapping[Content, int]) -> None:
        """Add a set: its contents with their sizes."""
        for content in contents:
            self._numbers[content].append(number)

    def shared(self, contents: Mapping[Content, int]) -> dict[int, int]:
        """Bytes that each set has in common with these contents, if there are any."""
        shared: dict[int, int] = defaultdict(int)
        for content, nbytes in contents.items():
            for number in self._numbers.get(content, ()):
                shared[number] += nbytes
        return shared
