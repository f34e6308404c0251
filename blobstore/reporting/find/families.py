"""Data files and checkpoints that can be stored as what differs from another one, such as fine-tunes of a model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from blobstore.core.regions.region import Region, RegionKind
from blobstore.core.regions.source import is_url
from blobstore.reporting.model import FileReport
from blobstore.reporting.overlap import Overlap

__all__ = ["Family", "can_be_delta", "find_families", "left_out"]

_TENSORS = {RegionKind.TENSOR, RegionKind.NAMED_DATA}

_Content = tuple[str, int, object]
"""A digest, a length and a layout."""


@dataclass(frozen=True)
class Family:
    """Files that have the keys of a base, and many of its bytes.

    Attributes:
        base: index of the file that stays.
        members: those of which a delta would do.
    """

    base: int
    members: tuple[int, ...]


def can_be_delta(files: Sequence[FileReport]) -> set[int]:
    """The files that `blobstore delta` takes, and that whoever uses them can load in two parts.

    A program finds a key in one data file only, so data files beside programs, or with records for them, stay whole.
    """
    programs = {_folder(file) for file in files if file.format == "pte"}
    return {f for f, file in enumerate(files) if _can_be_delta(file, programs)}


def _can_be_delta(file: FileReport, program_folders: Collection[str]) -> bool:
    if is_url(file.path) or file.format not in {"ptd", "safetensors"}:
        return False
    if file.format == "safetensors":
        return all(region.layout for region in file.regions if region.kind is RegionKind.TENSOR)
    records = (
        region for region in file.regions if region.kind is RegionKind.STRUCTURE and {*region.keys} - {"manifest"}
    )
    return _folder(file) not in program_folders and not any(records)


def _folder(file: FileReport) -> str:
    return os.path.dirname(file.path)  # noqa: PTH120 - text stays text


def find_families(files: Sequence[FileReport], candidates: Collection[int], least: int) -> list[Family]:
    """Files of which each has all keys of its base, and at least `least` bytes under equal keys with equal contents.

    Each file is in one family at most. Those with fewest keys, and of these those with most in common with others, are bases
    first; a file of which no base has half is one, too. Those that stay alone then take what base there is. A file is
    compared with bases only, and these are found by what they have in common with it, so the work grows with the number of
    tensors.
    """
    families = _Families({f: _contents(files[f]) for f in candidates})
    for f in families.order():
        families.place(f, least)
    for f in [f for f, of_base in families.members.items() if not of_base]:
        families.place_alone(f, least)
    return [Family(base, tuple(sorted(of_base))) for base, of_base in families.members.items() if of_base]


class _Families:
    """Bases, each with its members.

    Attributes:
        members: by base.
    """

    def __init__(self, contents: Mapping[int, Mapping[str, _Content]]) -> None:
        self._contents = contents
        self._sizes = {f: {(key, what): what[1] for key, what in of_file.items()} for f, of_file in contents.items()}
        self._overlap: Overlap[tuple[str, _Content]] = Overlap()
        self.members: dict[int, list[int]] = {}

    def order(self) -> list[int]:
        """Files that may be bases of others first."""
        number = Counter(item for sizes in self._sizes.values() for item in sizes)
        common = {
            f: sum(nbytes * (number[item] - 1) for item, nbytes in sizes.items()) for f, sizes in self._sizes.items()
        }
        return sorted(common, key=lambda f: (len(self._contents[f]), -common[f], f))

    def place(self, f: int, least: int) -> None:
        """Make a file a member of the base that has half of it, or else a base."""
        base = self._best(f, max(least, sum(self._sizes[f].values()) / 2))
        if base is not None:
            self.members[base].append(f)
        else:
            self.members[f] = []
            self._overlap.add(f, self._sizes[f])

    def place_alone(self, f: int, least: int) -> None:
        """Make a base a member of another one, unless it has got members meanwhile."""
        base = self._best(f, least) if not self.members[f] else None
        if base is not None:
            self.members[base].append(f)
            del self.members[f]

    def _best(self, f: int, least: float) -> int | None:
        """The base that a file has most in common with, of those of which it has all keys."""
        shared = self._overlap.shared(self._sizes[f])
        keys = self._contents[f].keys()
        fitting = [
            base
            for base, nbytes in shared.items()
            if nbytes >= least and base != f and base in self.members and self._contents[base].keys() <= keys
        ]
        return max(fitting, key=lambda base: (shared[base], -base), default=None)


def left_out(base: FileReport, file: FileReport) -> set[int]:
    """The regions of a file that a delta leaves out, because the base has all their keys with equal bytes and layouts."""
    of_base = _contents(base)
    return {
        r
        for r, region in enumerate(file.regions)
        if region.kind in _TENSORS and all(of_base.get(key) == _content(region) for key in region.keys)
    }


def _content(region: Region) -> _Content:
    return region.digest, region.nbytes, region.layout


def _contents(file: FileReport) -> Mapping[str, _Content]:
    return {key: _content(region) for region in file.regions if region.kind in _TENSORS for key in region.keys}
