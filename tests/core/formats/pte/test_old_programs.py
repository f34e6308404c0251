"""Programs from before 2024-09 keep constants, and often delegates' payloads, inside the flatbuffer."""

import pytest

from blobstore.core.formats.pte.program import ProgramFile, read_program
from blobstore.errors import UnsupportedProgramError
from tests.core.formats.pte import oracle, programs
from tests.helpers import models

NAMES = ("portable", "convolutions", "channels-last", "two methods", "two layouts of one buffer", "many dtypes")
CASES = {name: programs.everything()[name] for name in (*NAMES, "control flow", "no weights")}


def _read(pte):
    return ProgramFile("old.pte", memoryview(pte))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_constants_leave_the_flatbuffer(slim, stock_run, check_runs, name):
    model = CASES[name]()
    old = oracle.with_inline_data(model.pte)
    assert not any(segment.span.size for segment in _read(old).segments)
    target, ptd, moves = slim(old)
    new = target.read_bytes()
    for item in moves:
        if len(item.data) >= 64:
            assert bytes(item.data) not in new
    # A vtable is new, and for every key a table and its text. Of a constant, only its padding stays.
    added = sum(len(key) + 100 for key in moves.values())
    assert len(new) <= len(old) - sum(s.size for s in _read(old).inline if s) + added
    if moves and name != "many dtypes":  # it has a constant without bytes, which stays
        # ExecuTorch 1.5 does not load old programs; without constants it does.
        with pytest.raises(RuntimeError, match="Failed to load program"):
            stock_run(old, (), method=next(iter(model.methods)))
        check_runs(model, target, ptd)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("parity", [0, 1])
def test_every_second_constant_leaves(slim, check_runs, tmp_path, name, parity):
    model = CASES[name]()
    turn = iter(range(10**6))
    old = oracle.with_inline_data(model.pte)
    target, ptd, moves = slim(old, lambda _: next(turn) % 2 == parity)
    before = {item.key: bytes(item.data) for item in _read(old).movable()}
    after = {item.key: bytes(item.data) for item in read_program(target).movable()}
    assert after == {key: data for key, data in before.items() if key not in moves.values()}
    # ExecuTorch's Python still reads it, and converts it to a current program.
    file = oracle.deserialize(target.read_bytes())
    today = tmp_path / "today.pte"
    today.write_bytes(bytes(oracle._program.serialize_pte_binary(file, extract_delegate_segments=True)))
    check_runs(model, today, ptd)


@pytest.mark.parametrize("alignment", [16, 64, 1024])
def test_what_stays_keeps_its_alignment(slim, alignment):
    values = [oracle.tensor(i, [3 * i + 1]) for i in range(1, 9)]
    pte = oracle.serialize(values, [bytes([i]) * (12 * i + 4) for i in range(1, 9)], payload=b"p" * 33)
    program = oracle.deserialize(pte).program
    old = bytes(
        oracle._program_to_flatbuffer(program, constant_tensor_alignment=alignment, delegate_alignment=alignment).data
    )
    before = _read(old)
    assert all(span.start % alignment == 0 for span in before.inline if span)
    turn = iter(range(100))
    target, _, moves = slim(old, lambda _: next(turn) % 3 > 0)
    after = read_program(target)
    assert 0 < len(moves) < 8
    assert all(span.start % alignment == 0 for span in after.inline if span)
    (payload,) = after.delegates
    assert payload.segment is None
    assert payload.span.start % alignment == 0
    assert bytes(after.data[payload.span.start : payload.span.stop]) == b"p" * 33
    assert len(after.data) < len(before.data) + 100 * len(moves)


def test_before_there_was_a_constant_segment(slim, check_runs):
    model = models.mlp()
    program = oracle.to_json(oracle.with_inline_data(model.pte))
    del program["constant_segment"]
    target, ptd, _ = slim(oracle.from_json(program))
    check_runs(model, target, ptd)


def test_unknown_fields_are_refused(slim, later_executorch):
    """If bytes leave the flatbuffer, every reference must be known."""
    old = oracle.with_inline_data(models.mlp().pte)
    program = oracle.to_json(old)
    program["execution_plan"][0]["future_text"] = "x"
    pte = oracle.from_json(program, later_executorch)
    with pytest.raises(UnsupportedProgramError, match=r"unknown fields of ExecutionPlan"):
        slim(pte)
    target, _, _ = slim(pte, lambda _: False)
    assert target.read_bytes() == pte
