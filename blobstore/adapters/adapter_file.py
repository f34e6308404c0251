"""Adapter files: the tensors of an adapter, with its foundation and its scale in the metadata."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.adapters.foundation import NamedTensor, foundation_fingerprint, is_text, library, named_tensors, plain_of
from blobstore.adapters.lora_names import Pair
from blobstore.core.constants import FOUNDATION_KEY, SCALE_KEY
from blobstore.core.disk.staging import refuse_inputs
from blobstore.core.errors import AdapterError, BlobStoreError, KeyNotFoundError, UnsupportedDataError
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.core.memory.arrays import Plain, raw, tensor_of
from blobstore.core.memory.dtypes import NUMBERS
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.mapped_file import Paths, as_path, as_paths
from blobstore.core.memory.tensors import AnyTensor, Array, as_bytes, check_by_name, in_dim_order
from blobstore.core.reprs import count, line
from blobstore.core.store import BlobStore
from blobstore.core.text import size

if TYPE_CHECKING:
    from blobstore.runtime.tensors import LogicalTensors

__all__ = ["Adapter", "bind_adapter", "check_scale", "native_tensors", "raise_first", "read_adapter", "save_adapter"]
__all__ += ["save_plain"]

_FOUNDATION = FOUNDATION_KEY
_SCALE = SCALE_KEY


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read from a file. Its tensors are views of the mapped file and keep the map alive.

    Attributes:
        path: the file.
        foundation: the fingerprint of the foundation that it was made for; None if the file does not record it.
        scale: alpha / rank; None if the file does not record it.
        metadata: all other metadata of the file.
        contents: its tensors by name.
        pairs: its LoRA pairs, by module.
        unpaired: an AdapterError or LayoutError for each module without a valid pair.
    """

    path: Path
    foundation: str | None
    scale: float | None
    metadata: Mapping[str, str]
    contents: Mapping[str, NamedTensor]
    pairs: tuple[Pair, ...]
    unpaired: tuple[BlobStoreError, ...]
    _native: Any = field(repr=False, compare=False)

    @functools.cached_property
    def blobs(self) -> PtdDataMap:
        """The file. A folder of PEFT has none: AdapterError."""
        return PtdDataMap(self.path, data=memoryview(self._native.file()))

    @functools.cached_property
    def logical(self) -> LogicalTensors:
        """The tensors of its records, for a file that lowering wrote."""
        from blobstore.runtime.tensors import LogicalTensors  # here, because it imports the native module

        return LogicalTensors(self.blobs)

    @functools.cached_property
    def tensors(self) -> dict[str, AnyTensor]:
        """The tensors in the model's own shapes and dtypes, as read-only arrays. Those of bfloat16 are torch tensors
        or, without torch, arrays of `ml_dtypes`.

        Raises:
            UpdateError: a tensor is quantized, so its original values are not in the file.
        """

        return {name: tensor_of(self.value(name)) for name in self.contents}

    def value(self, name: str) -> tuple[Array, ScalarType]:
        """One tensor, as an array and a scalar type. An array of bfloat16 has the uint16 of the bits.

        Raises:
            KeyNotFoundError: there is no such tensor.
            UpdateError: the tensor is quantized.
        """
        if not isinstance(name, str) or name not in self.contents:
            raise KeyNotFoundError(f"{self.path}: no tensor {name!r}")

        return plain_of(self._native.value(name))

    @property
    def nbytes(self) -> int:
        """Total size of its blobs in bytes, without records."""
        return int(self._native.nbytes)

    def problems(self) -> list[BlobStoreError]:
        """Everything that is wrong with the file itself: `unpaired`, and an UpdateError for each tensor with infinities
        or NaN."""
        return list(self._native.problems())

    def check(self) -> None:
        """Raise the first of `problems`, if there is one."""
        raise_first(self.problems())

    def __repr__(self) -> str:
        unpaired = f"{len(self.unpaired):,} unpaired" if self.unpaired else ""
        return line("Adapter", self.path, count(len(self.pairs), "pair"), unpaired, lambda: size(self.nbytes))


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read an adapter: a file of `save_adapter`, the `.ptd` that lowering with `AdapterTags` wrote, or a folder of PEFT.

    If the file has digests, all blobs are compared with them. `Adapter.problems` lists what is wrong with the tensors.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
        AdapterError: it has no LoRA tensors.
        MissingDependencyError: the native package is not installed.
    """
    path = as_path(path)
    native = library().Adapter.read(os.fsencode(path))
    return Adapter(
        path=path,
        foundation=native.foundation,
        scale=native.scale,
        metadata=native.metadata,
        contents=named_tensors(native.tensors),
        pairs=tuple(Pair(*pair) for pair in native.pairs),
        unpaired=tuple(native.unpaired()),
        _native=native,
    )


def save_adapter(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    foundation: Paths,
    scale: float,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write an adapter for deployment: its tensors by name, the fingerprint of its foundation, and its scale.

    Args:
        path: the file to write; an existing file is replaced.
        tensors: maps names to torch tensors or arrays in the model's own shapes: `<module>.lora_a.weight` (rank, in)
            and `<module>.lora_b.weight` (out, rank) for each adapted module, and any other trained tensors.
        foundation: the `.ptd` that the adapter was made for, or several that are used together.
        scale: the factor of the product of a pair: alpha / rank.
        metadata: free text to keep with it.

    Returns:
        The size of the file in bytes.

    Raises:
        AdapterError: a pair is incomplete, there are no pairs, or the foundation is an adapter itself.
        LayoutError: the shapes of a pair do not match.
        UpdateError: a tensor has infinities or NaN.
        UnsupportedDataError: a value is not a tensor, or the metadata does not map str to str.
        InvalidKeyError: a name cannot be a key.
        OutputPathError: the path is that of the foundation.
        FileAccessError, InvalidFileError, IntegrityError: the foundation cannot be read, or the file cannot be written.
            After any of these errors, an existing file is unchanged.
        MissingDependencyError: the native package is not installed.
    """
    check_by_name(tensors)
    store = BlobStore()
    for key, tensor in tensors.items():
        store.add(key, tensor)
    raise_first(library().adapter_problems(native_tensors(tensors), os.fsencode(as_path(path))))
    return _write(store, path, foundation, scale, {} if metadata is None else metadata)


def save_plain(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Plain],
    *,
    foundation: Paths,
    scale: float,
    metadata: Mapping[str, str],
) -> int:
    """As `save_adapter`, for arrays with their scalar types."""

    store, rows = BlobStore(), []
    for key, (array, kind) in tensors.items():
        layout = TensorLayout(kind, array.shape)
        store.add(key, raw(array), layout=layout)
        rows.append((key, raw(array), int(kind), array.shape))
    raise_first(library().adapter_problems(rows, os.fsencode(as_path(path))))
    return _write(store, path, foundation, scale, metadata)


def bind_adapter(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    foundation: Paths,
    scale: float | None = None,
) -> int:
    """Rewrite an adapter, such as a `.ptd` that ExecuTorch wrote, with the fingerprint of its foundation.

    Keys and contents stay the same, so programs that take `source` take `target` too.

    Args:
        source: the adapter.
        target: the file to write.
        foundation: as in `save_adapter`.
        scale: as in `save_adapter`; the default is the scale that `source` records.

    Returns:
        The size of the file in bytes.

    Raises:
        AdapterError: `source` is not an adapter or is incomplete, or the scale is neither given nor recorded.
        OutputPathError: `target` is one of the files.
        As `save_adapter` otherwise.
    """
    adapter = read_adapter(source)
    adapter.check()
    if scale is None and adapter.scale is None:
        raise AdapterError(f"{adapter.path}: records no scale; give it as scale=")
    refuse_inputs([as_path(target)], [adapter.path])
    store = BlobStore()
    store.merge(adapter.blobs)
    return _write(store, target, foundation, adapter.scale if scale is None else scale, adapter.metadata)


def _write(
    store: BlobStore,
    path: str | os.PathLike[str],
    foundation: Paths,
    scale: float | None,
    metadata: Mapping[str, str],
) -> int:
    number, files = check_scale(scale), as_paths(foundation)
    refuse_inputs([as_path(path)], files)
    recorded = {_FOUNDATION: foundation_fingerprint(files), _SCALE: repr(number)}
    if not isinstance(metadata, Mapping) or recorded.keys() & metadata.keys():
        raise UnsupportedDataError(f"metadata must map str to str, without the keys {_FOUNDATION} and {_SCALE}")
    return store.write_ptd(path, metadata={**metadata, **recorded})


def native_tensors(tensors: Mapping[str, Any]) -> list[tuple[str, memoryview, int, tuple[int, ...]]]:
    """Tensors by name as the native module takes them: contiguous bytes, a scalar type and sizes.

    Raises:
        UnsupportedDataError: a value is not a tensor, or its dtype or device is not supported.
    """
    rows = []
    for name, tensor in tensors.items():
        if not is_text(name):
            raise UnsupportedDataError(f"expected tensors by name, found {name!r}")
        data, layout = as_bytes(tensor)
        if layout is None:
            raise UnsupportedDataError(f"expected a torch tensor or a numpy array, found {type(tensor).__name__}")
        if layout.scalar_type not in NUMBERS:
            raise UnsupportedDataError(f"weights of type {layout} are not supported")
        rows.append((name, in_dim_order(data, layout), int(layout.scalar_type), layout.sizes))
    return rows


def check_scale(scale: Any, what: str = "scale") -> float:
    """A factor for weights as a float, which errors call `what`; AdapterError if it is not a finite number."""
    try:
        number = float(scale)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise AdapterError(f"{what} {scale!r} is not a finite number")
    return number


def raise_first(problems: Iterable[BlobStoreError]) -> None:
    """Raise the first problem, if there is one."""
    for problem in problems:
        raise problem
