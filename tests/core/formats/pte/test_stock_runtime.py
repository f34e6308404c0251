"""A rewritten program computes the same bits in ExecuTorch's own runtime, which first verifies its structure (B1)."""

import numpy as np
import pytest

from blobstore.core.formats.pte.program import ProgramFile, read_program
from tests.core.formats.pte import oracle, programs

CASES = {name: make for name, make in programs.everything().items() if name != "already external"}


def _movables(pte):
    return list(ProgramFile("model.pte", memoryview(pte)).movable())


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_everything_moved(check_same_outputs, name):
    target, moves = check_same_outputs(CASES[name]())
    slim = read_program(target)
    assert bool(moves) == (name != "no weights")
    assert not list(slim.movable())
    assert not slim.named_data
    moved = {key for item, key in moves.items() if item.kind != "named_data"}
    assert {tensor.key for tensor in slim.externals} == moved


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parity", [0, 1])
def test_every_second_moved(check_same_outputs, name, parity):
    turn = iter(range(10**6))
    target, moves = check_same_outputs(CASES[name](), choose=lambda _: next(turn) % 2 == parity)
    kept = {item.key: bytes(item.data) for item in read_program(target).movable()}
    oracle.deserialize(target.read_bytes())
    assert not set(kept) & set(moves.values())
    assert len(kept) + len(set(moves.values())) == next(turn)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_nothing_moved_is_the_same_file(slim, name):
    pte = CASES[name]().pte
    target, _, _ = slim(pte, lambda _: False)
    assert target.read_bytes() == pte


@pytest.mark.long
def test_named_state_is_still_found_by_its_name(slim, module_runner):
    model = programs.named_counter()
    target, ptd, moves = slim(model.pte)
    assert {item.name for item in moves if item.kind == "state"} == {"total"}
    inputs = [np.ones(64, np.float32)]
    (output,) = module_runner(target, [ptd], inputs)
    assert np.array_equal(output, np.arange(1, 65) * 2.0)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_read_is_what_executorch_reads(name):
    pte = CASES[name]().pte
    theirs = oracle.deserialize(pte)
    items = _movables(pte)
    tensors = {
        (plan.name, number): value.val
        for plan in theirs.program.execution_plan
        for number, value in enumerate(plan.values)
        if isinstance(value.val, oracle.schema.Tensor)
    }
    found = set()
    for item in items:
        if item.kind == "named_data":
            entry = theirs.named_data.pte_data[item.name]
            assert bytes(item.data) == theirs.named_data.buffers[entry.buffer_index]
            continue
        for use in item.parts:
            tensor = tensors[use.method, use.value]
            found.add((use.method, use.value))
            assert (item.kind == "state") == (tensor.allocation_info is not None)
            assert item.layout.scalar_type == int(tensor.scalar_type)
            assert list(item.layout.sizes) == tensor.sizes
            assert list(item.layout.dim_order) == list(tensor.dim_order)
            buffers = theirs.mutable_data if item.kind == "state" else theirs.program.constant_buffer
            assert bytes(buffers[tensor.data_buffer_idx].storage).startswith(item.data)
    empty = {place for place, tensor in tensors.items() if 0 in tensor.sizes}
    stored = {place for place, tensor in tensors.items() if tensor.data_buffer_idx}
    assert found == stored - empty
    named = theirs.named_data.pte_data if theirs.named_data else {}
    assert {item.name for item in items if item.kind == "named_data"} == set(named)
