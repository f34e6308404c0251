"""Which freshly lowered programs can share keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.groups import Groups
from blobstore.core.memory.digest import Digest
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.store import BlobStore

__all__ = ["namespaces"]


def namespaces(data: Mapping[str, Sequence[PtdDataMap]]) -> dict[str, BlobStore]:
    """The store of each program's namespace, by its data files. In one namespace a key has one content, in one file.

    All programs have the same namespace, unless a key of several programs is in different files or has different contents.
    Then programs share a namespace if they have a file in common.
    """
    by_key: dict[str, tuple[str, Digest, TensorLayout | None]] = {}
    contents = (
        (key, (data_map.path.name, data_map.digest(key), data_map.get_tensor_layout(key)))
        for maps in data.values()
        for data_map in maps
        for key in data_map
    )
    if all(by_key.setdefault(key, what) == what for key, what in contents):
        return dict.fromkeys(data, BlobStore())
    groups = Groups(data)
    first: dict[str, str] = {}
    for name, maps in data.items():
        groups.join([name, *(first.setdefault(data_map.path.name, name) for data_map in maps)])
    return {name: store for group in groups.members() for store in [BlobStore()] for name in group}
