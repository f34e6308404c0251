"""Whether adapters fit a foundation, and what both hold: what `blobstore adapters` prints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blobstore.adapters.files import Adapter, read_adapter
from blobstore.adapters.foundation import NamedTensor, fingerprint, named_tensors, open_foundation
from blobstore.adapters.names import Pair, weight_names
from blobstore.errors import AdapterError, BlobStoreError, KeyNotFoundError, LayoutError
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.ptd.manifest import KEY_PREFIX
from blobstore.memory.mapped_file import Paths, as_paths

__all__ = ["AdapterInfo", "AdaptersInfo", "FoundationInfo", "find_weight", "inspect_adapters", "misfits"]


@dataclass(frozen=True)
class FoundationInfo:
    """A foundation.

    Attributes:
        paths: its files.
        fingerprint: 32 hexadecimal digits; see docs/format.md.
        keys: number of keys, records included.
        nbytes: of all blobs together, without records.
        tensors: those whose names its files tell.
    """

    paths: tuple[Path, ...]
    fingerprint: str
    keys: int
    nbytes: int
    tensors: tuple[NamedTensor, ...]


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter, and whether it fits.

    Attributes:
        path: the file.
        nbytes: of all blobs together, without records.
        foundation: the fingerprint of the foundation that it was made for; None if it is bound to none.
        scale: alpha / rank; None if it is not recorded.
        metadata: what else is recorded.
        tensors: all of its tensors.
        pairs: those that are LoRA's, module by module.
        fits: whether nothing speaks against using it with the foundation. One that is not bound can fit.
        problems: what does, in sentences.
    """

    path: Path
    nbytes: int
    foundation: str | None
    scale: float | None
    metadata: Mapping[str, str]
    tensors: tuple[NamedTensor, ...]
    pairs: tuple[Pair, ...]
    fits: bool
    problems: tuple[str, ...]


@dataclass(frozen=True)
class AdaptersInfo:
    """A foundation and adapters."""

    foundation: FoundationInfo
    adapters: tuple[AdapterInfo, ...]


def inspect_adapters(foundation: Paths, adapters: Iterable[str | os.PathLike[str]]) -> AdaptersInfo:
    """List what a foundation and its adapters hold, and check that they fit.

    Args:
        foundation: its `.ptd`, or several that are used together.
        adapters: files as for `read_adapter`.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        AdapterError: the foundation is an adapter, or an adapter is none.
    """
    with open_foundation(foundation) as blobs:
        tensors, print_ = named_tensors(blobs), fingerprint(blobs)
        infos = []
        for path in as_paths(adapters):
            adapter = read_adapter(path)
            problems = [*adapter.problems(), *misfits(adapter, tensors, print_, blobs.name)]
            infos.append(
                AdapterInfo(
                    path=adapter.path,
                    nbytes=_nbytes(adapter.blobs),
                    foundation=adapter.foundation,
                    scale=adapter.scale,
                    metadata=adapter.metadata,
                    tensors=tuple(adapter.contents.values()),
                    pairs=adapter.pairs,
                    fits=not problems,
                    problems=tuple(str(problem).removeprefix(f"{adapter.path}: ") for problem in problems),
                )
            )
        info = FoundationInfo(blobs.sources, print_, len(blobs), _nbytes(blobs), tuple(tensors.values()))
    return AdaptersInfo(info, tuple(infos))


def misfits(adapter: Adapter, tensors: Mapping[str, NamedTensor], foundation: str, name: str) -> list[BlobStoreError]:
    """What speaks against using an adapter with a foundation.

    Args:
        adapter: the adapter.
        tensors, foundation, name: the foundation's tensors, its fingerprint, and what messages call it.

    Returns:
        AdapterError: it was made for another one. KeyNotFoundError: a module is not there. LayoutError: its weight has
        another shape than the pair.
    """
    problems: list[BlobStoreError] = []
    if adapter.foundation not in (None, foundation):
        problems.append(
            AdapterError(f"{adapter.path}: made for foundation {adapter.foundation}, but {name} is {foundation}")
        )
    for pair in adapter.pairs:
        weight = find_weight(pair.module, tensors)
        if weight is None:
            names = ", ".join(map(repr, weight_names(pair.module)))
            problems.append(
                KeyNotFoundError(f"{adapter.path}: module '{pair.module}' is not in {name}, which has none of {names}")
            )
        elif (misfit := check_shape(adapter.path, pair, weight, tensors[weight].sizes)) is not None:
            problems.append(misfit)
    return problems


def find_weight(module: str, tensors: Iterable[str]) -> str | None:
    """The name of the weight that a module's pair adapts, among those that there are; None if there is none."""
    return next((name for name in weight_names(module) if name in tensors), None)


def check_shape(origin: object, pair: Pair, weight: str, sizes: tuple[int, ...]) -> LayoutError | None:
    """Whether the product of a pair has the shape of a weight."""
    if sizes == (pair.out_features, pair.in_features):
        return None
    return LayoutError(
        f"{origin}: '{weight}' is {list(sizes)}, but '{pair.b}' and '{pair.a}' make {[pair.out_features, pair.in_features]}"
    )


def _nbytes(blobs: NamedDataMap) -> int:
    return sum(len(data) for key, data in blobs.items() if not key.startswith(KEY_PREFIX))
