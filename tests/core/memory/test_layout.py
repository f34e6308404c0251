"""Layouts (R4); torch is the oracle for sizes, strides and bytes, ExecuTorch for the numbers."""

import importlib.util
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.memory.layout import MAX_NBYTES, MAX_RANK, ScalarType, TensorLayout
from blobstore.errors import LayoutError

shapes = st.lists(st.integers(1, 5), max_size=5).map(tuple)


@given(shape=shapes, data=st.data())
def test_strides_and_bytes_are_those_of_a_torch_tensor_permuted_alike(shape, data):
    """If torch lays out a tensor in some order of dimensions, its strides and bytes are those of the layout."""
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    inverse = np.argsort(order).tolist()
    tensor = torch.empty([shape[dim] for dim in order]).permute(inverse) if shape else torch.empty(())
    layout = TensorLayout(ScalarType.FLOAT, shape, order)
    assert layout.strides == tensor.stride()
    assert layout.nbytes == tensor.untyped_storage().nbytes()
    assert layout.is_contiguous == (list(order) == sorted(order))


def test_the_numbers_and_sizes_of_scalar_types_are_those_of_executorch():
    """A file stores element types as ExecuTorch's numbers: those of its exporter, and all that its runtime has."""
    from executorch.exir.scalar_type import ScalarType as Exporter

    exporter = {kind.name.upper(): int(kind) for kind in Exporter}
    assert {kind.name: int(kind) for kind in ScalarType if kind.name in exporter} == exporter
    (package,) = importlib.util.find_spec("executorch").submodule_search_locations
    header = Path(package, "include/executorch/runtime/core/portable_type/scalar_type.h").read_text()
    runtime = {int(number): name for name, number in re.findall(r", *\\?\s*(\w+)\) /\* (\d+) \*/", header)}
    assert sorted(runtime) == list(ScalarType)
    halves = {"COMPLEXHALF": "COMPLEX32", "COMPLEXFLOAT": "COMPLEX64", "COMPLEXDOUBLE": "COMPLEX128"}
    names = {number: name.upper().replace("8_E", "8E") for number, name in runtime.items()}
    assert {number: halves.get(name, name) for number, name in names.items()} == {k: k.name for k in ScalarType}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((99, (2,)), "scalar type"),
        ((ScalarType.FLOAT, (-1,)), "outside"),
        ((ScalarType.FLOAT, (2**31,)), "outside"),
        ((ScalarType.FLOAT, (1,) * (MAX_RANK + 1)), "dimensions"),
        ((ScalarType.FLOAT, (2, 3), (0,)), "entries"),
        ((ScalarType.FLOAT, (2, 3), (0, 0)), "permutation"),
        ((ScalarType.FLOAT, (2, 3), (1, 2)), "permutation"),
        ((ScalarType.FLOAT, (1.5,)), "integers"),
        ((ScalarType.FLOAT, None), "integers"),
        ((ScalarType.FLOAT, (2,), "a"), "integers"),
        ((ScalarType.FLOAT, (2**31 - 1,) * 3), "overflows"),
    ],
)
def test_an_impossible_layout_is_refused_with_its_reason(arguments, reason):
    """Every layout that exists fits into a file (B5)."""
    with pytest.raises(LayoutError, match=reason):
        TensorLayout(*arguments)


def test_a_tensor_without_elements_has_no_bytes_and_the_largest_one_fits():
    """The limits themselves are possible."""
    assert TensorLayout(ScalarType.FLOAT, (2**31 - 1, 0, 2**31 - 1)).nbytes == 0
    sizes = (2**31 - 1, 2**31 - 1)
    assert TensorLayout(ScalarType.BYTE, sizes).nbytes == math.prod(sizes) <= MAX_NBYTES
    assert TensorLayout(ScalarType.BOOL, ()).nbytes == 1


def test_numpy_integers_become_plain_ones():
    """Layouts compare and hash by value, whatever kind of integers they were made from."""
    layout = TensorLayout(ScalarType.INT, np.array([2, 3]), np.array([1, 0]))  # type: ignore[arg-type]
    assert layout == TensorLayout(ScalarType.INT, (2, 3), (1, 0))
    assert hash(layout) == hash(TensorLayout(ScalarType.INT, (2, 3), (1, 0)))
    assert {type(size) for size in layout.sizes + layout.dim_order} == {int}


def test_a_layout_prints_as_type_sizes_and_an_unusual_order():
    """Messages show layouts."""
    assert str(TensorLayout(ScalarType.FLOAT, (2, 3))) == "float[2, 3]"
    assert str(TensorLayout(ScalarType.HALF, (1, 2, 3, 4), (0, 2, 3, 1))) == "half[1, 2, 3, 4] dim_order=[0, 2, 3, 1]"
