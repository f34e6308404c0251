"""The graph that XNNPACK serializes: which constants belong together, which are packed, where the payload names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from blobstore.core.errors import InvalidKeyError
from blobstore.core.formats.payload import VERSION_SIZE, Constant, find_places
from blobstore.core.groups import Groups

__all__ = ["bias_scales", "constants_of_payload", "groups_of_constants", "packed_constants", "uses_of_constants"]

_PACKING = {"XNNFullyConnected", "XNNConv2d", "XNNDepthwiseConv2d", "XNNConvTranspose2d"}
"""The operators that pack their weight and their bias."""


def groups_of_constants(graph: Any) -> dict[int, int]:
    """The number of the group of each constant, by its index.

    The weight and the bias of an operator, with their scales, are a group.
    """
    groups: Groups[int] = Groups()
    of_value = _constants_of_values(graph)
    for node in graph.xnodes:
        operator = node.xnode_union
        ids = [getattr(operator, name, None) for name in ("filter_id", "bias_id")]
        groups.join(index for value in ids if value is not None for index in of_value.get(value, []))
    for together in of_value.values():
        groups.join(together)
    numbers: dict[int, int] = {}
    return {index: numbers.setdefault(groups.root(index), len(numbers)) for index in range(1, len(graph.constant_data))}


def packed_constants(graph: Any) -> set[int]:
    """The indices of the constants that operators only pack.

    XNNPACK reads others, such as the slopes of PReLU, where they are, whenever it runs.
    """
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


def uses_of_constants(graph: Any) -> dict[int, set[str]]:
    """What each operator that takes a constant says of its packing, as texts, by the constant's index.

    That is everything but ids and the shapes of what is computed, which differ between input lengths.
    """
    of_value = _constants_of_values(graph)
    values = {tensor.id_out: (union, tensor) for union, tensor in _values(graph)}
    uses: dict[int, set[str]] = {}
    for node in graph.xnodes:
        operator = node.xnode_union
        fields = {name: value for name, value in vars(operator).items() if not name.endswith("_id")}
        ids = {name: value for name, value in vars(operator).items() if name.endswith("_id") and value in values}
        about = {name: _about(*values[value], constant=bool(of_value.get(value))) for name, value in ids.items()}
        text = repr((type(operator).__name__, sorted(fields.items()), sorted(about.items())))
        for value in ids.values():
            for index in of_value.get(value, []):
                uses.setdefault(index, set()).add(text)
    return uses


def bias_scales(graph: Any) -> dict[int, tuple[int, float]]:
    """Which scales of biases are products of other scales: the index of the weight's, and the scale of the activations.

    Scales that are not the same product for all operators with the bias are left out.
    """
    values = {tensor.id_out: getattr(union, "quant_params", None) for union, tensor in _values(graph)}
    products: dict[int, set[tuple[int, float]]] = {}
    for node in graph.xnodes:
        operator = node.xnode_union
        if not hasattr(operator, "filter_id"):
            continue
        activation, weight, bias = (
            values.get(value) for value in (operator.input1_id, operator.filter_id, operator.bias_id)
        )
        index = getattr(bias, "scale_buffer_idx", -1)
        if index > 0:
            product = getattr(weight, "scale_buffer_idx", -1), getattr(activation, "scale", 0.0)
            products.setdefault(index, set()).add(product)
    return {index: next(iter(found)) for index, found in products.items() if len(found) == 1}


def _about(union: Any, tensor: Any, constant: bool) -> object:
    """What a value says of the packing of the constants beside it."""
    quant = getattr(union, "quant_params", None)
    scales = {name: value for name, value in vars(quant).items() if name != "scale_buffer_idx"} if quant else {}
    return (
        int(tensor.datatype),
        tuple(tensor.dims) if constant else (),
        type(quant).__name__,
        sorted(scales.items()),
    )


def constants_of_payload(
    payload: bytes,
    keys: Mapping[int, tuple[str, int]],
    groups: Mapping[int, int],
    packed: set[int],
    uses: Mapping[int, set[str]],
) -> list[Constant]:
    """The blobs that a payload asks for, each once.

    Args:
        payload: the serialized graph.
        keys: the key and the size of each constant, by its index.
        groups: the group of each constant, by its index. Constants of one key are one blob, which joins their groups.
        packed: the indices of constants that operators only pack.
        uses: what operators say of each constant's packing, by its index.

    Raises:
        InvalidKeyError: a key has no room for a version.
    """
    first: dict[str, tuple[int, int]] = {}
    joined: Groups[int] = Groups()
    for index, (key, nbytes) in keys.items():
        if len(key.encode()) < VERSION_SIZE:
            raise InvalidKeyError(f"key {key!r} is too short: its last {VERSION_SIZE} bytes must be replaceable")
        group, _ = first.setdefault(key, (groups[index], nbytes))
        joined.join((group, groups[index]))
    read = {key for index, (key, _) in keys.items() if index not in packed}
    texts: dict[int, set[str]] = {}
    for index, (key, _) in keys.items():
        texts.setdefault(joined.root(first[key][0]), set()).update(uses.get(index, ()))
    packing = {root: xxhash.xxh3_128_digest(repr(sorted(described)).encode()) for root, described in texts.items()}
    constants = []
    for key, (group, nbytes) in first.items():
        root = joined.root(group)
        constants.append(Constant(key, nbytes, root, find_places(payload, key), key not in read, packing[root]))
    return constants


def _values(graph: Any) -> list[tuple[Any, Any]]:
    """The values of a graph: each with its quantization, if it has one, and its tensor."""
    unions = [value.xvalue_union for value in graph.xvalues]
    return [(union, getattr(union, "tensor_value", union)) for union in unions]


def _constants_of_values(graph: Any) -> dict[int, list[int]]:
    """The indices of the constants behind each value of a graph, its bytes and its scales, by the value's id."""
    of_value: dict[int, list[int]] = {}
    for union, tensor in _values(graph):
        indices = [tensor.constant_buffer_idx, getattr(getattr(union, "quant_params", None), "scale_buffer_idx", 0)]
        of_value[tensor.id_out] = [index for index in indices if index and index > 0]
    return of_value
