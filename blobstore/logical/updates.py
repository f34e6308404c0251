"""Updates by logical tensor: from the names that a model's author knows to the blobs that must change."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.errors import (
    KeyConflictError,
    KeyNotFoundError,
    LayoutError,
    UnsupportedDataError,
    UpdateError,
)
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.keys import KEY_PREFIX, near, suggest
from blobstore.logical import steps
from blobstore.logical.index import EMBEDDED, Index
from blobstore.logical.records import STATE, Record, Source, is_propagated
from blobstore.logical.steps import Plain, same_tensors
from blobstore.memory.buffers import same_bytes
from blobstore.memory.dtypes import FLOATS
from blobstore.memory.layout import ScalarType
from blobstore.memory.tensors import as_bytes, scalar_type_of
from blobstore.text import quoted

__all__ = ["LogicalTensor", "LogicalTensors"]

_HASH_KEY = re.compile(r"(scale_)?[0-9a-f]{64}")


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of a model, as updates take it.

    Attributes:
        name: its fully qualified name.
        scalar_type, sizes: the dtype and the shape that an update must have.
        aliases: other names of the same tensor.
        keys: the keys of the blobs that are made of it.
        needs: the tensors that must be updated together with it, because a blob is made of all of them.
        refusal: why it cannot be changed; empty if it can.
        auxiliary: whether a state dict may lack it: scales, which come with quantization, buffers that are not
            persistent, and state, which the program changes itself.
    """

    name: str
    scalar_type: ScalarType
    sizes: tuple[int, ...]
    aliases: tuple[str, ...]
    keys: tuple[str, ...]
    needs: tuple[str, ...]
    refusal: str
    auxiliary: bool


class LogicalTensors(Mapping[str, LogicalTensor]):
    """The tensors that the records in a data map describe, by name.

    Args:
        blobs: the data map, with the records and the blobs.

    Raises:
        InvalidFileError: records are damaged.
        KeyConflictError: two records of one blob contradict each other.
    """

    def __init__(self, blobs: NamedDataMap) -> None:
        self._blobs = blobs
        self._index = index = Index(blobs)
        self._names, self._sources, self._records = index.names, index.sources, index.records
        self._using, self._refusals, self._auxiliary = index.using, index.refusals, index.auxiliary

    def __getitem__(self, name: str) -> LogicalTensor:
        if name not in self:
            raise KeyNotFoundError(self._unknown(name))
        name = self._names[name]
        source, records = self._sources[name], self._using.get(name, [])
        needs = {self._names[other.name] for record in records for other in record.sources} - {name}
        return LogicalTensor(
            name=name,
            scalar_type=source.scalar_type,
            sizes=source.sizes,
            aliases=source.aliases,
            keys=tuple(record.key for record in records),
            needs=tuple(sorted(needs)),
            refusal=self._refusals.get(name, ""),
            auxiliary=name in self._auxiliary,
        )

    def __iter__(self) -> Any:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._names

    def __repr__(self) -> str:
        return f"<LogicalTensors of {self._blobs.name}: {len(self):,} tensors, {len(self._refusals):,} of them fixed>"

    def split(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split `values` into blobs by key and logical tensors by name; some are both.

        Raises:
            KeyNotFoundError: a name is neither.
            UpdateError: a tensor cannot be updated, or two of its names have different values.
            UnsupportedDataError: `values` is not a mapping.
        """
        if not isinstance(values, Mapping):
            raise UnsupportedDataError(f"expected tensors by name, found a {type(values).__qualname__}")
        direct: dict[str, Any] = {}
        logical: dict[str, Any] = {}
        for name, value in values.items():
            canonical = self._names.get(name)
            if canonical is not None:
                logical[name] = value
                for key in self._index.own_keys(canonical):
                    if key in direct and not _is_same(direct[key], value):
                        raise UpdateError(_two_values(name, canonical))
                    direct[key] = value
            elif name in self._blobs:
                direct[name] = value
            else:
                raise KeyNotFoundError(self._unknown(name))
        refused = [name for name in logical if self._names[name] in self._refusals]
        if refused:
            raise UpdateError("; ".join(self._cannot(name, self._refusals[self._names[name]]) for name in refused))
        return direct, {name: value for name, value in logical.items() if self._names[name] in self._using}

    def resolve(self, values: Mapping[str, Any], *, finite: bool = False) -> dict[str, np.ndarray]:
        """The new contents of the blobs that are made of logical tensors.

        Args:
            values: by name, torch tensors or numpy arrays in the model's own shapes and dtypes. A quantized tensor may
                also be given as the integers that are stored.
            finite: refuse infinities and NaN.

        Returns:
            The contents of each blob, by key. An array may be a view of the caller's memory.

        Raises:
            LayoutError: a tensor has another shape or dtype.
            UpdateError: a value is not finite, a tensor is missing that a blob also needs, or two names of one tensor
                have different values.
            KeyNotFoundError: a blob is in none of the data files.
            UnsupportedDataError: a value is not a tensor.
        """
        given: dict[str, Plain] = {}
        for name, value in values.items():
            for part, tensor in self._parts(name, value):
                self._take(given, part, tensor, finite)
        records = {record.key: record for name in given for record in self._using[name]}
        made: dict[str, np.ndarray] = {}

        def lookup(key: str) -> memoryview:
            return steps.raw(made[key]) if key in made else self._blobs.get_data(key)

        # scales first, because weights in the same update are quantized with them
        for record in sorted(records.values(), key=lambda record: not record.auxiliary):
            self._check_complete(record, given)
            tensors = [given[self._names[source.name]] for source in record.sources]
            for source, (_, kind) in zip(record.sources, tensors, strict=True):
                if not steps.accepts(record, source, kind):
                    expected = f"{source.scalar_type.name.lower()}{list(source.sizes)}"
                    raise LayoutError(f"'{source.name}' is {expected}, the new one is {kind.name.lower()}")
            made[record.key] = steps.store(record, tensors, lookup)
        return made

    def _check_complete(self, record: Record, given: Mapping[str, Plain]) -> None:
        """Check that all tensors that a blob is made of were given, and that the blob is there."""
        sources = {self._names[source.name] for source in record.sources}
        if missing := sorted(sources - given.keys()):
            raise UpdateError(
                f"{quoted(sorted(sources & given.keys()))} cannot be updated without {quoted(missing)}: the delegate has "
                f"them combined in one blob, '{record.key}'"
            )
        if record.key not in self._blobs:
            raise KeyNotFoundError(
                f"{self._blobs.name}: blob '{record.key}' of {quoted(s.name for s in record.sources)} is in none of "
                "these data files"
            )

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
        if not isinstance(name, str):
            raise KeyNotFoundError(self._unknown(name))
        canonical = self._names.get(name, name)
        for key in self._index.own_keys(canonical) if canonical in self._sources else [canonical]:
            if key in self._blobs and (layout := self._blobs.get_tensor_layout(key)) is not None:
                return steps.from_blob(self._blobs.get_data(key), layout)
        records = [record for record in self._using.get(canonical, ()) if record.key in self._blobs]
        for number, record in enumerate(records, 1):
            try:
                return steps.restore(record, self._blobs.get_data(record.key))
            except UpdateError:
                if number == len(records):
                    raise
        raise KeyNotFoundError(self._unknown(name))

    def copy(self, name: str, value: Any) -> np.ndarray | Any:
        """A copy of a value for a logical tensor, after the checks that need no other tensor.

        Raises:
            LayoutError, UnsupportedDataError: as for `resolve`.
        """
        for part, tensor in self._parts(name, value):
            self._take({}, part, tensor, finite=False)
        return value.detach().clone() if hasattr(value, "detach") else np.array(value)

    def names_for_state_dict(self, tensors: Mapping[str, Any], *, strict: bool) -> list[str]:
        """The entries of a state dict to update: those that the program has, without state.

        Args:
            tensors: the state dict.
            strict: whether every tensor of the program must be updated. Otherwise at least one entry must be.

        Raises:
            UpdateError: with `strict`, the program has tensors that `tensors` lacks, that cannot be updated, or that may
                have been computed from `tensors`; without, none of `tensors` can be updated.
        """
        if strict:
            self._check_propagated(tensors)
            self._check_frozen()
        available = dict.fromkeys(tensors)
        chosen: list[str] = []
        missing: list[str] = []
        refused: list[str] = []
        for name, source in self._sources.items():
            found = [other for other in (name, *source.aliases) if other in available]
            if name in self._refusals and (not strict or self._refusals[name] == STATE):
                continue
            if found:
                chosen += found  # all names of a tied tensor: their values must be equal
            elif name in self._auxiliary:
                continue
            elif (reason := self._refusals.get(name, EMBEDDED)) != EMBEDDED:
                refused.append(self._cannot(name, reason))
            elif name in self._using or self._index.own_keys(name):
                missing.append(name)
        if refused:
            raise UpdateError("; ".join(refused))
        if missing and strict:
            hint = self._hint(available) or self._misspelt(available, missing)
            raise UpdateError(f"the state dict lacks {quoted(missing)}, which the program has{hint}")
        chosen += [name for name in available if name not in self._names and name in self._blobs]
        if available and not chosen:
            raise self.mismatch(available)
        return chosen

    @staticmethod
    def _cannot(name: str, reason: str) -> str:
        return f"'{name}' cannot be updated: {reason}"

    def _check_frozen(self) -> None:
        """Refuse weights that lost their names when they were quantized."""
        frozen = [name for name in self._refusals if name.startswith("_frozen_param")]
        if frozen:
            raise UpdateError(f"{quoted(frozen)} cannot be updated: {self._refusals[frozen[0]]}")

    def _check_propagated(self, tensors: Mapping[str, Any]) -> None:
        """Refuse tensors that the program may only have computed others from, before it was lowered."""
        computed = dict.fromkeys(name for name in (*self._refusals, *self._keys()) if is_propagated(name))
        gone = [
            name
            for name, value in tensors.items()
            if name not in self and name not in self._blobs and scalar_type_of(value) in FLOATS
        ]
        if computed and gone:
            raise UpdateError(
                f"{self._blobs.name}: no program has {_some(gone)}, and {_some(computed)} may have been computed from "
                "them: lower the model without constant_prop_pass()"
            )

    def mismatch(self, names: Iterable[str]) -> UpdateError:
        """The error for tensors of which none can be updated; it lists those that were given and those of the programs."""
        given = list(names)
        reasons = {name: self._refusals.get(self._names.get(name, name), "") for name in given}
        refused = [f"'{name}': {reason}" for name, reason in reasons.items() if reason]
        own = [name for name in self._sources if name not in self._refusals] or list(self._keys())
        return UpdateError(
            f"{self._blobs.name}: none of the tensors given can be updated"
            + (f" ({'; '.join(refused)})" if refused else "")
            + f": found {_some(given)}, the programs have {_some(own) or 'none with a name'}{self._hint(given) or suggest(given[0], own)}"
        )

    def _keys(self) -> Iterable[str]:
        return (key for key in self._blobs if not key.startswith(KEY_PREFIX) and "@" not in key)

    def _similar(self, name: str) -> list[str]:
        """Names of tensors that differ from `name` only in prefixes, or in what wrappers of modules insert."""
        plain = _unwrapped(name)
        known = dict.fromkeys((*self._names, *self._keys()))
        return [
            other
            for other in known
            if other != name and (other.endswith(f".{name}") or name.endswith(f".{other}") or other == plain)
        ]

    def _hint(self, names: Iterable[str]) -> str:
        """The end of a message: names that an unknown name may stand for."""
        for name in names:
            if (
                isinstance(name, str)
                and name not in self
                and name not in self._blobs
                and (similar := self._similar(name))
            ):
                return f"; '{name}' may be {_some(similar, 'or')} here"
        return ""

    def _misspelt(self, names: Iterable[str], missing: Collection[str]) -> str:
        """Which unknown name may have been meant for a missing one."""
        for name in names:
            if name not in self and name not in self._blobs and (found := near(name, missing)):
                return f"; '{name}' may be {_some(found, 'or')} here"
        return ""

    def check_stored(self, origin: str) -> None:
        """Check that delegates and kernels have the same tensor where they have one of the same name.

        Args:
            origin: the name of the program that was lowered to these data files, for messages.

        Raises:
            KeyConflictError: the tensor in a data file does not give the blob of the delegate.
        """
        for record in self._records.values():
            if record.key not in self._blobs or any(self._names[s.name] in self._refusals for s in record.sources):
                continue
            values = [value for source in record.sources if (value := self._stored(source)) is not None]
            if len(values) == len(record.sources):
                made = steps.raw(steps.store(record, values, self._blobs.get_data))
                if not same_bytes(made, self._blobs.get_data(record.key)):
                    raise KeyConflictError(
                        f"{origin}: a method that is delegated and one that is not have different tensors with the name "
                        f"{quoted(source.name for source in record.sources)}: export the methods from modules that use "
                        "different names (docs/lowering.md)"
                    )

    def _stored(self, source: Source) -> Plain | None:
        """The tensor that a data file has under its own key; None if there is none of its dtype."""
        for key in self._index.own_keys(self._names[source.name]):
            layout = self._blobs.get_tensor_layout(key)
            if layout is not None and layout.scalar_type == source.scalar_type:
                return steps.from_blob(self._blobs.get_data(key), layout)
        return None

    def _parts(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """The tensor itself, or the integers and the scales of a tensor that torchao quantized."""
        scales = f"{self._names[name]}.scale"
        if hasattr(value, "qdata") and hasattr(value, "scale") and scales in self._using:
            return [(name, value.qdata), (scales, value.scale)]
        return [(name, value)]

    def _take(self, given: dict[str, Plain], name: str, value: Any, finite: bool) -> None:
        """Check a value and add it to those that were given."""
        source = self._sources[self._names[name]]
        tensor = steps.plain(value)
        if tensor[0].shape != source.sizes:
            raise LayoutError(f"'{name}' has shape {list(source.sizes)}, the new one has {list(tensor[0].shape)}")
        if finite and not steps.check_finite(tensor):
            raise UpdateError(f"'{name}' has values that are not finite")
        other = given.get(source.name)
        if other is not None and not same_tensors(other, tensor):
            raise UpdateError(_two_values(name, source.name))
        given[source.name] = tensor

    def _unknown(self, name: str) -> str:
        return self._reason(name) + (self._hint([name]) or suggest(name, [*self._names, *self._keys()]))

    def _reason(self, name: str) -> str:
        where = self._blobs.name
        if not self._records and any(_HASH_KEY.fullmatch(key) for key in self._blobs):
            return (
                f"{where}: '{name}' cannot be updated by name: the keys of the weights are hashes of their contents, "
                "as in ExecuTorch's own lowering; lower the model with blobstore.lowering.BlobStorePartitioner"
            )
        if not self._records:
            return f"{where}: no key {name!r}, and no records of tensors"
        return f"{where}: no key and no tensor {name!r}"


def _two_values(name: str, canonical: str) -> str:
    return f"'{name}' is another name of '{canonical}', but was given other values"


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values for a key are equal; each is a tensor, or bytes."""
    try:
        return same_tensors(steps.plain(one), steps.plain(other))
    except UnsupportedDataError:  # bytes
        return same_bytes(as_bytes(one)[0], as_bytes(other)[0])


def _unwrapped(name: str) -> str:
    """A name without what data parallelism, compilation and outer modules insert."""
    return ".".join(part for part in name.split(".") if part not in {"module", "model", "_orig_mod"})


def _some(names: Iterable[str], last: str = "and") -> str:
    """At most five names, quoted; two of them with `last` in between."""
    every = list(names)
    return f" {last} ".join(map(quoted, ([name] for name in every))) if len(every) < 3 else quoted(every, most=5)
