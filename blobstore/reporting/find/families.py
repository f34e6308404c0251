"""Data files and checkpoints that can be stored as what differs from another one, such as fine-tunes of a model."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from blobstore.core.regions.region import Region, RegionKind
from blobstore.core.regions.source import is_url
from blobstore.reporting.model import FileReport

__all__ = ["Family", "can_be_delta", "find_families", "left_out"]

_TENSORS = {RegionKind.TENSOR, RegionKind.NAMED_DATA}


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
    contents = {f: _contents(files[f]) for f in candidates}
    number = Counter(item for f in candidates for item in contents[f].items())
    common = {f: sum(item[1][1] * (number[item] - 1) for item in contents[f].items()) for f in candidates}
    order = sorted(candidates, key=lambda f: (len(contents[f]), -common[f], f))
    bases: dict[object, list[int]] = defaultdict(list)  # which have a content under a key
    members: dict[int, list[int]] = {}

    def best(f: int, wanted: float) -> int | None:
        overlap: dict[int, int] = defaultdict(int)
        for item in contents[f].items():
            for base in bases[item]:
                overlap[base] += item[1][1]
        fitting = [
            base
            for base, nbytes in overlap.items()
            if base != f and base in members and nbytes >= wanted and contents[base].keys() <= contents[f].keys()
        ]
        return max(fitting, key=lambda base: (overlap[base], -base), default=None)

    for f in order:
        held = sum(nbytes for _, nbytes, _ in contents[f].values())
        if (base := best(f, max(least, held / 2))) is not None:
            members[base].append(f)
        else:
            members[f] = []
            for item in contents[f].items():
                bases[item].append(f)
    for f in order:
        if members.get(f) == [] and (base := best(f, least)) is not None:
            members[base].append(f)
            del members[f]
    return [Family(base, tuple(sorted(of_base))) for base, of_base in members.items() if of_base]


def left_out(base: FileReport, file: FileReport) -> set[int]:
    """The regions of a file that a delta leaves out, because the base has all their keys with equal bytes and layouts."""
    of_base = _contents(base)
    return {
        r
        for r, region in enumerate(file.regions)
        if region.kind in _TENSORS and all(of_base.get(key) == _content(region) for key in region.keys)
    }


_Content = tuple[str, int, object]


def _content(region: Region) -> _Content:
    return region.digest, region.nbytes, region.layout


def _contents(file: FileReport) -> Mapping[str, _Content]:
    return {key: _content(region) for region in file.regions if region.kind in _TENSORS for key in region.keys}
