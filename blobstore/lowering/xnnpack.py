"""All that is XNNPACK's own: how it names, lays out and combines constants, and how to watch it do so.

XNNPACK's exporter names a constant after the sha256 of its bytes. While its `preprocess` runs for us, a few of its
methods are wrapped: each constant gets the name of the tensor that it was made from and a digest of the steps in
between, and these steps are recorded. Nothing changes for programs that are lowered without us, in other threads too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy.typing as npt
import torch
import xxhash
from executorch.backends.xnnpack import xnnpack_preprocess
from executorch.backends.xnnpack._passes.decompose_batch_norm import DecomposeBatchNorm
from executorch.backends.xnnpack._passes.fuse_batch_norm import FuseBatchNormPass
from executorch.backends.xnnpack.operators.node_visitor import NodeVisitor
from executorch.backends.xnnpack.utils.utils import get_param_tensor, get_tensor_name
from executorch.backends.xnnpack.xnnpack_preprocess import XnnpackBackend
from executorch.exir.backend.backend_details import CompileSpec
from torch.export import ExportedProgram

from blobstore.errors import BlobStoreError
from blobstore.formats.payload import VERSION_SIZE, Constant, find_places
from blobstore.logical.records import Operation, Record, Source, Step
from blobstore.logical.steps import cast, plain, raw, store
from blobstore.lowering.inner import Lowered
from blobstore.lowering.names import NameTable, Refusal, scalar_type
from blobstore.memory.buffers import same_bytes
from blobstore.memory.layout import ScalarType

__all__ = ["XnnpackLowering"]


class XnnpackLowering:
    """Lowers through `XnnpackBackend`."""

    backend_id = "XnnpackBackend"

    def preprocess(self, program: ExportedProgram, specs: list[CompileSpec], table: NameTable) -> Lowered:
        """See `InnerLowering`."""
        signature = program.graph_signature
        used = [*signature.inputs_to_parameters.values(), *signature.inputs_to_buffers.values()]
        watch = _Watch(table, {**program.constants, **program.state_dict})
        with watch.installed():
            result = XnnpackBackend.preprocess(program, specs)
        groups = _groups(watch.graph)
        constants = _constants(bytes(result.processed_bytes), watch, groups, _packed(watch.graph))
        return Lowered(result, constants, _records(watch, groups, used))


# ------------------------------------------------------------------------------------------------ while it runs


@dataclass(frozen=True)
class _Origin:
    """Where a tensor of the graph comes from.

    Attributes:
        name: what to call it.
        sources: what it is made of.
        tensors: what the program has of that, before any pass: the sources, or the result of the first steps.
        steps: how it is made.
        done: how many of the steps are done in `tensors` already.
    """

    name: str
    sources: tuple[Source, ...]
    tensors: tuple[torch.Tensor, ...]
    steps: tuple[Step, ...] = ()
    done: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape after all steps: that of the first source, unless the last step gives it another."""
        last = self.steps[-1] if self.steps else None
        return last.ints if last is not None and last.operation is Operation.RESHAPE else self.sources[0].sizes

    @classmethod
    def combined(cls, name: str, parts: Sequence[_Origin | None], *steps: Step) -> _Origin:
        """That of a tensor made of those parts that there are."""
        there = [part for part in parts if part is not None]
        return cls(name, tuple(p.sources[0] for p in there), tuple(p.tensors[0] for p in there), steps)


@dataclass
class _Watch:
    """One run of XNNPACK's preprocess, watched.

    Attributes:
        table: the names.
        tensors: the program's tensors by their names there, before any pass replaces them.
        combined: the origin of what passes computed from several tensors.
        records: the record of a constant, by the constant's number.
        keys: the key and the size of a constant.
        refused: tensors that cannot be changed, and why.
        graph: what XNNPACK is about to serialize.
    """

    table: NameTable
    tensors: dict[str, torch.Tensor]
    combined: dict[str, _Origin] = field(default_factory=dict)
    records: dict[int, Record] = field(default_factory=dict)
    keys: dict[int, tuple[str, int]] = field(default_factory=dict)
    refused: dict[Source, str] = field(default_factory=dict)
    graph: Any = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap XNNPACK's methods for this thread's calls."""
        with _lock:
            _current.watch = self
            originals = [(owner, name, getattr(owner, name)) for owner, name, _ in _WRAPPERS]
            try:
                for (owner, name, wrapper), (_, _, original) in zip(_WRAPPERS, originals, strict=True):
                    setattr(owner, name, _watched(original, wrapper))
                yield
            finally:
                for owner, name, original in originals:
                    setattr(owner, name, original)
                _current.watch = None

    def origin(self, name: str) -> _Origin | None:
        """What is known of a tensor of the graph."""
        if name in self.combined:
            return self.combined[name]
        if name not in self.tensors or name in self.table.refused:
            return None
        held = (self.tensors[name],)
        if fold := self.table.folds.get(name):
            return _Origin(fold.name, fold.sources, held, (fold.step,), done=1)
        source = self.table.sources.get(name)
        return None if source is None else _Origin(source.name, (source,), held)

    def refuse(self, sources: Iterable[Source], reason: str) -> None:
        """Tensors cannot be changed; the first reason stays."""
        for source in sources:
            self.refused.setdefault(source, reason)


_lock = threading.Lock()
_current = threading.local()


def _watched(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = getattr(_current, "watch", None)
        return original(*args, **kwargs) if watch is None else wrapper(watch, original, *args, **kwargs)

    return call


class _Renaming:
    """Stands in for XNNPACK's NamedDataStore during one call, and gives what is added another key and file."""

    def __init__(self, store: Any, choose: Callable[[str, bytes], tuple[str, str | None]]) -> None:
        self._store, self._choose = store, choose
        self.key = ""

    def add_named_data(
        self, key: str, data: bytes, alignment: int | None = 1, external_tag: str | None = None, *rest: Any, **more: Any
    ) -> None:
        self.key, tag = self._choose(key, data)
        self._store.add_named_data(self.key, data, alignment, external_tag if tag is None else tag, *rest, **more)


def _weight(
    watch: _Watch,
    original: Callable[..., int],
    visitor: Any,
    tensor: torch.fx.Node,
    graph: Any,
    vals_to_ids: Any,
    convert_to_nhwc: bool,
    swap_in_out_for_weights: bool,
    quant_params: Any,
    force_fp32: bool = False,
    groups: int = 1,
) -> int:
    """A constant is about to be stored, in NodeVisitor.get_serialized_buffer_index."""
    program = visitor.exported_program
    node = tensor if quant_params is None else quant_params.q_input
    record: Record | None = None

    def choose(own: str, data: bytes) -> tuple[str, str | None]:
        nonlocal record
        name = get_tensor_name(program, node)
        made = _made(
            watch,
            name,
            get_param_tensor(program, node),
            data,
            quant_params,
            force_fp32,
            groups if swap_in_out_for_weights else 0,
            convert_to_nhwc,
        )
        if isinstance(made, Refusal):
            watch.refuse(*made)
            return own, watch.table.tag(name)
        record = made
        return record.key, watch.table.tag(record.sources[0].name)

    store, renaming = visitor._named_data_store, None
    visitor._named_data_store = renaming = _Renaming(store, choose)
    try:
        index = original(
            visitor,
            tensor,
            graph,
            vals_to_ids,
            convert_to_nhwc,
            swap_in_out_for_weights,
            quant_params,
            force_fp32,
            groups,
        )
    finally:
        visitor._named_data_store = store
    if index:
        _name_constant(watch, graph, index, renaming.key, record)
    return index


def _scales(
    watch: _Watch, original: Callable[..., Any], visitor: Any, quant_params: Any, graph: Any, external_tag: Any = None
) -> Any:
    """Quantization parameters are about to be stored, in NodeVisitor.get_quant_params."""
    program, index = visitor._exported_program, len(graph.constant_data)
    node = quant_params.q_input
    try:
        name = get_tensor_name(program, node)
    except AssertionError:  # not a constant
        name = ""
    origin = watch.origin(name)
    record: Record | None = None

    def choose(own: str, data: bytes) -> tuple[str, str | None]:
        nonlocal record
        if origin is None:
            return own, watch.table.tag(name)
        found = replace(_scale_record(origin.name, quant_params), nbytes=len(data))
        if reason := _contradiction(found, found.steps, [quant_params.scale], data):
            watch.refuse(found.sources, reason)
            return own, watch.table.tag(name)
        record = found
        return record.key, watch.table.tag(origin.sources[0].name)

    store = visitor._named_data_store
    visitor._named_data_store = renaming = _Renaming(store, choose)
    try:
        result = original(visitor, quant_params, graph, external_tag)
    finally:
        visitor._named_data_store = store
    if renaming.key:
        _name_constant(watch, graph, index, renaming.key, record)
    elif origin is not None and not quant_params.is_dynamic:
        scale = Source(f"{origin.name}.scale", ScalarType.FLOAT, ())
        watch.refuse((scale,), "its scale is one number inside the delegate's payload")
    return result


def _fuse(watch: _Watch, original: Callable[..., None], fusion: Any, *args: Any) -> None:
    """A batch normalization is about to be folded, in FuseBatchNormPass._fuse_ops."""
    _, _, node, norm, is_conv, _ = args
    program = fusion.exported_program
    parts = _Parts(watch, program)
    weight = parts.find(node.args[1])
    bias = parts.find(node.args[2]) if len(node.args) > 2 else None
    gamma, beta, mean, variance = (parts.find(argument) for argument in norm.args[1:5])
    epsilon = float(norm.args[-1])
    axis = 1 if is_conv and node.args[6] else 0
    original(fusion, *args)
    if not parts.known or weight is None or mean is None or variance is None:
        return
    kinds = (
        (Operation.FOLD_CONV_WEIGHT, Operation.FOLD_CONV_BIAS)
        if is_conv
        else (Operation.FOLD_LINEAR_WEIGHT, Operation.FOLD_LINEAR_BIAS)
    )
    watch.combined[get_tensor_name(program, node.args[1])] = _Origin.combined(
        weight.name,
        (weight, variance, gamma),
        Step(kinds[0], ints=(axis, int(gamma is not None)), floats=(epsilon,)),
    )
    flags = tuple(int(part is not None) for part in (bias, gamma, beta))
    watch.combined[get_tensor_name(program, node.args[2])] = _Origin.combined(
        bias.name if bias is not None else _sibling(weight.name, "bias"),
        (mean, variance, bias, gamma, beta),
        Step(kinds[1], ints=flags, floats=(epsilon,)),
    )


def _decompose(watch: _Watch, original: Callable[..., Any], decomposition: Any, norm: Any, *args: Any) -> Any:
    """A batch normalization is about to become a convolution, in DecomposeBatchNorm.replace_bn_node_with_conv."""
    program = decomposition.exported_program
    parts = _Parts(watch, program)
    gamma, beta, mean, variance = (parts.find(argument) for argument in norm.args[1:5])
    epsilon = float(norm.args[-1])
    conv = original(decomposition, norm, *args)
    if not parts.known or mean is None or variance is None:
        return conv
    name = mean.name if gamma is None else gamma.name
    value = get_param_tensor(program, conv.args[1])
    flags = tuple(int(part is not None) for part in (gamma, beta))
    watch.combined[get_tensor_name(program, conv.args[1])] = _Origin.combined(
        name,
        (mean, variance, gamma, beta),
        Step(Operation.NORM_WEIGHT, ints=flags, floats=(epsilon,)),
        Step(Operation.RESHAPE, ints=tuple(value.shape)),
    )
    watch.combined[get_tensor_name(program, conv.args[2])] = _Origin.combined(
        beta.name if beta is not None else _sibling(name, "bias"),
        (mean, variance, gamma, beta),
        Step(Operation.NORM_BIAS, ints=flags, floats=(epsilon,)),
    )
    return conv


def _serialize(watch: _Watch, original: Callable[..., bytes], graph: Any, *args: Any) -> bytes:
    """The graph is complete and about to become bytes."""
    watch.graph = graph
    return original(graph, *args)


_WRAPPERS: list[tuple[Any, str, Callable[..., Any]]] = [
    (NodeVisitor, "get_serialized_buffer_index", _weight),
    (NodeVisitor, "get_quant_params", _scales),
    (FuseBatchNormPass, "_fuse_ops", _fuse),
    (DecomposeBatchNorm, "replace_bn_node_with_conv", _decompose),
    (xnnpack_preprocess, "serialize_xnnpack_binary", _serialize),
]


# ------------------------------------------------------------------------------------------------- what is recorded


class _Parts:
    """The constants that a pass combines; `known` becomes false if one of them has no name."""

    def __init__(self, watch: _Watch, program: ExportedProgram) -> None:
        self._watch, self._program, self.known = watch, program, True

    def find(self, node: Any) -> _Origin | None:
        if not isinstance(node, torch.fx.Node):
            return None
        origin = self._watch.origin(get_tensor_name(self._program, node))
        if origin is None or origin.steps:
            self.known = False
            return None
        return origin


def _sibling(name: str, last: str) -> str:
    return ".".join([*name.split(".")[:-1], last])


def _unnamed(name: str) -> str:
    if name.startswith("_frozen_param"):
        return "its name was lost when it was quantized; call blobstore.lowering.restore_names(converted, model) before exporting"
    return "it was made up or computed from other tensors while lowering"


def _made(
    watch: _Watch,
    name: str,
    value: torch.Tensor,
    data: bytes,
    quant: Any,
    force_fp32: bool,
    swap_groups: int,
    nhwc: bool,
) -> Record | Refusal:
    """The record of a constant, proved: its steps give these very bytes. Or why there is none."""
    if name in watch.table.refused:
        return watch.table.refused[name]
    origin = watch.origin(name)
    if origin is None:
        return Refusal((Source(name, ScalarType.FLOAT, ()),), _unnamed(name))
    steps = _steps(origin, value, quant, force_fp32, swap_groups, nhwc)
    if isinstance(steps, str):
        return Refusal(origin.sources, steps)
    record = Record(_key(origin.name, origin.sources, steps), len(data), origin.sources, steps)
    scales = {}
    if quant is not None and quant.per_channel:
        kind = ScalarType.BFLOAT16 if quant.per_channel_group else ScalarType.FLOAT
        scales[_scale_record(origin.name, quant).key] = cast(plain(quant.scale), kind)[0]
    reason = _contradiction(record, steps[origin.done :], origin.tensors, data, scales)
    return Refusal(origin.sources, reason) if reason else record


def _contradiction(
    record: Record,
    steps: tuple[Step, ...],
    tensors: Sequence[torch.Tensor],
    data: bytes,
    scales: Mapping[str, npt.NDArray[Any]] = MappingProxyType({}),
) -> str:
    """Why a record would be wrong: its steps do not make the model's tensors these bytes. Empty if they do."""
    try:
        made = store(
            replace(record, steps=steps),
            [plain(tensor) for tensor in tensors],
            lambda key: raw(scales[key]),
        )
    except (BlobStoreError, ValueError) as error:
        return f"how it was stored cannot be repeated: {error}"
    if not same_bytes(raw(made), memoryview(data)):
        return "what is stored does not follow from it: it was changed, or combined with other tensors, while lowering"
    return ""


def _steps(
    origin: _Origin, value: torch.Tensor, quant: Any, force_fp32: bool, swap_groups: int, nhwc: bool
) -> tuple[Step, ...] | str:
    """The steps that XNNPACK's exporter takes, in its order; or why they cannot be repeated."""
    steps = list(origin.steps)
    shape, before = tuple(value.shape), origin.sizes
    if shape != before:
        if value.numel() != _count(before):
            return f"it was stretched from {before} to {shape} while lowering"
        steps.append(Step(Operation.RESHAPE, ints=shape))
    kind = scalar_type(value.dtype)
    if kind is None:
        return f"nothing is known of dtype {value.dtype}"
    if quant is not None and not quant.is_dynamic:
        step = _quantization(origin.name, quant)
        if isinstance(step, str):
            return step
        steps.append(step)
    elif (force_fp32 or value.dtype not in {torch.float16, torch.bfloat16}) and kind is not ScalarType.FLOAT:
        steps.append(Step(Operation.CAST, ints=(int(ScalarType.FLOAT),)))
    if swap_groups:
        steps.append(Step(Operation.SWAP_IN_OUT, ints=(swap_groups,)))
    if nhwc:
        steps.append(Step(Operation.CHANNELS_LAST))
    if quant is not None and quant.is_qc4w:
        steps.append(Step(Operation.PACK_INT4))
    return tuple(steps)


def _quantization(name: str, quant: Any) -> Step | str:
    kind = scalar_type(quant.dtype)
    if kind is None:
        return f"nothing is known of numbers of type {quant.dtype}"
    limits = (int(quant.qmin), int(quant.qmax), int(kind))
    if not quant.per_channel:
        return Step(Operation.QUANTIZE_TENSOR, (int(quant.zp), *limits), (float(quant.scale),))
    if bool((torch.as_tensor(quant.zp) != 0).any()):
        return "its channels have zero points other than 0"
    scales = (_scale_record(name, quant).key,)
    if quant.per_channel_group:
        return Step(Operation.QUANTIZE_GROUP, (int(quant.group_size), *limits), names=scales)
    if torch.as_tensor(quant.scale).dtype is not torch.float32:
        return f"its scales are {quant.scale.dtype}, not float32"
    return Step(Operation.QUANTIZE_CHANNEL, (int(quant.axis), *limits), names=scales)


def _scale_record(name: str, quant: Any) -> Record:
    """The scales of a tensor's channels or groups; which axis they belong to is the weight's own business."""
    kind = scalar_type(quant.scale.dtype) or ScalarType.FLOAT
    source = Source(f"{name}.scale", kind, tuple(quant.scale.shape))
    steps = (Step(Operation.CAST, ints=(int(ScalarType.BFLOAT16),)),) if quant.per_channel_group else ()
    return Record(_key(source.name, (source,), steps), 0, (source,), steps, auxiliary=True)


def _key(name: str, sources: tuple[Source, ...], steps: tuple[Step, ...]) -> str:
    """The name that users know, and a digest of everything that decides how the bytes are laid out."""
    made = repr([(source.name, int(source.scalar_type), source.sizes) for source in sources]) + repr(
        [(int(step.operation), step.ints, step.floats, step.names) for step in steps]
    )
    return f"{name}@{xxhash.xxh3_64_hexdigest(made.encode())}"


def _count(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _name_constant(watch: _Watch, graph: Any, index: int, key: str, record: Record | None) -> None:
    constant = graph.constant_data[index]
    constant.named_key = key
    watch.keys[index] = (key, constant.size)
    if record is not None:
        watch.records[index] = replace(record, nbytes=constant.size)


# --------------------------------------------------------------------------------------------------- when it is done


def _constants_of_values(graph: Any) -> dict[int, list[int]]:
    """The constants behind each value of a graph: its bytes and its scales, by number."""
    of_value: dict[int, list[int]] = {}
    for value in graph.xvalues:
        union = value.xvalue_union
        tensor = getattr(union, "tensor_value", union)
        found = [tensor.constant_buffer_idx, getattr(getattr(union, "quant_params", None), "scale_buffer_idx", 0)]
        of_value[tensor.id_out] = [i for i in found if i and i > 0]
    return of_value


_PACKING = {"XNNFullyConnected", "XNNConv2d", "XNNDepthwiseConv2d", "XNNConvTranspose2d"}


def _packed(graph: Any) -> set[int]:
    """Constants that are weights or biases of operators that pack them, and nothing else. XNNPACK reads others, such as
    the slopes of PReLU, where they are, whenever it runs."""
    of_value = _constants_of_values(graph)
    packed: set[int] = set()
    read: set[int] = set()
    for node in graph.xnodes:
        operator = node.xnode_union
        packs = type(operator).__name__ in _PACKING
        for name, value in vars(operator).items():
            if name.endswith("_id") and isinstance(value, int):
                use = packed if packs and name in {"filter_id", "bias_id"} else read
                use.update(of_value.get(value, []))
    return packed - read


def _groups(graph: Any) -> dict[int, int]:
    """Constants that belong together: an operator's weight and bias and their scales, by the number of the constant."""
    parent: dict[int, int] = {}

    def root(i: int) -> int:
        while parent.setdefault(i, i) != i:
            i = parent[i]
        return i

    of_value = _constants_of_values(graph)
    for node in graph.xnodes:
        operator = node.xnode_union
        ids = [getattr(operator, name, None) for name in ("filter_id", "bias_id")]
        together = [i for value in ids if value is not None for i in of_value.get(value, [])]
        for other in together[1:]:
            parent[root(other)] = root(together[0])
    for together in of_value.values():
        for other in together[1:]:
            parent[root(other)] = root(together[0])
    numbers: dict[int, int] = {}
    return {i: numbers.setdefault(root(i), len(numbers)) for i in range(1, len(graph.constant_data))}


def _constants(payload: bytes, watch: _Watch, groups: dict[int, int], packed: set[int]) -> list[Constant]:
    # a key that several values share is one blob, and joins their groups
    parent: dict[int, int] = {}

    def root(i: int) -> int:
        while parent.setdefault(i, i) != i:
            i = parent[i]
        return i

    first: dict[str, tuple[int, int]] = {}
    kept = {key for index, (key, _) in watch.keys.items() if index not in packed}
    for index, (key, nbytes) in watch.keys.items():
        if len(key.encode()) < VERSION_SIZE:
            raise ValueError(f"key {key!r} has no room for a version")
        group, _ = first.setdefault(key, (groups[index], nbytes))
        parent[root(groups[index])] = root(group)
    return [
        Constant(key, nbytes, root(group), find_places(payload, key), key not in kept)
        for key, (group, nbytes) in first.items()
    ]


def _records(watch: _Watch, groups: dict[int, int], used: list[str]) -> list[Record]:
    """The records, and a refusal for each tensor that has none or cannot be changed in all its blobs."""
    records = {record.key: replace(record, group=groups[index]) for index, record in watch.records.items()}
    covered = {source.name for record in records.values() for source in record.sources}
    for name in used:
        source = watch.table.sources.get(name)
        if source is not None and source.name not in covered:
            watch.refuse((source,), "it was combined with other tensors while lowering")
    table = watch.table
    groups_of_sources = (
        table.sources.values(),
        *(fold.sources for fold in table.folds.values()),
        *(refusal.sources for refusal in table.refused.values()),
    )
    own = {source.name for sources in groups_of_sources for source in sources}  # neither scales nor made-up names
    refusals = [
        Record("", 0, (source,), refusal=reason, auxiliary=source.name not in own)
        for source, reason in watch.refused.items()
        if source.name
    ]
    return [*records.values(), *refusals]
