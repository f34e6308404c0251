"""Deltas of data files and checkpoints: only what differs, and with the base all of it again (R3, B2)."""

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file as load_safetensors
from safetensors.numpy import save_file as save_safetensors

import blobstore
from blobstore.core.tools.delta import write_deltas
from blobstore.errors import BlobStoreError, FileAccessError, IntegrityError, OutputPathError, UnsupportedDataError
from tests.helpers.terminal import printed

Tensors = dict[str, np.ndarray]
A, B, C = (np.random.default_rng(seed).standard_normal((8, 6)).astype(np.float32) for seed in range(3))
FORMATS = ("ptd", "safetensors")


def write(path: Path, tensors: Tensors, **metadata: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (blobstore.save_file if path.suffix == ".ptd" else save_safetensors)(tensors, path, metadata=metadata or None)
    return path


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """By other code for .safetensors."""
    tensors = load_safetensors(path) if path.suffix == ".safetensors" else blobstore.load_file(path, "np")
    return {key: (str(array.dtype), array.shape, array.tobytes()) for key, array in tensors.items()}


@pytest.mark.parametrize("formats", list(itertools.product(FORMATS, repeat=2)), ids="-".join)
def test_only_what_differs_is_written(formats: tuple[str, str], tmp_path: Path) -> None:
    base = write(tmp_path / f"base.{formats[0]}", {"same": A, "changed": B, "bytes": A.view(np.int32), "turned": A})
    tensors = {"same": A, "changed": C, "bytes": A, "turned": A.reshape(6, 8), "new": A}
    tuned = write(tmp_path / f"tuned.{formats[1]}", tensors, author="somebody")
    before = tuned.read_bytes(), base.read_bytes()
    [result] = write_deltas(base, tuned, tmp_path / "out")
    assert result.path == tmp_path / "out" / tuned.name
    assert (result.keys, result.left_out) == (4, 1)
    assert contents(result.path).keys() == {"changed", "bytes", "turned", "new"}
    assert {**contents(base), **contents(result.path)} == contents(tuned)
    assert (tuned.read_bytes(), base.read_bytes()) == before
    with blobstore.safe_open(result.path, "np") as opened:
        assert opened.metadata() == {"author": "somebody"}
    assert result.bytes_after == result.path.stat().st_size


def test_what_equals_the_base_has_nothing_of_its_own(tmp_path: Path) -> None:
    base = write(tmp_path / "base.ptd", {"a": A})
    copies = [write(tmp_path / "x" / "a.ptd", {"a": A}), write(tmp_path / "y" / "a.ptd", {"a": A})]
    results = write_deltas(base, [*copies, write(tmp_path / "a.safetensors", {"a": A})], tmp_path / "out")
    assert [one.path.relative_to(tmp_path / "out") for one in results] == [
        Path("x/a.ptd"),
        Path("y/a.ptd"),
        Path("a.safetensors"),
    ]
    assert [contents(one.path) for one in results] == [{}, {}, {}]
    assert write_deltas(base, copies, tmp_path / "out")[0].bytes_after == results[0].bytes_after  # a second run


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    base = write(tmp_path / "base.ptd", {"a": A})
    blobstore.save_file({"a": A, "b": B, "c": B}, tmp_path / "tuned.ptd")
    [result] = write_deltas(base, tmp_path / "tuned.ptd", tmp_path / "out")
    with blobstore.open_ptd(result.path) as data_map:
        assert len(data_map.extents) == 1 and set(data_map) == {"b", "c"}


def test_a_delta_of_a_data_file_is_loaded_by_a_cache(tmp_path: Path) -> None:
    runtime = pytest.importorskip("blobstore.runtime")
    base = write(tmp_path / "base.ptd", {"a": A, "b": B})
    [result] = write_deltas(base, write(tmp_path / "tuned.ptd", {"a": A, "b": C}), tmp_path / "out")
    with runtime.BlobCache(base) as cache:
        cache.load(result.path)
        assert cache.bytes("b") == C.tobytes() and cache.bytes("a") == A.tobytes()


def test_a_delta_of_the_data_file_of_programs_is_none(tmp_path: Path, lowered: Any) -> None:
    """It would be taken for one that programs in its folder need."""
    lowered.mlp().write(tmp_path, "m")
    blobstore.dedup_programs(tmp_path / "m.pte", tmp_path / "slim")
    shared = tmp_path / "slim" / "shared.ptd"
    tensors = blobstore.load_file(shared, "np")
    base = write(tmp_path / "base.ptd", {key: array * 2 for key, array in tensors.items()})
    [result] = write_deltas(base, shared, tmp_path / "out")
    with blobstore.open_ptd(result.path) as data_map:
        assert not data_map.metadata and len(data_map) == len(tensors)


def f8(path: Path) -> Path:
    header = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(8)))
    return path


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    base = write(tmp_path / "base.ptd", {"a": A, "b": B})
    good, out = write(tmp_path / "good.ptd", {"a": C, "b": B}), tmp_path / "out"
    lacking = write(tmp_path / "lacking.safetensors", {"a": A})
    (tmp_path / "m.pte").write_bytes(b"not a program")
    damaged = write(tmp_path / "damaged.ptd", {"a": C, "b": B})
    data = bytearray(damaged.read_bytes())
    data[data.find(C.tobytes())] ^= 1
    damaged.write_bytes(data)
    cases: list[tuple[Any, type[BlobStoreError], str]] = [
        (lacking, UnsupportedDataError, r"lacking\.safetensors: it lacks key 'b' of \S*base\.ptd"),
        (base, OutputPathError, r"base\.ptd: this is the base"),
        (tmp_path / "gone.ptd", FileAccessError, r"gone\.ptd"),
        (tmp_path / "m.pte", UnsupportedDataError, r"m\.pte: .*expected a \.ptd or a \.safetensors"),
        (damaged, IntegrityError, r"damaged\.ptd"),
    ]
    for path, kind, message in cases:
        with pytest.raises(kind, match=message):
            write_deltas(base, [good, path], out)
        assert not out.exists()
    empty = write(tmp_path / "empty.safetensors", {})
    with pytest.raises(UnsupportedDataError, match="'a' has dtype F8_E8M0"):
        write_deltas(empty, [good, f8(tmp_path / "f8.safetensors")], out)
    with pytest.raises(OutputPathError, match="one of the inputs"):
        write_deltas(base, good, tmp_path)
    assert not out.exists()
    out.mkdir()
    (out / "good.ptd").write_text("notes")
    with pytest.raises(OutputPathError):
        write_deltas(base, good, out)
    assert (out / "good.ptd").read_text() == "notes"
    write_deltas(base, good, out, force=True)
    assert contents(out / "good.ptd").keys() == {"a"}


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    base = write(tmp_path / "base.ptd", {"a": A, "b": B})
    files = [write(tmp_path / f"{n}.{f}", {"a": C, "b": B}) for n, f in zip("xy", FORMATS, strict=True)]
    said = write_deltas(base, files, tmp_path / "new" / "out", dry_run=True)
    assert not (tmp_path / "new").exists()
    assert said == write_deltas(base, files, tmp_path / "new" / "out")


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 4)),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 4)),
    st.sampled_from(FORMATS),
    st.sampled_from(FORMATS),
)
def test_base_and_delta_are_the_file(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, int], other: dict[str, int], first: str, second: str
) -> None:
    """For any two files of which one has the keys of the other: nothing more, and nothing that the base has."""
    arrays = [A, B, A.reshape(6, 8), A.view(np.int32), A[:0]]
    folder = tmp_path_factory.mktemp("delta")
    base = write(folder / f"base.{first}", {key: arrays[number] for key, number in one.items()})
    tuned = write(folder / f"tuned.{second}", {key: arrays[number] for key, number in {**one, **other}.items()})
    [result] = write_deltas(base, tuned, folder / "out")
    assert {**contents(base), **contents(result.path)} == contents(tuned)
    assert contents(result.path).keys() == {key for key, number in other.items() if one.get(key) != number}


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("base.ptd"), {"a": A, "b": B})
    write(Path("tuned.safetensors"), {"a": C, "b": B})
    arguments = ["delta", "base.ptd", "tuned.safetensors", "-o", "out"]
    assert "Nothing was written" in printed(*arguments, "--dry-run") and not Path("out").exists()
    [line] = [line for line in printed(*arguments).splitlines() if line.startswith("All tensors of a file: ")]
    loaded = eval(line.removeprefix("All tensors of a file: ").removesuffix("."), {"blobstore": blobstore})  # noqa: S307
    assert {key: np.asarray(value).tobytes() for key, value in loaded.items()} == {"a": C.tobytes(), "b": B.tobytes()}
    [plain] = json.loads(printed(*arguments, "--json"))
    assert (plain["path"], plain["keys"], plain["left_out"]) == ("out/tuned.safetensors", 1, 1)
    printed("delta", "base.ptd", "gone.ptd", "-o", "out", code=3)
    printed("delta", "base.ptd", "-o", "out", code=2)
