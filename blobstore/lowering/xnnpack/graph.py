"""The graph that XNNPACK serializes: which constants belong together, and how each of them is packed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from blobstore.core.errors import InvalidKeyError, KeyConflictError
from blobstore.core.formats.payload import VERSION_SIZE, Constant
from blobstore.core.groups import Groups

__all__ = [
    "bias_scales",
    "check_biases",
    "check_layouts",
    "constants_of_payload",
    "groups_of_constants",
    "packed_constants",
    "separate_operators",
    "uses_of_constants",
]

_PACKING = {"XNNFullyConnected", "XNNConv2d", "XNNDepthwiseConv2d", "XNNConvTranspose2d"}
"""The operators that pack their weight and their bias."""

_PACKED = ("filter_id", "bias_id")
"""The values that they pack."""


def groups_of_constants(graph: Any) -> dict[int, int]:
    """The number of the group of each constant, by its index.

    The weight and the bias of an operator, with their scales, are a group.
    """
    groups: Groups[int] = Groups()
    of_value = _constants_of_values(graph)
    for node in graph.xnodes:
        operator = node.xnode_union
        ids = [getattr(operator, name, None) for name in _PACKED]
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
                use = packed if packs and name in _PACKED else read
                use.update(of_value.get(value, []))
    return packed - read


def uses_of_constants(graph: Any) -> dict[int, set[str]]:
    """What each operator that takes a constant says of its packing, as texts, by the constant's index.

    That is everything but ids and the shapes of what is computed, which differ between input lengths.
    """
    of_value = _constants_of_values(graph)
    about = _about_values(graph)
    uses: dict[int, set[str]] = {}
    for node in graph.xnodes:
        operator = node.xnode_union
        text = _use(operator, about)
        for value in _ids(operator, about).values():
            for index in of_value.get(value, []):
                uses.setdefault(index, set()).add(text)
    return uses


def check_biases(graph: Any) -> None:
    """Check that no bias of integers is shared by operators that need it in other scales.

    Its scale is that of the input times that of the weight. ExecuTorch quantizes it once, for the first operator, and all
    others compute wrong numbers.

    Raises:
        KeyConflictError: names the bias.
    """
    of_value = _constants_of_values(graph)
    about = _about_values(graph)
    quantized = {tensor.id_out for union, tensor in _values(graph) if hasattr(union, "quant_params")}
    needed: dict[int, object] = {}
    for operator in _packing(graph):
        if operator.bias_id in quantized and of_value[operator.bias_id]:
            weights = [graph.constant_data[index].named_key for index in of_value[operator.filter_id][1:]]
            scales = (about[operator.input1_id], about[operator.filter_id], weights)
            if needed.setdefault(operator.bias_id, scales) != scales:
                key = graph.constant_data[of_value[operator.bias_id][0]].named_key
                raise KeyConflictError(
                    f"two operators share the bias '{_name_of(key)}' and need it in different scales, "
                    "because those of their inputs or weights differ: ExecuTorch quantizes it for the first of them only. "
                    "Quantize both inputs with the same scale, or give each operator a bias of its own"
                )


def check_layouts(graph: Any) -> None:
    """Check that no weight is shared by operators that need it in different layouts.

    Depthwise and transposed convolutions swap its first two dimensions. ExecuTorch stores it once, for the first operator,
    and all others compute wrong numbers.

    Raises:
        KeyConflictError: names the weight.
    """
    of_value = _constants_of_values(graph)
    layouts: dict[int, object] = {}
    for operator in _packing(graph):
        kind = type(operator).__name__
        is_transposed, is_depthwise = kind == "XNNConvTranspose2d", kind == "XNNDepthwiseConv2d"
        layout = (is_transposed or is_depthwise, operator.groups if is_transposed else 1)
        if of_value.get(operator.filter_id) and layouts.setdefault(operator.filter_id, layout) != layout:
            key = graph.constant_data[of_value[operator.filter_id][0]].named_key
            raise KeyConflictError(
                f"two operators share the weight '{_name_of(key)}' and need it in different layouts, such as a convolution "
                "and a transposed one: ExecuTorch stores it for the first of them only. Give each a weight of its own"
            )


def _name_of(key: str) -> str:
    """The tensor that a key is made of, for messages."""
    return key.rpartition("@")[0] or key


def _packed_values(operator: Any, of_value: Mapping[int, Sequence[int]]) -> dict[str, int]:
    """The values that an operator packs and that have constants, by the name of its field."""
    return {name: value for name in _PACKED if of_value.get(value := getattr(operator, name))}


def separate_operators(graph: Any) -> dict[int, int]:
    """Give operators that pack the same constants in different ways constants of their own.

    XNNPACK looks packed weights up by the keys of the weight and the bias only, and not by what else decides the packed
    bytes: the quantization of the input and the output, scales, strides, groups. So each value of the graph that is packed
    belongs to operators that pack it, and everything beside it, in one way. Others get a copy, whose constants have the same
    keys, so that it can get another name at run time.

    Returns:
        The indices of the constants that were added, each with that of the one that it copies.
    """
    of_value = _constants_of_values(graph)
    about = _about_values(graph)
    ways: dict[object, dict[int, int]] = {}  # which value an operator takes in place of which
    taken: set[int] = set()
    added: dict[int, int] = {}
    for operator in _packing(graph):
        ids = _packed_values(operator, of_value)
        keys = [graph.constant_data[index].named_key for value in ids.values() for index in of_value[value]]
        own = ways.setdefault((_use(operator, about), *keys), {})
        for name, value in ids.items():
            if value not in own:
                own[value] = _copy_value(graph, value, added) if value in taken else value
                taken.add(value)
            setattr(operator, name, own[value])
    return added


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


def constants_of_payload(
    places: Mapping[int, int],
    keys: Mapping[int, tuple[str, int]],
    groups: Mapping[int, int],
    packed: set[int],
    uses: Mapping[int, set[str]],
) -> list[Constant]:
    """The constants that a payload asks for: each that is packed, and each key that is read, once.

    `places` has where the last bytes of the key of each constant lie in the payload, and `uses` what operators say of its
    packing.

    Raises:
        InvalidKeyError: a key has no room for a version.
    """
    together: dict[object, list[int]] = {}  # a blob that is read has one address, so it can have one name only
    joined: Groups[int] = Groups()
    for index, (key, _) in keys.items():
        if len(key.encode()) < VERSION_SIZE:
            raise InvalidKeyError(f"key {key!r} is too short: its last {VERSION_SIZE} bytes must be replaceable")
        same = together.setdefault(index if index in packed else key, [])
        same.append(index)
        joined.join((groups[same[0]], groups[index]))
    constants = []
    for indices in together.values():
        first = indices[0]
        described = sorted(set().union(*(uses.get(index, ()) for index in indices)))
        constants.append(
            Constant(
                *keys[first],
                joined.root(groups[first]),
                tuple(sorted(places[index] for index in indices)),
                first in packed,
                xxhash.xxh3_128_digest(repr(described).encode()),
            )
        )
    return constants


def _packing(graph: Any) -> list[Any]:
    """The operators of a graph that pack constants."""
    return [node.xnode_union for node in graph.xnodes if type(node.xnode_union).__name__ in _PACKING]


def _use(operator: Any, about: Mapping[int, object]) -> str:
    """What an operator says of the packing of its constants."""
    fields = sorted((name, value) for name, value in vars(operator).items() if not name.endswith("_id"))
    values = sorted((name, about[value]) for name, value in _ids(operator, about).items())
    return repr((type(operator).__name__, fields, values))


def _ids(operator: Any, values: Mapping[int, object]) -> dict[str, int]:
    """The values that an operator takes and makes, by the names of its fields."""
    return {name: value for name, value in vars(operator).items() if name.endswith("_id") and value in values}


def _about_values(graph: Any) -> dict[int, object]:
    """What each value says of the packing of the constants beside it, by its id."""
    about: dict[int, object] = {}
    for union, tensor in _values(graph):
        quant = getattr(union, "quant_params", None)
        scales = {} if quant is None else {k: v for k, v in vars(quant).items() if k != "scale_buffer_idx"}
        dims = tuple(tensor.dims) if tensor.constant_buffer_idx else ()
        about[tensor.id_out] = (int(tensor.datatype), dims, type(quant).__name__, sorted(scales.items()))
    return about


def _copy_value(graph: Any, value: int, added: dict[int, int]) -> int:
    """Add a copy of a value, and of its constants, to a graph. Returns its id."""
    (original,) = (
        one for one, (_, tensor) in zip(graph.xvalues, _values(graph), strict=True) if tensor.id_out == value
    )
    graph.xvalues.append(copy.deepcopy(original))
    union, tensor = _values(graph)[-1]
    tensor.id_out = len(graph.xvalues) - 1
    quant = getattr(union, "quant_params", None)
    for holder, field in ((tensor, "constant_buffer_idx"), (quant, "scale_buffer_idx")):
        index = getattr(holder, field, 0)
        if index:
            added[len(graph.constant_data)] = index
            setattr(holder, field, len(graph.constant_data))
            graph.constant_data.append(copy.deepcopy(graph.constant_data[index]))
    return int(tensor.id_out)


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
