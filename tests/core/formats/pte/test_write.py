"""Writing a program: what is refused, and the bytes of the file."""

import io

import pytest

from blobstore.core.formats.pte.program import ProgramFile, content_key, read_program
from blobstore.core.formats.pte.rewrite import Rewrite
from blobstore.core.memory.digest import digest
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.errors import InvalidKeyError, KeyConflictError, UnsupportedProgramError
from tests.core.formats.pte import oracle


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "model.pte"
    path.write_bytes(oracle.one_of_everything())
    return read_program(path)


def _moves(program, keep_small=0):
    return {item: item.key for item in program.movable(keep_small)}


def test_keep_small(program):
    assert [len(item.data) for item in program.movable(16)] == [24, 24, 20, 16]


def test_content_key_tells_content_and_layout_apart():
    a, b = digest(b"\x00" * 24), digest(b"\x01" * 24)
    layouts = [
        TensorLayout(ScalarType.FLOAT, (2, 3)),
        TensorLayout(ScalarType.FLOAT, (2, 3), (1, 0)),
        TensorLayout(ScalarType.FLOAT, (3, 2)),
        TensorLayout(ScalarType.FLOAT, (6,)),
        TensorLayout(ScalarType.INT, (6,)),
        TensorLayout(ScalarType.FLOAT, (1, 6)),
        TensorLayout(ScalarType.FLOAT, (6, 1), (1, 0)),
        TensorLayout(ScalarType.FLOAT, ()),
    ]
    keys = {content_key(address, layout) for address in (a, b) for layout in layouts}
    assert len(keys) == 2 * len(layouts)
    assert content_key(a, layouts[1]) == f"tensor.{a.xxh3_128.hex()}.float.2x3.1-0"
    assert content_key(a, layouts[-1]) == f"tensor.{a.xxh3_128.hex()}.float.scalar"


def test_golden_layout_of_a_slim_program(program):
    """Segments keep their index and alignment, empty ones stay, and the header has the sizes."""
    file = io.BytesIO()
    choose = {item: item.key for item in program.movable() if item.name in {"bias", "second", "cache"}}
    rewrite = Rewrite(program, choose)
    rewrite.write(file)
    data = file.getvalue()
    assert rewrite.nbytes == len(data)
    slim = ProgramFile("slim.pte", memoryview(data))
    assert [segment.users for segment in slim.segments] == [
        ["constants"],
        ["initial state 0"],
        ["method 'forward', delegate 0"],
        ["named data 'first'", "named data 'again'"],
        [],
    ]
    assert [segment.span.size for segment in slim.segments] == [24, 16, 7, 10, 0]
    assert all(segment.span.start % 128 == 0 for segment in slim.segments[:4])
    assert data[4:12] == b"ET12eh00"
    assert int.from_bytes(data[16:24], "little") == slim.program_size
    assert int.from_bytes(data[24:32], "little") == slim.segment_base == slim.segments[0].span.start
    assert int.from_bytes(data[32:40], "little") == len(data) - slim.segment_base
    theirs = oracle.deserialize(data)
    assert [b.storage for b in theirs.program.constant_buffer] == [b"", bytes(range(24)), b""]
    assert [b.storage for b in theirs.mutable_data] == [b"", bytes(range(16)), b""]
    assert list(theirs.named_data.pte_data) == ["first", "again"]
    assert theirs.program.backend_delegate_data[0].data == b"payload"


def test_blob_that_a_kept_key_shares_stays(program):
    (item,) = [item for item in program.movable() if item.name == "again"]
    file = io.BytesIO()
    Rewrite(program, {item: "again"}).write(file)
    slim = ProgramFile("slim.pte", memoryview(file.getvalue()))
    assert {blob.key: bytes(slim.data[blob.span.start : blob.span.stop]) for blob in slim.named_data} == {
        "first": b"named data",
        "second": b"more named data",
    }


@pytest.mark.parametrize("key", ["", "a\0b", "\ud800"])
def test_impossible_key(program, key):
    item = next(program.movable())
    with pytest.raises(InvalidKeyError):
        Rewrite(program, {item: key})


def test_other_key_for_something_with_a_name(program):
    for item in program.movable():
        if item.name:
            with pytest.raises(UnsupportedProgramError, match=rf"model\.pte: '{item.name}' has a recorded name"):
                Rewrite(program, {item: "other"})


def test_one_key_for_two_contents(program):
    matrix, flat, *_, state, _ = (item for item in program.movable() if item.kind != "named_data")
    for first, second in ((matrix, flat), (matrix, state)):
        with pytest.raises(KeyConflictError, match=r"model\.pte: the key 'k'"):
            Rewrite(program, {first: "k", second: "k"})


def test_move_of_another_program(program):
    other = ProgramFile("other.pte", program.data)
    with pytest.raises(UnsupportedProgramError, match="belongs to another program"):
        Rewrite(program, _moves(other))


@pytest.mark.parametrize("where", ["between", "behind"])
def test_bytes_that_belong_to_no_segment(program, where, tmp_path):
    data = bytearray(program.data)
    if where == "between":
        data[program.segments[0].span.stop] = 1
    else:
        data += b"\0\0signature"
    path = tmp_path / "signed.pte"
    path.write_bytes(data)
    signed = read_program(path)
    with pytest.raises(UnsupportedProgramError, match="belong to no segment"):
        Rewrite(signed, {})


def test_zeros_behind_the_last_segment(program):
    padded = ProgramFile("padded.pte", memoryview(bytes(program.data) + bytes(5000)))
    assert Rewrite(padded, {}).nbytes == len(program.data)


def test_a_tensor_at_the_beginning_of_one_that_leaves(slim):
    """What only the larger one needed is not kept (B1)."""
    whole = bytes(range(1, 129))
    pte = oracle.serialize([oracle.tensor(1, [8]), oracle.tensor(1, [32])], [whole])
    target, _, moves = slim(pte, lambda item: item.layout is not None and item.layout.sizes == (32,))
    assert len(moves) == 1
    assert whole[:32] in target.read_bytes()
    assert whole[32:48] not in target.read_bytes()
