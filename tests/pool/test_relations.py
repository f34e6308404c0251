"""A series that drifts gets new bases, a star of fine-tunes does not, and bases are whole."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blobstore.pool import Pool, distances, relations
from blobstore.pool.packs import Stored
from blobstore.pool.relations import stored_rows
from tests.pool.models import write
from tests.pool.places import Place

_Weight = npt.NDArray[np.generic]
_SHAPE = (96, 64)
DIGESTS = [hashlib.sha256(str(number).encode()).digest() for number in range(300)]


def star(seed: int, number: int, dtype: str) -> list[_Weight]:
    """A model, and fine-tunes that go from it in all directions, some further than others."""
    random = np.random.default_rng(seed)
    base = random.standard_normal(_SHAPE) * 0.02
    step = 0.02 * np.finfo(dtype).eps
    moves = [step * np.exp(random.uniform(-3, 1.5)) * random.standard_normal(_SHAPE) for _ in range(number)]
    return [base.astype(dtype), *((base + move).astype(dtype) for move in moves)]


def series(seed: int, number: int, dtype: str) -> list[_Weight]:
    """A model that moves on, by steps that are all alike."""
    random = np.random.default_rng(seed)
    place = random.standard_normal(_SHAPE) * 0.02
    weights = [place.astype(dtype)]
    for _ in range(number):
        place = place + 4e-6 * random.standard_normal(_SHAPE)
        weights.append(place.astype(dtype))
    return weights


def added(pool: Pool, folder: Path, weights: Sequence[_Weight]) -> Iterator[int]:
    """The bytes that each takes, added as a version of its own."""
    for number, weight in enumerate(weights):
        yield pool.add(write(folder / f"{number}.safetensors", {"weight": weight}), f"m@{number}").stored_bytes


def together(folder: Path, weights: Sequence[_Weight]) -> dict[str, tuple[int, int, int]]:
    """How all are stored that are added as one version."""
    for number, weight in enumerate(weights):
        write(folder / "files" / f"{number:03}.safetensors", {"weight": weight})
    with Pool(folder / "pool", create=True) as pool:
        pool.add(folder / "files", "m@1")
        assert pool.verify() == []
        return dict(pool.stats().encodings)


def wholes(encodings: dict[str, tuple[int, int, int]]) -> int:
    """How many weights are stored whole; headers of files are raw."""
    return sum(number for encoding, (number, _, _) in encodings.items() if encoding.startswith("planes"))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@settings(max_examples=3)
@given(seed=st.integers(0, 1000))
def test_a_star_has_one_base(tmp_path_factory: pytest.TempPathFactory, dtype: str, seed: int) -> None:
    """However far its fine-tunes are: none of them is nearer to another one than to the base."""
    assert wholes(together(tmp_path_factory.mktemp("star"), star(seed, 20, dtype))) == 1


@settings(max_examples=3)
@given(seed=st.integers(0, 1000))
def test_a_series_gets_a_new_base_now_and_then(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    assert 2 <= wholes(together(tmp_path_factory.mktemp("series"), series(seed, 30, "float16"))) <= 8


@pytest.mark.slow
@pytest.mark.long
def test_versions_of_a_series_stay_small(where: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all they take no more than against the first one alone, and each that is a difference takes less."""
    weights = series(1, 48, "float16")
    with where.open(create=True) as pool:
        taken = list(added(pool, tmp_path, weights))
        assert pool.verify() == []
        rows = pool.tables.query("SELECT base FROM blobs WHERE base IS NOT NULL")
        whole = {digest for (digest,) in pool.tables.query("SELECT digest FROM blobs WHERE base IS NULL")}
    assert {base for (base,) in rows} <= whole  # no chains
    assert len({base for (base,) in rows}) >= 2
    monkeypatch.setattr(relations, "_KEYFRAME", 1e9)
    with Pool(tmp_path / "first", create=True) as pool:
        against_the_first = list(added(pool, tmp_path, weights))
    assert sum(taken) < sum(against_the_first)
    assert np.median(taken) < 0.95 * np.median(against_the_first)


@pytest.mark.long
def test_a_series_gets_a_new_base_among_fine_tunes(tmp_path: Path) -> None:
    """Of its first version, one after the other, four between two of the series."""
    moving = series(3, 16, "float16")
    tunes = iter(star(3, 64, "float16")[1:])
    with Pool(tmp_path / "pool", create=True) as pool:
        between = (one for weight in moving for one in (weight, *itertools.islice(tunes, 4)))
        list(added(pool, tmp_path, list(between)))
        assert 2 <= wholes(dict(pool.stats().encodings)) <= 6


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_bits_of_a_difference_are_about_its_entropy(width: int) -> None:
    random = np.random.default_rng(width)
    one = random.integers(0, 200, 256).astype(np.float64)
    for spread in (0.0, 0.1, 1.0, 8.0, 60.0):
        differences = np.rint(random.laplace(0, spread, 1 << 16)) if spread else np.zeros(1 << 16)
        counts = np.unique(differences, return_counts=True)[1] / len(differences)
        entropy = -(counts * np.log2(counts)).sum()
        (bits,) = distances.bits((one + differences[:256])[None], one)
        assert abs(bits - entropy) < 0.35


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_base_is_found_however_old_it_is(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """And however many of its kind came after it."""
    random = np.random.default_rng(3)
    monkeypatch.setattr(relations, "_NEWEST", 1)
    models = [random.standard_normal(_SHAPE).astype("f4") for _ in range(40)]
    clock = iter(range(10**9, 2 * 10**9))
    monkeypatch.setattr("blobstore.pool.packs.time.time", lambda: next(clock))
    write(tmp_path / "bases.safetensors", {f"{number}": model for number, model in enumerate(models)})
    size = pool.add(tmp_path / "bases.safetensors", "bases@1").stored_bytes / len(models)
    for number in (39, 20, 0):
        near = np.nextafter(models[number], np.float32(np.inf)).astype(dtype)
        path = write(tmp_path / "near.safetensors", {"weight": near})
        assert pool.add(path, f"near@{number}").stored_bytes < size / 5


_FOLLOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in float32": lambda one: one.float(),
    "in another narrow type": lambda one: one.half(),
    "transposed": lambda one: one.T.contiguous(),
    "tuned and transposed": lambda one: (one.view(torch.int16) + 1).view(torch.bfloat16).T.contiguous(),
    "in float8": lambda one: one.to(torch.float8_e4m3fn),
    "in float8, scaled": lambda one: (one.float() * (448 / one.abs().max())).to(torch.float8_e4m3fn),
    "in int8, by channel": lambda one: torch.round(one.float() / (one.float().abs().amax(1, True) / 127)).char(),
    "half of it pruned": lambda one: torch.where(one.abs() > one.abs().median(), one, 0),
}


@pytest.mark.parametrize("what", _FOLLOWS)
def test_what_a_blob_follows_from_is_found_however_old_it_is(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whatever makes it of an old one or of a fine-tune of that, and however many of its type and size came after these."""
    monkeypatch.setattr(relations, "_NEWEST", 1)
    clock = iter(range(10**9, 2 * 10**9))
    monkeypatch.setattr("blobstore.pool.packs.time.time", lambda: next(clock))
    generator = torch.Generator().manual_seed(0)
    models = {f"{i}": (0.02 * torch.randn(_SHAPE, generator=generator)).bfloat16() for i in range(40)}
    moved = {number: (torch.rand(_SHAPE, generator=generator) < 0.1).short() for number in models}
    tunes = {f"tune{i}": (models[i].view(torch.int16) + moved[i]).view(torch.bfloat16) for i in models}
    for name, tensors in (("bases", models), ("tunes", tunes)):
        safetensors.torch.save_file(tensors, tmp_path / f"{name}.safetensors")
        pool.add(tmp_path / f"{name}.safetensors", f"{name}@1")
    models |= tunes
    for number in ("39", "0", "tune20", "tune0"):
        path = tmp_path / f"{number}.safetensors"
        safetensors.torch.save_file({"weight": _FOLLOWS[what](models[number])}, path)
        added = pool.add(path, f"follows@{number}")
        assert added.stored_bytes < 0.15 * added.bytes
        assert pool.get(f"follows@{number}", tmp_path / "out")[0].read_bytes() == path.read_bytes()


def test_similar_weights_have_similar_signatures() -> None:
    """In every type, and those of others have not."""
    random = np.random.default_rng(5)
    values = random.standard_normal((50, 256)) * 0.02 + 1
    types = {"half": "f2", "float": "f4", "double": "f8"}

    def signature(row: _Weight, dtype: str) -> int:
        return distances.signature(dtype, row.astype(types[dtype]).tobytes())

    def apart(one: int, other: int) -> int:
        return ((one ^ other) % (1 << 64)).bit_count()

    first = [signature(row, "float") for row in values]
    for dtype in types:
        again = [signature(row + 0.002 * random.standard_normal(256), dtype) for row in values]
        assert max(map(apart, first, again)) <= 10
    others = [apart(one, other) for at, one in enumerate(first) for other in first[:at]]
    assert 30 < np.mean(others) < 34
    assert np.mean(np.array(others) <= relations._ALIKE) < 0.01
    for dtype in (*types, "bfloat16", "char", ""):
        for junk in (b"\xff" * 2048, bytes(2048), random.bytes(2048)):
            assert -(1 << 63) <= distances.signature(dtype, junk) < 1 << 63


@pytest.mark.parametrize(("distance", "most"), [(0.003, 0.65), (0.015, 0.72), (0.05, 0.78)])
def test_fine_tunes_in_float32_are_differences(pool: Pool, tmp_path: Path, distance: float, most: float) -> None:
    """Their last bits are noise by themselves and in a difference, so neither is small."""
    random = np.random.default_rng(6)
    base = (random.standard_normal((256, 192)) * 0.02).astype("f4")
    first, *tunes = added(
        pool, tmp_path, [base, *(base * (1 + distance * random.standard_normal(base.shape).astype("f4")) for _ in "ab")]
    )
    assert first > 0.8 * base.nbytes
    assert max(tunes) < most * base.nbytes
    assert pool.verify() == []


def test_contents_are_found_by_whole_digests(pool: Pool) -> None:
    """In several files of the table, among many, and not if only the first bytes of a digest are those of another."""
    rows = {
        digest: Stored(digest, 4, "", "", "raw", None, bytes(32), 64 * at, 4, at) for at, digest in enumerate(DIGESTS)
    }
    for first in range(0, len(DIGESTS), 100):
        pool.tables.append("blobs", [rows[digest].row() for digest in DIGESTS[first : first + 100]])
    assert stored_rows(pool.tables, DIGESTS[::2]) == {digest: rows[digest] for digest in DIGESTS[::2]}
    assert stored_rows(pool.tables, [digest[:8] + bytes(24) for digest in DIGESTS]) == {}
    assert stored_rows(pool.tables, []) == {}
