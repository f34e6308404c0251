"""What is known of a model's tensors when its graph is partitioned: their names, dtypes, shapes, and files.

A backend gets its part of the graph only after the partitioner is done, and in between there is nothing but compile
specs, which end in the program. So a table is kept here under its digest, and the spec holds the digest.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from blobstore.errors import BlobStoreError, InvalidTagError
from blobstore.logical.records import Operation, Source, Step, is_propagated
from blobstore.memory.layout import ScalarType
from blobstore.store import check_tag

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram
    from torch.fx import Node

__all__ = [
    "ALIASES",
    "QUANTIZED",
    "Fold",
    "NameTable",
    "Refusal",
    "Tag",
    "check",
    "find",
    "identity",
    "is_generated",
    "keep",
    "logical_name",
    "mark",
    "mark_aliases",
    "scalar_type",
    "table_of",
]

Tag = str | Callable[[str], str | None] | None
"""The data file: its name, or a function from the tensor's name to it. None leaves a tensor in the program."""

QUANTIZED = "__quantized"
"""What the name of a quantized weight ends in, after that of the weight; see `restore_names`."""

ALIASES = "blobstore.aliases"
"""Where a placeholder's `meta["custom"]` has all names of its tensor, and for each whether a state dict has it.
Decompositions keep `custom`, and drop all names of a tied tensor but one from the state dict."""

_GENERATED = re.compile(r"_(frozen_param|tensor_constant|lifted_tensor|prop_tensor)|(^|\.)_(scale|zero_point)_\d+$")
"""Names that exporting and quantizing make up; another graph has the same ones for other tensors."""


_UNWRAPPED = re.compile(r"(?P<path>.*)\.parametrizations\.(?P<name>[^.]+)\.original(?P<part>[012])")
"""What torchao's quantized tensors are taken apart into: integers, scales, zero points."""


_MARK = "blobstore.names"
"""Under which key of an operator's `custom` metadata `restore_names` says what the operator's tensors are. Exporting,
saving and decomposing keep that metadata."""

_UNPROVED = (
    "a normalization may have been folded into it when the model was quantized; call "
    "blobstore.lowering.restore_names(converted, model) before exporting"
)

_PROPAGATED = "it was computed from other tensors before the program was lowered, as constant_prop_pass() does"


def is_generated(name: str) -> bool:
    """Whether a name was made up by exporting or quantizing, so that no state dict has it."""
    return _GENERATED.search(name) is not None


class Fold(NamedTuple):
    """What a tensor was folded of, before the program was exported.

    Attributes:
        name: what the result would be called in the model.
        sources: the model's tensors, as `step` takes them.
        step: what made one tensor of them.
    """

    name: str
    sources: tuple[Source, ...]
    step: Step


class Refusal(NamedTuple):
    """Tensors of the model that cannot be changed, and why."""

    sources: tuple[Source, ...]
    reason: str


def mark(node: Node, name: str, found: Fold | str | None) -> None:
    """Note at an operator what one of its tensors is.

    Args:
        node: uses the tensor.
        name: of the tensor in the graph.
        found: None, the model's own; what it was folded of; or why it cannot be changed.
    """
    custom = node.meta.get("custom") or {}
    marks = json.loads(custom.get(_MARK, "{}"))
    if isinstance(found, Fold):
        sources = [[source.name, int(source.scalar_type), source.sizes] for source in found.sources]
        step = [int(found.step.operation), found.step.ints, found.step.floats]
        marks[name] = {"name": found.name, "sources": sources, "step": step}
    else:
        marks[name] = found
    node.meta["custom"] = {**custom, _MARK: json.dumps(marks)}


def _marks(nodes: Iterable[Node]) -> dict[str, Fold | str | None]:
    """What `mark` noted."""
    found: dict[str, Fold | str | None] = {}
    for node in nodes:
        for name, value in json.loads((node.meta.get("custom") or {}).get(_MARK, "{}")).items():
            if isinstance(value, dict):
                sources = [Source(source, ScalarType(kind), tuple(sizes)) for source, kind, sizes in value["sources"]]
                operation, ints, floats = value["step"]
                step = Step(Operation(operation), tuple(ints), tuple(floats))
                found[name] = Fold(value["name"], tuple(sources), step)
            else:
                found[name] = value
    return found


_QUANTIZING = re.compile(r"(de)?quantize_per_(tensor|channel)\b")
_HANDING_ON = re.compile(r"quantize_per|permute|transpose|\bt\b|view|reshape|squeeze|clone|_to_copy|_to_dim_order")
_FOLDABLE = re.compile(r"convolution|\bconv(_transpose)?\dd\b|linear|addmm|\bmm\b")


def _operator(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target)) if node.op == "call_function" else ""


def _used_outside(placeholder: Node) -> bool:
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
            if _HANDING_ON.search(operator) and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


@dataclass(frozen=True)
class NameTable:
    """The named tensors of one exported program.

    Attributes:
        inner: the backend that the delegate wraps.
        sources: each tensor under its name in the program, which differs from its own if it was quantized.
        tags: the data file of each of them.
        default: gives the file of a constant that has no name.
        folds: what a tensor was folded of before the program was exported, and how, by its name in the program.
        refused: what cannot be changed, and why, by its name in the program.
        outside: tensors that no delegate has.
        shared: names of tensors that a delegate has and the program itself uses, too.
        exported: the tensors that programs with such a tensor were exported with; they may be gone.
        bearer: the partition whose records say what no other partition's do: `refused`, `outside` and `shared`.
        state: the buffers that the program changes itself, such as key/value caches.
        transient: names of tensors that no state dict has: buffers that are not persistent.
    """

    inner: str
    sources: dict[str, Source]
    tags: dict[str, str | None]
    default: Callable[[str], str | None]
    folds: dict[str, Fold] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    outside: tuple[Source, ...] = ()
    shared: tuple[str, ...] = ()
    bearer: str | None = None
    exported: Mapping[str, Sequence[weakref.ref[torch.Tensor]]] = field(default_factory=dict, repr=False, compare=False)
    state: tuple[Source, ...] = ()
    transient: frozenset[str] = frozenset()

    @property
    def digest(self) -> bytes:
        """Its content address."""
        return xxhash.xxh3_128_digest(
            repr(
                (
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
            ).encode()
        )

    def tag(self, name: str) -> str | None:
        """The data file of a tensor."""
        return self.tags[name] if name in self.tags else self.default(name)


_FLOATS = {ScalarType.HALF, ScalarType.FLOAT, ScalarType.DOUBLE, ScalarType.BFLOAT16}


def scalar_type(dtype: torch.dtype) -> ScalarType | None:
    """ExecuTorch's number for a dtype, None if it has none."""
    import torch

    return {
        torch.uint8: ScalarType.BYTE,
        torch.int8: ScalarType.CHAR,
        torch.int16: ScalarType.SHORT,
        torch.int32: ScalarType.INT,
        torch.int64: ScalarType.LONG,
        torch.float16: ScalarType.HALF,
        torch.float32: ScalarType.FLOAT,
        torch.float64: ScalarType.DOUBLE,
        torch.bool: ScalarType.BOOL,
        torch.bfloat16: ScalarType.BFLOAT16,
    }.get(dtype)


def table_of(program: ExportedProgram, inner: str, tag: Tag) -> NameTable:
    """The table of a program that was just partitioned.

    Args:
        program: the program; constants that go to a delegate have its tag.
        inner: the backend that the delegate wraps.
        tag: see `Tag`.

    Raises:
        InvalidTagError: the tag, or what it gives for a tensor, is not a plain file name.
    """
    choose = _chooser(tag)
    signature = program.graph_signature
    used = {node.name: node for node in program.graph.nodes if node.op == "placeholder" and node.users}
    marks = _marks(program.graph.nodes)
    quantized = any(_QUANTIZING.search(_operator(node)) for node in program.graph.nodes)
    inputs = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    changed = set(signature.buffers_to_mutate.values())
    names = {name: used[placeholder] for placeholder, name in inputs.items() if placeholder in used}
    same, transient = _same(program), set(signature.non_persistent_buffers)
    sources: dict[str, Source] = {}
    folds: dict[str, Fold] = {}
    refused: dict[str, Refusal] = {}
    state: dict[str, Source] = {}
    nowhere: set[str] = set()
    for placeholder_name, name in signature.inputs_to_lifted_tensor_constants.items():
        constant = program.constants.get(name)
        if placeholder_name in used and is_propagated(name) and constant is not None:
            kind = scalar_type(constant.dtype)
            if kind in _FLOATS:
                refused[name] = Refusal((Source(name, kind, tuple(constant.shape)),), _PROPAGATED)
    for name, placeholder in names.items():
        tensor = program.state_dict.get(name, program.constants.get(name))
        kind = None if tensor is None else scalar_type(tensor.dtype)
        if tensor is None or kind is None or is_generated(name):
            continue
        marked = (placeholder.meta.get("custom") or {}).get(ALIASES, {})
        aliases = tuple(other for other in dict.fromkeys((*same.get(name, ()), *marked)) if other != name)
        if name in changed:
            state[name] = Source(name, kind, tuple(tensor.shape), aliases)
            continue
        found = marks.get(name)
        if isinstance(found, Fold):
            if not _used_outside(placeholder):
                folds[name] = found
            else:
                refused[name] = Refusal(
                    found.sources, "it was folded before the program was exported, outside delegates"
                )
            continue
        logical = name.removesuffix(QUANTIZED)
        if (unwrapped := _UNWRAPPED.fullmatch(name)) and program.state_dict.keys() >= _parts_of(unwrapped):
            if unwrapped["part"] != "0":
                continue  # scales and zero points, which come with the integers
            if kind is ScalarType.CHAR:
                logical = f"{unwrapped['path']}.{unwrapped['name']}"
        if logical != name:
            kind = _kind_of_float(program.state_dict.get(logical))
        source = sources[name] = Source(logical, kind, tuple(tensor.shape), aliases)
        if not any(marked.get(other, other not in transient) for other in (name, *aliases)):
            nowhere.add(logical)
        proved = name in marks or not (quantized and kind in _FLOATS and _may_be_folded(placeholder))
        if not proved or (name.endswith(QUANTIZED) and name not in marks):
            found = _UNPROVED
        if found is not None:
            refused[name] = Refusal((source,), found)
    tags = {name: choose(name) for name in sources}
    placed = {name: placeholder.meta.get("delegation_tag") for name, placeholder in names.items()}
    outside = tuple(source for name, source in sources.items() if placed[name] is None)
    shared = tuple(source.name for name, source in sources.items() if placed[name] and _used_outside(names[name]))
    bearers = sorted((choose(name) is None, number) for number, (name, at) in enumerate(placed.items()) if at)
    bearer = list(placed.values())[bearers[0][1]] if bearers else None
    return NameTable(
        inner,
        sources,
        tags,
        choose,
        folds,
        refused,
        outside,
        shared,
        bearer,
        state=tuple(state.values()),
        transient=frozenset(nowhere),
    )


def mark_aliases(program: ExportedProgram) -> None:
    """Note at each placeholder which other names its tensor has; see `ALIASES`.

    Args:
        program: as `torch.export.export` gave it; only metadata of its nodes is added.
    """
    signature = program.graph_signature
    inputs = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    same = _same(program)
    for node in program.graph.nodes:
        if node.op == "placeholder" and len(names := same.get(inputs.get(node.name, ""), ())) > 1:
            node.meta.setdefault("custom", {})[ALIASES] = {name: name in program.state_dict for name in names}


def _same(program: ExportedProgram) -> dict[str, tuple[str, ...]]:
    """The names of each tensor, by each of them."""
    groups: dict[tuple[object, ...], list[str]] = {}
    transient = {name: program.constants.get(name) for name in program.graph_signature.non_persistent_buffers}
    for name, tensor in {**program.state_dict, **transient}.items():
        if tensor is None:
            continue
        groups.setdefault(identity(tensor), []).append(name)
    return {name: tuple(group) for group in groups.values() for name in group}


def logical_name(name: str) -> str:
    """The name of the parameter that a tensor of a program belongs to: itself, or one that was quantized."""
    if unwrapped := _UNWRAPPED.fullmatch(name):
        return f"{unwrapped['path']}.{unwrapped['name']}"
    return name.removesuffix(QUANTIZED)


def _parts_of(match: re.Match[str]) -> set[str]:
    return {f"{match['path']}.parametrizations.{match['name']}.original{part}" for part in range(3)}


def _kind_of_float(tensor: torch.Tensor | None) -> ScalarType:
    """The dtype of a weight before it was quantized; export may have dropped it."""
    kind = None if tensor is None else scalar_type(tensor.dtype)
    return ScalarType.FLOAT if kind is None else kind


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory, seen the same way."""
    try:
        storage = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
        return (id(tensor),)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def check(tag: str | None) -> str | None:
    """A tag as ExecuTorch takes it: without the ending, which it adds itself.

    Raises:
        InvalidTagError: it is not a plain file name.
    """
    if tag is None:
        return None
    if not isinstance(tag, str):
        raise InvalidTagError(f"a tag is a file name or None, not {tag!r}")
    check_tag(tag)
    return tag.removesuffix(".ptd")


def _chooser(tag: Tag) -> Callable[[str], str | None]:
    if callable(tag):
        return lambda name: check(tag(name))
    fixed = check(tag)
    return lambda name: fixed


_tables: dict[bytes, NameTable] = {}
_lock = threading.Lock()


def keep(table: NameTable) -> bytes:
    """Keep a table for as long as the process lives; its digest finds it again.

    Programs of different modules may have equal tables: then the one that is kept knows the tensors of all of them.
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
    """A table that was kept."""
    try:
        return _tables[digest]
    except KeyError:
        raise BlobStoreError(
            "this graph was partitioned in another process; lower it where it is partitioned"
        ) from None
