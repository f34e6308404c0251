"""A malformed program raises an error that names the file and the reason, within seconds (B5)."""

import copy
import io
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.core.formats.flatbuffer import U32
from blobstore.core.formats.pte.program import ProgramFile
from blobstore.core.formats.pte.rewrite import Rewrite
from blobstore.core.formats.pte.schema import PROGRAM
from blobstore.errors import BlobStoreError, InvalidFileError
from tests.core.formats.pte import oracle
from tests.helpers import models
from tests.helpers.bombs import Program

SECONDS = 2  # for one small file, even a hostile one on a busy machine


def _use(data):
    """Do everything possible with a program, in memory; return whether it was accepted."""
    start = time.monotonic()
    try:
        program = ProgramFile("bad.pte", memoryview(data))
        moves = {item: item.key for item in program.movable()}
        file = io.BytesIO()
        Rewrite(program, moves).write(file)
        ProgramFile("slim.pte", memoryview(file.getvalue()))
    except BlobStoreError as error:
        assert str(error).startswith("bad.pte: ")
        return False
    finally:
        assert time.monotonic() - start < SECONDS
    return True


@pytest.fixture(scope="module")
def small():
    return oracle.one_of_everything()


def _refused(data, match):
    with pytest.raises(InvalidFileError, match=r"^bad\.pte: .*" + match) as caught:
        ProgramFile("bad.pte", memoryview(data))
    assert str(caught.value.path) == "bad.pte"


def _changed(change, segments=None):
    """The small program with another flatbuffer."""
    flatbuffer, data = oracle.split(oracle.one_of_everything())
    program = oracle.to_json(flatbuffer)
    change(program)
    return oracle.join(oracle.from_json(program), data if segments is None else segments)


def test_good_one(small):
    assert _use(small)


def test_truncated_anywhere(small):
    for length in range(len(small)):
        with pytest.raises(InvalidFileError, match=r"^bad\.pte: "):
            ProgramFile("bad.pte", memoryview(small[:length]))


@pytest.mark.long
def test_old_program_truncated_anywhere():
    """No header records the length, so some truncated programs are accepted, but none does harm."""
    old = oracle.with_inline_data(models.channels_last().pte)
    for length in range(len(old)):
        _use(old[:length])


@pytest.mark.slow_for("True")
@pytest.mark.long
@pytest.mark.parametrize("inline", [False, True])
def test_every_bit_flipped(small, inline):
    data = bytearray(oracle.with_inline_data(models.channels_last().pte) if inline else small)
    flatbuffer = ProgramFile("x", memoryview(data)).program_size
    taken = 0
    for position in range(flatbuffer):
        for bit in range(8):
            data[position] ^= 1 << bit
            taken += _use(data)
            data[position] ^= 1 << bit
    assert taken < flatbuffer * 8


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_anything_at_all(data):
    assert not _use(data)
    assert not _use(b"\x30\0\0\0ET12" + data)


def test_not_a_program(small):
    _refused(b"PK\x03\x04 a zip archive, perhaps", "expected b'ET12'")
    _refused(small[:4] + b"ET13" + small[8:], "expected b'ET12' at byte 4, found b'ET13'")
    _refused(b"ET12", "too few")


@pytest.mark.parametrize(
    ("offset", "format_", "value", "match"),
    [
        (12, "<I", 23, "has 23 bytes, expected at least 24"),
        (12, "<I", 2**32 - 1, "does not fit"),
        (16, "<Q", 2**64 - 1, "truncated"),
        (16, "<Q", 8, "does not fit"),
        (24, "<Q", 2**64 - 1, "segments begin at"),
        (24, "<Q", 16, "segments begin at"),
        (24, "<Q", 0, "has no segments"),
        (32, "<Q", 2**64 - 1, "truncated"),
        (32, "<Q", 8, "reach beyond the end"),
        (0, "<I", 2**32 - 1, "the root Program"),
        (0, "<I", 12, "the root Program"),
    ],
)
def test_header(small, offset, format_, value, match):
    data = bytearray(small)
    struct.pack_into(format_, data, offset, value)
    _refused(data, match)


def _tensor(program, index):
    return program["execution_plan"][0]["values"][index]["val"]


CHANGES = {
    "segment beyond the end": (lambda p: p["segments"][1].update(size=10**6), "segment 1: .* beyond the end"),
    "sum that overflows": (lambda p: p["segments"][4].update(offset=2**64 - 8), "segment 4: .* beyond the end"),
    "huge segment": (lambda p: p["segments"][4].update(size=2**64 - 1), "segment 4: .* beyond the end"),
    "overlap": (lambda p: p["segments"][1].update(offset=8), "segments 0 and 1 overlap"),
    "twice": (lambda p: p["segments"].append(p["segments"][2]), "segments 2 and 5 overlap"),
    "named segment": (lambda p: p["named_data"][0].update(segment_index=9), "named data 'first': segment 9 is out of"),
    "constant segment": (lambda p: p["constant_segment"].update(segment_index=5), "constants: segment 5 is out of"),
    "state segment": (
        lambda p: p["mutable_data_segments"][0].update(segment_index=2**32 - 1),
        "initial state 0: segment 4294967295 is out of",
    ),
    "payload segment": (
        lambda p: p["execution_plan"][0]["delegates"][0]["processed"].update(index=77),
        "method 'forward', delegate 0: segment 77 is out of",
    ),
    "inline payload": (
        lambda p: p["execution_plan"][0]["delegates"][0].update(processed={"location": "INLINE", "index": 1}),
        "inline payload 1 is out of range",
    ),
    "same key": (lambda p: p["named_data"][2].update(key="first"), "the key 'first' occurs twice"),
    "no key": (lambda p: p["named_data"][2].update(key=""), "named data 2 has no key"),
    "offset": (lambda p: p["constant_segment"]["offsets"].append(2**63), "offset 9223372036854775808 is beyond"),
    "constant index": (lambda p: _tensor(p, 0).update(data_buffer_idx=9), "value 0: constant 9 is out of range"),
    "state index": (lambda p: _tensor(p, 3).update(data_buffer_idx=3), "value 3: state 3 is out of range"),
    "state without a place": (lambda p: p.pop("mutable_data_segments"), "initial state 0 is out of range"),
    "constant without a place": (lambda p: p.pop("constant_segment"), "constant 1 is out of range, there are 0"),
    "other state": (
        lambda p: _tensor(p, 4)["extra_tensor_info"].update(mutable_data_segments_idx=2**64 - 1),
        "initial state 18446744073709551615 is out of range",
    ),
    "too large": (
        lambda p: _tensor(p, 2).update(sizes=[600]),
        r"value 2: float\[600\] takes 2400 bytes, but there are only \d+",
    ),
    "negative": (lambda p: _tensor(p, 0).update(sizes=[-2, -3]), "value 0: .* size -2"),
    "huge size": (lambda p: _tensor(p, 0).update(sizes=[2**31 - 1, 2**20]), "value 0: .* takes"),
    "size that overflows": (lambda p: _tensor(p, 0).update(sizes=[2**31 - 1] * 2), "value 0: .* overflows"),
    "dim order": (lambda p: _tensor(p, 0).update(dim_order=[0, 0]), "not a permutation"),
    "rank": (lambda p: _tensor(p, 0).update(sizes=[1] * 5000), "5000 sizes, at most"),
    "no sizes": (lambda p: _tensor(p, 0).pop("sizes"), "the tensor has no sizes"),
    "no name": (
        lambda p: _tensor(p, 2).update(extra_tensor_info={"location": "EXTERNAL"}),
        "an external tensor has no name",
    ),
    "method without name": (lambda p: p["execution_plan"][0].pop("name"), "method 0 has no name"),
    "delegate without payload": (
        lambda p: p["execution_plan"][0]["delegates"][0].pop("processed"),
        "no backend id or no payload",
    ),
    "both": (lambda p: p.update(constant_buffer=[{"storage": []}]), "both inside the flatbuffer and in a segment"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_structure(name):
    change, match = CHANGES[name]
    _refused(_changed(change), match)


def test_data_size_bounds_segments_even_if_the_file_is_longer(small):
    data = bytearray(small) + bytes(1000)
    size = struct.unpack_from("<Q", data, 32)[0]
    assert ProgramFile("x", memoryview(data))
    struct.pack_into("<Q", data, 32, size - 1)
    _refused(data, "beyond the end")


def test_text_that_is_not_utf8(small):
    _refused(small.replace(b"first\0", b"fi\xffst\0"), "is not UTF-8")
    _refused(small.replace(b"first\0", b"first!"), "does not end in a zero byte")


def test_constants_that_overlap_are_written_once():
    """Overlapping offsets are valid; they must not make the slim file larger than the old one."""
    values = [oracle.tensor(i, [4000 - i]) for i in range(1, 12)] + [oracle.tensor(12, [2])]
    program = oracle.serialize(values, [bytes([i]) * 4 * (4000 - i) for i in range(1, 12)] + [b"y" * 8], payload=None)
    flatbuffer, segments = oracle.split(program)
    content = oracle.to_json(flatbuffer)
    content["constant_segment"]["offsets"] = [0] + [4 * i for i in range(1, 12)] + [16]
    data = oracle.join(oracle.from_json(content), segments)
    bad = ProgramFile("bad.pte", memoryview(data))
    (item,) = [item for item in bad.movable() if item.layout.sizes == (2,)]
    file = io.BytesIO()
    Rewrite(bad, {item: "k"}).write(file)
    assert len(file.getvalue()) < len(data) - len(segments) + 20000
    slim = ProgramFile("slim.pte", memoryview(file.getvalue()))
    for old, new in zip(bad.tensors[:11], slim.tensors, strict=True):
        assert bad.data[old.span.start : old.span.stop] == slim.data[new.span.start : new.span.stop]


def test_huge_counts_in_small_files():
    for field in list(PROGRAM.fields)[1:]:
        program = Program()
        data = program.finish(program.make("Program", **{field: program.numbers(U32, [7] * 17)}), b"ET12")
        count = struct.pack("<2I", 17, 7)
        assert data.count(count) == 1
        _refused(data.replace(count, struct.pack("<2I", 2**32 - 1, 7)), "damaged flatbuffer")


def test_many_references_to_one_vector():
    """A million tables of the same few bytes cost a bounded amount of work."""
    program = Program()
    values = program.references([program.make("EValue")] * 100_000)
    start = time.monotonic()
    _refused(program.whole([program.plan(f"{i}", values=values) for i in range(3000)]), "again and again")
    assert time.monotonic() - start < 20


def test_many_texts_inside_each_other():
    """Every operator's name starts one number later in one long text."""
    program, count, length = Program(), 20_000, 1 << 16
    text = program.CreateByteVector(struct.pack("<I", length) * count + bytes(length + 4))
    operators = [program.make("Operator", name=text - 4 - 4 * index) for index in range(count)]
    start = time.monotonic()
    _refused(program.whole([program.plan(operators=program.references(operators))]), "again and again")
    assert time.monotonic() - start < 20


def test_two_methods_that_share_everything():
    """Ordinary sharing is accepted: blobstore's own output shares tables, too."""
    flatbuffer, segments = oracle.split(oracle.one_of_everything())
    program = oracle.to_json(flatbuffer)
    second = copy.deepcopy(program["execution_plan"][0])
    second["name"] = "second"
    program["execution_plan"].append(second)
    data = oracle.join(oracle.from_json(program), segments)
    assert _use(data)
    assert [len(item.parts) for item in ProgramFile("x", memoryview(data)).movable()] == [2, 2, 2, 2, 2, 1, 1, 1]


def test_two_fields_in_the_same_bytes(small):
    """A change of one of them would change the other."""
    flatbuffer = bytearray(small)
    root = struct.unpack_from("<I", flatbuffer)[0]
    vtable = root - struct.unpack_from("<i", flatbuffer, root)[0]
    plans, segments = struct.unpack_from("<H", flatbuffer, vtable + 6)[0], vtable + 4 + 2 * 4
    for place in (plans, plans - 2):
        struct.pack_into("<H", flatbuffer, segments, place)
        _refused(bytes(flatbuffer), "share bytes")


def test_a_table_that_is_a_list():
    """The list of operators of one method is an operator of the other."""
    program = Program()
    program.raw(bytes(64))
    operator = program.make("Operator")  # its distance to its vtable is the length of the list
    plans = [program.plan("a", operators=operator), program.plan("b", operators=program.references([operator]))]
    _refused(program.whole(plans), "used as two different things")
