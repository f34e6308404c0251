"""Names of tensors and of data files, and how the tensors of a program are compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core.errors import InvalidTagError
from blobstore.core.memory.dtypes import NUMBERS, scalar_type_named
from blobstore.core.memory.layout import ScalarType
from blobstore.core.store import check_tag
from blobstore.logical.records import ModelTensor, Step

if TYPE_CHECKING:
    import torch

__all__ = [
    "QUANTIZED",
    "Fold",
    "Refusal",
    "Tag",
    "Unwrapped",
    "check",
    "chooser",
    "identity",
    "is_frozen",
    "is_generated",
    "logical_name",
    "same_bits",
    "scalar_type",
    "unwrapped",
]

Tag = str | Callable[[str], str | None] | None
"""The data file: its name, or a function from the tensor's name to it. None leaves a tensor in the program."""

QUANTIZED = "__quantized"
"""What `restore_names` appends to the name of a weight for the quantized form of it."""

_GENERATED = re.compile(r"_(frozen_param|tensor_constant|lifted_tensor|prop_tensor)|(^|\.)_(scale|zero_point)_\d+$")
"""Names that exporting and quantizing make up; another graph has the same ones for other tensors."""

_UNWRAPPED = re.compile(r"(?P<path>.*)\.parametrizations\.(?P<name>[^.]+)\.original(?P<part>[012])")
"""The tensors that exporting unwraps from one that torchao quantized: integers, scales, zero points."""


class Fold(NamedTuple):
    """What a tensor was folded of before the program was exported: what it would be called in the model, the model's
    tensors as the step takes them, and the step."""

    name: str
    sources: tuple[ModelTensor, ...]
    step: Step


class Refusal(NamedTuple):
    """Tensors of the model that cannot be changed, and why."""

    sources: tuple[ModelTensor, ...]
    reason: str


class Unwrapped(NamedTuple):
    """One of the tensors that exporting unwraps from a quantized parameter: part 0 is the integers, 1 the scales, 2 the
    zero points."""

    parameter: str
    part: int
    parts: frozenset[str]


def is_generated(name: str) -> bool:
    """Whether exporting or quantizing made up a name, so that no state dict has it."""
    return _GENERATED.search(name) is not None


def is_frozen(name: str) -> bool:
    """Whether a name is one that `convert_pt2e` gives a weight that it folds with its quantization."""
    return name.startswith("_frozen_param")


def unwrapped(name: str) -> Unwrapped | None:
    """What a tensor is that exporting unwrapped from a quantized parameter; None for any other."""
    match = _UNWRAPPED.fullmatch(name)
    if match is None:
        return None
    prefix = f"{match['path']}.parametrizations.{match['name']}.original"
    parts = frozenset(f"{prefix}{part}" for part in range(3))
    return Unwrapped(f"{match['path']}.{match['name']}", int(match["part"]), parts)


def logical_name(name: str) -> str:
    """The name of the parameter that a tensor of a program belongs to: itself, or one that was quantized."""
    wrapped = unwrapped(name)
    return name.removesuffix(QUANTIZED) if wrapped is None else wrapped.parameter


def scalar_type(dtype: torch.dtype) -> ScalarType | None:
    """ExecuTorch's number for a dtype; None if updates cannot take it."""
    kind = scalar_type_named(dtype)
    return kind if kind in NUMBERS else None


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that view the same memory in the same way."""
    try:
        storage = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return (id(tensor),)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same numbers, to the bit, however they lie in memory."""
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


def check(tag: str | None) -> str | None:
    """A tag as it was given, with or without `.ptd`: ExecuTorch keeps `model` and `model.ptd` apart until it writes files.

    So a partitioner and `external_constants` that are given the same text have the same file.

    Raises:
        InvalidTagError: it is not a plain file name.
    """
    if tag is None:
        return None
    if not isinstance(tag, str):
        raise InvalidTagError(f"a tag must be a file name or None, got {tag!r}")
    check_tag(tag)
    return tag


def chooser(tag: Tag) -> Callable[[str], str | None]:
    """The function from the name of a tensor to its data file.

    Raises:
        InvalidTagError: the tag is not a plain file name; from a function's result, when the returned function is called.
    """
    if not callable(tag):
        fixed = check(tag)
        return lambda name: fixed
    forms: dict[
        str, str
    ] = {}  # of a function that returns `model` and `model.ptd`, all weights get the form that came first

    def choose(name: str) -> str | None:
        file = check(tag(name))
        return None if file is None else forms.setdefault(file.removesuffix(".ptd"), file)

    return choose
