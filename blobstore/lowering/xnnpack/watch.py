"""Wraps functions of XNNPACK's exporter while it runs for blobstore.

Only calls of the thread that lowers are watched. Programs that other threads lower without blobstore stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from blobstore.core.memory.layout import ScalarType
from blobstore.logical.records import ModelTensor, Record
from blobstore.lowering.names import Refusal
from blobstore.lowering.xnnpack.batch_norm import record_fold, record_replacement
from blobstore.lowering.xnnpack.graph import check_biases, check_layouts, separate_operators
from blobstore.lowering.xnnpack.run import Run
from blobstore.lowering.xnnpack.steps import ConstantLayout, prove_constant, prove_scales
from blobstore.runtime.executorch import (
    DecomposeBatchNorm,
    FuseBatchNormPass,
    NodeVisitor,
    get_param_tensor,
    get_tensor_name,
    xnnpack_preprocess,
)

__all__ = ["watched"]

_Proved: TypeAlias = tuple[Record | Refusal | None, str]
"""The record of a blob, why it has none, or None if its tensor is unknown; and the name of the tensor that `NameTable.tag`
takes for the blob's file."""

_lock = threading.Lock()
_current = threading.local()


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """Wrap XNNPACK's functions, so that what this thread lowers is noted in `run`."""
    with _lock:
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in _WRAPPERS]
        _current.run = run
        try:
            for (owner, name, wrapper), (_, _, original) in zip(_WRAPPERS, originals, strict=True):
                setattr(owner, name, _for_this_thread(original, wrapper))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)
            _current.run = None


def _for_this_thread(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls the wrapper in the thread that lowers, and the original in all others."""

    def call(*args: Any, **kwargs: Any) -> Any:
        run = getattr(_current, "run", None)
        return original(*args, **kwargs) if run is None else wrapper(run, original, *args, **kwargs)

    return call


def _store_constant(
    run: Run,
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
    """Wraps `NodeVisitor.get_serialized_buffer_index`, which stores a constant and returns its index, or 0."""
    program = visitor.exported_program
    node = tensor if quant_params is None else quant_params.q_input
    layout = ConstantLayout(quant_params, force_fp32, groups if swap_in_out_for_weights else 0, convert_to_nhwc)

    def prove(data: bytes) -> _Proved:
        name = get_tensor_name(program, node)
        proved = prove_constant(run, name, get_param_tensor(program, node), data, layout)
        return proved, proved.sources[0].name if isinstance(proved, Record) else name

    with _naming(run, visitor, prove) as named:
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
    if index:
        run.name_constant(graph.constant_data[index], index, named.key, named.record)
    return index


def _store_scales(
    run: Run, original: Callable[..., Any], visitor: Any, quant_params: Any, graph: Any, external_tag: Any = None
) -> Any:
    """Wraps `NodeVisitor.get_quant_params`, which stores the scales of channels and groups as a constant."""
    index = len(graph.constant_data)
    try:
        name = get_tensor_name(visitor._exported_program, quant_params.q_input)
    except AssertionError:  # not a constant
        name = ""
    origin = run.origin(name)

    def prove(data: bytes) -> _Proved:
        proved = None if origin is None else prove_scales(origin, quant_params, data)
        return proved, origin.sources[0].name if origin is not None and isinstance(proved, Record) else name

    with _naming(run, visitor, prove) as named:
        result = original(visitor, quant_params, graph, external_tag)
    if named.key:
        run.name_constant(graph.constant_data[index], index, named.key, named.record)
    elif origin is not None and not quant_params.is_dynamic:
        scale = ModelTensor(f"{origin.name}.scale", ScalarType.FLOAT, ())
        run.refuse((scale,), "its scale is one number inside the delegate's payload")
    return result


def _serialize(run: Run, original: Callable[..., bytes], graph: Any, *args: Any) -> bytes:
    """Wraps `serialize_xnnpack_binary`, which is called when the graph is complete."""
    check_biases(graph)
    check_layouts(graph)
    for added, index in separate_operators(graph).items():
        run.keys[added] = run.keys[index]
    run.graph = graph
    return original(graph, *args)


class _Naming:
    """Stands in for XNNPACK's `NamedDataStore` during one call, and gives the blob that is added another key and file; with
    the record of how it is made, if that is proved."""

    def __init__(self, run: Run, store: Any, prove: Callable[[bytes], _Proved]) -> None:
        self._run, self._store, self._prove = run, store, prove
        self.key = ""
        self.record: Record | None = None

    def add_named_data(
        self, key: str, data: bytes, alignment: int | None = 1, external_tag: str | None = None, *rest: Any, **more: Any
    ) -> None:
        proved, name = self._prove(data)
        if isinstance(proved, Record):
            self.record, key = proved, proved.key
        elif proved is not None:
            self._run.refuse(*proved)
        self.key, tag = key, self._run.table.tag(name)
        self._store.add_named_data(key, data, alignment, external_tag if tag is None else tag, *rest, **more)


@contextmanager
def _naming(run: Run, visitor: Any, prove: Callable[[bytes], _Proved]) -> Iterator[_Naming]:
    """Let `_Naming` stand in for the store of a `NodeVisitor`, which proves each blob by its bytes."""
    store = visitor._named_data_store
    visitor._named_data_store = naming = _Naming(run, store, prove)
    try:
        yield naming
    finally:
        visitor._named_data_store = store


_WRAPPERS: list[tuple[Any, str, Callable[..., Any]]] = [
    (NodeVisitor, "get_serialized_buffer_index", _store_constant),
    (NodeVisitor, "get_quant_params", _store_scales),
    (FuseBatchNormPass, "_fuse_ops", record_fold),
    (DecomposeBatchNorm, "replace_bn_node_with_conv", record_replacement),
    (xnnpack_preprocess, "serialize_xnnpack_binary", _serialize),
]
