"""Names of tensors for what programs have under keys that are made of contents.

They come from a checkpoint that the caller names, from files of the report itself, or from checkpoints beside its programs.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.memory.digest import digest
from blobstore.core.memory.layout import TensorLayout
from blobstore.core.regions.region import Region, RegionKind
from blobstore.core.regions.source import is_url
from blobstore.reporting.model import FileReport

__all__ = [
    "NamesByContent",
    "can_name",
    "is_nameless",
    "name_related",
    "name_tensors",
    "nameless_folders",
    "names_in",
    "names_of",
]

_CONTENT = re.compile(r"(tensor\.)?[0-9a-f]{32,}\b.*|(constant|state)\[[^\]]*\]", re.DOTALL)
"""Keys of moved tensors, of ExecuTorch's delegates, and what `regions` calls a tensor without a name."""

_MADE = re.compile(r"(.+)@[0-9a-f]{16}", re.DOTALL)
"""Keys of what lowering made from a tensor of the model, which has the name before the last @."""

_NAMED = {RegionKind.TENSOR, RegionKind.CONSTANT, RegionKind.STATE, RegionKind.NAMED_DATA}

NamesByContent = Mapping[tuple[str, int], Sequence[tuple[str, TensorLayout | None]]]
"""By xxh3-128 in hexadecimal and size in bytes: the names of a content, each with its layout."""


def names_of(checkpoints: Iterable[NamedDataMap]) -> NamesByContent:
    """The names in checkpoints, whose tensors are read."""
    names: dict[tuple[str, int], list[tuple[str, TensorLayout | None]]] = defaultdict(list)
    for checkpoint in checkpoints:
        for key, data in checkpoint.views():
            address = digest(data)  # a recorded one may be wrong
            names[address.xxh3_128.hex(), address.nbytes].append((key, checkpoint.get_tensor_layout(key)))
    return names


def names_in(files: Iterable[FileReport]) -> NamesByContent:
    """The names that files have for their contents, each once."""
    names: dict[tuple[str, int], dict[tuple[str, TensorLayout | None], None]] = defaultdict(dict)
    blobs = (region for file in files for region in file.regions if region.digest and region.kind in _NAMED)
    for region in blobs:
        for key in filter(_is_name, region.keys):
            names[region.digest, region.nbytes][_without_mark(key), region.layout] = None
    return {content: list(named) for content, named in names.items()}


def _is_name(key: str) -> bool:
    return not _CONTENT.fullmatch(key)


def _without_mark(key: str) -> str:
    made = _MADE.fullmatch(key)
    return made[1] if made else key


def name_tensors(files: Sequence[FileReport], names: NamesByContent) -> list[FileReport]:
    """The files with `Region.tensor` set where `names` has exactly one name for a content; opaque bytes get its layout.

    Of several names for the same bytes, one that alone has the layout of the region counts.
    """

    def named(region: Region) -> Region:
        return _named(region, names.get((region.digest, region.nbytes), ())) if is_nameless(region) else region

    return [replace(file, regions=tuple(map(named, file.regions))) for file in files]


def _named(region: Region, entries: Sequence[tuple[str, TensorLayout | None]]) -> Region:
    """A nameless region with its name, if exactly one is left."""
    if len({name for name, _ in entries}) > 1:
        entries = [entry for entry in entries if entry[1] == region.layout]
    if len({name for name, _ in entries}) != 1:
        return region
    layouts = {layout for _, layout in entries}
    layout = region.layout or (layouts.pop() if len(layouts) == 1 else None)
    return replace(region, tensor=entries[0][0], layout=layout)


def name_related(files: Sequence[FileReport], related: Iterable[Sequence[tuple[int, int]]]) -> list[FileReport]:
    """The files with names for what has the values of exactly one named tensor, in another layout or type.

    Args:
        files: the files.
        related: places, as (file, region), whose values are the same.
    """
    given: dict[tuple[int, int], str] = {}
    for places in related:
        regions = {place: files[place[0]].regions[place[1]] for place in places}
        names = {_own_name(region) for region in regions.values()} - {""}
        if len(names) == 1:
            (name,) = names
            given.update((place, name) for place, region in regions.items() if is_nameless(region))
    named = list(files)
    for f in {f for f, _ in given}:
        regions_of = enumerate(files[f].regions)
        named[f] = replace(
            files[f], regions=tuple(replace(r, tensor=given.get((f, i), r.tensor)) for i, r in regions_of)
        )
    return named


def nameless_folders(files: Iterable[FileReport]) -> list[str]:
    """The folders of files with nameless blobs."""
    own = dict.fromkeys(
        os.path.dirname(os.path.abspath(file.path))  # noqa: PTH100, PTH120 - a link's own folder counts
        for file in files
        if not is_url(file.path) and any(map(is_nameless, file.regions))
    )
    return list(own)


def can_name(checkpoint: Sequence[Region], files: Iterable[FileReport]) -> bool:
    """Whether it is worth reading a checkpoint for names: by sizes, half of it or half of the nameless bytes may be
    the same tensors, in a type of any width."""
    nameless: dict[int, int] = defaultdict(int)
    for file in files:
        for region in filter(is_nameless, file.regions):
            nameless[region.nbytes] += region.nbytes
    every = matching = 0
    sizes = set()
    for region in checkpoint:
        if region.kind in _NAMED:
            elements = (
                region.nbytes // region.layout.scalar_type.itemsize if region.layout is not None else region.nbytes
            )
            widths = {elements * width for width in (1, 2, 4, 8)} & nameless.keys()
            every += region.nbytes
            matching += region.nbytes if widths else 0
            sizes |= widths
    return matching > 0 and (2 * matching >= every or 2 * sum(nameless[n] for n in sizes) >= sum(nameless.values()))


def is_nameless(region: Region) -> bool:
    """Whether it is a blob whose keys are made of its content or its index, and that got no name yet."""
    return bool(region.digest) and not region.tensor and all(_CONTENT.fullmatch(key) for key in region.keys)


def _own_name(region: Region) -> str:
    if region.tensor or region.kind not in _NAMED or not region.keys:
        return region.tensor
    return _without_mark(region.keys[0]) if _is_name(region.keys[0]) else ""
