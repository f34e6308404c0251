"""The Python reader and the native one accept the same files, and read the same contents (R3, B5).

Small files are changed byte by byte and word by word. As digests would detect nearly all changes at once, most files
are sealed again: their digests are recomputed, so that the structure itself must be checked."""

import random
import struct

import numpy as np
import pytest
import xxhash

from blobstore.core.formats.ptd import table
from blobstore.core.formats.ptd.reader import PtdDataMap
from blobstore.errors import IntegrityError, InvalidFileError
from blobstore.runtime import BlobCache
from tests.core.formats.ptd.test_bad_files import (
    BAD_OPAQUE,
    ENTRY,
    SEGMENTS,
    foreign,  # noqa: F401 - a fixture
    with_manifest,
    with_opaque,
)
from tests.core.formats.ptd.test_format import golden_store

pytestmark = pytest.mark.long

WORDS = (0, 1, 4, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def decide(data_map):
    """The contents of an opened file."""
    verified = data_map.verify()
    return verified, [
        (key, data_map.bytes(key), data_map.get_tensor_layout(key), data_map.alignment(key), data_map.digest(key))
        for key in data_map
    ]


def with_python(path, data):
    try:
        return decide(PtdDataMap(path, data=memoryview(data)))
    except InvalidFileError as error:
        return type(error)


def natively(path, data):
    path.write_bytes(data)
    try:
        return decide(BlobCache(path))
    except InvalidFileError as error:
        return type(error)


def check(path, data):
    """Whether the readers accept the file. Fails unless both agree."""
    if not data:
        return False
    python, native = with_python(path, bytes(data)), natively(path, bytes(data))
    assert python == native, bytes(data).hex()
    return isinstance(python, tuple)


def manifest_start(data):
    """Where the flatbuffer of the manifest begins, or would begin if there is no manifest."""
    return sum(struct.unpack_from("<2Q", data, 32))


def seal(data):
    """Recompute the digests of a file with a manifest, as far as its parts are where they should be."""
    base = struct.unpack_from("<Q", data, 32)[0]
    start, end = manifest_start(data), len(data) - 32
    if not 0 < start < end or base > len(data):
        return data
    body = data[start:end]
    root = struct.unpack_from("<I", body)[0]
    try:
        vtable = root - struct.unpack_from("<i", body, root)[0]
        head = root + struct.unpack_from("<H", body, vtable + 6)[0]
        if vtable > 0 and head + 16 <= len(body):
            body[head : head + 16] = xxhash.xxh3_128_digest(bytes(data[:base]))
    except struct.error:
        pass
    data[start:end] = body
    data[end : end + 16] = xxhash.xxh3_128_digest(bytes(body))
    return data


@pytest.fixture(scope="module", params=["new", "flatc", "foreign"])
def seed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seed")
    if request.param == "new":
        golden_store().write_ptd(folder / "x.ptd", metadata={"a": "b", "c": "d"})
        return (folder / "x.ptd").read_bytes()
    if request.param == "flatc":
        layout = {"scalar_type": "BYTE", "sizes": [10], "dim_order": [0]}
        other = {"key": "other", "segment_index": 1, "tensor_layout": layout}
        table = {"version": 0, "segments": SEGMENTS, "named_data": [ENTRY, {**ENTRY, "key": "tied"}, other]}
        return with_manifest(folder, {"opaque": [2]}, table=table).read_bytes()
    return request.getfixturevalue("foreign")


@pytest.mark.parametrize(("opaque", "layout", "reason"), BAD_OPAQUE)
def test_the_same_reason_for_a_list_of_opaque_keys(tmp_path, opaque, layout, reason):
    """Both name the file, the key, what was expected and what was found."""
    path = with_opaque(tmp_path, opaque, layout)
    with pytest.raises(IntegrityError, match=reason) as ours:
        PtdDataMap(path)
    with pytest.raises(IntegrityError) as native:
        BlobCache(path)
    assert str(native.value) == str(ours.value)


def test_numbers_that_are_not_aligned(tmp_path, monkeypatch):
    """A table of contents in which only the places of numbers are wrong: no processor may have to read them (F1)."""
    fields = {"names": ["vtable", "offset", "size"], "formats": ["<i4", "<u8", "<u8"], "itemsize": 24}
    for places in ([0, 8, 16], [0, 6, 14]):
        vtable, segment = (8, 24, *places[1:]), np.dtype({**fields, "offsets": places})
        monkeypatch.setitem(table._VTABLES, "segment", vtable)
        monkeypatch.setattr(table, "_SEGMENT", segment)
        golden_store().write_ptd(tmp_path / "x.ptd", force=True)
        for reader in (PtdDataMap, BlobCache):
            if places[1] == 8:  # the control
                assert list(reader(tmp_path / "x.ptd")) == list(golden_store())
                continue
            with pytest.raises(InvalidFileError, match="an offset is negative or not aligned"):
                reader(tmp_path / "x.ptd")


def test_a_key_that_ends_behind_the_table_of_contents(tmp_path):
    """In the zeros before the first blob, which are text, too (S1)."""
    golden_store().write_ptd(tmp_path / "x.ptd")
    data = bytearray((tmp_path / "x.ptd").read_bytes())
    key = list(golden_store())[-1].encode()
    at = data.index(struct.pack("<I", len(key)) + key)
    end, base = struct.unpack_from("<Q", data, 24)[0] + 48, struct.unpack_from("<Q", data, 32)[0]
    assert check(tmp_path / "y.ptd", seal(data))  # the control
    assert end < base and not any(data[end:base])
    struct.pack_into("<I", data, at, end + 1 - at - 4)
    assert not check(tmp_path / "y.ptd", seal(data))


def structure(data):
    """The offsets of bytes outside of blobs: those of the header, the table of contents and the manifest."""
    size = struct.unpack_from("<Q", data, 24)[0]
    return [*range(48 + size), *range(manifest_start(data), len(data))]


@pytest.mark.slow
def test_any_word_changed_and_sealed_again(tmp_path, seed):
    """Single words, with values at the limits."""
    path = tmp_path / "x.ptd"
    words = sorted({at & ~3 for at in structure(seed)})
    for at in words:
        for value in WORDS:
            data = bytearray(seed)
            data[at : at + 4] = struct.pack("<I", value)
            check(path, seal(data))


def test_several_words_changed_and_sealed_again(tmp_path, seed):
    """Pairs of words, with values from elsewhere in the file."""
    path = tmp_path / "x.ptd"
    choice = random.Random(0)  # noqa: S311
    words = sorted({at & ~3 for at in structure(seed)} - {len(seed) & ~3})
    for _ in range(500):
        data = bytearray(seed)
        for at in choice.sample(words, 2):
            moved = struct.unpack_from("<I", data, choice.choice(words))[0]
            data[at : at + 4] = struct.pack("<I", choice.choice([moved, choice.choice(WORDS), choice.randrange(256)]))
        check(path, seal(data))
