"""Contents that were met, each with a number."""

from __future__ import annotations

from blobstore.core.memory.buffers import same_bytes
from blobstore.core.memory.digest import Digest, sha256

__all__ = ["Distinct"]


class Distinct:
    """The numbers of different contents, by their bytes.

    A digest that was recorded may be wrong, and one that was computed may be that of a collision. So bytes are compared with
    the first contents of their digest, and with no others: those are told apart by their SHA-256. So many contents under
    one digest cost no more than one reading each.
    """

    def __init__(self) -> None:
        self._firsts: dict[Digest, tuple[memoryview, int]] = {}
        self._others: dict[tuple[Digest, str], int] = {}

    def find(self, data: memoryview, address: Digest) -> int | None:
        """The number of these bytes; None if they are new."""
        first = self._firsts.get(address)
        if first is None:
            return None
        if same_bytes(first[0], data):
            return first[1]
        return self._others.get((address, sha256(data)))

    def add(self, data: memoryview, address: Digest, number: int) -> None:
        """Give new bytes a number."""
        if address in self._firsts:
            self._others[address, sha256(data)] = number
        else:
            self._firsts[address] = data, number
