"""A file below one megabyte costs at most two seconds and 300 MB, however often its objects are referred to (B5)."""

import sys

import pytest
import xxhash

from blobstore.core.formats.flatbuffer import I8, I32, STRING, U8, U32, U64, TableType, Vector
from blobstore.core.formats.ptd.header import Header
from blobstore.core.formats.ptd.manifest import MANIFEST, PAIR
from blobstore.core.formats.table_builder import TableBuilder
from tests.helpers.bombs import check_cost
from tests.helpers.collisions import colliding_texts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")

MANY = 200_000  # references that fit
LONG = 600_000

LAYOUT = TableType("TensorLayout", scalar_type=I8, sizes=Vector(I32), dim_order=Vector(U8))
ENTRY = TableType("NamedData", key=STRING, segment_index=U32, tensor_layout=LAYOUT)
SEGMENT = TableType("DataSegment", offset=U64, size=U64)
TABLE = TableType("FlatTensor", version=U32, segments=Vector(SEGMENT), named_data=Vector(ENTRY))


def write(path, tables, nbytes=0, metadata=None):
    """A file with these tables, and with a manifest if there is metadata."""
    builder = TableBuilder(1 << 20)
    segments, entries = (builder.references(listed) for listed in tables(builder))
    raw = builder.finish(builder.table(TABLE, segments=segments, named_data=entries), b"FT01")
    base = -(-(len(raw) + 48) // 128) * 128
    header = Header(48, len(raw), base, nbytes).pack(b"BLOBMAN1" if metadata else bytes(8))
    root = (int.from_bytes(raw[:4], "little") + 48).to_bytes(4, "little")
    data = (root + raw[4:8] + header + raw[8:]).ljust(base, b"\0") + bytes(nbytes)
    if metadata:
        builder = TableBuilder(1 << 20)
        pairs = builder.references(metadata(builder))
        head = xxhash.xxh3_128_digest(data[:base])
        body = builder.finish(builder.table(MANIFEST, head=head, metadata=pairs), b"BM01")
        data += body + xxhash.xxh3_128_digest(body) + len(body).to_bytes(8, "little") + b"BLOBMAN1"
    path.write_bytes(data)
    assert len(data) < 1_000_000
    return path


def entry(builder, key, layout=None):
    return builder.table(ENTRY, key=builder.CreateString(key), tensor_layout=layout)


def nothing(builder):
    return [], []


def pair(builder, key, value):
    return builder.table(PAIR, key=builder.CreateString(key), value=builder.CreateString(value))


def one_pair(count, key, value):
    return lambda builder: [pair(builder, key, value)] * count


def one_value(builder):
    """Three keys of one value, which are longer than all bytes but within what a reader may look at."""
    value = builder.CreateString("v" * 10_000)
    return [builder.table(PAIR, key=builder.CreateString(key), value=value) for key in "abc"]


def one_entry(builder):
    return [builder.table(SEGMENT)], [entry(builder, "k")] * MANY


def one_segment(builder):
    return [builder.table(SEGMENT)] * MANY, [entry(builder, "k")]


def long_key(builder):
    key = builder.CreateString("k" * LONG)
    return [builder.table(SEGMENT)], [builder.table(ENTRY, key=key) for _ in range(10_000)]


def shared_sizes(builder):
    """Many layouts that share the same vectors of 64 sizes."""
    sizes = builder.numbers(I32, [*[1] * 63, 0])
    orders = [builder.numbers(U8, [*range(i, 64), *range(i)]) for i in range(64)]
    layouts = [builder.table(LAYOUT, scalar_type=6, sizes=sizes, dim_order=orders[i % 64]) for i in range(16_000)]
    return [builder.table(SEGMENT)], [entry(builder, f"{i}", layout) for i, layout in enumerate(layouts)]


def one_layout(builder):
    """Many keys with one layout of 64 sizes in one segment, as a store writes equal tensors."""
    fields = {"sizes": builder.numbers(I32, [1] * 64), "dim_order": builder.numbers(U8, range(64))}
    layout = builder.table(LAYOUT, scalar_type=6, **fields)
    return [builder.table(SEGMENT, size=4)], [entry(builder, f"{i}", layout) for i in range(20_000)]


def one_blob(builder):
    """Many keys that share their bytes, and of which each needs its own copy in memory."""
    return [builder.table(SEGMENT, size=LONG)], [entry(builder, f"{i}") for i in range(8_000)]


def colliding_keys(builder):
    """As many keys as fit, all with one hash value."""
    return [builder.table(SEGMENT)], [entry(builder, key) for key in colliding_texts(23_000)]


BOMBS = {
    "one pair of long texts": (nothing, one_pair(60_000, "k" * LONG, "v"), "metadata"),
    "one pair of short texts": (nothing, one_pair(MANY, "k", "v"), "metadata"),
    "one pair of empty texts": (nothing, one_pair(MANY, "", ""), "metadata"),
    "one pair with a long value": (nothing, one_pair(60_000, "k", "v" * LONG), "metadata"),
    "one value of three keys": (nothing, one_value, "texts of the metadata together"),
    "one entry": (one_entry, None, "twice"),
    "one segment": (one_segment, None, "taken"),
    "one long key": (long_key, None, "keys together"),
    "shared sizes": (shared_sizes, None, "layouts together"),
    "one layout": (one_layout, None, "taken"),
    "colliding keys": (colliding_keys, None, "taken"),
}

PYTHON, NATIVE = "from blobstore import open_ptd as read", "from blobstore.runtime import BlobCache as read"
EVERYTHING = """opened = read(path)
opened.verify()
for key in opened:
    opened.get_tensor_layout(key), opened.digest(key)"""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("reader", [PYTHON, NATIVE], ids=["Python", "C++"])
@pytest.mark.parametrize("name", BOMBS)
def test_what_refers_to_one_thing_many_times(tmp_path, name, reader):
    if reader is NATIVE:
        pytest.importorskip("blobstore_runtime")
    tables, metadata, expected = BOMBS[name]
    path = write(tmp_path / "bomb.ptd", tables, 4 if tables is one_layout else 0, metadata)
    assert expected in check_cost(path, reader, EVERYTHING)


def test_what_shares_its_bytes_in_a_cache_that_copies_them(tmp_path):
    pytest.importorskip("blobstore_runtime")
    path = write(tmp_path / "bomb.ptd", one_blob, LONG)
    assert "so many keys share their bytes" in check_cost(path, NATIVE, "read(path, 'copy')")
