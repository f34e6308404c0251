"""Which weights of loaded programs an update by name does not reach, because the programs do not take them from the cache.

A program may contain weights, as constants or for its delegates; another backend may have packed them; ExecuTorch's own
runtime may read them from its own map of the data file. An update changes none of these, so an update that must change
all weights is refused. A constant in a program has no name, so it is recognized by its dtype and shape.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from blobstore.formats.keys import is_content_key
from blobstore.formats.payload import split
from blobstore.formats.pte.parts import DelegatePayload
from blobstore.formats.pte.program import ProgramFile
from blobstore.logical.records import Records, is_records
from blobstore.logical.updates import LogicalTensors
from blobstore.memory.dtypes import FLOATS
from blobstore.memory.layout import ScalarType
from blobstore.memory.tensors import scalar_type_of
from blobstore.text import quoted

__all__ = ["LoadedProgram", "out_of_reach"]

Shape = tuple[ScalarType, tuple[int, ...]]

_OWN_BACKEND = "BlobStoreBackend"
_QUANTIZED = {ScalarType.CHAR, ScalarType.BYTE}
_TRAINING = "__et_training_"
_HASH = re.compile(rb"(?:scale_)?[0-9a-f]{64}")

_EXTERNAL = (
    "pass ExecutorchBackendConfig(external_constants=True) to to_executorch(), and no keep_small to save_programs()"
)


@dataclass(frozen=True)
class _Nameless:
    """A tensor that a method has without a name of the model: a constant, or an external tensor keyed by its contents."""

    method: str
    shape: Shape
    inside: bool


@dataclass(frozen=True)
class _Foreign:
    """A delegate of another backend, which packs weights without blobstore.

    Attributes:
        method: the method that calls it.
        backend: its backend.
        count: the number of its constants; None if that cannot be known.
        sizes: their sizes in bytes; empty unless all are known.
    """

    method: str
    backend: str
    count: int | None
    sizes: frozenset[int] = frozenset()


class LoadedProgram:
    """A program that is loaded on a cache.

    Args:
        path: its file, for messages.
        read: opens the file; returns None if ExecuTorch's own runtime loaded the program and its file is not known.
        tensors: returns the tensors that the records of the cache describe.
        keys: returns the keys of the cache.
        follows: whether the program's external tensor of a key changes with the cache.
        own: if the file is not known, the keys of the blobs that the program's delegates take, from any source.
    """

    def __init__(
        self,
        path: Path | str,
        read: Callable[[], ProgramFile | None],
        tensors: Callable[[], LogicalTensors],
        keys: Callable[[], Iterable[str]],
        follows: Callable[[str], bool] = lambda key: True,
        own: Iterable[str] = (),
    ) -> None:
        self.path = path
        self._read = read
        self._make_tensors = tensors
        self._make_keys = keys
        self._follows = follows
        self._own = frozenset(own)

    @cached_property
    def _file(self) -> ProgramFile | None:
        return self._read()

    @cached_property
    def _tensors(self) -> LogicalTensors:
        return self._make_tensors()

    @cached_property
    def _keys(self) -> frozenset[str]:
        return frozenset(self._make_keys())

    @cached_property
    def _externals(self) -> dict[str, str]:
        """The keys of the tensors that the program itself takes from data files, each with a method that takes it."""
        if self._file is None:  # then it may take any of them
            known = (name for tensor in self._tensors.values() for name in (tensor.name, *tensor.aliases))
            return {name: "" for name in known if name in self._keys}
        return {tensor.key: tensor.use.method for tensor in self._file.externals if tensor.key in self._keys}

    @cached_property
    def _nameless(self) -> list[_Nameless]:
        if self._file is None:
            return []
        found: dict[_Nameless | tuple[int, _Nameless], _Nameless] = {}
        for number, item in enumerate(self._file.tensors):
            for use in item.uses if item.kind == "constant" else ():
                if use.layout is not None:
                    one = _Nameless(use.method, (use.layout.scalar_type, use.layout.sizes), inside=True)
                    found[number, one] = one
        for tensor in self._file.externals:
            if is_content_key(tensor.key) and tensor.layout is not None and not tensor.mutable:
                one = _Nameless(tensor.use.method, (tensor.layout.scalar_type, tensor.layout.sizes), inside=False)
                found[one] = one
        return list(found.values())

    @cached_property
    def _delegates(self) -> tuple[dict[str, str], list[_Foreign]]:
        """The keys that delegates of blobstore take, each with a method; and the delegates of other backends."""
        if self._file is None:
            return dict.fromkeys(self._own, ""), []
        own: dict[str, str] = {}
        foreign: list[_Foreign] = []
        for delegate in self._file.delegates:
            payload = self._file.data[delegate.span.start : delegate.span.stop]
            if delegate.backend == _OWN_BACKEND:
                own.update((constant.key, delegate.method) for constant in split(payload)[2])
            elif (other := self._foreign(delegate, payload)).count != 0:
                foreign.append(other)
        return own, foreign

    def _foreign(self, delegate: DelegatePayload, payload: memoryview) -> _Foreign:
        # XNNPACK's header: 4 bytes, a magic of 4, the header's length (2), offset and size of the flatbuffer (4, 4) and of
        # constants behind it (4, 8). Other constants are named by the hash of their contents.
        if delegate.backend != "XnnpackBackend" or bytes(payload[4:8]) != b"XH00":
            return _Foreign(delegate.method, delegate.backend, None)
        if int.from_bytes(payload[22:30], "little"):
            return _Foreign(delegate.method, delegate.backend, None)
        keys = {match.decode() for match in _HASH.findall(payload)}
        inside = {blob.key: blob.span.size for blob in self._file.named_data} if self._file is not None else {}
        sizes = frozenset(inside[key] for key in keys if key in inside)
        known = all(key in inside for key in keys)
        return _Foreign(delegate.method, delegate.backend, len(keys), sizes if known else frozenset())

    @cached_property
    def _names_of_embedded(self) -> dict[str, tuple[str, ...]]:
        """By key, the tensors behind the blobs of delegates that the program contains, from the records in the program."""
        names: dict[str, tuple[str, ...]] = {}
        for blob in self._file.named_data if self._file is not None else ():
            data = self._file.data[blob.span.start : blob.span.stop]  # type: ignore[union-attr]
            if is_records(blob.key, data):
                for record in Records.parse(data, str(self.path)).records:
                    names[record.key] = tuple(source.name for source in record.sources)
        return names

    @cached_property
    def _in_data_files(self) -> frozenset[str]:
        """The names of the tensors that the program takes from data files without a delegate."""
        return frozenset(name for key in self._externals for name in self._names(key))

    @cached_property
    def _in_delegates(self) -> frozenset[str]:
        """The names of the tensors that its delegates take from data files, through the cache."""
        own = self._delegates[0]
        tensors = [self._tensors[name] for name in self._tensors]
        taken = [tensor for tensor in tensors if any(key in own and key in self._keys for key in tensor.keys)]
        return frozenset(name for tensor in taken for name in (tensor.name, *tensor.aliases))

    def _names(self, key: str) -> tuple[str, ...]:
        return (key, self._tensors[key].name, *self._tensors[key].aliases) if key in self._tensors else (key,)

    def out_of_reach(self, shapes: Mapping[str, Shape | None], *, whole: bool) -> Iterator[str]:
        """See the function of the same name."""
        if not whole and self._file is not None and any(name.startswith(_TRAINING) for name in self._file.methods):
            return  # the program trains its own copies
        yield from self._stale(shapes)
        yield from self._embedded(shapes, whole=whole)
        yield from self._packed_elsewhere(shapes, whole=whole)
        yield from self._constants(shapes, whole=whole)

    def _stale(self, shapes: Mapping[str, Shape | None]) -> Iterator[str]:
        """Weights that ExecuTorch's own runtime reads from a map that does not change with the cache."""
        found: dict[str, list[str]] = {}
        for key, method in self._externals.items():
            if any(name in shapes for name in self._names(key)) and not self._follows(key):
                found.setdefault(method, []).append(key)
        for method, keys in found.items():
            yield (
                f"{self._of(method)}, which ExecuTorch's own runtime has loaded, reads {_listed(keys)} from its own map: "
                "serve a working copy (make_working_copy(), mode='shared') and pass it as data_path"
            )

    def _embedded(self, shapes: Mapping[str, Shape | None], *, whole: bool) -> Iterator[str]:
        """Weights of blobstore's delegates that the program contains."""
        found: dict[str, dict[str, None]] = {}
        for key, method in self._delegates[0].items():
            if key not in self._keys and "@" in key:
                names = self._names_of_embedded.get(key, (key.rpartition("@")[0],))
                found.setdefault(method, {}).update(dict.fromkeys(name for name in names if whole or name in shapes))
        for method, inside in found.items():
            if inside:
                yield f"{self._of(method)} has {_listed(inside)} inside: pass a tag to BlobStorePartitioner"

    def _packed_elsewhere(self, shapes: Mapping[str, Shape | None], *, whole: bool) -> Iterator[str]:
        """Weights that delegates of other backends packed."""
        known = self._in_data_files | self._in_delegates
        nbytes = {_nbytes(shape) for name, shape in shapes.items() if name not in known and shape is not None}
        found: dict[tuple[str, str], list[int | None]] = {}
        for one in self._delegates[1]:
            if whole or nbytes & one.sizes or (nbytes and not one.sizes):
                found.setdefault((one.method, one.backend), []).append(one.count)
        for (method, backend), counts in found.items():
            count = "weights" if None in counts else f"{sum(filter(None, counts))} constants"
            yield f"{self._of(method)} has {count} that {backend} packed: lower it with BlobStorePartitioner"

    def _constants(self, shapes: Mapping[str, Shape | None], *, whole: bool) -> Iterator[str]:
        """Weights without names, recognized by dtype and shape unless their tensor is known to be in another place."""
        delegated = bool(self._delegates[0])
        knows_names = delegated or any(not is_content_key(key) for key in self._externals)
        by_shape: dict[Shape, list[str]] = {}
        for name, shape in shapes.items():
            elsewhere = name in self._in_data_files or (delegated and name not in self._tensors)
            # a matrix may be both in a delegate and in an embedding; for vectors, equal lengths prove nothing
            if shape is not None and not elsewhere and (len(shape[1]) > 1 or name not in self._in_delegates):
                by_shape.setdefault(shape, []).append(name)
        named: dict[tuple[str, bool], dict[str, None]] = {}
        unnamed: Counter[tuple[str, bool]] = Counter()
        for one in self._nameless:
            place = (one.method, one.inside)
            if one.shape in by_shape and _may_be_weight(one.shape, known=True):
                named.setdefault(place, {}).update(dict.fromkeys(by_shape[one.shape]))
            elif whole and not knows_names and _may_be_weight(one.shape, known=False):
                unnamed[place] += 1
        for (method, inside), names in named.items():
            yield f"{self._of(method)} has constants like {_listed(names)} {_where(inside)}"
        for (method, inside), count in unnamed.items():
            yield f"{self._of(method)} has {count} constants without names {_where(inside)}"

    def _of(self, method: str) -> str:
        return f"method '{method}' of {self.path}" if method else str(self.path)


def out_of_reach(programs: Iterable[LoadedProgram], tensors: Mapping[str, Any], *, whole: bool) -> list[str]:
    """Weights of loaded programs that an update by name does not change.

    Args:
        programs: the programs on the cache that is updated, and on caches above it.
        tensors: the values of the update by name, of which only dtypes and shapes are used.
        whole: whether the tensors are a whole model's. Then all weights that are out of reach count; otherwise only
            weights that may be one of the tensors.

    Returns:
        For each kind of such weights a clause that names the program, the method, the weights if known, and the remedy.

    Raises:
        InvalidFileError: a program, or a record in it, is damaged.
    """
    shapes = {name: _shape(value) for name, value in tensors.items()}
    found = (problem for program in programs for problem in program.out_of_reach(shapes, whole=whole))
    return list(dict.fromkeys(found))


def _shape(value: Any) -> Shape | None:
    kind = scalar_type_of(value)
    return None if kind is None else (kind, tuple(value.shape))


def _nbytes(shape: Shape) -> int:
    return shape[0].itemsize * math.prod(shape[1])


def _may_be_weight(shape: Shape, *, known: bool) -> bool:
    """Whether a constant may be a weight, rather than a number or an index that lowering made.

    Args:
        shape: its type and sizes.
        known: whether a tensor of the model has the same type and sizes.
    """
    kind, count = shape[0], math.prod(shape[1])
    if known:
        return kind in FLOATS or count > 1
    return count > 1 and (kind in FLOATS or kind in _QUANTIZED)


def _where(inside: bool) -> str:
    if inside:
        return f"inside: {_EXTERNAL}"
    return "under keys made of their contents: pass names= to save_programs() or dedup_programs()"


def _listed(names: Iterable[str]) -> str:
    return quoted(names, most=20)
