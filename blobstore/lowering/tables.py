"""What is known of a model's tensors when its graph is partitioned: their names, dtypes, shapes, and files.

A backend gets its part of the graph only after the partitioner has run. In between there is nothing but compile specs,
which end up in the program. So the tables are kept here by digest, and a compile spec holds the digest.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import xxhash

from blobstore.core.errors import BlobStoreError
from blobstore.core.memory.dtypes import FLOATS
from blobstore.core.memory.layout import ScalarType
from blobstore.logical.records import ModelTensor, is_propagated
from blobstore.lowering.marks import aliases_of, marks, names_of_tensors
from blobstore.lowering.names import (
    QUANTIZED,
    Fold,
    Refusal,
    Tag,
    chooser,
    is_generated,
    scalar_type,
    unwrapped,
)

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram
    from torch.fx import Node

__all__ = ["NameTable", "find", "keep", "table_of"]

_UNPROVED = (
    "a normalization may have been folded into it when the model was quantized; call "
    "blobstore.lowering.restore_names(converted, model) before exporting"
)
_PROPAGATED = "it was computed from other tensors before the program was lowered, as constant_prop_pass() does"
_FOLDED_OUTSIDE = "it was folded before the program was exported, and no delegate uses it"

_QUANTIZING = re.compile(r"(de)?quantize_per_(tensor|channel)\b")
_PASSING_ON = re.compile(r"quantize_per|permute|transpose|\bt\b|view|reshape|squeeze|clone|_to_copy|_to_dim_order")
_FOLDABLE = re.compile(r"convolution|\bconv(_transpose)?\dd\b|linear|addmm|\bmm\b")


@dataclass(frozen=True)
class NameTable:
    """The named tensors of one exported program.

    Attributes:
        inner: the backend that the delegate wraps.
        sources: each tensor by its name in the program, which differs from its own name if it was quantized.
        tags: the data file of each of them.
        default: returns the file of a constant that has no name.
        folds: what a tensor was folded of before the program was exported, and how, by its name in the program.
        refused: what cannot be changed, and why, by its name in the program.
        outside: tensors that no delegate has.
        shared: names of tensors that a delegate has and the program itself uses, too.
        bearer: the partition whose records include what concerns the whole program: `refused`, `outside` and `shared`.
        exported: weak references to the tensors that programs with such a table were exported with, by name.
        state: the buffers that the program changes itself, such as key/value caches.
        transient: names of tensors that no state dict has: buffers that are not persistent.
    """

    inner: str
    sources: dict[str, ModelTensor]
    tags: dict[str, str | None]
    default: Callable[[str], str | None]
    folds: dict[str, Fold] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    outside: tuple[ModelTensor, ...] = ()
    shared: tuple[str, ...] = ()
    bearer: str | None = None
    exported: Mapping[str, Sequence[weakref.ref[torch.Tensor]]] = field(default_factory=dict, repr=False, compare=False)
    state: tuple[ModelTensor, ...] = ()
    transient: frozenset[str] = frozenset()

    @property
    def digest(self) -> bytes:
        """Its content address."""
        content = (
            self.inner,
            self.sources,
            self.tags,
            self.folds,
            self.refused,
            self.outside,
            self.shared,
            self.state,
            sorted(self.transient),
        )
        return xxhash.xxh3_128_digest(repr(content).encode())

    def tag(self, name: str) -> str | None:
        """The data file of a tensor."""
        return self.tags[name] if name in self.tags else self.default(name)

    def source_names(self) -> set[str]:
        """The names of all tensors of the model that the table mentions, but for state."""
        folded = (source for fold in self.folds.values() for source in fold.sources)
        refused = (source for refusal in self.refused.values() for source in refusal.sources)
        return {source.name for source in (*self.sources.values(), *folded, *refused)}


def table_of(program: ExportedProgram, inner: str, tag: Tag) -> NameTable:
    """The table of a program that was just partitioned.

    Args:
        program: the program; constants that go to a delegate have its tag.
        inner: the backend that the delegate wraps.
        tag: see `Tag`.

    Raises:
        InvalidTagError: the tag, or what it returns for a tensor, is not a plain file name.
    """
    choose = chooser(tag)
    reading = _TableReading(program)
    partitions = {name: placeholder.meta.get("delegation_tag") for name, placeholder in reading.placeholders.items()}
    return NameTable(
        inner,
        reading.sources,
        {name: choose(name) for name in reading.sources},
        choose,
        reading.folds,
        reading.refused,
        outside=tuple(source for name, source in reading.sources.items() if partitions[name] is None),
        shared=tuple(
            source.name
            for name, source in reading.sources.items()
            if partitions[name]
            and any(
                _is_used_outside(reading.placeholders[n]) for n in (name, *source.aliases) if n in reading.placeholders
            )
        ),
        bearer=_bearer(partitions, choose),
        state=tuple(reading.state),
        transient=frozenset(reading.transient),
    )


def _bearer(partitions: Mapping[str, str | None], choose: Callable[[str], str | None]) -> str | None:
    """The partition of the first tensor that goes to a data file; otherwise that of the first tensor of a delegate."""
    delegated = [(name, partition) for name, partition in partitions.items() if partition]
    to_a_file = [partition for name, partition in delegated if choose(name) is not None]
    return next(iter((*to_a_file, *(partition for _, partition in delegated))), None)


class _TableReading:
    """The tensors of a program, read one after the other; the attributes are those of a `NameTable`.

    Attributes:
        placeholders: the node of each parameter and buffer that the program uses, by name.
    """

    def __init__(self, program: ExportedProgram) -> None:
        signature = program.graph_signature
        self._program = program
        self._marks = marks(program.graph.nodes)
        self._is_quantized = any(_QUANTIZING.search(_operator(node)) for node in program.graph.nodes)
        self._names_of = names_of_tensors(program)
        self._not_persistent = set(signature.non_persistent_buffers)
        self.sources: dict[str, ModelTensor] = {}
        self.folds: dict[str, Fold] = {}
        self.refused: dict[str, Refusal] = {}
        self.state: list[ModelTensor] = []
        self.transient: set[str] = set()
        used = {node.name: node for node in program.graph.nodes if node.op == "placeholder" and node.users}
        inputs = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self.placeholders = {name: used[node] for node, name in inputs.items() if node in used}
        for node, name in signature.inputs_to_lifted_tensor_constants.items():
            if node in used and is_propagated(name):
                self._refuse_propagated(name)
        changed = set(signature.buffers_to_mutate.values())
        for name, placeholder, tensor, kind in self._typed():
            aliases = self._aliases(name, placeholder)
            if name in changed:
                self.state.append(ModelTensor(name, kind, tuple(tensor.shape), aliases))
            elif isinstance(fold := self._marks.get(name), Fold):
                self._add_fold(name, placeholder, fold)
            else:
                self._add_source(name, placeholder, tensor, kind, aliases)

    def _refuse_propagated(self, name: str) -> None:
        constant = self._program.constants.get(name)
        kind = None if constant is None else scalar_type(constant.dtype)
        if kind in FLOATS:
            self.refused[name] = Refusal((ModelTensor(name, kind, tuple(constant.shape)),), _PROPAGATED)

    def _typed(self) -> Iterator[tuple[str, Node, torch.Tensor, ScalarType]]:
        """The tensors that have a name of their own and a dtype that updates can take."""
        for name, placeholder in self.placeholders.items():
            tensor = self._program.state_dict.get(name, self._program.constants.get(name))
            kind = None if tensor is None else scalar_type(tensor.dtype)
            if tensor is not None and kind is not None and not is_generated(name):
                yield name, placeholder, tensor, kind

    def _aliases(self, name: str, placeholder: Node) -> tuple[str, ...]:
        names = dict.fromkeys((*self._names_of.get(name, ()), *aliases_of(placeholder)))
        return tuple(other for other in names if other != name)

    def _add_fold(self, name: str, placeholder: Node, fold: Fold) -> None:
        # An operator of the program reads the folded tensor itself; changing it would give that one other numbers.
        if _is_used_outside(placeholder):
            self.refused[name] = Refusal(fold.sources, _FOLDED_OUTSIDE)
        else:
            self.folds[name] = fold

    def _add_source(
        self, name: str, placeholder: Node, tensor: torch.Tensor, kind: ScalarType, aliases: tuple[str, ...]
    ) -> None:
        logical = name.removesuffix(QUANTIZED)
        if (wrapped := unwrapped(name)) is not None and self._program.state_dict.keys() >= wrapped.parts:
            if wrapped.part != 0:
                return  # scales and zero points, which come with the integers
            if kind is ScalarType.CHAR:
                logical = wrapped.parameter
        # A state dict has the weight as it was before it was quantized.
        if logical != name:
            kind = _kind_of_float(self._program.state_dict.get(logical))
        source = self.sources[name] = ModelTensor(logical, kind, tuple(tensor.shape), aliases)
        noted = aliases_of(placeholder)
        if not any(noted.get(other, other not in self._not_persistent) for other in (name, *aliases)):
            self.transient.add(logical)
        reason = self._why_refused(name, placeholder, kind)
        if reason is not None:
            self.refused[name] = Refusal((source,), reason)

    def _why_refused(self, name: str, placeholder: Node, kind: ScalarType) -> str | None:
        """Why a tensor cannot be changed; None if it can."""
        if name in self._marks:
            marked = self._marks[name]
            return marked if isinstance(marked, str) else None
        # Quantizing may have folded a normalization into it without a trace, and then the numbers are no longer the weight.
        if name.endswith(QUANTIZED) or (self._is_quantized and kind in FLOATS and _may_be_folded(placeholder)):
            return _UNPROVED
        return None


def _operator(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else ""


def _is_used_outside(placeholder: Node) -> bool:
    """Whether the program itself uses a tensor, in an operator that no delegate has."""
    return any("delegation_tag" not in user.meta for user in placeholder.users)


def _may_be_folded(placeholder: Node) -> bool:
    """Whether a tensor is a weight or a bias of an operator that quantizing folds normalizations into."""
    waiting, seen = [placeholder], {placeholder}
    while waiting:
        for user in waiting.pop().users:
            operator = _operator(user)
            if _FOLDABLE.search(operator):
                return True
            if _PASSING_ON.search(operator) and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _kind_of_float(tensor: torch.Tensor | None) -> ScalarType:
    """The dtype of a weight before it was quantized; exporting may have dropped the weight."""
    kind = None if tensor is None else scalar_type(tensor.dtype)
    return ScalarType.FLOAT if kind is None else kind


_tables: dict[bytes, NameTable] = {}
_lock = threading.Lock()


def keep(table: NameTable) -> bytes:
    """Keep a table until the process ends, and return its digest, by which `find` returns it.

    Programs of different modules may have equal tables. The table that is kept then knows the tensors of all of them.
    """
    with _lock:
        exported = dict(table.exported)
        if (known := _tables.get(table.digest)) is not None:
            for name, tensors in known.exported.items():
                both = {id(tensor): tensor for tensor in (*tensors, *exported.get(name, ())) if tensor() is not None}
                exported[name] = list(both.values())
        _tables[table.digest] = replace(table, exported=exported)
    return table.digest


def find(digest: bytes) -> NameTable:
    """A table that was kept.

    Raises:
        BlobStoreError: no table with this digest was kept in this process.
    """
    try:
        return _tables[digest]
    except KeyError:
        raise BlobStoreError(
            "this graph was partitioned in another process; lower it in the process that partitions it"
        ) from None
