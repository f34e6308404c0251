"""Whether adapters fit a foundation, and what both contain; `blobstore adapters` prints this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blobstore.adapters.adapter_file import Adapter, read_adapter
from blobstore.adapters.foundation import NamedTensor, library, named_tensors, native_paths
from blobstore.adapters.lora_names import Pair
from blobstore.core.errors import AdapterError, BlobStoreError, KeyNotFoundError, LayoutError
from blobstore.core.memory.mapped_file import Paths, as_paths
from blobstore.core.reprs import and_others, count, line, listed
from blobstore.core.text import size

__all__ = ["AdapterInfo", "AdaptersInfo", "FoundationInfo", "inspect_adapters"]


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

    def __repr__(self) -> str:
        path = and_others([str(path) for path in self.paths])
        return line("FoundationInfo", path, count(self.keys, "key"), size(self.nbytes))


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

    def __repr__(self) -> str:
        fits = "fits" if self.fits else f"does not fit: {listed(self.problems, 1)}"
        return line("AdapterInfo", self.path, count(len(self.pairs), "pair"), size(self.nbytes), fits)


@dataclass(frozen=True)
class AdaptersInfo:
    """A foundation and adapters."""

    foundation: FoundationInfo
    adapters: tuple[AdapterInfo, ...]

    def __repr__(self) -> str:
        adapters = f"{count(len(self.adapters), 'adapter')}, {sum(one.fits for one in self.adapters):,} of them fit"
        return line("AdaptersInfo", f"of {and_others([str(path) for path in self.foundation.paths])}", adapters)


def inspect_adapters(foundation: Paths, adapters: Paths) -> AdaptersInfo:
    """List what a foundation and its adapters contain, and check whether they fit.

    Args:
        foundation: its `.ptd`, or several that are used together.
        adapters: one file or several, as for `read_adapter`.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: a file cannot be opened or trusted.
        AdapterError: the foundation is an adapter, or one of the adapters has no LoRA tensors.
        MissingDependencyError: the native package is not installed.
    """
    files = tuple(as_paths(foundation))
    print_, keys, nbytes, rows, _ = library().describe_foundation(native_paths(files))
    info = FoundationInfo(files, print_, keys, nbytes, tuple(named_tensors(rows).values()))
    return AdaptersInfo(info, tuple(_describe(read_adapter(path), info) for path in as_paths(adapters)))


def _describe(adapter: Adapter, foundation: FoundationInfo) -> AdapterInfo:
    problems = [*adapter.problems(), *_misfits(adapter, foundation)]
    return AdapterInfo(
        path=adapter.path,
        nbytes=adapter.nbytes,
        foundation=adapter.foundation,
        scale=adapter.scale,
        metadata=adapter.metadata,
        tensors=tuple(adapter.contents.values()),
        pairs=adapter.pairs,
        fits=not problems,
        problems=tuple(str(problem).removeprefix(f"{adapter.path}: ") for problem in problems),
    )


def _misfits(adapter: Adapter, foundation: FoundationInfo) -> list[BlobStoreError]:
    """The reasons why an adapter cannot be used with a foundation: an AdapterError if it was made for another one; a
    KeyNotFoundError for each module that the foundation lacks; a LayoutError for each weight whose shape is not that of
    the pair's product."""
    problems: list[BlobStoreError] = []
    name = " + ".join(map(str, foundation.paths))
    if adapter.foundation not in (None, foundation.fingerprint):
        problems.append(
            AdapterError(
                f"{adapter.path}: made for foundation {adapter.foundation}, but {name} is {foundation.fingerprint}"
            )
        )
    sizes = {name: tensor.sizes for tensor in foundation.tensors for name in (tensor.name, *tensor.aliases)}
    for pair in adapter.pairs:
        names = library().weight_names(pair.module)
        weight = next((one for one in names if one in sizes), None)
        product = (pair.out_features, pair.in_features)
        if weight is None:
            listed = " or ".join(map(repr, names))
            problems.append(
                KeyNotFoundError(f"{adapter.path}: module '{pair.module}' is not in {name}, which has no {listed}")
            )
        elif sizes[weight] != product:
            problems.append(
                LayoutError(
                    f"{adapter.path}: '{weight}' is {list(sizes[weight])}, but '{pair.b}' and '{pair.a}' make "
                    f"{list(product)}"
                )
            )
    return problems
