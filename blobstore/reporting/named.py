"""Names of tensors for what programs have under keys that are made of contents, taken from a checkpoint."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.memory.digest import digest
from blobstore.core.memory.layout import TensorLayout
from blobstore.reporting.model import FileReport, Region

__all__ = ["name_tensors"]

_CONTENT = re.compile(r"(tensor\.)?[0-9a-f]{32,}\b.*|(constant|state)\[[^\]]*\]", re.DOTALL)
"""Keys of moved tensors, of ExecuTorch's delegates, and what `regions` calls a tensor without a name."""


def name_tensors(files: Sequence[FileReport], names: NamedDataMap) -> list[FileReport]:
    """The files with `Region.tensor` set where a checkpoint has exactly one tensor of these bytes.

    Of several with the same bytes, one that alone has the layout of the region counts.
    """
    known: dict[tuple[str, int], list[tuple[str, TensorLayout | None]]] = defaultdict(list)
    for key in names:
        address = digest(names.get_data(key))  # a recorded one may be wrong
        known[address.xxh3_128.hex(), address.nbytes].append((key, names.get_tensor_layout(key)))

    def name(region: Region) -> str:
        if not region.digest or not all(_CONTENT.fullmatch(key) for key in region.keys):
            return ""
        entries = known.get((region.digest, region.nbytes), [])
        if len(entries) > 1:
            entries = [entry for entry in entries if entry[1] == region.layout]
        return entries[0][0] if len(entries) == 1 else ""

    named = []
    for file in files:
        regions = tuple(replace(r, tensor=given) if (given := name(r)) else r for r in file.regions)
        named.append(replace(file, regions=regions))
    return named
