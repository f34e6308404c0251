"""Updates by logical tensor: from the names that a model's author knows to the blobs that have to change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from blobstore.data_map import NamedDataMap
from blobstore.errors import (
    InvalidFileError,
    KeyConflictError,
    KeyNotFoundError,
    LayoutError,
    UnsupportedDataError,
    UpdateError,
)
from blobstore.layout import ScalarType
from blobstore.lowering import layouts
from blobstore.lowering.layouts import Plain
from blobstore.lowering.records import Record, Records, Source, is_records, records_key
from blobstore.ptd.manifest import KEY_PREFIX

__all__ = ["LogicalTensor", "LogicalTensors"]

_EMBEDDED = (
    "it is a constant inside the program; give to_executorch() "
    "ExecutorchBackendConfig(external_constants=True) to have it in a data file"
)
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
        auxiliary: it is no tensor of the model but belongs to its quantization, such as scales.
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
        shared: set[str] = set()
        for key in blobs:
            if key.startswith(KEY_PREFIX) and is_records(key, data := blobs.get_data(key)):
                if key != records_key(bytes(data)):
                    raise InvalidFileError(blobs.name, f"the records of a delegate do not have the digest in '{key}'")
                records = Records.parse(data, blobs.name)
                shared.update(records.shared)
                for record in records.records:
                    self._add(record)
                for source in records.outside:
                    self._know(source)
        for name, source in self._sources.items():
            if (name not in self._using or name in shared) and not any(key in blobs for key in (name, *source.aliases)):
                self._refusals.setdefault(name, _EMBEDDED)
        self._refuse_companions()

    def _refuse_companions(self) -> None:
        """What is stored together with a tensor that cannot be changed cannot be changed either."""
        waiting, seen = list(self._refusals), set()
        while waiting:
            refused = waiting.pop()
            for record in self._using.get(refused, ()):
                for source in record.sources if record.key not in seen else ():
                    if source.name not in self._refusals:
                        self._refusals[source.name] = (
                            f"it is stored together with '{refused}', of which is known: {self._refusals[refused]}"
                        )
                        waiting.append(source.name)
                seen.add(record.key)

    def _add(self, record: Record) -> None:
        for source in record.sources:
            self._know(source)
        if record.refusal:
            for source in record.sources:
                self._refusals.setdefault(source.name, record.refusal)
            return
        known = self._records.setdefault(record.key, record)
        if known is record:
            for source in record.sources:
                self._using.setdefault(source.name, []).append(record)
        elif (known.steps, known.nbytes) != (record.steps, record.nbytes):
            raise KeyConflictError(f"{self._blobs.name}: two records tell different things of '{record.key}'")

    def _know(self, source: Source) -> None:
        self._sources.setdefault(source.name, source)
        for name in (source.name, *source.aliases):
            self._names.setdefault(name, source.name)

    def __getitem__(self, name: str) -> LogicalTensor:
        name = self._names[name]
        source, records = self._sources[name], self._using.get(name, [])
        needs = {other.name for record in records for other in record.sources} - {name}
        return LogicalTensor(
            name=name,
            scalar_type=source.scalar_type,
            sizes=source.sizes,
            aliases=source.aliases,
            keys=tuple(record.key for record in records),
            needs=tuple(sorted(needs)),
            refusal=self._refusals.get(name, ""),
            auxiliary=bool(records) and all(record.auxiliary for record in records),
        )

    def __iter__(self) -> Any:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._names

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
                for key in (canonical, *self._sources[canonical].aliases):
                    if key in self._blobs:
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
            missing = sorted({source.name for source in record.sources} - set(given))
            if missing:
                present = sorted({source.name for source in record.sources} & set(given))
                raise UpdateError(
                    f"{_list(present)} cannot be updated without {_list(missing)}: the delegate has them combined in "
                    f"one blob, '{record.key}'"
                )
            if record.key not in self._blobs:
                raise KeyNotFoundError(
                    f"{self._blobs.name}: blob '{record.key}' of {_list(s.name for s in record.sources)} is in none of "
                    "these data files"
                )
            for source in record.sources:
                if not layouts.accepts(record, source, given[source.name][1]):
                    found = given[source.name][1].name.lower()
                    raise LayoutError(
                        f"'{source.name}' is {source.scalar_type.name.lower()}{list(source.sizes)}, the new one is {found}"
                    )
            made[record.key] = layouts.store(record, [given[source.name] for source in record.sources], lookup)
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
        canonical = self._names.get(name, name)
        source = self._sources.get(canonical)
        for key in (canonical, *(source.aliases if source else ())):
            if key in self._blobs and (layout := self._blobs.get_tensor_layout(key)) is not None:
                return layouts.from_blob(self._blobs.get_data(key), layout)
        records = [record for record in self._using.get(canonical, ()) if record.key in self._blobs]
        for number, record in enumerate(records, 1):
            try:
                return layouts.restore(record, self._blobs.get_data(record.key))
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

    def names_for_state_dict(self, names: Iterable[str], *, strict: bool) -> list[str]:
        """Which entries of a state dict to update: those that the program has.

        Raises:
            UpdateError: with `strict`, the program has tensors that are not among `names`.
        """
        nameless = [name for name in self._refusals if name.startswith("_frozen_param")]
        if nameless and strict:
            raise UpdateError(f"{_list(nameless)} cannot be updated: {self._refusals[nameless[0]]}")
        available = set(names)
        chosen: list[str] = []
        missing: list[str] = []
        for name, source in self._sources.items():
            found = [other for other in (name, *source.aliases) if other in available]
            if found:
                if strict or name not in self._refusals:
                    chosen.append(found[0])
            elif name in self._using and not all(record.auxiliary for record in self._using[name]):
                missing.append(name)
        if missing and strict:
            raise UpdateError(f"the state dict lacks {_list(missing)}, which the program has")
        known = set(self._names)
        chosen += [name for name in available - known if name in self._blobs]
        return chosen

    def _parts(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """A tensor; or, of one that torchao quantized, its integers and its scales."""
        scales = f"{self._names[name]}.scale"
        if hasattr(value, "qdata") and hasattr(value, "scale") and scales in self._using:
            return [(name, value.qdata), (scales, value.scale)]
        return [(name, value)]

    def _take(self, given: dict[str, Plain], name: str, value: Any, finite: bool) -> None:
        source = self._sources[self._names[name]]
        tensor = layouts.plain(value)
        if tensor[0].shape != source.sizes:
            raise LayoutError(f"'{name}' has shape {list(source.sizes)}, the new one has {list(tensor[0].shape)}")
        if finite and not layouts.check_finite(tensor):
            raise UpdateError(f"'{name}' has values that are not finite")
        other = given.get(source.name)
        if other is not None and (other[1] != tensor[1] or other[0].tobytes() != tensor[0].tobytes()):
            raise UpdateError(f"'{name}' is another name of '{source.name}', but was given other values")
        given[source.name] = tensor

    def _unknown(self, name: str) -> str:
        where = self._blobs.name
        if not self._records and any(_HASH_KEY.fullmatch(key) for key in self._blobs):
            return (
                f"{where}: '{name}' cannot be updated by name: the weights' keys are hashes of their contents, as "
                "ExecuTorch's own lowering makes them; lower the model with blobstore.lowering.BlobStorePartitioner"
            )
        if not self._records:
            return f"{where}: no key {name!r}, and no records that would tell of tensors by name"
        return f"{where}: no key and no tensor {name!r}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
