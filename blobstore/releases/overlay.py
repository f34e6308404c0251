"""Several data files as one map of keys, where the newest file with a key counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobstore.formats.ptd.reader import PtdDataMap
from blobstore.formats.ptd.writer import Entry
from blobstore.memory.buffers import same_bytes
from blobstore.memory.digest import Digest

__all__ = ["entries_of", "newest", "newest_entries"]


def newest(maps: Iterable[PtdDataMap]) -> dict[str, PtdDataMap]:
    """For each key the file that counts.

    Args:
        maps: the files, the oldest first.
    """
    found: dict[str, PtdDataMap] = {}
    for data_map in maps:
        found.update(dict.fromkeys(data_map, data_map))
    return found


def entries_of(data_map: PtdDataMap, keys: Iterable[str]) -> list[Entry]:
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
    home = newest(maps)
    numbers: dict[Digest, list[int]] = {}
    firsts: list[memoryview] = []
    found = []
    for data_map in maps:
        for entry in entries_of(data_map, [key for key in data_map if home[key] is data_map]):
            same = numbers.setdefault(entry.digest, [])
            number = next((n for n in same if same_bytes(firsts[n], entry.data)), None)
            if number is None:
                number = len(firsts)
                firsts.append(entry.data)
                same.append(number)
            found.append(Entry(entry.key, entry.data, entry.digest, number, entry.alignment, entry.layout))
    return found
