"""Tensors that are cut, joined or distributed take little beside those that they were, to the bit (P1, P2)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.errors import DataChangedError
from blobstore.pool import Pool
from blobstore.pool.derived import derive, made_size, split_steps
from blobstore.pool.pieces import pieces_of, row_length
from blobstore.pool.scan import scan, scan_parts
from blobstore.pool.slices import Slice, parse_slice
from tests.pool.models import Tensors, write
from tests.pool.rows import change_rows
from tests.pool.test_layouts import bytes_of

Array = npt.NDArray[Any]
Model = dict[str, Array]

ROWS, COLUMNS = 256, 192
LAYERS = 4


def matrices(seed: int, dtype: str = "bfloat16", shape: tuple[int, int] = (ROWS, COLUMNS)) -> Model:
    random = np.random.default_rng(seed)
    return {f"{layer}.weight": (random.standard_normal(shape) * 0.02).astype(dtype) for layer in range(LAYERS)}


def tuned(model: Model, seed: int) -> Model:
    """All numbers moved by about a hundredth of their deviation."""
    random = np.random.default_rng(seed)
    return {
        name: (values.astype(np.float32) + random.standard_normal(values.shape) * 0.0002).astype(values.dtype)
        for name, values in model.items()
    }


def joined(model: Model) -> Model:
    return {"joined": np.concatenate(list(model.values()))}


def stacked(model: Model) -> Model:
    return {"stacked": np.stack(list(model.values()))}


def apart(model: Model) -> Model:
    (whole,) = model.values()
    return {f"{layer}.weight": part for layer, part in enumerate(whole.reshape(LAYERS, ROWS, COLUMNS))}


def longer(model: Model) -> Model:
    random = np.random.default_rng(7)
    more = (random.standard_normal((5, COLUMNS)) * 0.02).astype(next(iter(model.values())).dtype)
    return {name: np.concatenate([values, more]) for name, values in model.items()}


def with_rows_inside(model: Model) -> Model:
    values = next(iter(model.values()))
    return {"wide": np.concatenate([values[:100], -values[3:6], values[100:]])}


def shards(model: Model) -> Model:
    return {f"{name}.{at}": part for name, values in model.items() for at, part in enumerate(np.split(values, 2))}


def column_shards(model: Model) -> Model:
    return {f"{name}.{at}": part for name, values in model.items() for at, part in enumerate(np.split(values, 3, 1))}


def cut(model: Model) -> Model:
    return {name: values[: ROWS * 3 // 4, : COLUMNS * 2 // 3] for name, values in model.items()}


def flat(model: Model) -> Model:
    return {"flat": np.concatenate([values.ravel() for values in model.values()])}


def shuffled(model: Model) -> Model:
    """The heads of several projections in turns, as some models store them."""
    heads = [values.reshape(2, -1, COLUMNS) for values in model.values()]
    return {"heads": np.stack(heads, 1).reshape(-1, COLUMNS)}


def narrower(model: Model) -> Model:
    return {name: np.ascontiguousarray(values[64:]).astype("bfloat16") for name, values in model.items()}


SHORT: list[tuple[Callable[[Model], Model], str]] = [
    (joined, "bfloat16"),
    (longer, "bfloat16"),
    (column_shards, "float32"),
]
LONG: list[tuple[Callable[[Model], Model], str]] = [
    (joined, "float32"),
    (joined, "int8"),
    (stacked, "float16"),
    (with_rows_inside, "bfloat16"),
    (shards, "bfloat16"),
    (cut, "bfloat16"),
    (flat, "bfloat16"),
    (shuffled, "bfloat16"),
    (narrower, "float32"),
]


def save(path: Path, model: Model) -> Path:
    tensors: Tensors = {name: np.ascontiguousarray(values) for name, values in model.items()}
    return write(path, tensors)


def one_of(dtype: str) -> Model:
    model = matrices(1, "float32")
    if dtype == "int8":
        return {name: (values * 2000).astype(np.int8) for name, values in model.items()}
    return {name: values.astype(dtype) for name, values in model.items()}


def check(pool: Pool, version: str, path: Path, model: Model, folder: Path) -> None:
    """Whether a version comes back, as a file and as tensors."""
    (restored,) = pool.get(version, folder, force=True)
    assert restored.read_bytes() == path.read_bytes()
    opened = pool.open(version)
    assert dict(opened.views()).keys() == set(opened) == model.keys()
    for name, values in model.items():
        assert opened.bytes(name) == values.tobytes()
        assert tuple(opened.numpy(name).shape) == values.shape
    assert pool.verify() == []


@pytest.mark.parametrize(("make", "dtype"), [*SHORT, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)])
def test_what_is_made_of_stored_tensors_takes_little(
    pool: Pool, tmp_path: Path, make: Callable[[Model], Model], dtype: str
) -> None:
    model = one_of(dtype)
    made = make(model)
    path = save(tmp_path / "made.safetensors", made)
    pool.add(save(tmp_path / "model.safetensors", model), "m@1")
    added = pool.add(path, "m@2")
    assert added.stored_bytes < 0.06 * path.stat().st_size
    assert pool.add(path, "m@3").stored_bytes == 0
    pool.drop("m@1")
    pool.drop("m@2")
    pool.gc(grace=0, keep=0)
    pool.gc(grace=0, keep=0)
    check(pool, "m@3", path, made, tmp_path / "out")


@pytest.mark.long
@pytest.mark.parametrize("make", [joined, stacked, shards, column_shards, cut, longer])
def test_the_same_of_a_fine_tune_is_a_difference(pool: Pool, tmp_path: Path, make: Callable[[Model], Model]) -> None:
    model = matrices(2)
    made = make(tuned(model, 3))
    path = save(tmp_path / "made.safetensors", made)
    with Pool(tmp_path / "alone", create=True) as other:
        alone = other.add(path, "m@1").stored_bytes
    pool.add(save(tmp_path / "model.safetensors", model), "m@1")
    assert pool.add(path, "m@2").stored_bytes < 0.6 * alone
    check(pool, "m@2", path, made, tmp_path / "out")


@pytest.mark.parametrize("join", [joined, pytest.param(stacked, marks=pytest.mark.long)])
def test_parts_of_a_whole_that_came_first(pool: Pool, tmp_path: Path, join: Callable[[Model], Model]) -> None:
    """Whether they come all together, or one of them with others that are new."""
    model = matrices(4)
    one = {"one": model["2.weight"], "other": matrices(5)["0.weight"]}
    pool.add(save(tmp_path / "whole.safetensors", join(model)), "m@1")
    path = save(tmp_path / "parts.safetensors", model)
    assert pool.add(path, "m@2").stored_bytes < 1000
    single = save(tmp_path / "one.safetensors", one)
    pool.add(single, "m@3")
    check(pool, "m@2", path, model, tmp_path / "out")
    check(pool, "m@3", single, one, tmp_path / "single")


_STEPS = st.lists(
    st.tuples(st.sampled_from(["rows", "columns", "join", "new", "tune"]), st.integers(0, 10**6)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=8)
@given(steps=_STEPS, dtype=st.sampled_from(["bfloat16", "float16", "float32"]))
@pytest.mark.long
def test_any_cuts_and_joins_come_back(tmp_path_factory: pytest.TempPathFactory, steps: Any, dtype: str) -> None:
    folder = tmp_path_factory.mktemp("any")
    model = matrices(6, dtype)
    now = model["0.weight"]
    with Pool(folder / "pool", create=True) as pool:
        pool.add(save(folder / "model.safetensors", model), "m@0")
        for number, (step, random) in enumerate(steps, 1):
            rows, columns = now.shape
            other = model[f"{random % LAYERS}.weight"]
            if step == "rows":
                now = now[random % (rows // 2) :][: max(rows // 2, 8)]
            elif step == "columns" and columns > 96:
                now = now[:, 32 * (random % 3) :][:, : columns // 2]
            elif step == "join":
                now = np.concatenate([other[:, :columns], now, other[random % 64 :, :columns]])
            elif step == "new":
                now = np.concatenate([now, matrices(random, dtype)["1.weight"][: random % 40, :columns]])
            else:
                now = tuned({"": now}, random)[""]
            made = {"made": np.ascontiguousarray(now)}
            path = save(folder / f"{number}.safetensors", made)
            pool.add(path, f"m@{number}")
            check(pool, f"m@{number}", path, made, folder / "out")


def test_an_overlap_never_costs_more_than_a_tensor_of_its_own(pool: Pool, tmp_path: Path) -> None:
    """Rows that are everywhere, and numbers whose signs say nothing."""
    random = np.random.default_rng(8)
    row = random.standard_normal(COLUMNS).astype(np.float32)
    made = {
        "same": np.tile(row, (300, 1)),
        "sorted": np.sort(random.standard_normal((300, COLUMNS)).astype(np.float32)),
        "zeros": np.zeros((300, COLUMNS), np.float32),
    }
    path = save(tmp_path / "made.safetensors", made)
    with Pool(tmp_path / "alone", create=True) as other:
        alone = other.add(path, "m@1").stored_bytes
    pool.add(save(tmp_path / "rows.safetensors", {"rows": np.tile(row, (200, 1))}), "m@1")
    assert pool.add(path, "m@2").stored_bytes <= 1.02 * alone + 500
    check(pool, "m@2", path, made, tmp_path / "out")


def test_a_file_that_changes_while_it_is_taken_apart(tmp_path: Path) -> None:
    """The parts would not be those of the file whose digest is known."""
    path = save(tmp_path / "made.safetensors", joined(matrices(10)))
    (part,) = (part for part in scan(str(path), "made").parts if [one.name for one in part.tensors] == ["joined"])
    with path.open("r+b") as file:
        file.seek(part.source.start)
        file.write(b"other")
    with pytest.raises(DataChangedError, match="changed"):
        scan_parts(part, [(part.size // 2, ""), (part.size, "")])


# ------------------------------------------------------------------------------------------------- one recipe


@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_a_slice_is_that_of_numpy(rows: int, columns: int, data: st.DataObject) -> None:
    base = np.arange(rows * columns, dtype="<u2").reshape(rows, columns)
    first, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    last, right = data.draw(st.integers(first + 1, rows)), data.draw(st.integers(left + 1, columns))
    part = Slice(2 * (first * columns + left), 2 * (right - left), 2 * columns, last - first)
    assert parse_slice(part.recipe) == part
    assert split_steps(part.recipe + "+raw") == ((part.recipe,), "raw")
    assert made_size(base.nbytes, (part.recipe,)) == (part.size, 0)
    made = derive(bytes_of(base), (part.recipe,), part.size)
    assert made is not None
    assert bytes(made) == base[first:last, left:right].tobytes()
    assert made_size(part.stop - 1, (part.recipe,)) is None


@given(st.sampled_from([(64, 192), (3, 64, 256), (64, 30, 3, 3), (20_000,), (70, 100)]), st.integers(0, 3))
def test_a_dense_tensor_has_the_pieces_of_what_it_is_made_of(shape: tuple[int, ...], seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(shape).astype(ml_dtypes.bfloat16)
    text = ",".join(map(str, shape))
    kept = pieces_of(bytes_of(values), "bfloat16", text)
    dense = pieces_of(bytes_of(values), "bfloat16", text, dense=True)
    assert len(kept.keys)
    assert set(kept.keys.tolist()) <= set(dense.keys.tolist())
    wide = pieces_of(bytes_of(values.astype(np.float32)), "float", text)
    assert wide.keys.tolist() == kept.keys.tolist()


@pytest.mark.parametrize("shape", ["", "0", "1,,2", "-3,4", "x", "9" * 6000, "7,9", "0,64", "\u0661,4"])
def test_whatever_a_shape_says_rows_fit(shape: str) -> None:
    assert 100 % row_length(shape, 100) == 0


@pytest.mark.parametrize(
    ("keys", "places"),
    [
        (lambda keys: keys, lambda places: [-place for place in places]),
        (lambda keys: keys, lambda places: [place + 2**49 for place in places]),
        (lambda keys: keys, lambda places: [2**63 - 1] * len(places)),
        (lambda keys: keys, lambda places: places[1:]),
        (lambda keys: keys[::-1], lambda places: places),
        (lambda keys: [None] * len(keys), lambda places: [None] * len(places)),
    ],
)
def test_pieces_that_somebody_made_up_lead_to_no_other_bytes(
    pool: Pool, tmp_path: Path, keys: Any, places: Any
) -> None:
    model = matrices(9)
    made = joined(model)
    path = save(tmp_path / "made.safetensors", made)
    pool.add(save(tmp_path / "model.safetensors", model), "m@1")
    change_rows(
        pool,
        "true",
        lambda row: {"piece_keys": keys(row.piece_keys or []), "piece_places": places(row.piece_places or [])},
    )
    pool.add(path, "m@2")
    check(pool, "m@2", path, made, tmp_path / "out")
