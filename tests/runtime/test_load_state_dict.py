"""State dicts that the native library reads from files (N1). Its reader of .safetensors and the Python one accept the
same files and read the same from them."""

import json
import struct

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from blobstore import BlobStore, save_file
from blobstore.core.formats.keys import KEY_PREFIX
from blobstore.core.formats.safetensors import SafetensorsDataMap
from blobstore.core.memory.dtypes import SAFETENSORS
from blobstore.core.memory.layout import ScalarType, TensorLayout, layout_nbytes
from blobstore.errors import FileAccessError, IntegrityError, InvalidFileError, UnsupportedDataError
from blobstore.runtime.native import layout_of, native, native_path
from blobstore.testing import strategies


def load(path):
    """Layout and bytes of each tensor, by name."""
    return {
        name: (layout_of(layout), data) for name, (*layout, data) in native.load_state_dict(native_path(path)).items()
    }


def safetensors_file(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


# .ptd


@pytest.mark.long
@given(blobs=st.dictionaries(strategies.keys, strategies.tensors(), max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_tensors_of_a_ptd(tmp_path, blobs):
    """N1: by key, with scalar type, sizes and dim order; opaque bytes are left out."""
    store = BlobStore()
    for key, (data, layout) in blobs.items():
        store.add(key, data, layout=layout)
    store.add(KEY_PREFIX + "0", b"a record")
    store.write_ptd(tmp_path / "x.ptd")
    assert load(tmp_path / "x.ptd") == {
        key: (layout, data) for key, (data, layout) in blobs.items() if layout is not None
    }


def test_a_damaged_ptd(tmp_path):
    """N1: bytes are compared with their digests."""
    save_file({"w": np.ones(3, np.float32)}, path := tmp_path / "x.ptd")
    data = path.read_bytes()
    path.write_bytes(data.replace(np.float32(1).tobytes(), np.float32(2).tobytes(), 1))
    with pytest.raises(IntegrityError, match=r"x\.ptd.*'w' are damaged"):
        load(path)


@pytest.mark.parametrize("content", [b"\x08\0\0\0ET12" + bytes(50), b"text", b"\x02\0\0\0\0\0\0\0[]"])
def test_other_files(tmp_path, content):
    """N1."""
    (tmp_path / "x.ptd").write_bytes(content)
    with pytest.raises(InvalidFileError, match=r"x\.ptd.*neither a \.ptd data file nor a \.safetensors file"):
        load(tmp_path / "x.ptd")
    with pytest.raises(FileAccessError, match="missing"):
        load(tmp_path / "missing")
    (tmp_path / "x.ptd").write_bytes(b"")
    with pytest.raises(InvalidFileError, match="empty"):
        load(tmp_path / "x.ptd")


@pytest.mark.parametrize(
    ("sizes", "reason"), [((1,) * 17, "17 dimensions, ExecuTorch has up to 16"), ((0, 2**16, 2**16), "strides above")]
)
def test_tensors_that_executorch_does_not_have(tmp_path, sizes, reason):
    """N1."""
    layout = TensorLayout(ScalarType.BYTE, sizes)
    store = BlobStore()
    store.add("w", bytes(layout.nbytes), layout=layout)
    store.write_ptd(tmp_path / "x.ptd")
    with pytest.raises(UnsupportedDataError, match=rf"x\.ptd: tensor 'w'.*{reason}"):
        load(tmp_path / "x.ptd")


# .safetensors


def test_the_tensors_of_a_safetensors(tmp_path):
    """N1: of every dtype that ExecuTorch has, as the safetensors package writes them."""
    names = "float16 bfloat16 float32 float64 float8_e5m2 float8_e4m3fn bool"
    names += " int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    tensors = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names.split()}
    tensors["scalar"] = torch.tensor(3.0)
    tensors["empty"] = torch.zeros(0, 4)
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"a": "b"})
    found = load(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        layout, data = found[name]
        assert (layout.sizes, data) == (
            tuple(tensor.shape),
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        assert layout.is_contiguous


def test_tensors_at_odd_places(tmp_path):
    """N1: a header of any length is valid; then the tensors are not aligned in the file."""
    values = np.arange(5, dtype=np.float64)
    for blanks in range(9):
        header = json.dumps({"a": {"dtype": "F64", "shape": [5], "data_offsets": [0, 40]}}).encode() + b" " * blanks
        path = safetensors_file(tmp_path / "x.safetensors", header, values.tobytes())
        assert load(path) == {"a": (TensorLayout(ScalarType.DOUBLE, (5,)), values.tobytes())}


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"), [("F6_E2M3", [4], 3), ("F4", [4], 2), ("F32", [0, 2**31], 0), ("NEW", [1], 3)]
)
def test_dtypes_that_executorch_does_not_have(tmp_path, dtype, shape, nbytes):
    """N1: valid files for the Python reader, which has them as opaque bytes."""
    header = {"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}
    path = safetensors_file(tmp_path / "x.safetensors", header, bytes(nbytes))
    assert list(SafetensorsDataMap(path)) == ["w"]
    with pytest.raises(UnsupportedDataError, match=rf"'w' is {dtype} or too large"):
        load(path)


# The same files


def decide(read):
    """What a reader says of a file; `opaque` stands for tensors that only the Python reader has."""
    try:
        return read()
    except InvalidFileError:
        return "refused"
    except UnsupportedDataError:
        return "opaque"


def check(path):
    """Whether the file is accepted. Fails unless both readers agree."""

    def python():
        data_map = SafetensorsDataMap(path)
        layouts = {key: data_map.get_tensor_layout(key) for key in data_map}
        if any(layout is None or len(layout.sizes) > 16 for layout in layouts.values()):
            return "opaque"
        if any(max(map(abs, layout.strides), default=0) >= 2**31 for layout in layouts.values()):
            return "opaque"
        return {key: (layouts[key], bytes(data_map.get_data(key))) for key in data_map}

    one, other = decide(python), decide(lambda: load(path))
    assert one == other, path.read_bytes()
    return one != "refused"


def test_sizes_whose_product_overflows(tmp_path):
    """N1: modulo 2**64 they would be no bytes."""
    header = {"w": {"dtype": "F32", "shape": [2**31, 2**31, 2], "data_offsets": [0, 0]}}
    assert not check(safetensors_file(tmp_path / "x.safetensors", header))


_NUMBERS = st.integers(-1, 40) | st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 1.0, True, None])
_VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def headers(draw):
    """Headers and data: valid ones, with one thing wrong, or with additional fields."""
    header, position = {}, 0
    for name in draw(st.lists(strategies.keys | st.just("__metadata__"), unique=True, max_size=4)):
        if name == "__metadata__":
            header[name] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2) | _VALUES)
            continue
        dtype = draw(st.sampled_from([*SAFETENSORS, "F4"]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = layout_nbytes(SAFETENSORS.get(dtype, ScalarType.BYTE), shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    if header and draw(st.booleans()):
        info = header[draw(st.sampled_from(sorted(header)))]
        if isinstance(info, dict):
            field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
            info[field] = draw(_VALUES | st.lists(_NUMBERS, min_size=2, max_size=2))
    return header, bytes(position + draw(st.sampled_from([0, 0, 0, 1])))


@pytest.mark.long
@given(made=headers(), ascii_only=st.booleans(), blanks=st.integers(0, 3))
@example(made=({}, b""), ascii_only=True, blanks=0)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_headers(tmp_path, made, ascii_only, blanks):
    """N1."""
    header, data = made
    raw = json.dumps(header, ensure_ascii=ascii_only, indent=blanks or None).encode()
    path = safetensors_file(tmp_path / "x.safetensors", raw + b" \n\t\r"[:blanks], data)
    if path.stat().st_size > 8:
        check(path)


_INFO = b'{"dtype":"U8","shape":[2],"data_offsets":[0,2]%s}'


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        (b"", True),
        (b',"more":[1,-1.5e+3,1e400,NaN,-Infinity,Infinity,true,false,null,"",{},[]]', True),
        (b',"more":-0', True),
        (b',"more":"\\ud800"', True),  # half of a pair is valid where it is not used
        (b',"more":"\\ud83d\\ude00\\u00e9\\b\\f\\n\\r\\t\\/\\"\\\\"', True),
        (b',"more":%s' % (b"9" * 4300), True),
        (b',"more":%s' % (b"9" * 4301), False),
        (b',"more":%s.0' % (b"9" * 4301), True),
        (b',"more":%s%s' % (b"[" * 190, b"]" * 190), True),
        (b',"more":%s%s' % (b"[" * 100_000, b"]" * 100_000), False),
        (b',"more":%s' % (b"[" * 100_000), False),
        (b',"more":%s' % (b'{"a":' * 100_000), False),
        *((b',"more":' + bad, False) for bad in (b"01", b"1.", b".5", b"1e", b"+1", b"-", b"- 1", b"0x1", b"1_0")),
        *((b',"more":' + bad, False) for bad in (b"nan", b"tru", b"TRUE", b"-NaN", b"'a'", b"", b",", b"[1,]", b"[,]")),
        *(
            (b',"more":' + bad, False)
            for bad in (b'{"a":1,}', b'{"a"}', b"{1:2}", b'{"a" 1}', b"[1 2]", b"/**/1", b"\x0c1")
        ),
        *(
            (b',"more":"%s"' % bad, False)
            for bad in (b"\n", b"\0", b"\x1f", b"\\x41", b"\\u12", b"\\u12g4", b"\\", b"\xff")
        ),
        *((b',"more":"%s"' % bad, False) for bad in (b"\xed\xa0\x80", b"\xc0\x80", b"\\uD800\\u12")),
        (b',"more":"\x7f\xc2\x80"', True),
        (b',"more":{"a":1,"\\u0061":2}', False),
        (b',"dtype":"U8"', False),
        (b',"d\\u0074ype":"U8"', False),
        (b"}", False),
    ],
)
def test_json(tmp_path, fields, accepted):
    """N1: what JSON allows, and what Python's reader allows beyond it."""
    path = safetensors_file(tmp_path / "x.safetensors", b'{"w":' + _INFO % fields + b"}", b"ab")
    assert check(path) == accepted


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (b'{"w":%s,"\\u0077":%s}', False),
        (b'{"w":%s,"v":%s}', False),  # an overlap
        (b'{"\\ud800":%s}', False),
        (b'{"\\ud83d\\ude00":%s}', True),
        (b'{"":%s}', True),
        (b'{"\\u0000":%s}', True),
        (b'{"w":%s,"__metadata__":{"a":"b"}}', True),
        (b'{"w":%s,"__metadata__":{"a":"\\udc00"}}', False),
        (b'{"w":%s,"__metadata__":{"\\udc00":"a"}}', False),
        (b'{"w":%s,"__metadata__":{"a":"b","a":"c"}}', False),
        (b'{"w":%s,"__metadata__":{"a":1}}', False),
        (b'{"w":%s,"__metadata__":null}', False),
        (b'{"w":%s,"__metadata__":{}}', True),
        (b'{"w":%s} {}', False),
        (b'{"w":%s}\0', False),
        (b'{"w":%s}\n', True),
        (b' \n{"w":%s}', True),
        (b'\f{"w":%s}', False),
        (b'{"w":%s', False),
        (b"{}", False),
    ],
)
def test_names_and_metadata(tmp_path, header, accepted):
    """N1."""
    raw = header.replace(b"%s", _INFO % b"")
    assert check(safetensors_file(tmp_path / "x.safetensors", raw, b"ab")) == accepted


@pytest.mark.parametrize(
    ("info", "accepted"),
    [
        ({"shape": [-0]}, False),
        ({"dtype": "NEW", "shape": [2**63 - 1] * 70}, True),
        ({"dtype": "NEW", "shape": [2**63]}, False),
        ({"shape": [2] + [1] * 63}, True),
        ({"shape": [2] + [1] * 64}, False),
        ({"shape": [2**32, 2**32, 2]}, False),
        ({"shape": [2.0]}, False),
        ({"shape": [True, 2]}, False),
        ({"shape": "ab"}, False),
        ({"shape": None}, False),
        ({"data_offsets": [0]}, False),
        ({"data_offsets": [0, 2, 2]}, False),
        ({"data_offsets": [2, 0]}, False),
        ({"data_offsets": [0, 2**63]}, False),
        ({"data_offsets": "ab"}, False),
        ({"data_offsets": {"a": 0, "b": 2}}, False),
        ({"dtype": 1}, False),
        ({"dtype": ["U8"]}, False),
        ({"dtype": "u8"}, True),
    ],
)
def test_fields(tmp_path, info, accepted):
    """N1."""
    header = {"w": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2], **info}}
    assert check(safetensors_file(tmp_path / "x.safetensors", header, b"ab")) == accepted
