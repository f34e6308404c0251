"""The differences between two files, or two folders: key by key, and in everything else that they hold."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from blobstore.core.disk.progress import Progress, check_progress
from blobstore.core.errors import BlobStoreError, UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.opening import open_any
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.pte.data_map import PteDataMap
from blobstore.core.formats.pte.description import describe
from blobstore.core.formats.safetensors import CheckpointDataMap
from blobstore.core.memory.buffers import first_difference, same_bytes
from blobstore.core.memory.digest import Digest
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.memory.mapped_file import as_path, map_file
from blobstore.core.tools.folders import files_of

__all__ = [
    "Change",
    "Comparison",
    "Difference",
    "FileComparison",
    "FolderComparison",
    "compare",
    "compare_files",
    "compare_folders",
]


@dataclass(frozen=True)
class Change:
    """One key that differs between the two sides.

    Attributes:
        key: the key.
        kind: "added" (only on the right), "removed" (only on the left), "layout" (equal bytes, different layouts),
            "bytes" (different bytes), or "renamed" (the right has its bytes and layout under the key `other`).
        left, right: the layouts; None on a side without the key, and for an opaque blob.
        left_bytes, right_bytes: the sizes; 0 on a side without the key.
        other: the new key of a renamed blob.
    """

    key: str
    kind: Literal["added", "removed", "layout", "bytes", "renamed"]
    left: TensorLayout | None
    right: TensorLayout | None
    left_bytes: int
    right_bytes: int
    other: str | None = None


@dataclass(frozen=True)
class Difference:
    """A difference outside the blobs.

    Attributes:
        what: the part of the file, such as "method forward: instructions" or "metadata".
        left, right: the text of each side; for a list of several entries, their number and the first that differs.
    """

    what: str
    left: str
    right: str


@dataclass(frozen=True)
class Comparison:
    """The changes from one data map, or file, to another.

    Attributes:
        changes: the keys that differ, in the order of the left map and then of the right one.
        same: number of keys with equal bytes and layout.
        same_bytes: their bytes.
        differences: what else differs; for data maps without files only alignments and the order of the keys.
    """

    changes: list[Change]
    same: int
    same_bytes: int
    differences: list[Difference]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.changes and not self.differences


@dataclass(frozen=True)
class FileComparison:
    """One file of two folders.

    Attributes:
        path: its path below both folders.
        kind: "same", "changed", "added" (only on the right), "removed" (only on the left), or "error".
        comparison: what differs; None unless the file was compared.
        error: why the file cannot be compared; None unless `kind` is "error".
    """

    path: Path
    kind: Literal["same", "changed", "added", "removed", "error"]
    comparison: Comparison | None = None
    error: str | None = None


@dataclass(frozen=True)
class FolderComparison:
    """Two folders, file by file, in the order of their paths."""

    files: list[FileComparison]

    @property
    def equal(self) -> bool:
        """Whether both have the same files without any difference."""
        return all(file.kind == "same" for file in self.files)


def compare(left: NamedDataMap, right: NamedDataMap, *, progress: Progress | None = None) -> Comparison:
    """Compare two data maps byte by byte.

    If a key of the left is missing on the right, and a new key there has its bytes and its layout, it counts as renamed.

    Args:
        left: the older one.
        right: the newer one.
        progress: called for every blob on the left.

    Raises:
        UnsupportedDataError: one of them is not a data map.
    """
    _check_opened(left)
    _check_opened(right)
    check_progress(progress)
    total, done = sum(len(data) for _, data in left.views()) if progress else 0, 0
    added = [key for key in right if key not in left]
    # By content, so that a renamed key is found without comparing each pair.
    new = {(right.digest(key), right.get_tensor_layout(key)): key for key in added}
    changes: list[Change] = []
    same: list[int] = []  # bytes
    for key, data in left.views():
        done += len(data)
        if progress:
            progress("comparing", done, total)
        change = _change(key, data, left, right, new)
        if change is None:
            same.append(len(data))
        else:
            changes.append(change)
    renamed = {change.other for change in changes}
    changes += [
        Change(key, "added", None, right.get_tensor_layout(key), 0, len(right.get_data(key)))
        for key in added
        if key not in renamed
    ]
    return Comparison(changes, len(same), sum(same), _differences(_keys(left, right), _keys(right, left)))


def _check_opened(side: object) -> None:
    if not isinstance(side, NamedDataMap):
        raise UnsupportedDataError(f"expected an opened file (open_any), found a {type(side).__qualname__}")


def _change(
    key: str,
    data: memoryview,
    left: NamedDataMap,
    right: NamedDataMap,
    new: dict[tuple[Digest, TensorLayout | None], str],
) -> Change | None:
    """What became of a key of the left; None if it is the same. A renamed one takes its new key, so that no other gets it."""
    layout = left.get_tensor_layout(key)
    if key in right:
        other, its = right.get_data(key), right.get_tensor_layout(key)
        if not same_bytes(data, other):
            return Change(key, "bytes", layout, its, len(data), len(other))
        return None if layout == its else Change(key, "layout", layout, its, len(data), len(other))
    name = new.pop((left.digest(key), layout), None)
    if name is not None and same_bytes(data, right.get_data(name)):
        return Change(key, "renamed", layout, layout, len(data), len(data), name)
    return Change(key, "removed", layout, None, len(data), 0)


def _keys(data_map: NamedDataMap, other: NamedDataMap) -> dict[str, list[str]]:
    """What a data map records about the keys that the other one has too."""
    common = [key for key in data_map if key in other]
    return {
        "order of the keys": common,
        "alignments": [f"{key}: {data_map.alignment(key)}" for key in sorted(common)],
    }


def compare_files(
    left: str | os.PathLike[str], right: str | os.PathLike[str], *, progress: Progress | None = None
) -> Comparison:
    """Compare two files completely: what `compare` compares, and everything outside the blobs.

    For programs these are the methods with their inputs, outputs, values, operators, instructions, delegates and planned
    memory; for data files the metadata, the digests and which keys share their bytes. The remaining bytes are compared,
    too, so only files that are equal to the byte have no difference. Files of two formats differ in that, and in what
    both formats have.

    Args:
        left: the older file, a .pte, .ptd or .safetensors.
        right: the newer one.
        progress: called for every blob on the left.

    Raises:
        FileAccessError, InvalidFileError, UnsupportedDataError: as `open_any`.
        KeyConflictError: a program gives one name to two contents.
    """
    one, two = map_file(left), map_file(right)
    at = first_difference(one, two)
    if at is None:  # equal files hold the same, whatever their format
        with open_any(left) as a:
            return Comparison([], len(a), sum(len(data) for _, data in a.views()), [])
    with open_any(left) as a, open_any(right) as b:
        comparison = compare(a, b, progress=progress)
        common = [key for key in a if key in b]
        differences = comparison.differences + _other_differences(_parts(a, common), _parts(b, common))
    if not comparison.changes and not differences:
        sides = [f"{len(data):,} bytes, from byte {at:,} on {bytes(data[at : at + 8]).hex()}" for data in (one, two)]
        differences = [Difference("other bytes, such as the order of parts or padding", *sides)]
    return replace(comparison, differences=differences)


def compare_folders(
    left: str | os.PathLike[str], right: str | os.PathLike[str], *, progress: Progress | None = None
) -> FolderComparison:
    """Compare the .pte, .ptd and .safetensors in two folders and below them, by `compare_files`.

    Files with the same path below both folders are compared. One that cannot be compared does not stop the others.

    Args:
        left: the older folder.
        right: the newer one.
        progress: called for every blob on the left.

    Raises:
        FileAccessError: a folder cannot be read, or has no such file.
    """
    left, right = as_path(left), as_path(right)
    ours, theirs = ([file.relative_to(side) for file in files_of(side)] for side in (left, right))
    only_left, only_right = set(ours) - set(theirs), set(theirs) - set(ours)
    files: list[FileComparison] = []
    for path in sorted({*ours, *theirs}):
        if path in only_left or path in only_right:
            files.append(FileComparison(path, "removed" if path in only_left else "added"))
            continue
        try:
            comparison = compare_files(left / path, right / path, progress=progress)
        except BlobStoreError as error:
            files.append(FileComparison(path, "error", error=str(error)))
        else:
            files.append(FileComparison(path, "same" if comparison.equal else "changed", comparison))
    return FolderComparison(files)


def _parts(data_map: NamedDataMap, common: Sequence[str]) -> dict[str, list[str]]:
    """What a file holds beside its blobs, as lines by subject, and only for the keys that both files have."""
    parts: dict[str, list[str]] = {}
    if isinstance(data_map, PtdDataMap):
        parts = _parts_of_ptd(data_map, common)
    elif isinstance(data_map, CheckpointDataMap):
        parts["format"] = ["safetensors" if len(data_map.sources) == 1 else "safetensors in shards"]
        parts["metadata"] = _pairs(data_map.metadata)
        parts["dtypes"] = [f"{key}: {data_map.dtypes[key]}{list(data_map.shapes[key])}" for key in common]
    elif isinstance(data_map, PteDataMap):
        parts["format"] = ["pte"]
        parts |= describe(data_map.program)
    return parts


def _parts_of_ptd(data_map: PtdDataMap, common: Sequence[str]) -> dict[str, list[str]]:
    first: dict[int, str] = {}
    homes = [(key, first.setdefault(data_map.segment_of(key), key)) for key in common]
    used = {data_map.segment_of(key) for key in data_map}
    unused = [extent for number, extent in enumerate(data_map.extents) if number not in used]
    return {
        "format": ["ptd"],
        "metadata": _pairs(data_map.metadata),
        "digests": ["recorded" if data_map.has_digests else "none"],
        "keys that share their bytes": [f"{key} with {home}" for key, home in homes if home != key],
        "segments without a key": [f"{stop - start:,} bytes" for start, stop in unused],
    }


def _pairs(metadata: Mapping[str, str]) -> list[str]:
    return [f"{key}: {value}" for key, value in sorted(metadata.items())]


def _other_differences(left: dict[str, list[str]], right: dict[str, list[str]]) -> list[Difference]:
    """The subjects beside the blobs in which the two sides differ."""
    if left.get("format") != right.get("format"):  # what only one format can say is no difference of its own
        left = {what: lines for what, lines in left.items() if what in right}
        right = {what: lines for what, lines in right.items() if what in left}
    return _differences(left, right)


def _differences(left: Mapping[str, list[str]], right: Mapping[str, list[str]]) -> list[Difference]:
    """The subjects in which the two sides differ."""
    differences = []
    for what in dict.fromkeys([*left, *right]):
        one, two = left.get(what), right.get(what)
        if one != two:
            at = next((i for i, (a, b) in enumerate(zip(one or (), two or (), strict=False)) if a != b), None)
            if at is None:
                at = min(len(one or ()), len(two or ()))
            differences.append(Difference(what, _side(one, at), _side(two, at)))
    return differences


def _side(lines: list[str] | None, at: int) -> str:
    if lines is None:
        return "not there"
    if len(lines) < 2:
        return lines[0] if lines else "none"
    first = f", first difference: {lines[at]}" if at < len(lines) else ""
    return f"{len(lines)} entries{first}"
