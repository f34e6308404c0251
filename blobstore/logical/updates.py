"""Updates by logical tensor: from the names that a model's author knows to the blobs that have to change."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blobstore.errors import (
    InvalidFileError,
    KeyConflictError,
    KeyNotFoundError,
    LayoutError,
    UnsupportedDataError,
    UpdateError,
)
from blobstore.formats.data_map import NamedDataMap
from blobstore.formats.ptd.manifest import KEY_PREFIX
from blobstore.formats.suggestions import near, suggest
from blobstore.logical import steps
from blobstore.logical.records import STATE, Record, Records, Source, is_propagated, is_records, records_key
from blobstore.logical.steps import Plain
from blobstore.memory.buffers import same_bytes
from blobstore.memory.layout import ScalarType
from blobstore.memory.tensors import as_bytes, scalar_type_of

__all__ = ["LogicalTensor", "LogicalTensors"]

_EMBEDDED = (
    "it is a constant inside the program; give to_executorch() "
    "ExecutorchBackendConfig(external_constants=True) to have it in a data file"
)
_FLOATS = {ScalarType.HALF, ScalarType.FLOAT, ScalarType.DOUBLE, ScalarType.BFLOAT16}
_HASH_KEY = re.compile(r"(scale_)?[0-9a-f]{64}")


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor of a model, as updates take it.

    Attributes:
        name: its fully qualified name.
        scalar_type, sizes: the dtype and shape that an update has to have.
        aliases: other names of the same tensor.
        keys: the blobs that are made of it.
        needs: the tensors that have to be given together with it, because a blob is made of all of them.
        refusal: why it cannot be changed; empty if it can.
        auxiliary: a state dict need not have it: scales, which come with quantization, buffers that are not
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
    """The tensors that the records in a data map tell of, by name.

    Args:
        blobs: where the records and the blobs are.

    Raises:
        InvalidFileError: records are damaged.
        KeyConflictError: two records of one blob contradict each other.
    """

    def __init__(self, blobs: NamedDataMap) -> None:
        self._blobs = blobs
        self._records: dict[str, Record] = {}
        self._using: dict[str, list[Record]] = {}
        self._sources: dict[str, Source] = {}
        self._names: dict[str, str] = {}
        self._refusals: dict[str, str] = {}
        self._auxiliary: set[str] = set()
        ambiguous: dict[str, str] = {}
        refused: list[Record] = []
        shared: set[str] = set()
        outside: list[tuple[Source, bool]] = []
        for key in blobs:
            if key.startswith(KEY_PREFIX) and is_records(key, data := blobs.get_data(key)):
                if key != records_key(bytes(data)):
                    raise InvalidFileError(blobs.name, f"the records of a delegate do not have the digest in '{key}'")
                records = Records.parse(data, blobs.name)
                shared.update(records.shared)
                for record in records.records:
                    for source in record.sources:
                        self._know(source, ambiguous)
                    if record.refusal:
                        refused.append(record)
                    else:
                        self._add(record)
                transient = frozenset(records.transient)
                for source in records.outside:
                    self._know(source, ambiguous)
                    outside.append((source, source.name in transient))
        for record in self._records.values():
            for name in dict.fromkeys(self._names[source.name] for source in record.sources):
                self._using.setdefault(name, []).append(record)
        for name, source in self._sources.items():
            for layout in map(blobs.get_tensor_layout, self._own_keys(name)):
                if layout is not None and layout.sizes != source.sizes:
                    ambiguous[name] = _two_shapes(source.sizes, layout.sizes)
        self._refusals.update((self._names[name], reason) for name, reason in ambiguous.items())
        for name in self._refusals:
            self._using.pop(name, None)
        for record in refused:
            self._refuse(record)
        shared = {self._names.get(name, name) for name in shared}
        for name in self._sources:
            if not self._own_keys(name) and (name not in self._using or name in shared):
                self._refusals.setdefault(name, _EMBEDDED)
        self._auxiliary -= {name for name in self._auxiliary if name in self._using or self._own_keys(name)}
        self._auxiliary |= {name for name, using in self._using.items() if all(record.auxiliary for record in using)}
        persistent = {self._names[source.name] for source, transient in outside if not transient}
        self._auxiliary |= {self._names[source.name] for source, transient in outside if transient} - {*self._using}
        self._auxiliary -= {name for name in persistent if self._own_keys(name)}
        self._refuse_companions()

    def _refuse(self, record: Record) -> None:
        """Note why the sources of a record cannot be changed; state of one method may be a constant of another."""
        for name in (self._names[source.name] for source in record.sources):
            if record.refusal == STATE and (name in self._using or self._own_keys(name)):
                continue
            self._refusals.setdefault(name, record.refusal)
            if record.auxiliary:
                self._auxiliary.add(name)

    def _refuse_companions(self) -> None:
        """What is stored together with a tensor that cannot be changed cannot be changed either."""
        waiting, seen = list(self._refusals), set()
        while waiting:
            refused = waiting.pop()
            for record in self._using.get(refused, ()):
                for name in (self._names[source.name] for source in record.sources if record.key not in seen):
                    if name not in self._refusals:
                        self._refusals[name] = (
                            f"it is stored together with '{refused}', of which is known: {self._refusals[refused]}"
                        )
                        waiting.append(name)
                seen.add(record.key)

    def _add(self, record: Record) -> None:
        known = self._records.setdefault(record.key, record)
        if (known.steps, known.nbytes) != (record.steps, record.nbytes):
            raise KeyConflictError(f"{self._blobs.name}: two records tell different things of '{record.key}'")

    def _know(self, source: Source, ambiguous: dict[str, str]) -> None:
        """One tensor may be told of under several of its names, by methods that each kept another."""
        groups = dict.fromkeys(self._names[n] for n in (source.name, *source.aliases) if n in self._names)
        name, *others = groups or [source.name]
        known = self._sources.get(name, source)
        names = dict.fromkeys((name, *known.aliases))
        for more in (*(self._sources.pop(other) for other in others), source):
            names.update(dict.fromkeys((more.name, *more.aliases)))
            if more.sizes != known.sizes:
                ambiguous[name] = _two_shapes(known.sizes, more.sizes)
        self._sources[name] = replace(known, name=name, aliases=tuple(names)[1:])
        self._names.update(dict.fromkeys(names, name))

    def _own_keys(self, name: str) -> list[str]:
        """The keys of a tensor that is stored as it is."""
        return [key for key in (name, *self._sources[name].aliases) if key in self._blobs]

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
        """What of `values` are blobs under their own keys, and what are logical tensors; some are both.

        Raises:
            KeyNotFoundError: a name is neither.
            UnsupportedDataError: `values` is no mapping.
        """
        if not isinstance(values, Mapping):
            raise UnsupportedDataError(f"expected tensors by name, found a {type(values).__qualname__}")
        direct: dict[str, Any] = {}
        logical: dict[str, Any] = {}
        for name, value in values.items():
            canonical = self._names.get(name)
            if canonical is not None:
                logical[name] = value
                for key in self._own_keys(canonical):
                    if key in direct and not _is_same(direct[key], value):
                        raise UpdateError(f"'{name}' is another name of '{canonical}', but was given other values")
                    direct[key] = value
            elif name in self._blobs:
                direct[name] = value
            else:
                raise KeyNotFoundError(self._unknown(name))
        refused = [name for name in logical if self._names[name] in self._refusals]
        if refused:
            raise UpdateError(
                "; ".join(f"'{name}' cannot be updated: {self._refusals[self._names[name]]}" for name in refused)
            )
        return direct, {name: value for name, value in logical.items() if self._names[name] in self._using}

    def resolve(self, values: Mapping[str, Any], *, finite: bool = False) -> dict[str, np.ndarray]:
        """The blobs that have to change for logical tensors to have new values.

        Args:
            values: name to a torch tensor or numpy array in the model's own shape and dtype; a quantized one may be
                given as the integers that it is stored as.
            finite: refuse infinities and NaN.

        Returns:
            Key to the bytes of the blob, which may be memory of the caller's.

        Raises:
            LayoutError: a tensor has another shape or dtype.
            UpdateError: not finite; a tensor that belongs to those given is missing; two names of one tensor have
                different values.
            KeyNotFoundError: a blob is in none of the data files.
            UnsupportedDataError: not a tensor.
        """
        given: dict[str, Plain] = {}
        for name, value in values.items():
            for part, tensor in self._parts(name, value):
                self._take(given, part, tensor, finite)
        records = {record.key: record for name in given for record in self._using[name]}
        made: dict[str, np.ndarray] = {}

        def lookup(key: str) -> memoryview:
            return made[key].reshape(-1).view(np.uint8).data if key in made else self._blobs.get_data(key)

        # scales first: what is quantized in the same update uses them
        for record in sorted(records.values(), key=lambda record: not record.auxiliary):
            sources = [self._names[source.name] for source in record.sources]
            missing = sorted(set(sources) - set(given))
            if missing:
                present = sorted(set(sources) & set(given))
                raise UpdateError(
                    f"{_list(present)} cannot be updated without {_list(missing)}: the delegate has them combined in "
                    f"one blob, '{record.key}'"
                )
            if record.key not in self._blobs:
                raise KeyNotFoundError(
                    f"{self._blobs.name}: blob '{record.key}' of {_list(s.name for s in record.sources)} is in none of "
                    "these data files"
                )
            for name, source in zip(sources, record.sources, strict=True):
                if not steps.accepts(record, source, given[name][1]):
                    found = given[name][1].name.lower()
                    raise LayoutError(
                        f"'{source.name}' is {source.scalar_type.name.lower()}{list(source.sizes)}, the new one is {found}"
                    )
            made[record.key] = steps.store(record, [given[name] for name in sources], lookup)
        return made

    def value(self, name: str) -> Plain:
        """A tensor as it is stored now, in its own shape, and in the dtype that it is stored in.

        Args:
            name: of a tensor, or a key with a layout.

        Returns:
            A view of the blob's memory, unless its order of dimensions has to be changed.

        Raises:
            KeyNotFoundError: it is not in these data files.
            UpdateError: it was quantized, packed or combined with others, so that it is not there any more.
        """
        if not isinstance(name, str):
            raise KeyNotFoundError(self._unknown(name))
        canonical = self._names.get(name, name)
        for key in self._own_keys(canonical) if canonical in self._sources else [canonical]:
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
        """A copy of a value for a logical tensor, checked as far as it can be alone.

        Raises:
            LayoutError, UnsupportedDataError: as for `resolve`.
        """
        for part, tensor in self._parts(name, value):
            self._take({}, part, tensor, finite=False)
        return value.detach().clone() if hasattr(value, "detach") else np.array(value)

    def names_for_state_dict(self, tensors: Mapping[str, Any], *, strict: bool) -> list[str]:
        """Which entries of a state dict to update: those that the program has, but for state.

        Raises:
            UpdateError: with `strict`, the program has tensors that are not among `tensors` or cannot be updated, or
                has some that may have been computed from these; without, none of `tensors` can be updated.
        """
        if strict:
            self._check_propagated(tensors)
        nameless = [name for name in self._refusals if name.startswith("_frozen_param")]
        if nameless and strict:
            raise UpdateError(f"{_list(nameless)} cannot be updated: {self._refusals[nameless[0]]}")
        available = dict.fromkeys(tensors)
        chosen: list[str] = []
        missing: list[str] = []
        refused: list[str] = []
        for name, source in self._sources.items():
            found = [other for other in (name, *source.aliases) if other in available]
            if name in self._refusals and (not strict or self._refusals[name] == STATE):
                continue
            if found:
                chosen += found  # all names of a tied tensor: they must not contradict each other
            elif name in self._auxiliary:
                continue
            elif (reason := self._refusals.get(name, _EMBEDDED)) != _EMBEDDED:
                refused.append(f"'{name}' cannot be updated: {reason}")
            elif name in self._using or self._own_keys(name):
                missing.append(name)
        if refused:
            raise UpdateError("; ".join(refused))
        if missing and strict:
            hint = self._hint(available) or self._misspelt(available, missing)
            raise UpdateError(f"the state dict lacks {_list(missing)}, which the program has{hint}")
        chosen += [name for name in available if name not in self._names and name in self._blobs]
        if available and not chosen:
            raise self.mismatch(available)
        return chosen

    def _check_propagated(self, tensors: Mapping[str, Any]) -> None:
        computed = dict.fromkeys(name for name in (*self._refusals, *self._keys()) if is_propagated(name))
        gone = [
            name
            for name, value in tensors.items()
            if name not in self and name not in self._blobs and scalar_type_of(value) in _FLOATS
        ]
        if computed and gone:
            raise UpdateError(
                f"{self._blobs.name}: no program has {_some(gone)}, and {_some(computed)} may have been computed from "
                "them: lower the model without constant_prop_pass()"
            )

    def mismatch(self, names: Iterable[str]) -> UpdateError:
        """The error for tensors of which none can be updated: what was given, and what there is."""
        given = list(names)
        reasons = {name: self._refusals.get(self._names.get(name, name), "") for name in given}
        refused = [f"'{name}': {reason}" for name, reason in reasons.items() if reason]
        own = [name for name in self._sources if name not in self._refusals] or list(self._keys())
        return UpdateError(
            f"{self._blobs.name}: none of the tensors given can be updated"
            + (f" ({'; '.join(refused)})" if refused else "")
            + f": given are {_some(given)}, the programs have {_some(own) or 'none with a name'}"
            + (self._hint(given) or suggest(given[0], own))
        )

    def _keys(self) -> Iterable[str]:
        return (key for key in self._blobs if not key.startswith(KEY_PREFIX) and "@" not in key)

    def _similar(self, name: str) -> list[str]:
        """Names of tensors that differ from `name` in what is in front, or in what wrappers put in between."""
        plain = _unwrapped(name)
        known = dict.fromkeys((*self._names, *self._keys()))
        return [
            other
            for other in known
            if other != name and (other.endswith(f".{name}") or name.endswith(f".{other}") or other == plain)
        ]

    def _hint(self, names: Iterable[str]) -> str:
        """What an unknown name may have been meant for."""
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
        """Refuse tensors of one name of which a delegate has one and a kernel reads another.

        Args:
            origin: what messages call the program that was lowered to these data files.

        Raises:
            KeyConflictError: what a delegate's blob was made of is not what the file has by the same name.
        """
        for record in self._records.values():
            if record.key not in self._blobs or any(self._names[s.name] in self._refusals for s in record.sources):
                continue
            values = [value for source in record.sources if (value := self._stored(source)) is not None]
            if len(values) == len(record.sources):
                made = steps.store(record, values, self._blobs.get_data).reshape(-1).view(np.uint8).data
                if not same_bytes(made, self._blobs.get_data(record.key)):
                    raise KeyConflictError(
                        f"{origin}: {_list(source.name for source in record.sources)} of one method, which is delegated, "
                        "and of another, which is not, are different: export them from modules that call them "
                        "differently (docs/lowering.md)"
                    )

    def _stored(self, source: Source) -> Plain | None:
        for key in self._own_keys(self._names[source.name]):
            layout = self._blobs.get_tensor_layout(key)
            if layout is not None and layout.scalar_type == source.scalar_type:
                return steps.from_blob(self._blobs.get_data(key), layout)
        return None

    def _parts(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """A tensor; or, of one that torchao quantized, its integers and its scales."""
        scales = f"{self._names[name]}.scale"
        if hasattr(value, "qdata") and hasattr(value, "scale") and scales in self._using:
            return [(name, value.qdata), (scales, value.scale)]
        return [(name, value)]

    def _take(self, given: dict[str, Plain], name: str, value: Any, finite: bool) -> None:
        source = self._sources[self._names[name]]
        tensor = steps.plain(value)
        if tensor[0].shape != source.sizes:
            raise LayoutError(f"'{name}' has shape {list(source.sizes)}, the new one has {list(tensor[0].shape)}")
        if finite and not steps.check_finite(tensor):
            raise UpdateError(f"'{name}' has values that are not finite")
        other = given.get(source.name)
        if other is not None and (other[1] != tensor[1] or other[0].tobytes() != tensor[0].tobytes()):
            raise UpdateError(f"'{name}' is another name of '{source.name}', but was given other values")
        given[source.name] = tensor

    def _unknown(self, name: str) -> str:
        return self._reason(name) + (self._hint([name]) or suggest(name, [*self._names, *self._keys()]))

    def _reason(self, name: str) -> str:
        where = self._blobs.name
        if not self._records and any(_HASH_KEY.fullmatch(key) for key in self._blobs):
            return (
                f"{where}: '{name}' cannot be updated by name: the weights' keys are hashes of their contents, as "
                "ExecuTorch's own lowering makes them; lower the model with blobstore.lowering.BlobStorePartitioner"
            )
        if not self._records:
            return f"{where}: no key {name!r}, and no records that would tell of tensors by name"
        return f"{where}: no key and no tensor {name!r}"


def _two_shapes(one: tuple[int, ...], other: tuple[int, ...]) -> str:
    return (
        f"programs have tensors of different shapes by this name, {list(one)} and {list(other)}; open a cache for each"
    )


def _is_same(one: Any, other: Any) -> bool:
    try:
        (left, kind), (right, other_kind) = steps.plain(one), steps.plain(other)
    except UnsupportedDataError:  # bytes of a key
        return same_bytes(as_bytes(one)[0], as_bytes(other)[0])
    return (kind, left.shape) == (other_kind, right.shape) and same_bytes(as_bytes(left)[0], as_bytes(right)[0])


def _unwrapped(name: str) -> str:
    """A name without what data parallelism, compilation and outer modules add to it."""
    return ".".join(part for part in name.split(".") if part not in {"module", "model", "_orig_mod"})


def _some(names: Iterable[str], last: str = "and") -> str:
    """At most five names."""
    every = list(names)
    if len(every) > 5:
        return f"{_list(every[:5])} and {len(every) - 5} others"
    return f" {last} ".join(f"'{name}'" for name in every) if len(every) < 3 else _list(every)


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
