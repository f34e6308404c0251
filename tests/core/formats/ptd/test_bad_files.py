"""Any file gives an error that names it, or the right bytes, quickly and with little memory (B5)."""

import json
import os
import resource
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash

from blobstore import BlobStore, ScalarType, TensorLayout, open_ptd, save_file
from blobstore.errors import BlobStoreError, FileAccessError, IntegrityError, InvalidFileError
from tests.core.disk.outputs import damage
from tests.core.formats.ptd.test_format import golden_store
from tests.core.formats.pte.oracle import write_ptd
from tests.helpers.schemas import SCHEMA
from tests.helpers.schemas import flatc as run_flatc

HEADER = struct.Struct("<4sIQQQQ")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "good.ptd"
    golden_store().write_ptd(path, metadata={"a": "b"})
    return path.read_bytes()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A file without a manifest, as ExecuTorch writes it."""
    weight = ("weight", np.arange(6, dtype=np.float32).tobytes(), TensorLayout(ScalarType.FLOAT, (2, 3)))
    path = tmp_path_factory.mktemp("foreign") / "theirs.ptd"
    return write_ptd(path, [weight, ("opaque", b"some bytes", None)]).read_bytes()


def read(path):
    """Open a file, verify it, and read everything."""
    with open_ptd(path, verify=True) as data_map:
        return {key: (data_map.bytes(key), data_map.get_tensor_layout(key)) for key in data_map}


@pytest.mark.long
def test_truncated_at_any_byte(tmp_path, good, foreign):
    path = tmp_path / "cut.ptd"
    for whole in (good, foreign):
        path.write_bytes(whole)
        for length in reversed(range(len(whole))):
            os.truncate(path, length)
            with pytest.raises(InvalidFileError, match=r"cut\.ptd: .+"):
                read(path)


def flipped(path, content, *, every=True):
    """Write a file, flip one bit of each byte or every one of them, and then flip it back, one after another."""
    path.write_bytes(content)
    with path.open("r+b") as file:
        for at in range(len(content)):
            for bit in range(8) if every else [at % 8]:
                yield os.pwrite(file.fileno(), bytes([content[at] ^ 1 << bit]), at)
            os.pwrite(file.fileno(), content[at : at + 1], at)


@pytest.mark.slow_for("True")
@pytest.mark.long
@pytest.mark.parametrize("every", [False, True])
def test_any_bit_flipped(tmp_path, good, every):
    """One bit of each byte, or every one."""
    for _ in flipped(path := tmp_path / "flip.ptd", good, every=every):
        with pytest.raises(InvalidFileError, match=r"flip\.ptd: .+"):
            read(path)
    assert read(path)


@pytest.mark.long
def test_any_bit_flipped_without_a_manifest(tmp_path, foreign):
    """Damage to the bytes of a blob cannot be detected here, but nothing worse may happen."""
    for _ in flipped(path := tmp_path / "flip.ptd", foreign):
        try:
            read(path)
        except InvalidFileError as error:
            assert "flip.ptd" in str(error)


def test_appended_bytes(tmp_path, good, foreign):
    path = tmp_path / "more.ptd"
    path.write_bytes(good + b"x")
    with pytest.raises(IntegrityError, match="bytes"):
        open_ptd(path)
    path.write_bytes(foreign + b"x")  # stock readers ignore it, and nothing marks it as foreign
    assert set(read(path)) == {"weight", "opaque"}


# Files that are well-formed flatbuffers with impossible contents; flatc makes them, not the code under test.

SEGMENTS = [{"offset": 0, "size": 24}, {"offset": 128, "size": 10}]
LAYOUT = {"scalar_type": "FLOAT", "sizes": [2, 3], "dim_order": [0, 1]}
ENTRY = {"key": "weight", "segment_index": 0, "tensor_layout": LAYOUT}


def flatc(folder, schema, contents):
    """The flatbuffer with these contents."""
    made = folder / "flatc"
    made.mkdir(exist_ok=True)
    (made / "contents.json").write_text(json.dumps(contents))
    run_flatc("--binary", "-o", made, "-I", SCHEMA, SCHEMA / schema, made / "contents.json")
    (made / "contents.json").unlink()
    (binary,) = made.iterdir()
    flatbuffer = binary.read_bytes()
    binary.unlink()
    return flatbuffer


def build(folder, table, *, header=None, patch=None):
    """A .ptd with this table of contents and 138 bytes of segments."""
    flatbuffer = flatc(folder, "flat_tensor.fbs", table)
    base = -(-(len(flatbuffer) + 48) // 128) * 128
    fields = {"magic": b"FH01", "length": 40, "offset": 48, "size": len(flatbuffer), "base": base, "data": 138}
    fields.update(header or {})
    root = struct.unpack("<I", flatbuffer[:4])[0] + 48
    data = struct.pack("<I", root) + flatbuffer[4:8] + HEADER.pack(*fields.values()).ljust(48, b"\0") + flatbuffer[8:]
    data = data.ljust(base, b"\0") + bytes(138)
    for old, new in (patch or {}).items():
        assert data.count(old) == 1
        data = data.replace(old, new)
    path = folder / "made.ptd"
    path.write_bytes(data)
    return path


def table(*, version=0, segments=SEGMENTS, entries=(ENTRY,)):
    return {"version": version, "segments": segments, "named_data": list(entries)}


def with_layout(**changes):
    return table(entries=[{**ENTRY, "tensor_layout": {**LAYOUT, **changes}}])


def test_the_builder_builds_good_files(tmp_path):
    assert list(read(build(tmp_path, table()))) == ["weight"]
    assert read(build(tmp_path, table(entries=[]))) == {}


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (table(version=1), "version 0, found 1"),
        (table(segments=[{"offset": 0, "size": 139}]), "not within"),
        (table(segments=[{"offset": 139, "size": 0}]), "not within"),
        (table(segments=[{"offset": 120, "size": 24}]), "not within"),
        (table(segments=[{"offset": 2**64 - 8, "size": 24}]), "not within"),
        (table(segments=[{"offset": 8, "size": 2**64 - 8}]), "not within"),
        (table(segments=[{"offset": 8, "size": 2**64 - 1}]), "not within"),
        (table(segments=[{"offset": 2**63, "size": 2**63}]), "not within"),
        (table(segments=[{"offset": 0, "size": 24}, {"offset": 23, "size": 1}]), "overlap"),
        (table(segments=[{"offset": 20, "size": 24}, {"offset": 0, "size": 24}]), "overlap"),
        (table(segments=[]), "'weight' is in segment 0, there are 0"),
        (table(entries=[{**ENTRY, "segment_index": 2}]), "'weight' is in segment 2, there are 2"),
        (table(entries=[{**ENTRY, "segment_index": 2**32 - 1}]), "there are 2"),
        (table(entries=[ENTRY, ENTRY]), "'weight' occurs twice"),
        (table(entries=[{"segment_index": 0}]), "no key"),
        (with_layout(sizes=[2, 4]), "'weight' is float.* of 32 bytes, but its segment has 24"),
        (with_layout(sizes=[2, 2]), "16 bytes"),
        (with_layout(scalar_type="DOUBLE"), "48 bytes"),
        (with_layout(scalar_type=30), "unknown scalar type 30"),
        (with_layout(scalar_type=-1), "unknown scalar type -1"),
        (with_layout(sizes=[-2, -3]), "size -2"),
        (with_layout(sizes=[2**31 - 1] * 6, dim_order=list(range(6))), "overflows"),
        (with_layout(sizes=[2**16] * 4 + [0], dim_order=list(range(5))), "0 bytes"),
        (with_layout(sizes=[6]), "1 sizes and a dim_order of 2"),
        (with_layout(dim_order=[0, 0]), "not a permutation"),
        (with_layout(dim_order=[0, 2]), "not a permutation"),
        (with_layout(sizes=[1] * 65, dim_order=list(range(65))), "at most 64"),
        ({"version": 0, "named_data": []}, "missing"),
        ({"version": 0, "segments": []}, "missing"),
        ({}, "missing"),
    ],
)
def test_impossible_contents(tmp_path, contents, reason):
    with pytest.raises(InvalidFileError, match=rf"made\.ptd: .*{reason}"):
        open_ptd(build(tmp_path, contents))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": b"FH02"}, "FH02"),
        ({"length": 39}, "length 39"),
        ({"offset": 0}, "between"),
        ({"offset": 2**64 - 1}, "between"),
        ({"size": 2**64 - 48}, "between"),
        ({"size": 10**6}, "between"),
        ({"base": 2**64 - 1}, "truncated"),
        ({"base": 0}, "between"),
        ({"data": 139}, "truncated"),
        ({"data": 2**64 - 1}, "truncated"),
        ({"size": 8}, "flatbuffer"),
    ],
)
def test_impossible_headers(tmp_path, changes, reason):
    with pytest.raises(InvalidFileError, match=reason):
        open_ptd(build(tmp_path, table(), header=changes))


def test_a_vtable_that_ends_with_the_flatbuffer(tmp_path):
    """The length of the flatbuffer need not be a multiple of four."""
    data = bytearray(build(tmp_path, table()).read_bytes())
    _, size, base, _ = struct.unpack_from("<4Q", data, 16)
    root = struct.unpack_from("<I", data)[0]
    vtable = root - struct.unpack_from("<i", data, root)[0]
    end = 48 + size
    moved = data[vtable : vtable + struct.unpack_from("<H", data, vtable)[0]]
    assert end % 4 == 0 and len(moved) == 10 and base - end >= 10
    data[end : end + 10] = moved
    struct.pack_into("<i", data, root, root - end)
    (tmp_path / "made.ptd").write_bytes(data)
    for room, accepted in ((8, False), (9, False), (10, True), (11, True), (12, True)):
        struct.pack_into("<Q", data, 24, size + room)
        (tmp_path / "made.ptd").write_bytes(data)
        if accepted:
            assert list(read(tmp_path / "made.ptd")) == ["weight"]
        else:
            with pytest.raises(InvalidFileError, match="flatbuffer"):
                read(tmp_path / "made.ptd")


# Valid manifests with wrong contents; flatc makes them, too.


def digest_of(data):
    return {"bytes": list(xxhash.xxh3_128_digest(data))}


def with_manifest(folder, changes=(), *, length=0, mark=b"BLOBMAN1", magic=b"BLOBMAN1", table=None):
    """A .ptd with a correct manifest except for `changes`, where None stands for a field that is left out."""
    table = table or {"version": 0, "segments": SEGMENTS, "named_data": [ENTRY]}
    data = bytearray(build(folder, table).read_bytes())
    data[48:56] = mark
    base = struct.unpack_from("<Q", data, 32)[0]
    contents = {
        "version": 0,
        "head": digest_of(data[:base]),
        "segments": [digest_of(data[base + s["offset"] :][: s["size"]]) for s in table["segments"]],
        "alignments": [16] * len(table["named_data"]),
        "metadata": [{"key": "a", "value": "1"}, {"key": "b", "value": "2"}],
        **dict(changes),
    }
    body = flatc(folder, "manifest.fbs", {key: value for key, value in contents.items() if value is not None})
    data += body + xxhash.xxh3_128_digest(body) + struct.pack("<Q", len(body) + length) + magic
    path = folder / "made.ptd"
    path.write_bytes(data)
    return path


def test_manifests_that_flatc_made(tmp_path):
    assert list(read(with_manifest(tmp_path))) == ["weight"]
    assert list(read(with_manifest(tmp_path, {"metadata": None}))) == ["weight"]
    assert read(with_manifest(tmp_path, table={"version": 0, "segments": [], "named_data": []})) == {}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 1}, "version 1"),
        ({"head": None}, "lacks the digest of the head"),
        ({"head": {"bytes": [0] * 16}}, "bytes are damaged"),
        ({"segments": None}, "0 segments and 1 keys, the file has 2 and 1"),
        ({"segments": [{"bytes": [0] * 16}] * 3}, "3 segments"),
        ({"segments": [{"bytes": [0] * 16}] * 2}, "the bytes of 'weight' are damaged"),
        ({"alignments": None}, "2 segments and 0 keys"),
        ({"alignments": [1, 1]}, "2 keys"),
        ({"alignments": [0]}, "alignment 0"),
        ({"alignments": [7]}, "alignment 7"),
        ({"alignments": [2**31]}, "alignment 2147483648"),
        ({"metadata": [{"key": "b", "value": ""}, {"key": "a", "value": ""}]}, "ascend"),
        ({"metadata": [{"key": "a", "value": ""}, {"key": "a", "value": ""}]}, "ascend"),
        ({"metadata": [{}, {}]}, "ascend"),
    ],
)
def test_manifests_that_contradict_the_file(tmp_path, changes, reason):
    with pytest.raises(InvalidFileError, match=rf"made\.ptd: .*{reason}"):
        read(with_manifest(tmp_path, changes))


def with_opaque(folder, opaque, layout=None):
    """A .ptd of three keys, a tensor and two of ten bytes, whose manifest lists the keys `opaque`.

    Args:
        layout: the layout of the last key instead of that of ten bytes; empty for none.
    """
    ten = {"scalar_type": "BYTE", "sizes": [10], "dim_order": [0]}
    last = ten if layout is None else layout
    entries = [
        ENTRY,
        {"key": "bytes", "segment_index": 1, "tensor_layout": ten},
        {"key": "last", "segment_index": 1, **({"tensor_layout": last} if last else {})},
    ]
    return with_manifest(folder, {"opaque": opaque}, table=table(entries=entries))


BAD_OPAQUE = [
    ([3], None, "it lists key 3 as opaque, there are 3"),
    ([1, 2**32 - 1], None, "it lists key 4294967295 as opaque, there are 3"),
    ([2, 1], None, "the opaque keys do not ascend"),
    ([1, 1], None, "the opaque keys do not ascend"),
    ([1, 2, 1], None, "the opaque keys do not ascend"),
    ([0], None, r"it lists 'weight' as opaque: expected the layout byte\[24\], found float\[2, 3\]"),
    ([1, 2], {}, r"it lists 'last' as opaque: expected the layout byte\[10\], found none"),
    ([2], {"scalar_type": "CHAR", "sizes": [10], "dim_order": [0]}, r"byte\[10\], found char\[10\]"),
    ([2], {"scalar_type": "BYTE", "sizes": [2, 5], "dim_order": [0, 1]}, r"byte\[10\], found byte\[2, 5\]"),
]
"""Lists that contradict the file: the list, the layout of the last key, and the reason."""


def test_opaque_keys_that_flatc_listed(tmp_path):
    """A listed key has no layout, and another one keeps its layout; an empty list is as good as no list (R4)."""
    bytes_ = TensorLayout(ScalarType.BYTE, (10,))
    for opaque, layouts in (
        ([1, 2], [None, None]),
        ([2], [bytes_, None]),
        ([], [bytes_, bytes_]),
        (None, [bytes_] * 2),
    ):
        found = read(with_opaque(tmp_path, opaque))
        assert [layout for _, layout in found.values()] == [TensorLayout(ScalarType.FLOAT, (2, 3)), *layouts]


@pytest.mark.parametrize(("opaque", "layout", "reason"), BAD_OPAQUE)
def test_lists_of_opaque_keys_that_contradict_the_file(tmp_path, opaque, layout, reason):
    with pytest.raises(IntegrityError, match=rf"made\.ptd: the manifest is malformed: .*{reason}"):
        read(with_opaque(tmp_path, opaque, layout))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"length": 1}, "does not fit"),
        ({"length": -1}, "does not fit"),
        ({"length": 2**63}, "does not fit"),
        ({"magic": b"BLOBMAN2"}, "magic .* missing"),
        ({"mark": bytes(8)}, "mark"),
    ],
)
def test_manifests_that_are_not_where_they_should_be(tmp_path, changes, reason):
    with pytest.raises(IntegrityError, match=reason):
        read(with_manifest(tmp_path, **changes))


def test_a_blob_that_is_itself_a_file_with_a_manifest(tmp_path, good):
    """The last blob of a file without a manifest may end with the magic of one."""
    at = {"offset": 0, "size": len(good)}
    path = build(tmp_path, {"version": 0, "segments": [at], "named_data": [{"key": "k"}]}, header={"data": 0})
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 40, len(good))
    base = struct.unpack_from("<Q", data, 32)[0]
    path.write_bytes(data[:base] + good)
    assert read(path) == {"k": (good, None)}


def test_longer_header_of_a_later_version(tmp_path):
    assert list(read(build(tmp_path, table(), header={"length": 48}))) == ["weight"]


def test_wrong_identifier(tmp_path):
    with pytest.raises(InvalidFileError, match="FT02"):
        open_ptd(build(tmp_path, table(), patch={b"FT01": b"FT02"}))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "pointer of Git LFS; git lfs pull"),
        (struct.pack("<Q", 60) + b'{"w":{"dtype":"F32"', "this is a .safetensors; blobstore convert"),
        (b"\x10\0\0\0ET12eh00", "this is a program, a .pte"),
    ],
)
def test_files_that_are_taken_for_a_ptd(head, message, tmp_path):
    path = tmp_path / "other"
    path.write_bytes(head.ljust(200, b" "))
    with pytest.raises(InvalidFileError, match=message):
        open_ptd(path)


def test_invalid_utf_8(tmp_path):
    with pytest.raises(InvalidFileError, match="not valid UTF-8"):
        open_ptd(build(tmp_path, table(), patch={b"weight\0": b"wei\xffht\0"}))


def test_huge_counts_cost_nothing(tmp_path):
    """A vector that claims four billion elements in a file of 500 bytes."""
    good = build(tmp_path, table()).read_bytes()
    tracemalloc.start()
    try:
        for at in range(56, len(good) - 138, 4):
            for count in (2**32 - 1, 2**31, 2**30, 10**8):
                data = bytearray(good)
                data[at : at + 4] = count.to_bytes(4, "little")
                (tmp_path / "huge.ptd").write_bytes(data)
                try:
                    read(tmp_path / "huge.ptd")
                except InvalidFileError:
                    pass
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_not_a_file(tmp_path):
    with pytest.raises(FileAccessError, match="directory"):
        open_ptd(tmp_path)
    with pytest.raises(FileAccessError, match="No such file"):
        open_ptd(tmp_path / "missing.ptd")
    (tmp_path / "empty.ptd").touch()
    with pytest.raises(InvalidFileError, match=r"empty\.ptd: the file is empty"):
        open_ptd(tmp_path / "empty.ptd")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileAccessError, match="not a regular file"):
        open_ptd(tmp_path / "fifo")


def test_disk_full_leaves_the_old_file(tmp_path):
    path = tmp_path / "full.ptd"
    save_file({"small": np.ones(3, np.float32)}, path)
    before = path.read_bytes()
    store = BlobStore()
    store.add("big", np.zeros(1 << 20, np.uint8))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        with pytest.raises(FileAccessError, match=r"full\.ptd: "):
            store.write_ptd(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["full.ptd"]


def test_every_error_is_ours_and_a_standard_one():
    assert issubclass(InvalidFileError, BlobStoreError) and issubclass(InvalidFileError, ValueError)
    assert issubclass(FileAccessError, OSError)


def test_damage_to_a_blob_is_found_by_verify_and_names_the_key(tmp_path, good):
    path = tmp_path / "hurt.ptd"
    path.write_bytes(good)
    damage(path, "linear.weight")
    with open_ptd(path) as data_map, pytest.raises(IntegrityError, match="'linear.weight', 'tied.weight'"):
        data_map.verify()
    with pytest.raises(IntegrityError):
        open_ptd(path, verify=True)


def test_verify_says_when_there_is_nothing_to_verify(tmp_path, foreign):
    path = tmp_path / "foreign.ptd"
    path.write_bytes(foreign)
    with open_ptd(path) as data_map:
        assert data_map.verify() is False
        assert not data_map.has_digests
