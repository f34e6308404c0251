"""What changed between two files, key by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from blobstore.buffers import same_bytes
from blobstore.data_map import NamedDataMap
from blobstore.layout import TensorLayout
from blobstore.staging import Progress

__all__ = ["Change", "Comparison", "compare"]


@dataclass(frozen=True)
class Change:
    """One key that is not the same on both sides.

    Attributes:
        key: the key.
        kind: "added" (only on the right), "removed" (only on the left), "layout" (equal bytes, another layout),
            "bytes", or "renamed": its bytes and layout are on the other side, under `other`.
        left, right: the layouts; None on a side without the key, and for opaque blobs.
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
class Comparison:
    """The changes from one data map to another.

    Attributes:
        changes: the keys that differ, in the order of the left map and then of the right one.
        same: number of keys with equal bytes and layout.
        same_bytes: their bytes.
    """

    changes: list[Change]
    same: int
    same_bytes: int


def compare(left: NamedDataMap, right: NamedDataMap, *, progress: Progress | None = None) -> Comparison:
    """Compare two data maps byte by byte.

    A key of the left that is missing on the right, where a new key has its bytes and its layout, counts as renamed.

    Args:
        left: the older one.
        right: the newer one.
        progress: told of every blob on the left.
    """
    total, done = sum(map(len, left.values())), 0
    new = {(right.digest(key), right.get_tensor_layout(key)): key for key in right if key not in left}
    changes: list[Change] = []
    renamed: set[str] = set()
    same = same_size = 0
    for key, data in left.items():
        layout = left.get_tensor_layout(key)
        done += len(data)
        if progress:
            progress("comparing", done, total)
        if key in right:
            other_data, other_layout = right[key], right.get_tensor_layout(key)
            equal = same_bytes(data, other_data)
            if equal and layout == other_layout:
                same, same_size = same + 1, same_size + len(data)
            else:
                kind: Literal["layout", "bytes"] = "layout" if equal else "bytes"
                changes.append(Change(key, kind, layout, other_layout, len(data), len(other_data)))
            continue
        other = new.pop((left.digest(key), layout), None)
        if other is not None and same_bytes(data, right[other]):
            renamed.add(other)
            changes.append(Change(key, "renamed", layout, layout, len(data), len(data), other))
        else:
            changes.append(Change(key, "removed", layout, None, len(data), 0))
    for key, data in right.items():
        if key not in left and key not in renamed:
            changes.append(Change(key, "added", None, right.get_tensor_layout(key), 0, len(data)))
    return Comparison(changes, same, same_size)
