"""Slices as recipes: some rows of a tensor, or some columns of some rows.

A recipe is `slice:START:LENGTH:STRIDE:ROWS`, in bytes: from START on, ROWS times LENGTH bytes, of which each begins STRIDE bytes
behind the one before. Rows with all their columns are one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

__all__ = ["Slice", "parse_slice"]

_RECIPE = re.compile(r"slice:(0|[1-9][0-9]{0,14}):([1-9][0-9]{0,14}):([1-9][0-9]{0,14}):([1-9][0-9]{0,14})", re.ASCII)


@dataclass(frozen=True)
class Slice:
    """Which bytes of a blob, as the recipe has them."""

    start: int
    length: int
    stride: int
    rows: int

    @property
    def recipe(self) -> str:
        """As it is stored."""
        return f"slice:{self.start}:{self.length}:{self.stride}:{self.rows}"

    @property
    def size(self) -> int:
        """Of the slice, in bytes."""
        return self.length * self.rows

    @property
    def stop(self) -> int:
        """Behind its last byte in the blob."""
        return self.start + self.stride * (self.rows - 1) + self.length

    def taken(self, base: memoryview) -> memoryview:
        """The bytes, of a blob that has them; of a single row, without a copy."""
        if self.rows == 1:
            return base[self.start : self.stop]
        given = np.frombuffer(base, np.uint8)[self.start : self.stop]
        rows = np.lib.stride_tricks.as_strided(given, (self.rows, self.length), (self.stride, 1))
        return memoryview(rows.reshape(-1))  # type: ignore[arg-type]


def parse_slice(recipe: str) -> Slice | None:
    """A recipe that tables have; None if it is none, or its rows overlap."""
    match = _RECIPE.fullmatch(recipe)
    found = Slice(*map(int, match.groups())) if match else None
    return found if found is not None and found.length <= found.stride else None
