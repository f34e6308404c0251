"""Listing what a file holds."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from blobstore.core.errors import BlobStoreError, InvalidFileError, UnsupportedDataError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.formats.delegate_keys import keys_of
from blobstore.core.formats.opening import open_any
from blobstore.core.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.core.formats.pte.data_map import PteDataMap
from blobstore.core.formats.pte.parts import DelegatePayload
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.formats.ptn import PtnDataMap
from blobstore.core.formats.safetensors import CheckpointDataMap
from blobstore.core.formats.torch_saved import TorchDataMap
from blobstore.core.memory.layout import TensorLayout

__all__ = ["BlobInfo", "DelegateInfo", "ExternalInfo", "FileInfo", "inspect_file"]


@dataclass(frozen=True)
class BlobInfo:
    """One key.

    Attributes:
        key: the key; for a constant of a program that has no name, one made of its content.
        kind: "tensor" or "blob"; in a program "constant", "state" or "named data".
        layout: None for opaque bytes.
        nbytes: bytes of the blob.
        alignment: in bytes; 1 if the file does not record it.
        digest: its xxh3-128 in hexadecimal.
        shared: the first key with the same bytes; empty if this is the first.
    """

    key: str
    kind: str
    layout: TensorLayout | None
    nbytes: int
    alignment: int
    digest: str
    shared: str


@dataclass(frozen=True)
class ExternalInfo:
    """A key that a program takes from a data file.

    Attributes:
        key: the key.
        kind: "external" for a tensor of the program, "delegate" for what a delegate looks up.
        taken_by: the methods and delegates that take it.
        layout: of a tensor; None for what a delegate looks up.
        nbytes: its size; None if neither the program nor a data file beside it has it.
        found_in: the name of a data file beside the program that has the key; empty if there is none.
    """

    key: str
    kind: str
    taken_by: tuple[str, ...]
    layout: TensorLayout | None
    nbytes: int | None
    found_in: str


@dataclass(frozen=True)
class DelegateInfo:
    """A part of a method that a backend runs.

    Attributes:
        method: the method.
        index: its number among the method's delegates.
        backend: the backend.
        payload_bytes: the size of its payload.
    """

    method: str
    index: int
    backend: str
    payload_bytes: int


@dataclass(frozen=True)
class FileInfo:
    """One file.

    Attributes:
        path: the file.
        format: "pte", "ptd", "ptn", "safetensors" or "torch".
        size: bytes of the file.
        blobs: its blobs, in the order of the file.
        externals: of a program, the keys that it takes from data files, as far as its payloads can be read.
        metadata: the text that was stored with a data file.
        has_digests: whether a .ptd records the digests of its blobs; None for other files.
        methods: those of a program.
        flatbuffer_bytes: the size of a program without its segments; None for other files.
        delegates: those of a program, in its order.
        parameters: the elements of all tensors by type, such as `{"float": 22713216}`; a tensor counts under each of its keys, as
            in a state_dict, and what a delegate has packed does not count.
    """

    path: Path
    format: str
    size: int
    blobs: list[BlobInfo]
    externals: list[ExternalInfo] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    has_digests: bool | None = None
    methods: tuple[str, ...] = ()
    flatbuffer_bytes: int | None = None
    delegates: tuple[DelegateInfo, ...] = ()
    parameters: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.__dict__["parameters"] = _parameters(self.blobs)


_FORMATS: dict[type, str] = {
    PtdDataMap: "ptd",
    CheckpointDataMap: "safetensors",
    PtnDataMap: "ptn",
    TorchDataMap: "torch",
}


def inspect_file(path: str | os.PathLike[str]) -> FileInfo:
    """List a .pte, .ptd, .ptn or .safetensors, a file of torch.save, or a sharded checkpoint by its index, whose size is that
    of all its files.

    Raises:
        FileAccessError, InvalidFileError, UnsupportedDataError: as `open_any`.
    """
    with open_any(path) as data_map:
        if isinstance(data_map, PteDataMap):
            return _of_program(Path(path), data_map)
        kind = next((name for reader, name in _FORMATS.items() if isinstance(data_map, reader)), None)
        if kind is None:
            raise UnsupportedDataError(f"{os.fspath(path)}: a file of this format cannot be listed")
        return FileInfo(
            Path(path),
            kind,
            sum(source.stat().st_size for source in data_map.sources),
            _blobs(data_map, {}),
            metadata=dict(getattr(data_map, "metadata", {})),
            has_digests=data_map.has_digests if isinstance(data_map, PtdDataMap) else None,
        )


def _of_program(path: Path, data_map: PteDataMap) -> FileInfo:
    program = data_map.program
    kinds = {item.key: item.kind.replace("_", " ") for item in program.movable()}
    return FileInfo(
        path,
        "pte",
        path.stat().st_size,
        _blobs(data_map, kinds),
        _externals(program),
        methods=tuple(program.methods),
        flatbuffer_bytes=program.program_size,
        delegates=tuple(DelegateInfo(d.method, d.index, d.backend, d.span.size) for d in program.delegates),
    )


def _blobs(data_map: NamedDataMap, kinds: dict[str, str]) -> list[BlobInfo]:
    first: dict[object, str] = {}
    blobs = []
    for key, data in data_map.views():
        address = data_map.digest(key)
        layout = data_map.get_tensor_layout(key)
        shared = first.setdefault(address, key)
        kind = kinds.get(key, "blob" if layout is None else "tensor")
        alignment = data_map.alignment(key)
        digest = address.xxh3_128.hex()
        blobs.append(BlobInfo(key, kind, layout, len(data), alignment, digest, "" if shared == key else shared))
    return blobs


def _parameters(blobs: list[BlobInfo]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for blob in blobs:
        if blob.layout is not None:
            counts[blob.layout.scalar_type.name.lower()] += math.prod(blob.layout.sizes)
    return dict(counts.most_common())


def _externals(program: ProgramFile) -> list[ExternalInfo]:
    """The keys that a program takes from data files."""
    takers: dict[tuple[str, str], dict[str, None]] = {}
    layouts: dict[str, TensorLayout | None] = {}
    sizes: dict[str, int | None] = {}
    for external in program.externals:
        takers.setdefault((external.key, "external"), {})[external.use.method] = None
        layouts[external.key] = external.layout
        sizes[external.key] = None if external.layout is None else external.layout.nbytes
    own = {blob.key for blob in program.named_data}
    for delegate in program.delegates:
        name = f"{delegate.method}/{delegate.index} {delegate.backend}"
        for key, nbytes in _looked_up(program, delegate).items():
            if key not in own:
                takers.setdefault((key, "delegate"), {})[name] = None
                sizes.setdefault(key, nbytes)
    beside = _beside(program.path, {key for key, _ in takers})
    externals = []
    for (key, kind), by in takers.items():
        nbytes, found_in = beside.get(key, (None, ""))
        nbytes = nbytes if sizes[key] is None else sizes[key]
        externals.append(ExternalInfo(key, kind, tuple(by), layouts.get(key), nbytes, found_in))
    return externals


def _looked_up(program: ProgramFile, delegate: DelegatePayload) -> Mapping[str, int | None]:
    """The keys that a delegate looks up, with their sizes where its payload has them."""
    with suppress(InvalidFileError):  # damaged, or of a later version
        return keys_of(delegate.backend, program.data[delegate.span.start : delegate.span.stop]) or {}
    return {}


def _beside(program: Path, keys: Set[str]) -> dict[str, tuple[int | None, str]]:
    """The keys of data files beside a program, each with its size and the first such file; at least all of `keys`, if found."""
    beside: dict[str, tuple[int | None, str]] = {}
    for path in sorted(program.parent.glob("*.ptd")) if keys else ():
        if beside.keys() >= keys:  # a folder may have many files, and opening one reads its whole table
            break
        status = path.stat()
        for key, nbytes in _sizes_in(path, status.st_size, status.st_mtime_ns).items():
            beside.setdefault(key, (nbytes, path.name))
    return beside


@functools.lru_cache(maxsize=256)
def _sizes_in(path: Path, size: int, modified: int) -> Mapping[str, int]:
    """The sizes of the blobs in a data file by key; empty if it cannot be read. The last two arguments identify it."""
    try:
        with open_ptd(path) as data_map:
            return {key: len(data) for key, data in data_map.views()}
    except BlobStoreError:
        return {}
