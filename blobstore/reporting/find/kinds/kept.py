"""Which contents carry the same information, and which one of them stays."""

from __future__ import annotations

from collections.abc import Iterable

from blobstore.reporting.find.catalog import Content

__all__ = ["Kept"]


class Kept:
    """Contents that were proved to follow from each other; of each such group the smallest stays.

    Of equally small ones a tensor is preferred to opaque bytes, and an earlier one to a later one.
    """

    def __init__(self, contents: Iterable[Content]) -> None:
        self._parent: dict[Content, Content] = {content: content for content in contents}
        self._rank = {content: i for i, content in enumerate(self._parent)}

    def join(self, a: Content, b: Content) -> None:
        """Say that each follows from the other."""
        one, two = self.of(a), self.of(b)
        if one is not two:
            stays, goes = sorted((one, two), key=self._preference)
            self._parent[goes] = stays

    def of(self, content: Content) -> Content:
        """The content that stays in the group of this one."""
        while (parent := self._parent[content]) is not content:
            self._parent[content] = self._parent[parent]
            content = parent
        return content

    def _preference(self, content: Content) -> tuple[int, bool, int]:
        return content.nbytes, content.layout is None, self._rank[content]
