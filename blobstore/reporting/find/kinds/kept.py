"""Which contents carry the same information, and which one of them stays."""

from __future__ import annotations

from collections.abc import Iterable

from blobstore.core.groups import Groups
from blobstore.reporting.find.catalog import Content

__all__ = ["Kept"]


class Kept(Groups[Content]):
    """Contents that were proved to follow from each other; the root of each such group is the one that stays, the smallest.

    Of equally small ones a tensor is preferred to opaque bytes, and an earlier one to a later one.
    """

    def __init__(self, contents: Iterable[Content]) -> None:
        super().__init__(contents)
        self._rank = {content: i for i, content in enumerate(self._parent)}

    def join(self, items: Iterable[Content]) -> None:
        """Say that each of them follows from the others."""
        super().join(sorted(map(self.root, items), key=self._preference))

    def _preference(self, content: Content) -> tuple[int, bool, int]:
        return content.nbytes, content.layout is None, self._rank[content]
