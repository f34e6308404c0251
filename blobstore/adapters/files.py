"""Adapter files: the tensors of an adapter, and in the metadata what they are for and how they are scaled."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Mapping
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
from blobstore.adapters.names import Pair, find_pairs
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
from blobstore.store import BlobStore

__all__ = ["Adapter", "bind_adapter", "check_scale", "read_adapter", "save_adapter"]


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read from a file; its tensors lie in a map of the file, which stays while they are in use.

    Attributes:
        path: the file.
        foundation: the fingerprint of the foundation that it was made for; None if the file does not say.
        scale: alpha / rank; None if the file does not say.
        metadata: what else was recorded with it.
        contents: its tensors by name.
        pairs: those of them that are LoRA's, module by module.
        unpaired: what is wrong with the pairs: an AdapterError or LayoutError each.
        logical: what its records tell, for a file that lowering wrote.
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
        """The tensors in the model's own shapes and dtypes: read-only arrays; bfloat16 as torch tensors, or, without
        torch, arrays of `ml_dtypes`.

        Raises:
            UpdateError: one is quantized, so that its numbers are not there.
        """
        return {name: steps.tensor_of(self.value(name)) for name in self.contents}

    def value(self, name: str) -> Plain:
        """One of them, as `layouts` has tensors.

        Raises:
            KeyNotFoundError: there is no such tensor.
            UpdateError: it is quantized.
        """
        if not isinstance(name, str) or name not in self.contents:
            raise KeyNotFoundError(f"{self.path}: no tensor {name!r}")
        return steps.cast(self.logical.value(name), self.contents[name].scalar_type)

    def problems(self) -> list[BlobStoreError]:
        """What is wrong with it by itself: `unpaired`, and an UpdateError for each tensor that is not finite."""
        infinite = [name for name in self.contents if not self._is_finite(name)]
        return [
            *self.unpaired,
            *(UpdateError(f"{self.path}: '{name}' has values that are not finite") for name in infinite),
        ]

    def check(self) -> None:
        """Raise the first of `problems`, if there are any."""
        for problem in self.problems():
            raise problem

    def _is_finite(self, name: str) -> bool:
        try:
            return steps.check_finite(self.logical.value(name))
        except UpdateError:
            return True  # integers are


def read_adapter(path: str | os.PathLike[str]) -> Adapter:
    """Read an adapter: one of `save_adapter`, or the `.ptd` that lowering with `AdapterTags` gave.

    Digests that the file carries are compared. What is wrong with the tensors is told by `problems`.

    Raises:
        FileAccessError, InvalidFileError, IntegrityError: the file cannot be opened or trusted.
        AdapterError: it holds no LoRA tensors.
    """
    blobs = open_ptd(path, verify=True)
    logical = LogicalTensors(blobs)
    contents = named_tensors(blobs, logical)
    pairs, problems = find_pairs({name: tensor.sizes for name, tensor in contents.items()}, blobs.name)
    if not pairs and not problems:
        raise AdapterError(f"{blobs.name}: holds no adapter: no key has a part lora_a or lora_b")
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
    """Write an adapter for deployment: its tensors by name, what foundation it is for, and its scale.

    Args:
        path: the file; one that is there is replaced.
        tensors: name to torch tensor or array, in the model's own shapes: `<module>.lora_a.weight` (rank, in) and
            `<module>.lora_b.weight` (out, rank) for each adapted module, and whatever else was trained.
        foundation: the `.ptd` that it was made for, or several that are used together.
        scale: what its product is multiplied with: alpha / rank.
        metadata: free text to keep with it.

    Returns:
        The size of the file in bytes.

    Raises:
        AdapterError: the pairs are not complete, there are none, or the foundation is an adapter itself.
        LayoutError: two tensors of a pair do not fit together.
        UpdateError: a tensor has values that are not finite.
        UnsupportedDataError: something is not a tensor, or the metadata is not text.
        InvalidKeyError: a name is none.
        OutputPathError: the path is that of the foundation.
        FileAccessError, InvalidFileError, IntegrityError: the foundation cannot be read, or the file not written. A
            file that was there is as before, in every case.
    """
    if not isinstance(tensors, Mapping):
        raise UnsupportedDataError(f"expected tensors by name, found a {type(tensors).__qualname__}")
    name = str(as_path(path))
    store = BlobStore()
    for key, tensor in tensors.items():
        store.add(key, tensor)
    values = {key: steps.plain(tensor) for key, tensor in tensors.items()}
    pairs, problems = find_pairs({key: value.shape for key, (value, _) in values.items()}, name)
    problems += [
        UpdateError(f"{name}: '{key}' has values that are not finite")
        for key, value in values.items()
        if not steps.check_finite(value)
    ]
    if not pairs and not problems:
        problems.append(AdapterError(f"{name}: no tensor has a name with a part lora_a or lora_b"))
    for problem in problems:
        raise problem
    return _write(store, path, foundation, scale, {} if metadata is None else metadata)


def bind_adapter(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    foundation: Paths,
    scale: float | None = None,
) -> int:
    """Write an adapter anew with the foundation that it is for, such as a `.ptd` that ExecuTorch wrote.

    Keys and contents stay, so programs that take `source` take `target`.

    Args:
        source: the adapter.
        target: the file to write.
        foundation: as for `save_adapter`.
        scale: likewise; left out, what `source` records.

    Returns:
        The size of the file in bytes.

    Raises:
        AdapterError: `source` holds no adapter, is not complete, or neither it nor `scale` tells the scale.
        OutputPathError: `target` is one of the files.
        As `save_adapter` otherwise.
    """
    adapter = read_adapter(source)
    adapter.check()
    if scale is None and adapter.scale is None:
        raise AdapterError(f"{adapter.blobs.name}: records no scale; give it")
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
        raise UnsupportedDataError(f"metadata maps text to text, and {FOUNDATION} and {SCALE} are not for it to tell")
    return store.write_ptd(path, metadata={**metadata, **recorded})


def check_scale(scale: Any, what: str = "scale") -> float:
    """A number that weights can be multiplied with.

    Raises:
        AdapterError: it is none.
    """
    try:
        number = float(scale)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise AdapterError(f"{what} {scale!r} is not a finite number")
    return number


def recorded_scale(blobs: PtdDataMap) -> float | None:
    """The scale in the metadata of a file.

    Raises:
        InvalidFileError: it is not a number.
    """
    if SCALE not in blobs.metadata:
        return None
    try:
        return check_scale(blobs.metadata[SCALE])
    except AdapterError as error:
        raise InvalidFileError(blobs.path, f"the adapter's metadata is malformed: {error}") from None


def _recorded_foundation(blobs: PtdDataMap) -> str | None:
    text = blobs.metadata.get(FOUNDATION)
    if text is not None and not re.fullmatch("[0-9a-f]{32}", text):
        raise InvalidFileError(blobs.path, f"the adapter's metadata is malformed: {text!r} is no fingerprint")
    return text
