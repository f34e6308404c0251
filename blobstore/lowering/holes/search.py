"""Finds constants in the payload of a backend, and proves that nothing but these places follows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import xxhash

from blobstore.core.constants import MOST_HOLES
from blobstore.core.memory.digest import Digest, digest
from blobstore.logical.records import Step
from blobstore.lowering.holes.encodings import encodings, stored
from blobstore.lowering.holes.probes import other_values

__all__ = ["Payload", "Placement", "Search"]

_MOST_ATTEMPTS = 24
"""Each lowers the part of the graph twice."""

_NOT_FOUND = (
    "it is not in the payload as a tensor of its own: the backend combined it with other constants, or stores it in a "
    "form that is not known"
)
_TOO_OFTEN = f"it is in the payload more than {MOST_HOLES} times"
_UNPROVED = "when it changes, more of the payload changes than the places where it lies"
_UNTRIED = "it was not proved that nothing else of the payload follows it: that would take too many lowerings"
_ALIKE = "it has so few bits that other values cannot be told from those of other constants"

_SMALL = 8
"""Bytes of a constant that other data may equal by chance."""

_MOST_SERIES = 64
"""Other values of a constant that are tried, until they differ from all others."""


class Payload:
    """What a backend made of a part of a graph: the result of its `preprocess`, and the payload."""

    Values: TypeAlias = Mapping[str, torch.Tensor]

    def __init__(self, result: Any, data: bytes | None = None) -> None:
        self.result = result
        self.data = bytes(result.processed_bytes) if data is None else data

    @property
    def has_named_data(self) -> bool:
        """Whether the backend keeps constants outside of the payload."""
        output = self.result.data_store_output
        return output is not None and len(output.buffers) > 0

    def filled(self, blobs: Mapping[int, bytes]) -> Payload:
        """The same with other bytes in some places."""
        data = bytearray(self.data)
        for place, blob in blobs.items():
            data[place : place + len(blob)] = blob
        return Payload(self.result, bytes(data))


@dataclass(frozen=True)
class Placement:
    """Where a constant lies in a payload, and the steps to the form in which it is there."""

    steps: tuple[Step, ...]
    places: tuple[int, ...]


class Search:
    """Which constants of a part of a graph can leave the payload.

    A payload of other values shows where constants lie. It also shows equal constants apart, which a backend may store
    once. Then the payload of the constants' own values must have them at the same places, and must be equal in all other
    bytes. Constants that may be stored in a special way because of their values (all numbers equal, or equal to another
    constant) have other values in that payload, too, and are filled in afterwards. So the template is that of general
    values: one in which they can change.

    Args:
        lower: lowers the part with other values for some constants.
        tensors: the constants that may leave the payload, by name.
        comparable: see `HolesLowering`.

    Attributes:
        found: filled by `run`, by name.
        refused: filled by `run`: why a constant stays in the payload, by name.
    """

    def __init__(
        self,
        lower: Callable[[Payload.Values], Payload],
        tensors: Mapping[str, torch.Tensor],
        comparable: Callable[[bytes], object],
    ) -> None:
        self._lower = lower
        self._tensors = tensors
        self._comparable = comparable
        self._special = set(_special(tensors))
        self._seeds = _different_seeds(tensors)
        self._attempts = 0
        self._untried: set[str] = set()
        self.found: dict[str, Placement] = {}
        self.refused: dict[str, str] = {}

    def run(self) -> Payload:
        """Search; returns the payload of the constants' own values, with the constants in their places."""
        probed = self._lower(self._others(self._seeds, 1))
        # Named data can be shared as it is, by the keys that the backend chose.
        if probed.has_named_data or not self._tensors:
            return self._lower({})
        whys = {name: self._why_not(name, probed) for name in self._tensors}
        self.found, payload = self._largest([name for name, why in whys.items() if why is None], probed)
        for name, why in whys.items():
            if name not in self.found:
                self.refused[name] = why or (_UNTRIED if name in self._untried else _UNPROVED)
        if payload is None:
            return self._lower({})
        blobs = {name: stored(self._tensors[name], found.steps) for name, found in self.found.items()}
        return payload.filled({place: blobs[name] for name, found in self.found.items() for place in found.places})

    def _is_too_often(self, name: str, places: Sequence[int]) -> bool:
        """Whether a constant is in more places than it may. The places of a small one are not known until it is proved."""
        return len(places) > MOST_HOLES and self._tensors[name].nbytes > _SMALL

    def _locate(self, name: str, probed: Payload) -> Placement | None:
        """Where the other values of a constant lie in a payload."""
        probe = self._other(name, 1)
        for steps in encodings(probe):
            if places := tuple(_occurrences(probed.data, stored(probe, steps))):
                return Placement(steps, places)
        return None

    def _why_not(self, name: str, probed: Payload) -> str | None:
        """Why a constant cannot leave the payload, as far as one with other values shows; None if it may."""
        if name not in self._seeds:
            return _ALIKE
        located = self._locate(name, probed)
        if located is None:
            return _NOT_FOUND
        return _TOO_OFTEN if self._is_too_often(name, located.places) else None

    def _largest(self, names: Sequence[str], probed: Payload | None) -> tuple[dict[str, Placement], Payload | None]:
        """The proved constants among some: all, or those that halves of them add to each other."""
        if not names:
            return {}, None
        if (whole := self._attempt(names, probed, names)) is not None:
            return whole
        if len(names) == 1:
            return {}, None
        # One constant that cannot be proved must not keep all others in the payload; halves find it in few attempts.
        half = len(names) // 2
        first, first_payload = self._largest(names[:half], None)
        second, second_payload = self._largest(names[half:], None)
        larger, smaller = (first, second) if len(first) >= len(second) else (second, first)
        if smaller and (both := self._attempt([*first, *second], None, smaller)) is not None:
            return both
        return larger, first_payload if larger is first else second_payload

    def _attempt(
        self, names: Sequence[str], probed: Payload | None, otherwise: Iterable[str]
    ) -> tuple[dict[str, Placement], Payload] | None:
        """What `_prove` returns; after too many attempts None, and the constants `otherwise` count as untried."""
        if self._attempts >= _MOST_ATTEMPTS:
            self._untried.update(otherwise)
            return None
        self._attempts += 1
        return self._prove(names, probed)

    def _prove(self, names: Sequence[str], probed: Payload | None) -> tuple[dict[str, Placement], Payload] | None:
        """Prove that a payload follows these constants in their places, and nowhere else.

        `probed` is the payload with other values for all constants, if these are all. Returned are their places, and the
        payload with their own values, but for special ones; None if it is not so.
        """
        others, own = self._others(names, 1), self._others(self._special.intersection(names), 2)
        if probed is None or len(names) < len(self._tensors):
            probed = self._lower(others)
        payload = self._lower(own)
        by_name = {name: located for name in names if (located := self._locate(name, probed)) is not None}
        if len(by_name) < len(names):
            return None
        holes: dict[int, int] = {}
        for name, located in by_name.items():
            data = stored(own.get(name, self._tensors[name]), located.steps)
            places = _places_of(data, payload, located.places)
            if places is None:
                return None
            by_name[name] = Placement(located.steps, places)
            holes.update(dict.fromkeys(places, len(data)))
        if _overlap(holes) or sum(len(located.places) for located in by_name.values()) != len(holes):
            return None
        # What else differs was computed from the constants, such as a checksum, and could not follow an update.
        if self._rest(probed, holes) != self._rest(payload, holes):
            return None
        return by_name, payload

    def _others(self, names: Iterable[str], series: int) -> dict[str, torch.Tensor]:
        return {name: self._other(name, series) for name in names}

    def _other(self, name: str, series: int) -> torch.Tensor:
        """Other values of a constant; no other constant has the same."""
        return other_values(self._tensors[name], self._seeds[name][series - 1])

    def _rest(self, payload: Payload, holes: Mapping[int, int]) -> object:
        return self._comparable(payload.filled({place: bytes(nbytes) for place, nbytes in holes.items()}).data)


def _places_of(data: bytes, payload: Payload, places: Sequence[int]) -> tuple[int, ...] | None:
    """Those of the places of a constant's other values where its own lie, too; None if these do not show where it is."""
    # A small constant occurs in other bytes by chance; those that stay the same with its own values are not it.
    kept = tuple(place for place in places if payload.data[place : place + len(data)] == data)
    if not kept or len(kept) > MOST_HOLES:
        return None
    if len(kept) < len(places) and len(data) > _SMALL:
        return None  # of so many bytes, none are equal by chance
    return kept


def _occurrences(data: bytes, blob: bytes) -> Iterator[int]:
    at = data.find(blob)
    while at >= 0:
        yield at
        at = data.find(blob, at + 1)


def _overlap(holes: Mapping[int, int]) -> bool:
    places = sorted(holes)
    return any(place + holes[place] > after for place, after in pairwise(places))


def _different_seeds(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """The seeds of two series of other values for each constant. Of all these and the own values, no two are equal in
    the shortest form; constants without such values are left out."""
    forms = {_shortest(tensor) for tensor in tensors.values()}
    seeds_of = {}
    for name, tensor in tensors.items():
        seeds: list[int] = []
        for number in range(_MOST_SERIES):
            seed = xxhash.xxh3_64_intdigest(f"{number}:{name}".encode()) >> 1
            if (form := _shortest(other_values(tensor, seed))) not in forms:
                forms.add(form)
                seeds.append(seed)
            if len(seeds) == 2:
                seeds_of[name] = (seeds[0], seeds[1])
                break
    return seeds_of


def _shortest(tensor: torch.Tensor) -> Digest:
    """What a tensor is in the form with the fewest bits. Those that differ there differ in every form."""
    return digest(stored(tensor.detach().to(torch.bfloat16), ()))


def _special(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Constants that a backend may store in a special way: all numbers equal, or equal to another constant."""
    addresses = {name: digest(stored(tensor, ())) for name, tensor in tensors.items()}
    counts = Counter(addresses.values())
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        if counts[addresses[name]] > 1 or bool((flat == flat[0]).all()):
            yield name
