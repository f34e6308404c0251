"""Parts of a set of files: nothing in one has anything to do with a file of another, so each has its findings alone.

Two files are in one part if they have a token in common: what makes a comparison of two blobs worth while, in 64 bits. That
two tokens are equal by accident, or that a comparison then finds nothing, makes a part larger and no finding different.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from blobstore.core.groups import Groups
from blobstore.reporting.fingerprint import Fingerprint, fold_for
from blobstore.reporting.model import FileReport, Region, RegionKind

__all__ = ["Links", "divide", "links_of"]

_WIDTHS = (1, 2, 4, 8)
_SPREAD = 0x9E3779B97F4A7C15
_SIZES = 0xC2B2AE3D27D4EB4F
_LARGEST = 2**64 - 1
_SLICE = 1 << 59

Tokens = npt.NDArray[np.uint64]


class Links(NamedTuple):
    """What may connect a file, or a part, with others.

    Attributes:
        tokens: ascending, each once.
        payload: the size of the largest payload of a delegate, which may hold any tensor that is not larger; 0 for none.
        tensor: the size of the smallest tensor that is looked for in payloads.
    """

    tokens: Tokens
    payload: int
    tensor: int

    @staticmethod
    def together(links: Sequence[Links]) -> Links:
        """Those of several files."""
        tokens = np.unique(np.concatenate([one.tokens for one in links])) if links else np.empty(0, np.uint64)
        return Links(
            tokens, max((one.payload for one in links), default=0), min((one.tensor for one in links), default=_LARGEST)
        )

    def finder(self) -> Finder:
        """What tells whether these connect with others."""
        return Finder(self)


class Finder:
    """Compares many links with the same ones."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._table = np.zeros(1 << 16, np.bool_)  # by the highest bits: tells most of what is not there
        self._table[(links.tokens >> np.uint64(48)).astype(np.int64)] = True

    def connects(self, other: Links) -> bool:
        """Whether a file of these and one of the others may have to do with each other."""
        return self.holds(other.payload, other.tensor) or self.shares(other.tokens)

    def holds(self, payload: int, tensor: int) -> bool:
        """Whether a payload of one side may hold a tensor of the other."""
        return self._links.payload >= tensor or payload >= self._links.tensor

    def shares(self, tokens: Tokens) -> bool:
        """Whether any of some tokens is one of these."""
        likely = tokens[self._table[(tokens >> np.uint64(48)).astype(np.int64)]]
        ours = self._links.tokens
        if not len(likely) or not len(ours):
            return False
        at = np.minimum(np.searchsorted(ours, likely), len(ours) - 1)
        return bool((ours[at] == likely).any())


def links_of(file: FileReport, prints: Sequence[Fingerprint | None]) -> Links:
    """The links of a file with the fingerprints of its regions."""
    single: set[int] = set()
    bands: list[tuple[int, str]] = []
    payload, tensor = 0, _LARGEST
    for region, known in zip(file.regions, prints, strict=True):
        if known is None:
            continue
        single.update(_tokens(region, known))
        if known.bands:
            bands.append((region.nbytes, known.bands))
        if region.kind is RegionKind.PAYLOAD:
            payload = max(payload, region.nbytes if not known.repeats else 0)
        elif known.needle is not None and not known.repeats:
            tensor = min(tensor, region.nbytes)
    tokens = np.fromiter(single, np.uint64, len(single))
    if bands:
        tokens = np.concatenate([tokens, _of_bands(bands)])
    return Links(np.unique(tokens), payload, tensor)


def _tokens(region: Region, known: Fingerprint) -> Iterator[int]:
    """The digest, those of the same values in narrower types, and what does not depend on the order of elements."""
    yield int(known.digest[:16], 16)
    for digest in known.narrow.values():
        yield int(digest[:16], 16)
    if known.fold is not None:
        for width in _WIDTHS if region.layout is None else (region.layout.scalar_type.itemsize,):
            yield xxhash.xxh3_64_intdigest(repr((region.nbytes, width, fold_for(known.fold, width))).encode())


def _of_bands(bands: Sequence[tuple[int, str]]) -> Tokens:
    """A token of each band of each blob."""
    values = np.frombuffer(bytes.fromhex("".join(text for _, text in bands)), "<u4").astype(np.uint64)
    tokens = values.reshape(len(bands), -1)
    tokens |= np.arange(1, tokens.shape[1] + 1, dtype=np.uint64) << np.uint64(32)
    tokens ^= np.array([nbytes * _SIZES & _LARGEST for nbytes, _ in bands], np.uint64)[:, None]
    tokens *= np.uint64(_SPREAD)
    return tokens.reshape(-1)


def divide(links: Sequence[Links]) -> list[list[int]]:
    """The parts of files with these links, as ascending indices; the part of the first file comes first."""
    groups: Groups[int] = Groups(range(len(links)))
    if links:
        for begin in range(0, _LARGEST, _SLICE):  # so that no copy is large
            for one, other in _pairs(links, begin, begin + _SLICE - 1):
                groups.join((one, other))
        smallest = min(range(len(links)), key=lambda f: links[f].tensor)
        largest = max(range(len(links)), key=lambda f: links[f].payload)
        if links[largest].payload >= links[smallest].tensor:
            groups.join(f for f, one in enumerate(links) if one.payload >= links[smallest].tensor)
            groups.join(f for f, one in enumerate(links) if one.tensor <= links[largest].payload)
            groups.join((smallest, largest))
    return [sorted(members) for members in groups.members()]


def _pairs(links: Sequence[Links], first: int, last: int) -> list[list[int]]:
    """Pairs of files that have a token between two, inclusive, in common: enough of them to connect all that have it."""
    of_file = []
    for one in links:
        begin, end = one.tokens.searchsorted(np.uint64(first)), one.tokens.searchsorted(np.uint64(last), "right")
        of_file.append(one.tokens[begin:end])
    tokens = np.concatenate(of_file)
    owners = np.repeat(np.arange(len(links), dtype=np.int32), list(map(len, of_file)))
    order = np.argsort(tokens, kind="stable")
    tokens, owners = tokens[order], owners[order]
    same = tokens[1:] == tokens[:-1]
    pairs: list[list[int]] = np.unique(np.stack([owners[:-1][same], owners[1:][same]], axis=1), axis=0).tolist()
    return pairs
