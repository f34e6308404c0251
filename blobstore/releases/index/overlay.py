"""Several data files as one map of keys, where the newest file with a key counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.formats.ptd.writer import Entry
from blobstore.core.memory.distinct import Distinct

__all__ = ["newest_entries", "replaceable"]


def _newest(maps: Iterable[PtdDataMap]) -> dict[str, PtdDataMap]:
    """For each key the file that counts.

    Args:
        maps: the files, the oldest first.
    """
    by_key: dict[str, PtdDataMap] = {}
    for data_map in maps:
        by_key.update(dict.fromkeys(data_map, data_map))
    return by_key


def _entries_of(data_map: PtdDataMap, keys: Iterable[str]) -> list[Entry]:
    """Some keys of a file, for a writer."""
    return [
        Entry(
            key,
            data_map.get_data(key),
            data_map.digest(key),
            data_map.segment_of(key),
            data_map.alignment(key),
            data_map.get_tensor_layout(key),
        )
        for key in keys
    ]


def newest_entries(maps: Sequence[PtdDataMap]) -> list[Entry]:
    """All keys of several files, in the order of the files; equal contents become one blob.

    Args:
        maps: the files, the oldest first.
    """
    home = _newest(maps)
    contents = Distinct()
    count = 0
    entries = []
    for data_map in maps:
        for entry in _entries_of(data_map, [key for key in data_map if home[key] is data_map]):
            number = contents.find(entry.data, entry.digest)
            if number is None:
                number = count
                contents.add(entry.data, entry.digest, number)
                count += 1
            entries.append(Entry(entry.key, entry.data, entry.digest, number, entry.alignment, entry.layout))
    return entries


def replaceable(old: PtdDataMap, new: PtdDataMap, key: str) -> bool:
    """Whether the blob of a key can take the place of another one in a cache: its size and layout are the same, and it
    is not one of the records that describe other blobs."""
    return (
        not key.startswith(KEY_PREFIX)
        and len(old.get_data(key)) == len(new.get_data(key))
        and old.get_tensor_layout(key) == new.get_tensor_layout(key)
    )
