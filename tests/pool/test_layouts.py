"""Weights that a backend stores in another order of their elements follow from the checkpoint, to the bit (P1, P2)."""

import functools
import hashlib
import itertools
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore import BlobStore
from blobstore.core.codec.elements import cast, widen
from blobstore.errors import IntegrityError, PoolError
from blobstore.pool import Pool
from blobstore.pool.derived import derive, made_size, split_steps
from blobstore.pool.layouts import Layout, layout_size, layouts, parse_layout, rearrange
from tests.pool.models import write
from tests.pool.rows import change_rows

Array = npt.NDArray[Any]

_SHAPES = [(48, 32, 3, 3), (32, 48, 3, 3), (96, 144), (64, 24, 3, 3), (256, 6, 3, 3), (16, 16, 6, 3, 3)]
"""Of one size, so that all can be taken for one another."""

_TYPES = ("float32", "float16", "bfloat16", "int8")


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.05).astype(np.dtype(dtype))


def bytes_of(array: Array) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def opaque(path: Path, contents: dict[str, bytes]) -> Path:
    """A data file of bytes without types and shapes, as those of delegates."""
    store = BlobStore()
    for key, content in contents.items():
        store.add(key, content)
    path.write_bytes(store.to_bytes())
    return path


def stored(pool: Pool, content: bytes | memoryview) -> tuple[str, int, bool]:
    """How a content is stored: its encoding, its bytes, and whether its base is whole."""
    ((encoding, length, base),) = pool.tables.query(
        "SELECT encoding, length, base FROM blobs WHERE digest = ?", hashlib.sha256(content).digest()
    )
    wholes = pool.tables.query("SELECT count(*) FROM blobs WHERE digest = ? AND base IS NULL", base) if base else [(0,)]
    return encoding, length, wholes[0][0] == 1


def back(pool: Pool, reference: str, path: Path, folder: Path) -> bool:
    """Whether a file comes back to the bit, and all others of the pool."""
    shutil.rmtree(folder, ignore_errors=True)
    (restored,) = pool.get(reference, folder)
    return restored.read_bytes() == path.read_bytes() and pool.verify() == []


# ------------------------------------------------------------------------------------------------- one recipe


@given(
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 127, 128, 129, 130, 260]), min_size=2, max_size=6),
    st.sampled_from(["u1", "u2", "u4", "u8"]),
    st.randoms(use_true_random=False),
)
def test_any_order_is_that_of_numpy(sizes: list[int], kind: str, random: Any) -> None:
    """Also over the edges of tiles, and back."""
    while math.prod(sizes) > 100_000:
        sizes[sizes.index(max(sizes))] = 2
    order = random.sample(range(len(sizes)), len(sizes))
    base = np.arange(math.prod(sizes), dtype="u8").astype(kind).reshape(sizes)
    expected = base.transpose(order).tobytes()
    layout = Layout(tuple(sizes), tuple(order))
    assert parse_layout(layout.recipe) == layout
    assert split_steps(f"{layout.recipe}+near:u1:0") == ((layout.recipe,), "near:u1:0")
    made = derive(bytes_of(base), (layout.recipe,), base.nbytes)
    assert made is not None and bytes(made) == expected
    assert bytes(rearrange(made, layout.inverse())) == base.tobytes()
    numbers = np.arange(base.size)
    assert np.array_equal(numbers.reshape(sizes).transpose(order).ravel()[layout.places(numbers)], numbers)


@pytest.mark.parametrize(
    "shape", [(6,), (4, 6), (6, 1, 3, 3), (4, 6, 1, 1), (4, 2, 3, 5), (1, 4, 3, 3), (2, 3, 2, 3, 2)]
)
def test_every_order_of_dimensions_is_tried(shape: tuple[int, ...]) -> None:
    base = np.arange(math.prod(shape), dtype=np.uint8).reshape(shape)
    text = ",".join(map(str, shape))
    possible = layouts(text, "")
    made = [bytes(rearrange(bytes_of(base), layout)) for layout in possible]
    assert {base.transpose(order).tobytes() for order in itertools.permutations(range(len(shape)))} <= set(made)
    assert possible[0].is_trivial and made[0] == base.tobytes()
    backwards = layouts("", text)
    for layout, other in zip(possible, made, strict=True):
        assert any(bytes(rearrange(memoryview(other), one)) == base.tobytes() for one in backwards), layout
    assert all(
        layout.is_trivial or parse_layout(layout.recipe) == layout for layout in [*possible, *backwards]
    )  # what is found can be stored


@pytest.mark.parametrize("groups", [2, 4, 8])
def test_transposed_convolutions_of_groups_are_tried(groups: int) -> None:
    """As ExecuTorch has them for XNNPACK: the channels of each group change places, then come last."""
    weight = torch.arange(16 * 6 * 3 * 2, dtype=torch.float32).reshape(16, 6, 3, 2)
    swapped = weight.reshape(groups, 16 // groups, 6, 3, 2).transpose(1, 2).reshape(groups * 6, 16 // groups, 3, 2)
    expected = swapped.permute(0, 2, 3, 1).contiguous().numpy().tobytes()
    assert expected in {bytes(rearrange(bytes_of(weight.numpy()), layout)) for layout in layouts("16,6,3,2", "")}


def test_the_shape_of_a_result() -> None:
    assert Layout((48, 576), (1, 0)).shape_of_result("48,64,3,3") == "64,3,3,48"
    assert Layout((64, 32, 9), (0, 2, 1)).shape_of_result("64,32,3,3") == "64,3,3,32"
    assert Layout((2, 8, 54), (0, 2, 1)).shape_of_result("16,6,3,3") == "2,54,8"  # groups are not in the shape
    assert Layout((4, 6), (1, 0)).shape_of_result("4,1,6") == "1,6,4"
    assert Layout((4, 6), (1, 0)).shape_of_result("") == "6,4"


def test_shapes_without_other_layouts() -> None:
    assert layouts("", "") == []
    for shape in ("", "1", "7", "1,1,7"):
        assert all(layout.is_trivial for layout in layouts(shape, "7"))
    assert [layout.is_trivial for layout in layouts("2,3,2,3,2,3,2", "")] == [True]  # too many orders to try


_LAYOUT = "layout:4,6:1,0"


@pytest.mark.parametrize(
    "step",
    [
        *("", "layout", "layout:", "layout:4,6", "layout:4,6:", "layout:4,6:1", "layout:4,6:1,1", "layout:4,6:0,2"),
        *("layout:4,0:1,0", "layout:4,-6:1,0", "layout:4, 6:1,0", "layout:4,6:1,0:", "layout:4,6:1,0\n", "layout:24:0"),
        *("layout:04,6:1,0", "layout:4,6,1:1,0", "layout:2,2,2,2,2,2,2:0,1,2,3,4,5,6", f"layout:4,{'9' * 16}:1,0"),
        *("layout:٤,6:1,0", "cast", "cast:", "cast:float", "widen:float", "widen:double", "cast:half:", "raw"),
        *("scale", "scale:", "scale:0", "scale:-1", "scale:4:4", "scale:1e3", "scale:٤"),
        *("quant", "quant:127:0:n", "quant:127:32:x", "quant:3:32:n", "quant:255e:32:n", "quant:127:32:n:"),
        *("mask", "mask:2", "mask:8:z", "mask:2:*", "mask:2:+", "mask:2:z:7"),
        *("prune:4:z", "prune:4:z:-1", "prune:4:z:07", "prune:4:z:1e3", "prune:4:s:9999999999999"),
        *("gguf:q8_1", "gguf:", "float8:float8e4m3fn:1", "float8:float8e4m3fn:1:0", "float8:half:1:1"),
        *("float8:float8e5m2:x:1", "slice", "slice:0:1:1", "slice:0:0:1:1", "slice:0:2:1:1", "slice:-1:1:1:1"),
        *("slice:01:1:1:1", "slice:0:1:1:0", "slice:0:1:1:1:1", "slice:1e1:1:1:1"),
    ],
)
def test_other_steps_are_not_known(step: str) -> None:
    assert split_steps(step) == ((), step)
    assert split_steps(f"{_LAYOUT}+{step}") == ((_LAYOUT,), step)


def test_a_kind_of_step_comes_once() -> None:
    """Or a damaged row could ask for memory without end."""
    assert split_steps("widen:half+widen:half") == (("widen:half",), "widen:half")
    assert split_steps(f"{_LAYOUT}+layout:4,6:0,1+near:u1:0") == ((_LAYOUT,), "layout:4,6:0,1+near:u1:0")


@pytest.mark.parametrize(
    ("steps", "nbytes", "size"),
    [
        ((_LAYOUT,), 24, 24),
        ((_LAYOUT,), 192, 192),
        ((_LAYOUT,), 0, None),
        ((_LAYOUT,), 72, None),
        ((_LAYOUT,), 384, None),
        ((_LAYOUT,), 25, None),
        (("layout:999999999999999,999999999999999,999999999999999:1,0,2",), 1 << 40, None),
        (("widen:half",), 7, None),
        (("cast:half",), 6, None),
        (("widen:half", "quant:127:4:n", _LAYOUT), 48, 24),
        (("widen:bfloat16", _LAYOUT, "quant:127:6:l"), 48, 12),
        (("quant:127:4:l", _LAYOUT), 96, None),
        (("quant:127:5:n", _LAYOUT), 96, None),
        ((), 5, 5),
    ],
)
def test_sizes_are_known_before_memory_is_taken(steps: tuple[str, ...], nbytes: int, size: int | None) -> None:
    assert made_size(nbytes, steps) == (None if size is None else (size, 0))
    if nbytes < 1000:
        base = memoryview(bytes(nbytes))
        made = derive(base, steps, size or 0)
        assert (made is None) == (size is None) and (made is None or len(made) == size)
        assert derive(base, steps, nbytes + 1) is None


def test_a_layout_takes_the_memory_of_its_result() -> None:
    base = np.zeros((512, 512, 9), np.float32)
    tracemalloc.start()
    try:
        made = derive(bytes_of(base), ("layout:512,512,9:0,2,1",), base.nbytes)
        assert made is not None
        assert tracemalloc.get_traced_memory()[1] < 1.05 * base.nbytes
    finally:
        tracemalloc.stop()
    assert layout_size(base.nbytes, Layout((512, 512, 9), (0, 2, 1))) == base.nbytes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_weights_in_float32(dtype: str) -> None:
    """All of them: the values of torch; of what is not a number, its bits."""
    every = np.arange(1 << 16, dtype="<u2")
    wide = np.frombuffer(widen(memoryview(every).cast("B"), "half" if dtype == "float16" else dtype), "<u4")
    expected = torch.from_numpy(every).view(getattr(torch, dtype)).float().numpy()
    numbers = ~np.isnan(expected)
    assert numbers.sum() < numbers.size
    np.testing.assert_array_equal(wide[numbers], expected.view("<u4")[numbers])
    fraction, bias = (10, 13) if dtype == "float16" else (7, 16)
    kept = (every[~numbers].astype("<u4") & ((1 << fraction) - 1)) << bias
    signs = every[~numbers].astype("<u4") >> 15 << 31
    np.testing.assert_array_equal(wide[~numbers], signs | 0x7F800000 | kept)
    if dtype == "bfloat16":
        assert bytes(cast(memoryview(wide).cast("B"), dtype))[:200] == every.tobytes()[:200]


# ------------------------------------------------------------------------------------------------- in a pool


@functools.cache
def checkpoint(dtype: str) -> dict[str, Array]:
    """Weights of one size, two of each shape."""
    shapes = [*_SHAPES, *_SHAPES]
    if dtype == "int8":
        random = np.random.default_rng(0)
        return {f"{at}": random.integers(-128, 128, shape).astype(np.int8) for at, shape in enumerate(shapes)}
    return {f"{at}": normal(at, shape, dtype) for at, shape in enumerate(shapes)}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pools with a checkpoint, one for each type."""
    folder = tmp_path_factory.mktemp("full")
    for dtype in _TYPES:
        with Pool(folder / dtype, create=True) as pool:
            pool.add(write(folder / f"{dtype}.safetensors", checkpoint(dtype)), "checkpoint@1")
    return folder


@pytest.mark.long
@settings(max_examples=10)
@given(st.sampled_from(_TYPES), st.integers(0, 11), st.permutations(range(5)))
def test_any_layout_of_any_weight_is_found_among_others(full: Path, dtype: str, which: int, among: list[int]) -> None:
    weight = checkpoint(dtype)[str(which)]
    content = weight.transpose([axis for axis in among if axis < weight.ndim]).tobytes()
    path = opaque(full / "opaque.ptd", {"constant": content})
    with Pool(full / dtype) as pool:
        pool.add(path, "lowered@1")
        try:
            encoding, length, _ = stored(pool, content)
            assert content == weight.tobytes() or (encoding.startswith("layout:") and length == 0)
            (restored,) = pool.get("lowered@1", full / "out", force=True)
            assert restored.read_bytes() == path.read_bytes()
        finally:  # for the next example
            pool.drop("lowered@1")


def convolution(seed: int = 0) -> Array:
    return normal(seed, (64, 48, 3, 3))


def last(weight: Array) -> bytes:
    """As XNNPACK has the weight of a convolution."""
    return weight.transpose(0, 2, 3, 1).tobytes()


def rows_int8(weight: Array) -> Array:
    """By channel, as PT2E."""
    scale = np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / np.float32(127)
    return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8)


def moved(weight: Array, seed: int = 5) -> Array:
    """A fine-tune."""
    random = np.random.default_rng(seed)
    return (weight * (1 + 2e-6 * random.standard_normal(weight.shape))).astype(weight.dtype)


def forms() -> dict[str, tuple[dict[str, Array], bytes, int]]:
    """A checkpoint, what a program made of it has, and what that may take."""
    weight, deep = convolution(), normal(1, (256, 1, 7, 7))
    rounded = weight.astype(ml_dtypes.bfloat16)
    transposed = normal(2, (48, 64, 3, 3))  # of a transposed convolution, whose channels change places
    linear = normal(3, (96, 256))
    groups = linear.reshape(-1, 32)
    four = np.clip(np.rint(groups / (np.abs(groups).max(1, keepdims=True) / np.float32(7.5))), -8, 7).reshape(96, 256)
    nibbles = (four.astype(np.int8) + 8).astype(np.uint8)
    number = np.abs(transposed).max(axis=(0, 2, 3), keepdims=True) / np.float32(127)
    half = weight.size * 2
    return {
        "in float16": ({"w": weight}, last(weight.astype(np.float16)), 0),
        "in bfloat16": ({"w": weight}, last(rounded), 0),
        "in float32, from bfloat16": ({"w": rounded}, last(rounded.astype(np.float32)), 0),
        "in int8 by channel": ({"w": weight}, last(rows_int8(weight)), half // 20),
        "in int8, from bfloat16": ({"w": rounded}, last(rows_int8(rounded.astype(np.float32))), half // 20),
        "depthwise in int8 by channel": ({"w": deep}, rows_int8(deep).transpose(2, 3, 1, 0).tobytes(), deep.size // 20),
        "transposed in int8 by channel": (
            {"w": transposed},
            np.rint(transposed / number).astype(np.int8).transpose(1, 2, 3, 0).tobytes(),
            half // 20,
        ),
        "4 bits in groups": ({"w": linear}, (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).tobytes(), linear.size // 20),
        "in int8, unmoved": ({"w": weight}, rows_int8(weight).tobytes(), half // 20),
        "of a fine-tune": ({"w": weight}, last(moved(weight)), weight.nbytes // 3),
        "of a fine-tune, unmoved": ({"w": weight}, moved(weight).tobytes(), weight.nbytes // 3),
        "of a fine-tune in bfloat16": ({"w": rounded}, last(moved(rounded, 7)), rounded.nbytes // 3),
    }


def follows(folder: Path, model: dict[str, Array], content: bytes, most: int) -> str:
    """How what a program has is stored beside the checkpoint that it is made of: in no more than some bytes, and it comes back,
    also after the checkpoint is dropped."""
    values = [*model.values()] * 3
    others = {f"other{at}": normal(90 + at, one.shape).astype(one.dtype) for at, one in enumerate(values)}
    program = opaque(folder / "program.ptd", {"constant": content})
    with Pool(folder / "pool", create=True) as pool:
        pool.add(write(folder / "checkpoint.safetensors", {**others, **model}), "checkpoint@1")
        pool.add(program, "program@1")
        encoding, length, is_based = stored(pool, content)
        assert is_based and length <= most, encoding
        pool.drop("checkpoint@1")
        pool.gc(grace=0, keep=0)
        assert back(pool, "program@1", program, folder / "out")
    return encoding


@pytest.mark.slow
@pytest.mark.parametrize("form", forms())
def test_what_programs_make_of_a_weight(tmp_path: Path, form: str) -> None:
    follows(tmp_path, *forms()[form])


def test_a_checkpoint_that_comes_later(pool: Pool, tmp_path: Path) -> None:
    """It follows from what a program had."""
    weight = convolution()
    pool.add(opaque(tmp_path / "program.ptd", {"constant": last(weight), "other": last(convolution(4))}), "program@1")
    checkpoint = write(tmp_path / "checkpoint.safetensors", {"w": weight})
    pool.add(checkpoint, "checkpoint@1")
    encoding, length, _ = stored(pool, weight.tobytes())
    assert encoding.startswith("layout:") and length == 0
    assert back(pool, "checkpoint@1", checkpoint, tmp_path / "out")
    np.testing.assert_array_equal(pool.open("checkpoint@1").numpy("w"), weight)


def test_both_at_once(pool: Pool, tmp_path: Path) -> None:
    """Whatever their files are called: the checkpoint is stored whole."""
    weight = convolution()
    (tmp_path / "in").mkdir()
    opaque(tmp_path / "in/a.ptd", {"wide": last(weight), "numbers": last(rows_int8(weight))})
    write(tmp_path / "in/b.safetensors", {"w": weight})
    pool.add(tmp_path / "in", "both@1")
    assert stored(pool, weight.tobytes())[0] == "planes:4"
    assert stored(pool, last(weight))[1] == stored(pool, last(rows_int8(weight)))[1] == 0
    assert pool.verify() == []


def test_the_program_of_a_fine_tune_follows_from_it(pool: Pool, tmp_path: Path) -> None:
    """The fine-tune is stored against its base; both stay as long as the program does, wherever they are moved to."""
    weight = convolution()
    tune = moved(weight)
    filling = {f"f{at}": normal(90 + at, (64, 64)) for at in range(20)}  # so that little of a pack is needed in the end
    for version, one in (("1", weight), ("2", tune)):
        pool.add(write(tmp_path / f"{version}.safetensors", {"w": one, **filling}), f"m@{version}")
        filling = {name: -values for name, values in filling.items()}
    program = opaque(tmp_path / "program.ptd", {"constant": last(tune)})
    pool.add(program, "program@2")
    assert stored(pool, last(tune)) == ("layout:64,48,9:0,2,1", 0, False)
    # a further step would be one too many: there is no base for what is close to the program
    again = last(moved(tune))
    pool.add(opaque(tmp_path / "again.ptd", {"constant": again}), "program@3")
    chains = """SELECT count(b.base), count(c.base) FROM blobs a
        JOIN blobs b ON a.base = b.digest LEFT JOIN blobs c ON b.base = c.digest WHERE a.base IS NOT NULL"""
    ((twos, threes),) = pool.tables.query(chains)
    assert twos > 0 and threes == 0 and pool.verify() == []
    for version in ("m@1", "m@2", "program@3"):
        pool.drop(version)
    for _ in range(2):
        pool.gc(keep=0)
        assert pool.verify() == []
        restored = pool.get("program@2", tmp_path / "out", force=True)
        assert restored[0].read_bytes() == program.read_bytes()
    assert len(pool.tables.query("SELECT DISTINCT digest FROM blobs")) < 12


def test_what_follows_from_nothing_is_stored_as_it_is(pool: Pool, tmp_path: Path) -> None:
    pool.add(write(tmp_path / "checkpoint.safetensors", checkpoint("float32")), "checkpoint@1")
    contents = {"own": last(convolution(77)), "numbers": last(rows_int8(convolution(78))), "zeros": bytes(55_296)}
    pool.add(opaque(tmp_path / "program.ptd", contents), "program@1")
    for content in contents.values():
        assert stored(pool, content)[0] in {"raw", "planes:1", "planes:4"}
    assert pool.verify() == []


def test_a_tensor_with_another_shape(pool: Pool, tmp_path: Path) -> None:
    """A weight that is transposed, and one that only has other dimensions, of types that are known."""
    weight = normal(0, (96, 128))
    pool.add(write(tmp_path / "1.safetensors", {"w": weight}), "m@1")
    pool.add(write(tmp_path / "2.safetensors", {"w": np.ascontiguousarray(weight.T)}), "m@2")
    pool.add(write(tmp_path / "3.safetensors", {"w": moved(weight).reshape(96, 128, 1, 1)}), "m@3")
    assert stored(pool, weight.T.tobytes())[:2] == ("layout:96,128:1,0", 0)
    assert stored(pool, moved(weight).tobytes())[0].startswith("near:f4")
    assert pool.verify() == []


@pytest.mark.parametrize(
    "shape", ["", "x", "64,48,3", "64,48,3,3,", "-64,-48,3,3", "٦٤,48,3,3", "0,9", "1," * 500 + "27648"]
)
def test_a_damaged_shape_is_no_reason_to_fail(pool: Pool, tmp_path: Path, shape: str) -> None:
    weight = convolution()
    pool.add(write(tmp_path / "checkpoint.safetensors", {"w": weight}), "checkpoint@1")
    change_rows(pool, "dtype = 'float'", lambda row: {"shape": shape})
    program = opaque(tmp_path / "program.ptd", {"constant": last(weight), "numbers": rows_int8(weight).tobytes()})
    pool.add(program, "program@1")
    assert back(pool, "program@1", program, tmp_path / "out")


@pytest.mark.parametrize(
    ("encoding", "error", "message"),
    [
        ("layout:64,48,8:0,2,1", IntegrityError, "a base of another size"),
        ("layout:99999999,48,9:0,2,1", IntegrityError, "a base of another size"),
        ("widen:half+layout:64,48,9:0,2,1", IntegrityError, "a base of another size"),
        ("layout:64,48,9:2,0,1", IntegrityError, "are damaged"),
        ("layout:64,48,9:0,2,2", PoolError, "which this version does not know"),
        ("layout:64,48,9:0,2,1+layout:64,9,48:0,2,1", PoolError, "which this version does not know"),
    ],
)
def test_a_damaged_recipe_is_one_error(
    pool: Pool, tmp_path: Path, encoding: str, error: type[Exception], message: str
) -> None:
    weight = convolution()
    pool.add(write(tmp_path / "checkpoint.safetensors", {"w": weight}), "checkpoint@1")
    pool.add(opaque(tmp_path / "program.ptd", {"constant": last(weight)}), "program@1")
    change_rows(pool, "encoding LIKE 'layout%'", lambda row: {"encoding": encoding})
    with pytest.raises(error, match=message):
        pool.get("program@1", tmp_path / "out")


# ------------------------------------------------------------------------------------------- stock ExecuTorch


class Net(torch.nn.Module):
    """Convolutions of every kind that XNNPACK stores in an order of its own, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 64, 3, padding=1)
        self.wide = torch.nn.Conv2d(64, 128, 3, padding=1)
        self.deep = torch.nn.Conv2d(128, 128, 5, padding=2, groups=128)
        self.point = torch.nn.Conv2d(128, 64, 1)
        self.groups = torch.nn.Conv2d(64, 64, 3, groups=4)
        self.up = torch.nn.ConvTranspose2d(64, 32, 4, stride=2)
        self.up_in_groups = torch.nn.ConvTranspose2d(32, 64, 3, groups=2)
        self.along = torch.nn.Conv1d(64, 96, 5)
        self.linear = torch.nn.Linear(96, 256)
        self.norm = torch.nn.BatchNorm2d(128)  # which is folded into `wide`
        with torch.no_grad():
            for values in (self.norm.weight, self.norm.running_mean, self.norm.running_var):
                values.uniform_(0.3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.wide, self.norm, self.deep, self.point, self.groups, self.up, self.up_in_groups):
            x = torch.relu(layer(x))
        return self.linear(torch.relu(self.along(x.mean(2))).mean(2))


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the net, and what stock ExecuTorch makes of it through XNNPACK, in float32 and quantized by PT2E."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from executorch.exir import to_edge_transform_and_lower
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    from blobstore.lowering.export import quiet

    folder = tmp_path_factory.mktemp("lowered")
    torch.manual_seed(0)
    net, inputs = Net().eval(), (torch.randn(1, 3, 12, 12),)
    write(folder / "net.safetensors", {key: value.numpy() for key, value in net.state_dict().items()})
    with quiet():
        quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
        prepared = prepare_pt2e(torch.export.export(net, inputs).module(), quantizer)
        prepared(*inputs)
        for name, module in {"float32": net, "int8": convert_pt2e(prepared)}.items():
            exported = torch.export.export(module, inputs)
            program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
            (folder / f"{name}.pte").write_bytes(program.buffer)
    return folder


@pytest.mark.slow
@pytest.mark.long
def test_programs_of_xnnpack_take_nearly_nothing_beside_their_checkpoint(
    lowered: Path, pool: Pool, tmp_path: Path
) -> None:
    weights = sum(value.numel() * 4 for value in Net().state_dict().values())
    pool.add(lowered / "net.safetensors", "net@checkpoint")
    for name in ("float32", "int8"):
        program = lowered / f"{name}.pte"
        assert pool.add(program, f"net@{name}").stored_bytes <= 0.03 * weights, name
        assert back(pool, f"net@{name}", program, tmp_path / "out")


@pytest.mark.long
def test_programs_and_their_checkpoint_at_once(lowered: Path, pool: Pool) -> None:
    checkpoint = (lowered / "net.safetensors").stat().st_size
    assert pool.add(lowered, "net@all").stored_bytes <= 0.95 * checkpoint
    assert pool.verify() == []
