"""Updates by logical tensor: from the names that a model's author knows to the blobs that must change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.core.errors import KeyNotFoundError, LayoutError, UnsupportedDataError, UpdateError
from blobstore.core.formats.data_map import NamedDataMap
from blobstore.core.memory.arrays import DTYPES, Plain
from blobstore.core.memory.layout import ScalarType
from blobstore.core.memory.tensors import as_bytes, check_by_name, scalar_type_of
from blobstore.core.notebook import block, heading, shown, table
from blobstore.core.reprs import count, fields_line, line
from blobstore.runtime.native import NativeLayout, decode_text, is_utf8, native, native_layout

__all__ = ["LogicalTensor", "LogicalTensors", "Quantized", "Updated"]

Item = tuple[str, Any, "NativeLayout | None", str]
"""A value as the native module takes it: a name, bytes, their layout if it is a tensor, and what messages call it."""


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of a model, as updates take it.

    Attributes:
        name: its fully qualified name.
        scalar_type, sizes: the dtype and the shape that an update must have.
        aliases: other names of the same tensor.
        keys: the keys of the blobs that an update of it may change: those that are made of it, first, and for integers the
            scales that follow from its numbers, and the biases that follow the scales. `BlobCache.revert` takes them.
        needs: the tensors that must be updated together with it, because a blob is made of all of them.
        refusal: why it cannot be changed; empty if it can.
        auxiliary: whether a state dict may lack it: scales, which come with quantization, buffers that are not
            persistent, and state, which the program changes itself.
    """

    __repr__ = fields_line

    name: str
    scalar_type: ScalarType
    sizes: tuple[int, ...]
    aliases: tuple[str, ...]
    keys: tuple[str, ...]
    needs: tuple[str, ...]
    refusal: str
    auxiliary: bool


@dataclass(frozen=True)
class Quantized:
    """What an update did to a tensor that is stored as integers.

    Attributes:
        name: of the tensor.
        key: of the blob that stores it.
        numbers: how many it has.
        clipped: how many of these lie outside of what its scales can express, and were limited or are NaN.
        rescaled: how many channels or groups of it got another scale, which follows from its new numbers.
    """

    __repr__ = fields_line

    name: str
    key: str
    numbers: int
    clipped: int
    rescaled: int


class Updated(int):
    """What an update did: the cache's new generation, as a number.

    Attributes:
        quantized: each blob of integers that was made of new numbers; also of a bias that was not given, but whose integers
            count steps of its weight's scales, if these changed.
    """

    quantized: tuple[Quantized, ...] = ()

    @classmethod
    def of(cls, found: tuple[int, Sequence[tuple[str, str, int, int, int]]]) -> Updated:
        """From what the native module returns."""
        generation, quantized = found
        self = cls(generation)
        self.quantized = tuple(Quantized(*one) for one in quantized)
        return self

    def __repr__(self) -> str:
        facts = count(len(self.quantized), "quantized tensor"), lambda: f"{self.clipped:,} numbers clipped"
        return line("Updated", f"to generation {int(self)}", *facts)

    def __str__(self) -> str:
        return int.__repr__(self)

    @property
    def clipped(self) -> int:
        """How many numbers were clipped, of all tensors."""
        return sum(one.clipped for one in self.quantized)


class LogicalTensors(Mapping[str, LogicalTensor]):
    """The tensors that the records in a data map describe, by name.

    Args:
        blobs: the data map, with the records and the blobs; a `BlobCache` to change them.

    Raises:
        InvalidFileError: records are damaged.
        KeyConflictError: two records of one blob contradict each other.
    """

    def __init__(self, blobs: NamedDataMap) -> None:
        self._blobs = blobs
        self._native: Any = native.Tensors(getattr(blobs, "_native", blobs))

    def __getitem__(self, name: str) -> LogicalTensor:
        if name not in self:
            raise self._unknown(name)
        first, scalar_type, *others = self._native.describe(name)
        return LogicalTensor(first, ScalarType(scalar_type), *others)

    def __iter__(self) -> Iterator[str]:
        return iter(self._native.names())

    def __len__(self) -> int:
        return len(self._native.names())

    def __contains__(self, name: object) -> bool:
        return is_utf8(name) and bool(self._native.contains(name))

    def __repr__(self) -> str:
        facts = (lambda: count(len(self), "tensor")), (lambda: f"{self._native.refused():,} of them fixed")
        return line("LogicalTensors of", self._blobs._title(), *facts)

    def _repr_html_(self) -> str:
        return shown(self, lambda: block(heading(repr(self)[1:-1]), self._table()))

    def _table(self) -> str:
        tensors = (self[name] for name in self)
        rows = (
            (
                one.name,
                one.scalar_type.name.lower(),
                " x ".join(map(str, one.sizes)) or "scalar",
                one.refusal or "can be updated",
            )
            for one in tensors
        )
        return table(("tensor", "dtype", "shape", ""), rows, len(self), numbers=("shape",))

    def check_names(self, names: Iterable[str]) -> None:
        """Raise KeyNotFoundError for a name that is neither a tensor nor a key, and UpdateError for a tensor that cannot be
        updated."""
        every = list(names)
        for name in every:
            if not is_utf8(name):
                raise self._unknown(name)
        self._native.check_names(every)

    def update(self, values: Mapping[str, Any], *, finite: bool = False, strict: bool = False) -> Updated:
        """Change tensors or blobs of a cache in one commit.

        Args:
            values: by name, torch tensors or numpy arrays in the model's own shapes and dtypes. A quantized tensor may
                also be given as the integers that are stored. For a key, also bytes.
            finite: refuse infinities and NaN.
            strict: refuse if more than one in a thousand numbers of a tensor would be clipped.

        Returns, raises:
            As `BlobCache.update`.
        """
        check_by_name(values)
        given = [(name, value) for name, value in values.items()]
        return Updated.of(self._native.update(given, self._items, finite, strict))

    def commit(self, items: list[Item], *, finite: bool = False) -> Updated:
        """As `update`, for values that were taken apart already."""
        return Updated.of(self._native.commit(items, finite))

    def copies(self, name: str, value: Any) -> list[Item]:
        """Copies of a value for a tensor, after the checks that need no other tensor.

        Raises:
            KeyNotFoundError, UpdateError: as for `check_names`.
            LayoutError, UnsupportedDataError: the tensor has another shape, or is not a tensor.
        """
        self.check_names([name])
        items = self._items(name, value)
        for item in items:
            self._native.check(item)
        return [(part, bytes(data), layout, what) for part, data, layout, what in items]

    def value(self, name: str) -> Plain:
        """The current value of a tensor, in its own shape and in the dtype that it is stored in.

        Args:
            name: of a tensor, or a key with a layout.

        Returns:
            A view of the blob's memory, or a copy if the order of its dimensions must be changed.

        Raises:
            KeyNotFoundError: it is not in these data files.
            UpdateError: it was quantized, packed or combined with others, so its value is not stored.
        """
        if not is_utf8(name):
            raise self._unknown(name)
        data, scalar_type, sizes = self._native.value(name)
        kind = ScalarType(scalar_type)
        return np.frombuffer(data, DTYPES[kind]).reshape(sizes), kind

    def names_for_state_dict(self, tensors: Mapping[str, Any], *, strict: bool) -> list[str]:
        """The entries of a state dict to update: those that the program has, without state.

        Args:
            tensors: the state dict.
            strict: whether every tensor of the program must be updated. Otherwise at least one entry must be.

        Raises:
            UpdateError: with `strict`, the program has tensors that `tensors` lacks, that cannot be updated, or that may
                have been computed from `tensors`; without, none of `tensors` can be updated.
        """
        entries = [(_text(name), _number(value)) for name, value in tensors.items()]
        return list(self._native.choose(entries, strict))

    def check_reach(self, tensors: Mapping[str, Any], *, whole: bool = False) -> None:
        """Check that an update of these tensors reaches all loaded programs of the cache.

        Args:
            tensors: the values, of which only dtypes and shapes are used.
            whole: whether the tensors are a whole model's. Then all weights that are out of reach count; otherwise only
                weights that may be one of the tensors.

        Raises:
            UpdateError: programs have weights that do not change; the message names them.
            InvalidFileError: a program, or a record in it, is damaged.
        """
        shapes = [(_text(name), _number(value), _sizes(value)) for name, value in tensors.items()]
        self._native.check_reach(shapes, whole)

    def mismatch(self, names: Iterable[str]) -> UpdateError:
        """The error for tensors of which none can be updated; it lists those that were given and those of the programs."""
        return UpdateError(decode_text(self._native.mismatch([_text(name) for name in names])))

    def check_stored(self, origin: str) -> None:
        """Raise KeyConflictError if delegates and kernels of a program have different tensors of the same name."""
        self._native.check_stored(origin)

    def _items(self, name: str, value: Any) -> list[Item]:
        """A value as the native module takes it; of a tensor that torchao quantized, the integers and the scales."""
        if hasattr(value, "qdata") and hasattr(value, "scale") and name in self:
            scales = f"{self[name].name}.scale"
            if scales in self and self[scales].keys:
                return [*self._items(name, value.qdata), *self._items(scales, value.scale)]
        what = type(value).__name__
        try:
            data, own_layout = as_bytes(value)
        except (LayoutError, UnsupportedDataError) as error:
            reason = str(error)
            if name in self and not hasattr(value, "dtype"):
                reason = f"expected a torch tensor or a numpy array, found {what}"
            raise type(error)(f"{self._blobs.name}: {name!r}: {reason}") from None
        return [(name, data, None if own_layout is None else native_layout(own_layout), what)]

    def _unknown(self, name: object) -> KeyNotFoundError:
        return KeyNotFoundError(decode_text(self._native.unknown(_text(name))))


def _text(name: object) -> str:
    """A name as UTF-8 can have it."""
    return str(name).encode(errors="backslashreplace").decode()


def _number(value: Any) -> int:
    """The scalar type of a tensor as a number; -1 if it has none."""
    kind = scalar_type_of(value)
    return -1 if kind is None else int(kind)


def _sizes(value: Any) -> tuple[int, ...]:
    return () if scalar_type_of(value) is None else tuple(value.shape)
