"""What is known of a model's tensors when its graph is partitioned: their names, dtypes, shapes, and files.

A backend gets its part of the graph only after the partitioner is done, and in between there is nothing but compile
specs, which end in the program. So a table is kept here under its digest, and the spec holds the digest.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from blobstore.errors import BlobStoreError, InvalidTagError
from blobstore.layout import ScalarType
from blobstore.lowering.records import Source
from blobstore.store import check_tag

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

__all__ = [
    "ALIASES",
    "QUANTIZED",
    "NameTable",
    "Tag",
    "check",
    "find",
    "identity",
    "keep",
    "logical_name",
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


@dataclass(frozen=True)
class NameTable:
    """The named tensors of one exported program.

    Attributes:
        inner: the backend that the delegate wraps.
        sources: each tensor under its name in the program, which differs from its own if it was quantized.
        tags: the data file of each of them.
        default: gives the file of a constant that has no name.
        state: the buffers that the program changes itself, such as key/value caches.
        transient: names of tensors that no state dict has: buffers that are not persistent.
    """

    inner: str
    sources: dict[str, Source]
    tags: dict[str, str | None]
    default: Callable[[str], str | None]
    state: tuple[Source, ...] = ()
    transient: frozenset[str] = frozenset()

    @property
    def digest(self) -> bytes:
        """Its content address."""
        return xxhash.xxh3_128_digest(
            repr((self.inner, self.sources, self.tags, self.state, sorted(self.transient))).encode()
        )

    def tag(self, name: str) -> str | None:
        """The data file of a tensor."""
        return self.tags[name] if name in self.tags else self.default(name)


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
    """The table of a program that is about to be partitioned.

    Raises:
        InvalidTagError: the tag, or what it gives for a tensor, is not a plain file name.
    """
    choose = _chooser(tag)
    signature = program.graph_signature
    used = {node.name: node for node in program.graph.nodes if node.op == "placeholder" and node.users}
    inputs = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    changed = set(signature.buffers_to_mutate.values())
    same, transient = _same(program), set(signature.non_persistent_buffers)
    sources: dict[str, Source] = {}
    state: dict[str, Source] = {}
    nowhere: set[str] = set()
    for placeholder, name in inputs.items():
        tensor = program.state_dict.get(name, program.constants.get(name))
        kind = None if tensor is None else scalar_type(tensor.dtype)
        if placeholder not in used or tensor is None or kind is None or _GENERATED.search(name):
            continue
        marked = used[placeholder].meta.get("custom", {}).get(ALIASES, {})
        aliases = tuple(other for other in dict.fromkeys((*same.get(name, ()), *marked)) if other != name)
        if name in changed:
            state[name] = Source(name, kind, tuple(tensor.shape), aliases)
            continue
        logical = name.removesuffix(QUANTIZED)
        if (unwrapped := _UNWRAPPED.fullmatch(name)) and program.state_dict.keys() >= _parts_of(unwrapped):
            if unwrapped["part"] != "0":
                continue  # scales and zero points, which come with the integers
            if kind is ScalarType.CHAR:
                logical = f"{unwrapped['path']}.{unwrapped['name']}"
        if logical != name:
            kind = _kind_of_float(program.state_dict.get(logical))
        sources[name] = Source(logical, kind, tuple(tensor.shape), aliases)
        if not any(marked.get(other, other not in transient) for other in (name, *aliases)):
            nowhere.add(logical)
    return NameTable(
        inner,
        sources,
        {name: choose(name) for name in sources},
        choose,
        tuple(state.values()),
        frozenset(nowhere),
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
    """Keep a table for as long as the process lives; its digest finds it again."""
    with _lock:
        _tables[table.digest] = table
    return table.digest


def find(digest: bytes) -> NameTable:
    """A table that was kept."""
    try:
        return _tables[digest]
    except KeyError:
        raise BlobStoreError(
            "this graph was partitioned in another process; lower it where it is partitioned"
        ) from None
