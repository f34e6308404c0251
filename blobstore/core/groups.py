"""Which items belong together: a union-find."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

__all__ = ["Groups"]

Item = TypeVar("Item", bound=Hashable)


class Groups(Generic[Item]):
    """Items in groups that grow together when two of their members are joined. One that was never mentioned is a group of
    its own."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._parent = {item: item for item in items}

    def root(self, item: Item) -> Item:
        """The member that stands for the group of an item."""
        parents = self._parent
        while parents.setdefault(item, item) != item:
            parents[item] = item = parents[parents[item]]  # so that no path stays long
        return item

    def join(self, items: Iterable[Item]) -> None:
        """Make one group of the groups of these items; the root of the first item's group becomes that of all."""
        roots = [self.root(item) for item in items]
        for root in roots:
            self._parent[root] = roots[0]

    def members(self) -> list[list[Item]]:
        """The groups, each with its items, all in the order in which they were first mentioned."""
        groups: dict[Item, list[Item]] = {}
        for item in self._parent:
            groups.setdefault(self.root(item), []).append(item)
        return list(groups.values())
