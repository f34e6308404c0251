"""What XNNPACK's graph shows about constants: which belong together, which are packed, where the payload names them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blobstore.errors import InvalidKeyError
from blobstore.lowering.export import quiet
from blobstore.lowering.xnnpack.graph import constants_of_payload, groups_of_constants, packed_constants

with quiet():
    from executorch.backends.xnnpack.serialization import xnnpack_graph_schema as schema


def tensor(number: int, buffer: int = 0, scales: int = -1) -> Any:
    """A value with the constant `buffer`, and with scales if it is quantized by channel."""
    value: Any = schema.XNNTensorValue(
        datatype=schema.XNNDatatype.xnn_datatype_fp32,
        num_dims=1,
        dims=[1],
        constant_buffer_idx=buffer,
        external_id=0,
        flags=0,
        id_out=number,
    )
    if scales >= 0:
        quantized = schema.PerChannelQuant(scale=[], channel_dim=0, scale_buffer_idx=scales)
        value = schema.XNNQuantizedTensorValue(value, quantized)
    return SimpleNamespace(xvalue_union=value)


def linear(x: int, weight: int, bias: int, y: int) -> Any:
    return SimpleNamespace(
        xnode_union=schema.XNNFullyConnected(input1_id=x, filter_id=weight, bias_id=bias, output_id=y, flags=0)
    )


def multiply(a: int, b: int, y: int) -> Any:
    return SimpleNamespace(xnode_union=schema.XNNMultiply(input1_id=a, input2_id=b, output_id=y, flags=0))


def graph(values: list[Any], nodes: list[Any], constants: int) -> Any:
    """A graph with this many constants; the first, which stands for none, is not counted."""
    return SimpleNamespace(xvalues=values, xnodes=nodes, constant_data=[None] * (constants + 1))


def test_an_operators_constants_are_a_group() -> None:
    """Weight, scales and bias of one operator are packed together, those of another are not (U1)."""
    values = [tensor(0), tensor(1, 1, scales=2), tensor(2, 3), tensor(3), tensor(4, 4), tensor(5, 5), tensor(6)]
    found = groups_of_constants(graph(values, [linear(0, 1, 2, 3), linear(3, 4, 5, 6)], 5))
    assert found == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1}


def test_a_constant_of_two_operators_joins_their_groups() -> None:
    """A tied weight is packed with the biases of both (U1)."""
    values = [tensor(0), tensor(1, 1), tensor(2, 2), tensor(3), tensor(4, 3), tensor(5)]
    found = groups_of_constants(graph(values, [linear(0, 1, 2, 3), linear(3, 1, 4, 5)], 3))
    assert len(set(found.values())) == 1


def test_what_an_operator_reads_is_not_packed() -> None:
    """Even if another operator packs it, too (U1)."""
    values = [tensor(0), tensor(1, 1), tensor(2, 2), tensor(3), tensor(4, 3), tensor(5), tensor(6)]
    nodes = [linear(0, 1, 2, 3), multiply(3, 4, 5), multiply(5, 2, 6)]
    assert packed_constants(graph(values, nodes, 3)) == {1}


def test_a_key_is_one_blob_with_all_its_places() -> None:
    """Values with one key have one blob, which joins their groups, and is read if one of them is (U1)."""
    one, two = "one@0123456789abcdef", "two@0123456789abcdef"
    text = b"\x14\0\0\0"
    payload = b"".join((text, one.encode(), b"\0\0\0\0", text, two.encode(), b"\0\0\0\0", text, one.encode(), b"\0"))
    keys = {1: (one, 8), 2: (two, 4), 3: (one, 8)}
    first, second = constants_of_payload(payload, keys, {1: 0, 2: 1, 3: 1}, {1, 2}, {})
    assert (first.key, first.nbytes, first.packed) == (one, 8, False)
    assert (second.key, second.nbytes, second.packed) == (two, 4, True)
    assert first.group == second.group
    assert [payload[place : place + 16] for place in first.places] == [b"0123456789abcdef"] * 2
    assert len(second.places) == 1


def test_a_key_has_room_for_a_version() -> None:
    """Its last 16 bytes are replaced at run time (U1)."""
    with pytest.raises(InvalidKeyError, match="key 'short' is too short"):
        constants_of_payload(b"", {1: ("short", 4)}, {1: 0}, set(), {})
