"""Bases that versions in a row need: kept decoded, within a budget, from the second version on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blobstore.core.codec.blobs import CHUNK

__all__ = ["KeptBase", "KeptBases"]

_BUDGET = 1 << 28


class KeptBase:
    """A base of which each chunk is decoded when it is first needed, by whichever thread."""

    def __init__(self, size: int) -> None:
        self._bytes = memoryview(np.empty(size, np.uint8))  # type: ignore[arg-type]
        self._is_there = bytearray(-(-size // CHUNK))
        self.last = 0

    def __len__(self) -> int:
        return len(self._bytes)

    def chunk(self, number: int, decode: Callable[[memoryview], object]) -> memoryview:
        """A chunk, by its number; `decode` writes it to its place, which two threads may do at once, with the same bytes."""
        room = self._bytes[number * CHUNK : (number + 1) * CHUNK]
        if not self._is_there[number]:
            decode(room)
            self._is_there[number] = 1
        return room


class KeptBases:
    """The bases that are kept; a version that needs one for the second time has it kept if there is room.

    What is not needed by two versions in a row makes room for others. If the bases of one version are larger than the budget,
    those that came first stay.

    Args:
        budget: bytes.
    """

    def __init__(self, budget: int = _BUDGET) -> None:
        self._budget = budget
        self._seen: dict[bytes, int] = {}
        self._kept: dict[bytes, KeptBase] = {}
        self._version = 0

    def next_version(self) -> None:
        """Call this when the next version begins."""
        self._version += 1
        self._seen = {digest: last for digest, last in self._seen.items() if last >= self._version - 2}
        self._kept = {digest: base for digest, base in self._kept.items() if base.last >= self._version - 2}

    def forget(self) -> None:
        """Keep none of those that were decoded until now."""
        self._seen.clear()
        self._kept.clear()

    def get(self, digest: bytes, size: int) -> KeptBase | None:
        """A base that is kept, or is from now on; None if its chunks are to be decoded for this use alone."""
        base = self._kept.get(digest)
        if base is None and digest in self._seen and sum(map(len, self._kept.values())) + size <= self._budget:
            base = self._kept[digest] = KeptBase(size)
        self._seen[digest] = self._version
        if base is not None:
            base.last = self._version
        return base
