"""Adapter files: the tensors of an adapter, with its foundation and its scale in the metadata."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blobstore.adapters.foundation import (
    FOUNDATION,
    SCALE,
    NamedTensor,
    fingerprint,
    named_tensors,
    open_foundation,
)
from blobstore.adapters.lora_names import Pair, find_pairs, no_adapter, raise_first
from blobstore.disk.staging import refuse_inputs
from blobstore.errors import (
    AdapterError,
    BlobStoreError,
    InvalidFileError,
    KeyNotFoundError,
    UnsupportedDataError,
    UpdateError,
)
from blobstore.formats.ptd.reader import PtdDataMap, open_ptd
from blobstore.logical import steps
from blobstore.logical.steps import Plain
from blobstore.logical.updates import LogicalTensors
from blobstore.memory.mapped_file import Paths, as_path
from blobstore.memory.tensors import check_by_name
from blobstore.store import BlobStore

__all__ = ["Adapter", "bind_adapter", "check_scale", "read_adapter", "recorded_scale", "save_adapter"]


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
        logical: the tensors of its records, for a file that lowering wrote.
        blobs: the file.
    """

    path: Path
    foundation: str | None
    scale: float | None
    metadata: Mapping[str, str]
    contents: Mapping[str, NamedTensor]
    pairs: tuple[Pair, ...]
    unpaired: tuple[BlobStoreError, ...]
    logical: LogicalTensors
    blobs: PtdDataMap

    @functools.cached_property
    def tensors(self) -> dict[str, Any]:
        """The tensors in the model's own shapes and dtypes, as read-only arrays. Those of bfloat16 are torch tensors
        or, without torch, arrays of `ml_dtypes`.

        Raises:
            UpdateError: a tensor is quantized, so its original values are not in the file.
        """
        return {name: steps.tensor_of(self.value(name)) for name in self.contents}

    def value(self, name: str) -> Plain:
        """One tensor, as an array and a scalar type.

        Raises:
            KeyNotFoundError: there is no such tensor.
            UpdateError: the tensor is quantized.
        """
        if not isinstance(name, str) or name not in self.contents:
            raise KeyNotFoundError(f"{self.path}: no tensor {name!r}")
        return steps.cast(self.logical.value(name), self.contents[name].scalar_type)

    def problems(self) -> list[BlobStoreError]:
        """Everything that is wrong with the file itself: `unpaired`, and an UpdateError for each tensor with infinities
        or NaN."""
        return [*self.unpaired, *_not_finite(self.path, (name for name in self.contents if not self._is_finite(name)))]

    def check(self) -> None:
        """Raise the first of `problems`, if there is one."""
        raise_first(self.problems())

    def _is_finite(self, name: str) -> bool:
        try:
            return steps.check_finite(self.logical.value(name))
        except UpdateError:
            return True  # it is quantized, and integers are finite


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read an adapter: a file of `save_adapter`, or the `.ptd` that lowering with `AdapterTags` wrote.

    If the file has digests, all blobs are compared with them. `Adapter.problems` lists what is wrong with the tensors.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
        AdapterError: it has no LoRA tensors.
    """
    blobs = open_ptd(path, verify=True)
    logical = LogicalTensors(blobs)
    contents = named_tensors(blobs, logical)
    pairs, problems = find_pairs({name: tensor.sizes for name, tensor in contents.items()}, blobs.name)
    if not pairs and not problems:
        raise no_adapter(blobs.name)
    return Adapter(
        path=blobs.path,
        foundation=_recorded_foundation(blobs),
        scale=recorded_scale(blobs),
        metadata={key: text for key, text in blobs.metadata.items() if key not in (FOUNDATION, SCALE)},
        contents=contents,
        pairs=tuple(pairs),
        unpaired=tuple(problems),
        logical=logical,
        blobs=blobs,
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
    """
    check_by_name(tensors)
    name = str(as_path(path))
    store = BlobStore()
    for key, tensor in tensors.items():
        store.add(key, tensor)
    values = {key: steps.plain(tensor) for key, tensor in tensors.items()}
    pairs, problems = find_pairs({key: value.shape for key, (value, _) in values.items()}, name)
    problems += _not_finite(name, (key for key, value in values.items() if not steps.check_finite(value)))
    raise_first(problems)
    if not pairs:
        raise no_adapter(name)
    return _write(store, path, foundation, scale, {} if metadata is None else metadata)


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
        raise AdapterError(f"{adapter.blobs.name}: records no scale; give it as scale=")
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
    number = check_scale(scale)
    with open_foundation(foundation) as blobs:
        refuse_inputs([as_path(path)], blobs.sources)
        recorded = {FOUNDATION: fingerprint(blobs), SCALE: repr(number)}
    if not isinstance(metadata, Mapping) or recorded.keys() & metadata.keys():
        raise UnsupportedDataError(f"metadata must map str to str, without the keys {FOUNDATION} and {SCALE}")
    return store.write_ptd(path, metadata={**metadata, **recorded})


def check_scale(scale: Any, what: str = "scale") -> float:
    """A factor for weights as a float.

    Args:
        scale: the factor.
        what: what messages call it.

    Raises:
        AdapterError: it is not a finite number.
    """
    try:
        number = float(scale)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise AdapterError(f"{what} {scale!r} is not a finite number")
    return number


def recorded_scale(blobs: PtdDataMap) -> float | None:
    """The scale in the metadata of a file; None if it has none.

    Raises:
        InvalidFileError: the recorded scale is not a finite number.
    """
    if SCALE not in blobs.metadata:
        return None
    try:
        return check_scale(blobs.metadata[SCALE])
    except AdapterError as error:
        raise _malformed(blobs, str(error)) from None


def _recorded_foundation(blobs: PtdDataMap) -> str | None:
    text = blobs.metadata.get(FOUNDATION)
    if text is not None and not re.fullmatch("[0-9a-f]{32}", text):
        raise _malformed(blobs, f"{text!r} is not a fingerprint")
    return text


def _malformed(blobs: PtdDataMap, reason: str) -> InvalidFileError:
    return InvalidFileError(blobs.path, f"the adapter's metadata is malformed: {reason}")


def _not_finite(origin: object, names: Iterable[str]) -> list[UpdateError]:
    """An error for each of these tensors."""
    return [UpdateError(f"{origin}: '{name}' has values that are not finite") for name in names]
