"""What a report says of files and findings. All sizes are in bytes."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from blobstore.core.regions.region import ALIGNMENT, Region, RegionKind
from blobstore.core.reprs import count, fields_line, line
from blobstore.core.text import size

__all__ = [
    "DUPLICATES",
    "CauseKind",
    "Claim",
    "FileReport",
    "Finding",
    "FindingKind",
    "Place",
    "PoolAdvice",
    "Problem",
    "Work",
]


class FindingKind(str, enum.Enum):
    """Why bytes are wasted, in the order in which savings are counted."""

    DUPLICATE_FILES = "duplicate_files"  # equal bytes in several files
    DUPLICATE_METHODS = "duplicate_methods"  # ... in one program, used by different methods
    DUPLICATE_TIED = "duplicate_tied"  # ... in one file under several names: a tied weight that was written twice
    DUPLICATE_PAYLOAD = "duplicate_payload"  # equal payloads of delegates
    OTHER_LAYOUT = "other_layout"  # the same elements in another order
    OTHER_DTYPE = "other_dtype"  # the same values, exactly, in a narrower type
    CONSTANT = "constant"  # one value repeated
    CONTAINED = "contained"  # a payload holds a known tensor byte for byte
    NEAR_DUPLICATE = "near_duplicate"  # a small share of the elements differs
    PADDING = "padding"  # more padding than a 16-byte alignment needs
    UNREFERENCED = "unreferenced"  # bytes that nothing refers to


Place = tuple[int, int]
"""Index of a file of a report, and of one of its regions."""

Work = Literal["dedup", "delta", "convert"]
"""What a command of blobstore does to act on a finding."""

DUPLICATES = {
    FindingKind.DUPLICATE_FILES,
    FindingKind.DUPLICATE_METHODS,
    FindingKind.DUPLICATE_TIED,
    FindingKind.DUPLICATE_PAYLOAD,
}
"""Findings about equal bytes."""


_PARAMETERS = {RegionKind.TENSOR, RegionKind.CONSTANT, RegionKind.NAMED_DATA}


class CauseKind(str, enum.Enum):
    """Why bytes are no longer shared that were shared in an earlier report; the last three, why less is wasted."""

    KEY = "key"  # the same bytes are stored again, under another key
    COPIES = "copies"  # stored once for several keys or methods, now once for each
    DATA_FILE = "data_file"  # was in a data file, and other files have it themselves now
    ADDED_FILE = "added_file"  # a file was added that has what others have
    DTYPE = "dtype"  # one of several uses has another element type now
    LAYOUT = "layout"  # ... another order of its elements
    VALUES = "values"  # ... other values
    PAYLOAD = "payload"  # a payload of a delegate holds it now
    LOWERED_TWICE = "lowered_twice"  # delegates have equal payloads
    CONSTANT = "constant"  # has one value now
    PADDING = "padding"
    UNREFERENCED = "unreferenced"
    EQUAL = "equal"  # nothing was lost: what differed is equal now
    ADDED = "added"  # nothing was lost: it is new, and there more than once
    SHARED = "shared"  # is stored once now, or was joined with what it followed from
    CHANGED = "changed"  # has other bytes now
    REMOVED = "removed"  # is no longer there


@dataclass(frozen=True)
class FileReport:
    """One file, in regions that follow each other without a gap from its first byte to its last.

    Attributes:
        path: as the caller named it, or a URL.
        format: "pte", "ptd", "ptn", "safetensors", "gguf" or "torch".
        size: of the file; the sum of its regions.
        aliases: other names of the same file (links), which take no bytes of their own.
        alignment: padding up to the next multiple of this is not waste. 16 for most files; what blobstore wrote keeps
            the format's 128, or more if a key asks for it, and rewritten programs the alignment that they had.
    """

    path: str
    format: str
    size: int
    regions: tuple[Region, ...] = field(repr=False)
    aliases: tuple[str, ...] = ()
    alignment: int = ALIGNMENT

    @cached_property
    def by_kind(self) -> dict[RegionKind, int]:
        """Bytes of each kind that occurs."""
        sums: dict[RegionKind, int] = defaultdict(int)
        for region in self.regions:
            sums[region.kind] += region.nbytes
        return dict(sums)

    @cached_property
    def already_shared(self) -> int:
        """What keys that share a region would take besides if each had its own."""
        return sum(region.nbytes * (len(region.keys) - 1) for region in self.regions if len(region.keys) > 1)

    @cached_property
    def parameters(self) -> int:
        """Elements of the tensors in it, each content of a region once. Opaque bytes that equal no known tensor do not count."""
        return sum(region.elements for region in self.regions if region.kind in _PARAMETERS)

    def __repr__(self) -> str:
        return line("FileReport", self.path, self.format, size(self.size), count(len(self.regions), "region"))


@dataclass(frozen=True)
class PoolAdvice:
    """A pool of all files, which takes much less than the other commands leave.

    Attributes:
        command: adds the files to it.
        bytes: of the pool then; an estimate, unless it is a bound.
        is_bound: whether it takes no more than that: each content is counted as it is, without compression and differences.
    """

    __repr__ = fields_line

    command: str
    bytes: int
    is_bound: bool


@dataclass(frozen=True)
class Problem:
    """A file that could not be read."""

    __repr__ = fields_line

    path: str
    reason: str


@dataclass(frozen=True, order=True)
class Claim:
    """Bytes of a region that acting on a finding frees: `start` to `stop`, counted from the region's first byte.

    Attributes:
        file: index into `Report.files`.
        region: index into that file's `regions`.
    """

    __repr__ = fields_line

    file: int
    region: int
    start: int
    stop: int


@dataclass(frozen=True)
class Finding:
    """Bytes that are wasted, and what to do about it.

    Attributes:
        kind: the class of finding.
        places: where: (file, region) as indices, each once; what stays comes first.
        claims: what acting on this finding alone frees.
        saves: bytes of the claims.
        counted: bytes of the claims that no finding before this one claims too; the total is the sum of these.
        detail: what is special about it, in a few words.
        command: the command that does it; None when it takes more than a command.
        work: what that command does: "dedup", "delta" or "convert".
        advice: what to do, in a sentence.
        share: for near duplicates, the share of elements that differ.
    """

    kind: FindingKind
    places: tuple[Place, ...] = field(repr=False)
    claims: tuple[Claim, ...] = field(repr=False)
    saves: int
    detail: str = ""
    command: str | None = None
    advice: str = ""
    share: float | None = None
    counted: int = 0
    work: Work | None = None

    def __repr__(self) -> str:
        return line(
            "Finding", self.kind.value, count(len(self.places), "place"), f"{size(self.saves)} can go", self.detail
        )
