"""From tensors to bytes and back (R4); torch and numpy are the oracles."""

import contextlib

import numpy as np
import pytest
import torch
from executorch.exir.tensor import scalar_type_table
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.memory.dtypes import scalar_type_named
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.core.memory.tensors import FileSlice, as_bytes, in_dim_order, to_numpy, to_torch
from blobstore.errors import FileAccessError, InvalidFileError, LayoutError, UnsupportedDataError

DTYPES = sorted(
    {one for one in vars(torch).values() if isinstance(one, torch.dtype) and scalar_type_named(one)}, key=str
)


@st.composite
def strided(draw):
    """A tensor in memory with any order of dimensions, with gaps, repeats and offsets."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(int(np.prod([size + 1 for size in shape])), dtype=torch.float32)
    tensor = tensor.reshape([size + 1 for size in shape])
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, draw(st.integers(0, 1)), size)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    return tensor.unsqueeze(0).expand(3, *tensor.shape) if draw(st.booleans()) else tensor


@given(tensor=strided())
def test_a_strided_tensor_comes_back_with_its_values_shape_and_order(tensor):
    """Dense memory stays as it is; memory with other strides is made contiguous."""
    for data in (tensor, tensor.numpy()):
        view, layout = as_bytes(data)
        assert layout is not None
        assert layout.nbytes == len(view)
        assert torch.equal(to_torch(memoryview(bytearray(view)), layout), tensor)
        assert np.array_equal(to_numpy(view, layout), tensor.numpy())
        if torch.empty_like(tensor).stride() != tensor.stride():  # which torch keeps if the memory is dense
            assert layout.is_contiguous
        elif len(view):
            assert np.frombuffer(view, np.uint8).ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bytes(dtype):
    """Also dtypes that numpy lacks. The types have the numbers of ExecuTorch, as far as it has them."""
    tensor = torch.arange(96, dtype=torch.uint8).view(dtype).reshape(2, -1)
    view, layout = as_bytes(tensor)
    assert layout == TensorLayout(layout.scalar_type, tuple(tensor.shape))
    assert layout.scalar_type == scalar_type_table.get(dtype, layout.scalar_type)
    assert bytes(view) == bytes(range(96))
    back = to_torch(memoryview(bytearray(view)), layout)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    with contextlib.suppress(UnsupportedDataError):
        of_numpy = as_bytes(to_numpy(view, layout))
        assert (bytes(of_numpy[0]), of_numpy[1]) == (bytes(view), layout)


def test_negated_big_endian_and_scalar_data():
    """What torch conjugates and negates when it reads is computed, bytes are swapped to the order of files, and a scalar has no dimensions."""
    negated = torch.tensor([1 + 2j], requires_grad=True).conj().imag
    assert np.frombuffer(as_bytes(negated)[0], np.float32).tolist() == [-2.0]
    assert np.frombuffer(as_bytes(torch.tensor([1 + 2j]).conj())[0], np.complex64).tolist() == [1 - 2j]
    assert np.frombuffer(as_bytes(np.arange(3, dtype=np.int32)[::-1])[0], np.int32).tolist() == [2, 1, 0]
    assert bytes(as_bytes(np.array([1], ">u4"))[0]) == b"\1\0\0\0"
    assert as_bytes(np.float64(2))[1] == TensorLayout(ScalarType.DOUBLE, ())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (torch.ones(2, device="meta"), "device"),
        (torch.ones(2, 2).to_sparse(), "layout"),
        (torch.ones(2, dtype=torch.float8_e8m0fnu), "no counterpart"),
        (np.array(["a"]), "no counterpart"),
        (np.array([object()]), "no counterpart"),
        (5, "buffer protocol"),
        ("text", "buffer protocol"),
        ([1, 2], r"expected a torch tensor.*; numpy\.asarray makes an array of it"),
        (memoryview(b"abcdef")[::2], "contiguous"),
        (memoryview(np.arange(4, dtype=">f4")), "big-endian"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_gives_no_bytes_is_refused_by_name(data, reason):
    """The message names the reason."""
    with pytest.raises(UnsupportedDataError, match=reason):
        as_bytes(data)


def test_a_layout_that_does_not_fit_is_refused():
    """A given layout must be the tensor's own, or have as many bytes as the data."""
    float4 = TensorLayout(ScalarType.FLOAT, (4,))
    assert as_bytes(bytes(16), float4)[1] == float4
    with pytest.raises(LayoutError, match="16 bytes, the data has 15"):
        as_bytes(bytes(15), float4)
    with pytest.raises(LayoutError, match="not float"):
        as_bytes(torch.ones(5), float4)
    with pytest.raises(LayoutError, match="TensorLayout"):
        as_bytes(bytes(16), (4,))  # type: ignore[arg-type]


def test_torch_gets_no_read_only_memory():
    """torch could write to it."""
    with pytest.raises(UnsupportedDataError, match="read-only"):
        to_torch(memoryview(bytes(4)), None)
    assert to_torch(memoryview(b""), None).numel() == 0


def test_a_slice_of_a_file_is_its_bytes_and_never_more(tmp_path):
    """Bounds are checked when it is mapped."""
    path = tmp_path / "data"
    path.write_bytes(b"0123456789")
    assert bytes(FileSlice(path, 2, 3).view()) == b"234"
    assert bytes(FileSlice(path, 7).view()) == b"789"
    for offset, nbytes in [(-1, 2), (0, 11), (11, None), (9, 2), (0, -1), (2**63, 1)]:
        with pytest.raises(InvalidFileError, match="data"):
            FileSlice(path, offset, nbytes).view()
    with pytest.raises(UnsupportedDataError, match="integer"):
        FileSlice(path, 1.5).view()  # type: ignore[arg-type]
    with pytest.raises(FileAccessError):
        FileSlice(tmp_path / "none").view()


@given(shape=st.lists(st.integers(0, 4), max_size=4).map(tuple), data=st.data())
def test_another_dim_order_moves_bytes_and_keeps_values(shape, data):
    """From any order to any other; torch's permutation is the oracle."""
    old, new = (tuple(data.draw(st.permutations(range(len(shape))))) for _ in range(2))
    values = torch.arange(int(np.prod(shape)), dtype=torch.int16).reshape(shape)
    stored = memoryview(values.permute(old).contiguous().view(-1).numpy().tobytes())
    moved = in_dim_order(stored, TensorLayout(ScalarType.SHORT, shape, old), new)
    assert bytes(moved) == values.permute(new).contiguous().view(-1).numpy().tobytes()
    contiguous = in_dim_order(stored, TensorLayout(ScalarType.SHORT, shape, old))
    assert bytes(contiguous) == values.numpy().tobytes()


@pytest.mark.parametrize("kind", list(ScalarType), ids=lambda kind: kind.name)
def test_elements_of_every_type_move_as_they_are(kind):
    """The dtype need not exist in numpy; bytes that are in the right order already are not copied."""
    elements = [bytes([i + 1]) * kind.itemsize for i in range(6)]
    data = memoryview(b"".join(elements))
    layout = TensorLayout(kind, (2, 3), (1, 0))
    assert bytes(in_dim_order(data, layout)) == b"".join(elements[i] for i in (0, 2, 4, 1, 3, 5))
    assert in_dim_order(data, layout, (1, 0)) is data
