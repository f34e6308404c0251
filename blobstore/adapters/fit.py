"""Whether adapters fit a foundation, and what both contain; `blobstore adapters` prints this."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blobstore.adapters.adapter_file import Adapter, read_adapter
from blobstore.adapters.foundation import NamedTensor, content_keys, fingerprint, named_tensors, open_foundation
from blobstore.adapters.lora_names import Pair, weight_names
from blobstore.errors import AdapterError, BlobStoreError, KeyNotFoundError, LayoutError
from blobstore.formats.data_map import NamedDataMap
from blobstore.memory.mapped_file import Paths, as_paths

__all__ = ["AdapterInfo", "AdaptersInfo", "FoundationInfo", "check_shape", "find_weight", "inspect_adapters", "misfits"]


@dataclass(frozen=True)
class FoundationInfo:
    """A foundation.

    Attributes:
        paths: its files.
        fingerprint: 32 hexadecimal digits; see docs/format.md.
        keys: number of keys, including those of records.
        nbytes: total size of its blobs in bytes, without records.
        tensors: the tensors whose names its files record.
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
        nbytes: total size of its blobs in bytes, without records.
        foundation: the fingerprint of the foundation that it was made for; None if the file does not record it.
        scale: alpha / rank; None if the file does not record it.
        metadata: all other metadata of the file.
        tensors: all of its tensors.
        pairs: its LoRA pairs, by module.
        fits: whether it can be used with the foundation. An adapter that records no foundation may fit.
        problems: the reasons why it does not fit, as sentences.
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


def inspect_adapters(foundation: Paths, adapters: Paths) -> AdaptersInfo:
    """List what a foundation and its adapters contain, and check whether they fit.

    Args:
        foundation: its `.ptd`, or several that are used together.
        adapters: one file or several, as for `read_adapter`.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        AdapterError: the foundation is an adapter, or one of the adapters has no LoRA tensors.
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
    """The reasons why an adapter cannot be used with a foundation.

    Args:
        adapter: the adapter.
        tensors, foundation, name: the foundation's tensors, its fingerprint, and its name in messages.

    Returns:
        An AdapterError if it was made for another foundation; a KeyNotFoundError for each module that the foundation
        lacks; a LayoutError for each weight whose shape is not that of the pair's product.
    """
    problems: list[BlobStoreError] = []
    if adapter.foundation not in (None, foundation):
        problems.append(
            AdapterError(f"{adapter.path}: made for foundation {adapter.foundation}, but {name} is {foundation}")
        )
    for pair in adapter.pairs:
        weight = find_weight(pair.module, tensors)
        if weight is None:
            names = " or ".join(map(repr, weight_names(pair.module)))
            problems.append(
                KeyNotFoundError(f"{adapter.path}: module '{pair.module}' is not in {name}, which has no {names}")
            )
        elif (misfit := check_shape(adapter.path, pair, weight, tensors[weight].sizes)) is not None:
            problems.append(misfit)
    return problems


def find_weight(module: str, tensors: Iterable[str]) -> str | None:
    """The name of the weight that a module's pair adapts, if the tensors include it, else None."""
    return next((name for name in weight_names(module) if name in tensors), None)


def check_shape(origin: object, pair: Pair, weight: str, sizes: tuple[int, ...]) -> LayoutError | None:
    """An error if the product of a pair does not have the shape of a weight, else None.

    Args:
        origin: the adapter as messages name it.
        pair: the pair.
        weight, sizes: the name and the shape of the weight.
    """
    if sizes == (pair.out_features, pair.in_features):
        return None
    return LayoutError(
        f"{origin}: '{weight}' is {list(sizes)}, but '{pair.b}' and '{pair.a}' make {[pair.out_features, pair.in_features]}"
    )


def _nbytes(blobs: NamedDataMap) -> int:
    return sum(len(blobs[key]) for key in content_keys(blobs))
