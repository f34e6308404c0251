"""A file below one megabyte costs at most two seconds and 300 MB, however often its objects are referred to (B5)."""

import json
import subprocess
import sys
import time
from pathlib import Path

import flatbuffers
import pytest
import xxhash
from tests.helpers.schemas.flat_tensor import DataSegment, FlatTensor, NamedData, TensorLayout
from tests.helpers.schemas.manifest import Manifest, Pair

from blobstore.core.formats.ptd.header import Header
from blobstore.errors import InvalidFileError
from tests.helpers.collisions import colliding_texts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is measured as Linux tells it")

MANY = 200_000  # references that fit
LONG = 600_000


def repeated(builder, target, count):
    """A vector of `count` references to one object."""
    builder.StartVector(4, count, 4)
    for _ in range(count):
        builder.PrependUOffsetTRelative(target)
    return builder.EndVector()


def references(builder, targets):
    builder.StartVector(4, len(targets), 4)
    for target in reversed(targets):
        builder.PrependUOffsetTRelative(target)
    return builder.EndVector()


def layout_table(builder, sizes, order):
    TensorLayout.Start(builder)
    TensorLayout.AddScalarType(builder, 6)
    TensorLayout.AddSizes(builder, sizes)
    TensorLayout.AddDimOrder(builder, order)
    return TensorLayout.End(builder)


def entry(builder, key, layout=0, segment=0):
    NamedData.Start(builder)
    NamedData.AddKey(builder, key)
    NamedData.AddSegmentIndex(builder, segment)
    if layout:
        NamedData.AddTensorLayout(builder, layout)
    return NamedData.End(builder)


def segment(builder, size):
    DataSegment.Start(builder)
    DataSegment.AddOffset(builder, 0)
    DataSegment.AddSize(builder, size)
    return DataSegment.End(builder)


def write(path, tables, nbytes=0, metadata=None):
    """A file with these tables, and with a manifest if there is metadata."""
    builder = flatbuffers.Builder(1 << 20)
    segments, named_data = tables(builder)
    FlatTensor.Start(builder)
    FlatTensor.AddSegments(builder, segments)
    FlatTensor.AddNamedData(builder, named_data)
    builder.Finish(FlatTensor.End(builder), file_identifier=b"FT01")
    raw = bytes(builder.Output())
    base = -(-(len(raw) + 48) // 128) * 128
    header = Header(48, len(raw), base, nbytes).pack(b"BLOBMAN1" if metadata else bytes(8))
    root = (int.from_bytes(raw[:4], "little") + 48).to_bytes(4, "little")
    data = (root + raw[4:8] + header + raw[8:]).ljust(base, b"\0") + bytes(nbytes)
    if metadata:
        builder = flatbuffers.Builder(1 << 20)
        pairs = metadata(builder)
        Manifest.Start(builder)
        builder.Prep(1, 16)
        builder.Bytes[builder.head - 16 : builder.head] = xxhash.xxh3_128_digest(data[:base])
        builder.head -= 16
        Manifest.AddHead(builder, builder.Offset())
        Manifest.AddMetadata(builder, pairs)
        builder.Finish(Manifest.End(builder), file_identifier=b"BM01")
        body = bytes(builder.Output())
        data += body + xxhash.xxh3_128_digest(body) + len(body).to_bytes(8, "little") + b"BLOBMAN1"
    path.write_bytes(data)
    assert len(data) < 1_000_000
    return path


def nothing(builder):
    return references(builder, []), references(builder, [])


def one_pair(count, key, value):
    def metadata(builder):
        at = builder.CreateString(key), builder.CreateString(value)
        Pair.Start(builder)
        Pair.AddKey(builder, at[0])
        Pair.AddValue(builder, at[1])
        return repeated(builder, Pair.End(builder), count)

    return metadata


def one_value(builder):
    """Three keys of one value, which are longer than all bytes but within what a reader may look at."""
    value, pairs = builder.CreateString("v" * 10_000), []
    for text in "abc":
        key = builder.CreateString(text)
        Pair.Start(builder)
        Pair.AddKey(builder, key)
        Pair.AddValue(builder, value)
        pairs.append(Pair.End(builder))
    return references(builder, pairs)


def one_entry(builder):
    return references(builder, [segment(builder, 0)]), repeated(
        builder, entry(builder, builder.CreateString("k")), MANY
    )


def one_segment(builder):
    return repeated(builder, segment(builder, 0), MANY), references(
        builder, [entry(builder, builder.CreateString("k"))]
    )


def long_key(builder):
    key = builder.CreateString("k" * LONG)
    return references(builder, [segment(builder, 0)]), references(builder, [entry(builder, key) for _ in range(10_000)])


def shared_sizes(builder):
    """Many layouts that share the same vectors of 64 sizes."""
    sizes = [1] * 63 + [0]
    builder.StartVector(4, 64, 4)
    for size in reversed(sizes):
        builder.PrependInt32(size)
    at = builder.EndVector()
    orders = [builder.CreateByteVector(bytes([*range(i, 64), *range(i)])) for i in range(64)]
    keys = [builder.CreateString(f"{i}") for i in range(16_000)]
    tables = [entry(builder, key, layout_table(builder, at, orders[i % 64])) for i, key in enumerate(keys)]
    return references(builder, [segment(builder, 0)]), references(builder, tables)


def one_layout(builder):
    """Many keys with one layout of 64 sizes in one segment, as a store writes equal tensors."""
    builder.StartVector(4, 64, 4)
    for _ in range(64):
        builder.PrependInt32(1)
    sizes = builder.EndVector()
    layout = layout_table(builder, sizes, builder.CreateByteVector(bytes(range(64))))
    keys = [builder.CreateString(f"{i}") for i in range(20_000)]
    return references(builder, [segment(builder, 4)]), references(builder, [entry(builder, k, layout) for k in keys])


def one_blob(builder):
    """Many keys that share their bytes, and of which each needs its own copy in memory."""
    keys = [builder.CreateString(f"{i}") for i in range(8_000)]
    return references(builder, [segment(builder, LONG)]), references(builder, [entry(builder, key) for key in keys])


def colliding_keys(builder):
    """As many keys as fit, all with one hash value."""
    tables = [entry(builder, builder.CreateString(key)) for key in colliding_texts(23_000)]
    return references(builder, [segment(builder, 0)]), references(builder, tables)


BOMBS = {
    "one pair of long texts": (nothing, one_pair(60_000, "k" * LONG, "v"), "metadata"),
    "one pair of short texts": (nothing, one_pair(MANY, "k", "v"), "metadata"),
    "one pair of empty texts": (nothing, one_pair(MANY, "", ""), "metadata"),
    "one pair with a long value": (nothing, one_pair(60_000, "k", "v" * LONG), "metadata"),
    "one value of three keys": (nothing, one_value, "texts of the metadata together"),
    "one entry": (one_entry, None, "twice"),
    "one segment": (one_segment, None, None),
    "one long key": (long_key, None, "keys together"),
    "shared sizes": (shared_sizes, None, "layouts together"),
    "one layout": (one_layout, None, None),
    "colliding keys": (colliding_keys, None, None),
}


def measure(module, name, path, *mode):
    """Open a file, verify it and read everything; return the cost and the error. Runs in a process of its own."""
    open_file = getattr(__import__(module, fromlist=[name]), name)
    before = peak_memory()
    start, reason = time.process_time(), None
    try:
        opened = open_file(path, *mode)
        opened.verify()
        for key in opened:
            opened.get_tensor_layout(key), opened.digest(key)
    except InvalidFileError as error:
        reason = str(error)
    seconds = time.process_time() - start
    sys.stdout.write(json.dumps([seconds, peak_memory() - before, reason]))


def peak_memory():
    """The peak memory of this process in bytes; getrusage would include that of its parent."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("reader", [("blobstore", "open_ptd"), ("blobstore.runtime", "BlobCache")])
@pytest.mark.parametrize("name", BOMBS)
def test_what_refers_to_one_thing_many_times(tmp_path, name, reader):
    tables, metadata, expected = BOMBS[name]
    path = write(tmp_path / "bomb.ptd", tables, 4 if tables is one_layout else 0, metadata)
    reason = check_cost(*reader, str(path))
    assert reason is None if expected is None else f"{path}: " in reason and expected in reason


def test_what_shares_its_bytes_in_a_cache_that_copies_them(tmp_path):
    path = write(tmp_path / "bomb.ptd", one_blob, LONG)
    assert "so many keys share their bytes" in check_cost("blobstore.runtime", "BlobCache", str(path), "copy")


def check_cost(module, name, *arguments):
    """Fail if a reader takes too much time or memory; return the reason for which it refused the file."""
    if module == "blobstore.runtime":
        pytest.importorskip("blobstore_runtime")
    code = f"from tests.core.formats.ptd.test_small_files import measure; measure{(module, name, *arguments)}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[4]
    )
    seconds, nbytes, reason = json.loads(done.stdout)
    assert seconds < 2 and nbytes < 300e6, (seconds, nbytes, reason)
    return reason
