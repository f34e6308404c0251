"""Fields that a later ExecuTorch added to a program are kept, or the rewrite is refused."""

import copy

import pytest

from blobstore.core.formats.pte.program import ProgramFile
from blobstore.errors import UnsupportedProgramError
from tests.core.formats.pte import oracle, programs
from tests.helpers import models


def _extend(pte, change, fbs, tail=b"", more=b""):
    """The program with the additions of `change`, and with `more` bytes behind its segments."""
    flatbuffer, segments = oracle.split(pte)
    program = oracle.to_json(flatbuffer)
    change(program)
    segments += bytes(-len(segments) % 128) + more if more else b""
    return oracle.join(oracle.from_json(program, fbs), segments, tail)


def _add_everywhere(node, tables):
    """Add the new fields to every table in `tables`, each recognized by one of its own fields."""
    if isinstance(node, list):
        for item in node:
            _add_everywhere(item, tables)
    elif isinstance(node, dict):
        for value in list(node.values()):
            _add_everywhere(value, tables)
        if tables & node.keys():
            node["future_text"] = "from later"
            node["future_number"] = 7


SAFE = {"execution_plan", "chains", "val_type", "sizes", "processed", "op_index", "instructions", "memory_id"}


@pytest.mark.long
@pytest.mark.parametrize("make", [models.mlp, models.counter, programs.branches, models.decoder])
def test_unknown_fields_survive(make, slim, check_runs, later_executorch):
    model = make()
    pte = _extend(model.pte, lambda program: _add_everywhere(program, SAFE), later_executorch)
    target, ptd, moves = slim(pte)
    assert moves
    after = oracle.to_json(oracle.split(target.read_bytes())[0], later_executorch)
    expected = oracle.to_json(oracle.split(pte)[0], later_executorch)
    assert str(expected).count("from later") > 20
    assert str(after).count("from later") == str(expected).count("from later")
    for plan, other in zip(expected["execution_plan"], after["execution_plan"], strict=True):
        for value, changed in zip(plan["values"], other["values"], strict=True):
            if value["val_type"] == "Tensor":
                for tensor in (value["val"], changed["val"]):
                    tensor.pop("extra_tensor_info", None)
                    tensor.pop("data_buffer_idx", None)
        assert plan == other
    check_runs(model, target, ptd)


def test_longer_header_is_kept(slim, check_runs, later_executorch):
    model = models.mlp()
    pte = _extend(model.pte, lambda program: None, later_executorch, tail=b"what a later one knows".ljust(32))
    target, ptd, _ = slim(pte)
    new = target.read_bytes()
    assert new[40:72] == pte[40:72]
    assert new[12:16] == pte[12:16] == (64).to_bytes(4, "little")
    assert ProgramFile("x", memoryview(new)).header_size == 64
    check_runs(model, target, ptd, pte)


def test_short_header_of_the_first_versions(slim, check_runs):
    """Before 1.0 the header did not record the length of the segments."""
    model = models.mlp()
    pte = bytearray(model.pte)
    pte[12:16] = (24).to_bytes(4, "little")
    pte[32:40] = b"\xee" * 8  # not part of the header
    target, ptd, _ = slim(bytes(pte), lambda item: item.layout.nbytes > 500)
    assert target.read_bytes()[32:40] == b"\xee" * 8
    check_runs(model, target, ptd)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("SubsegmentOffsets", lambda p: p["constant_segment"].update(future_number=1)),
        ("SubsegmentOffsets", lambda p: p["mutable_data_segments"][0].update(future_number=1)),
        ("DataSegment", lambda p: p["segments"][0].update(future_number=1)),
        ("DataSegment", lambda p: p["segments"][-1].update(future_number=1)),
        ("NamedData", lambda p: p["named_data"][1].update(future_number=1)),
        (
            "ExtraTensorInfo",
            lambda p: p["execution_plan"][0]["values"][2]["val"]["extra_tensor_info"].update(future_number=1),
        ),
    ],
)
def test_unknown_fields_of_what_must_change_are_refused(what, change, slim, later_executorch, tmp_path):
    pte = _extend(oracle.one_of_everything(), change, later_executorch)
    with pytest.raises(UnsupportedProgramError, match=rf"model\.pte: .* {what} has unknown fields"):
        slim(pte)
    assert not (tmp_path / "slim.pte").exists()
    target, _, _ = slim(pte, lambda _: False)
    assert target.read_bytes() == pte


def test_unknown_kinds_of_values_are_refused(slim, later_executorch):
    def change(program):
        program["execution_plan"][0]["values"].append({"val_type": "FutureValue", "val": {"data_buffer_idx": 1}})

    pte = _extend(oracle.one_of_everything(), change, later_executorch)
    with pytest.raises(UnsupportedProgramError, match="values of unknown types"):
        slim(pte)
    target, _, moves = slim(pte, lambda item: item.kind == "named_data")
    assert len(moves) == 3
    assert "FutureValue" in str(oracle.to_json(oracle.split(target.read_bytes())[0], later_executorch))


def test_unknown_segments_are_copied(slim, later_executorch):
    """A segment without known references stays, with its index."""
    extra = b"a segment of a later version" * 10

    def change(program):
        segments = program["segments"]
        offset = segments[-1]["offset"] + segments[-1]["size"]
        segments.append({"offset": offset + -offset % 128, "size": len(extra)})
        program["future_text"] = "the last segment is mine"

    pte = oracle.one_of_everything()
    target, _, moves = slim(_extend(pte, change, later_executorch, more=extra))
    assert moves
    after = ProgramFile("x", memoryview(target.read_bytes()))
    assert len(after.segments) == len(ProgramFile("x", memoryview(pte)).segments) + 1
    span = after.segments[-1].span
    assert bytes(after.data[span.start : span.stop]) == extra
    assert after.segments[-1].users == []
    assert after.unknown == {"Program"}


def test_new_scalar_types_stay(slim, later_executorch):
    def change(program):
        tensor = copy.deepcopy(program["execution_plan"][0]["values"][2])
        tensor["val"] |= {"scalar_type": 77, "data_buffer_idx": 1}
        program["execution_plan"][0]["values"].append(tensor)

    pte = _extend(oracle.one_of_everything(), change, later_executorch)
    target, _, moves = slim(pte)
    assert all(len(item.parts) == 1 for item in moves)
    after = ProgramFile("x", memoryview(target.read_bytes()))
    (kept,) = after.tensors
    assert (kept.index, kept.uses[0].layout) == (1, None)
    assert bytes(after.data[kept.span.start : kept.span.stop]).startswith(bytes(range(24)))
