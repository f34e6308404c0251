"""What XNNPACK's graph shows about constants: which belong together, which are packed, where the payload names them."""

from types import SimpleNamespace
from typing import Any

import pytest

from blobstore.errors import InvalidKeyError
from blobstore.lowering.export import quiet
from blobstore.lowering.xnnpack.graph import (
    constants_of_payload,
    groups_of_constants,
    packed_constants,
    separate_operators,
)

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


KEYS = ("one@0123456789abcdef", "two@0123456789abcdef")


def test_a_key_that_is_read_is_one_blob_with_all_its_places() -> None:
    """It has one address, so it gets one name, apart from that under which it is packed (U1, X3)."""
    one, two = KEYS
    keys = {1: (one, 8), 2: (two, 4), 3: (one, 8), 4: (one, 8)}
    first, second, third = constants_of_payload(
        {1: 10, 2: 20, 3: 40, 4: 30}, keys, {1: 0, 2: 1, 3: 2, 4: 1}, {2, 3}, {}
    )
    assert (first.key, first.nbytes, first.packed, first.places) == (one, 8, False, (10, 30))
    assert (second.key, second.nbytes, second.packed, second.places) == (two, 4, True, (20,))
    assert (third.key, third.nbytes, third.packed, third.places) == (one, 8, True, (40,))
    assert first.group == second.group != third.group


def test_a_key_has_room_for_a_version() -> None:
    """Its last 16 bytes are replaced at run time (U1)."""
    with pytest.raises(InvalidKeyError, match="key 'short' is too short"):
        constants_of_payload({1: 0}, {1: ("short", 4)}, {1: 0}, set(), {})


def scaled(number: int, scale: float, buffer: int = 0) -> Any:
    """A value of int8 with one scale."""
    value = tensor(number, buffer)
    quant = schema.PerTensorQuant(scale=scale, zero_point=0)
    return SimpleNamespace(xvalue_union=schema.XNNQuantizedTensorValue(value.xvalue_union, quant))


def shared(*scales: float) -> Any:
    """Linear layers with one weight and one bias, whose inputs have these scales."""
    inputs = [scaled(2 + number, scale) for number, scale in enumerate(scales)]
    nodes = [linear(2 + number, 0, 1, 2) for number in range(len(scales))]
    made = graph([tensor(0, 1, scales=2), tensor(1, 3), *inputs], nodes, 0)
    made.constant_data = [
        schema.ConstantDataOffset(offset=0, size=0, named_key=key)
        for key in ("", "weight", "weight.scale", "l.bias@0123456789abcdef")
    ]
    return made


def test_equal_operators_share() -> None:
    """Nothing is added (X3)."""
    made = shared(1.0, 1.0)
    assert separate_operators(made) == {} and len(made.constant_data) == 4


def test_equal_numbers_with_other_scales_are_apart() -> None:
    """Two weights of one key, with scales of two: their operators describe themselves in the same words (X3)."""
    made = shared(1.0)
    other = tensor(3, 4, scales=5)
    made.xvalues.append(other)
    made.xnodes.append(linear(2, 3, 1, 2))
    made.constant_data += [schema.ConstantDataOffset(0, 0, key) for key in ("weight", "other.scale")]
    assert separate_operators(made) == {6: 3}
    groups = groups_of_constants(made)
    assert groups[1] == groups[2] == groups[3] != groups[4] == groups[5] == groups[6]
