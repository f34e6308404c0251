"""safe_open: tensors of a file one by one and in parts; the safetensors package is the oracle."""

import gc
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import blobstore
from blobstore import errors
from tests.helpers.process_memory import memory

TENSORS = {
    "cube": torch.arange(24.0).reshape(2, 3, 4),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "long": torch.arange(10),
    "half": torch.randn(3, 3).half(),
    "bf16": torch.randn(5).bfloat16(),
    "flags": torch.tensor([True, False]),
    "float8": torch.randn(4).to(torch.float8_e4m3fn),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    blobstore.save_file(TENSORS, folder / "m.ptd", metadata={"a": "b"})
    safetensors.torch.save_file(TENSORS, folder / "m.safetensors", metadata={"a": "b"})
    return folder


def same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        equal = isinstance(one, torch.Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return equal and torch.equal(one.double(), other.double())
    return isinstance(one, np.ndarray) and (one.dtype, one.shape) == (other.dtype, other.shape) and (one == other).all()


@pytest.mark.parametrize("name", ["m.ptd", "m.safetensors"])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_everything_that_safetensors_tells(files: Path, name: str, framework: str) -> None:
    with (
        blobstore.safe_open(files / name, framework) as ours,
        safetensors.safe_open(files / "m.safetensors", framework) as theirs,
    ):
        assert sorted(ours.keys()) == theirs.keys()
        assert sorted(ours.offset_keys()) == theirs.keys()
        if name == "m.safetensors":  # a tensor without bytes lies nowhere
            with_bytes = [[key for key in one.offset_keys() if key != "empty"] for one in (ours, theirs)]
            assert with_bytes[0] == with_bytes[1]
        assert ours.metadata() == theirs.metadata() == {"a": "b"}
        for key in list(theirs.keys()):
            mine, other = ours.get_slice(key), theirs.get_slice(key)
            assert (mine.get_shape(), mine.get_dtype()) == (other.get_shape(), other.get_dtype())
            if framework == "np" and key in {"bf16", "float8"}:  # safetensors has them as raw bytes or not at all
                assert ours.get_tensor(key).tobytes() == TENSORS[key].view(torch.uint8).numpy().tobytes()
            else:
                assert same(ours.get_tensor(key), theirs.get_tensor(key))
        assert ours.get_tensors().keys() == set(theirs.keys())


def test_no_metadata_is_none_as_in_safetensors(tmp_path: Path) -> None:
    blobstore.save_file({"w": np.zeros(1)}, tmp_path / "m.ptd")
    safetensors.numpy.save_file({"w": np.zeros(1)}, tmp_path / "m.safetensors")
    for name in ("m.ptd", "m.safetensors"):
        assert blobstore.safe_open(tmp_path / name).metadata() is None
    assert safetensors.safe_open(tmp_path / "m.safetensors", "np").metadata() is None


numbers = st.integers(-6, 6)
parts = (
    numbers | st.just(...) | st.none() | st.builds(slice, st.none() | numbers, st.none() | numbers, st.none() | numbers)
)
indices = parts | st.lists(parts, max_size=4).map(tuple)


@pytest.mark.long
@given(key=st.sampled_from(["cube", "scalar", "empty", "long"]), index=indices)
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_slices_are_those_of_safetensors_and_numpy(files: Path, key: str, index: Any) -> None:
    """The same part, or an error where they have one."""
    theirs = safetensors.safe_open(files / "m.safetensors", "pt").get_slice(key)
    for name, framework, whole in (
        ("m.ptd", "pt", theirs),
        ("m.safetensors", "pt", theirs),
        ("m.ptd", "np", TENSORS[key].numpy()),
    ):
        ours: Any = blobstore.safe_open(files / name, framework).get_slice(key)
        try:
            expected = whole[index]
        except (IndexError, ValueError):
            with pytest.raises(errors.SliceError, match=re.escape(f"'{key}' of shape {ours.get_shape()}")):
                ours[index]
        else:
            assert same(ours[index], expected if framework == "pt" else np.asarray(expected))


@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize(
    "index", [2, -3, 2**70, (0, 3), (0, 0, 0, 0), 1.5, slice(1.5, None), slice(None, None, 0), "x"]
)
def test_an_index_that_does_not_fit(files: Path, framework: str, index: Any) -> None:
    ours = blobstore.safe_open(files / "m.ptd", framework).get_slice("cube")
    with pytest.raises(IndexError, match=r"m\.ptd: 'cube' of shape \[2, 3, 4\]") as caught:
        ours[index]
    assert isinstance(caught.value, errors.SliceError)


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_lists_and_masks(files: Path, framework: str) -> None:
    """They pick rows, as in numpy and in the torch to come."""
    ours = blobstore.safe_open(files / "m.ptd", framework).get_slice("cube")
    cube = TENSORS["cube"].numpy()
    for index in ([1, 0], (slice(None), [0, 2]), np.array([True, False])):
        assert np.array_equal(np.asarray(ours[index]), cube[index])


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs the memory accounting of Linux")
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_a_slice_reads_only_what_it_touches(tmp_path: Path, framework: str) -> None:
    rows = np.zeros((1024, 64 << 10), np.uint8)
    blobstore.save_file({"rows": rows, "others": rows[1:]}, tmp_path / "m.ptd")
    with blobstore.safe_open(tmp_path / "m.ptd", framework) as file:
        file.get_slice("rows")[0].sum()  # whatever is imported is imported
        before = memory()
        part = file.get_slice("rows")[500:510]
        assert int(part.sum()) == 0 and tuple(part.shape) == (10, 64 << 10)
        # the kernel maps what lies around a page that is read, but nothing near the 64 MiB
        assert memory()["Rss"] - before["Rss"] < 16 << 10


@pytest.mark.long
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_memory_is_private_and_outlives_file_and_handle(tmp_path: Path, framework: str) -> None:
    """R1: equal tensors have memory of their own; one name has one memory."""
    path = tmp_path / "m.ptd"
    blobstore.save_file({"a": np.ones(3), "b": np.ones(3)}, path)
    before = path.read_bytes()
    with blobstore.safe_open(path, framework) as file:
        a, b, again, part = file.get_tensor("a"), file.get_tensor("b"), file.get_tensor("a"), file.get_slice("a")
    a[0] = 5
    assert b.tolist() == [1, 1, 1] and again.tolist() == part[:].tolist() == [5, 1, 1]
    assert path.read_bytes() == before
    path.unlink()
    gc.collect()
    assert part[1:].tolist() == [1, 1]
    with pytest.raises(errors.ClosedError):
        file.get_tensor("a")
    for call in (file.keys, file.metadata, file.offset_keys, file.get_tensors, file.__enter__):
        with pytest.raises(errors.ClosedError):
            call()
    assert "closed" in repr(file)


def test_tensors_of_a_program(lowered: Any, tmp_path: Path) -> None:
    """A program's tensors come under the keys that its data map has."""
    (tmp_path / "m.pte").write_bytes(lowered.counter().pte)
    expected = {key: data_map.numpy(key) for data_map in [blobstore.open_pte(tmp_path / "m.pte")] for key in data_map}
    assert expected
    with blobstore.safe_open(tmp_path / "m.pte", "np") as file:
        assert file.keys() == list(expected)
        assert file.metadata() is None
        for key, array in expected.items():
            assert same(file.get_tensor(key), array)
            file.get_tensor(key)[...] = 7
    assert all(same(blobstore.load_file(tmp_path / "m.pte", "np")[key], array) for key, array in expected.items())


def test_channels_last_keeps_its_strides(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    blobstore.save_file({"i": image}, tmp_path / "m.ptd")
    with blobstore.safe_open(tmp_path / "m.ptd") as file:
        assert file.get_tensor("i").stride() == image.stride()
        assert blobstore.load_file(tmp_path / "m.ptd")["i"].stride() == image.stride()
        assert torch.equal(file.get_slice("i")[1, :, ::2], image[1, :, ::2])


def test_opaque_bytes_are_uint8(tmp_path: Path) -> None:
    blobstore.save_file({"o": b"\1\2\3", "none": b""}, tmp_path / "m.ptd")
    with blobstore.safe_open(tmp_path / "m.ptd", "np") as file:
        part = file.get_slice("o")
        assert (part.get_shape(), part.get_dtype(), part[1:].tolist()) == ([3], "U8", [2, 3])
        assert file.get_tensor("none").shape == (0,)


def test_a_dtype_that_a_ptd_cannot_have(tmp_path: Path) -> None:
    """Its shape and dtype are told; its values would be other ones."""
    safetensors.torch.save_file({"c": torch.zeros(2, dtype=torch.float8_e8m0fnu)}, tmp_path / "m.safetensors")
    with blobstore.safe_open(tmp_path / "m.safetensors") as file:
        part = file.get_slice("c")
        assert (part.get_shape(), part.get_dtype()) == ([2], "F8_E8M0")
        for call in (lambda: file.get_tensor("c"), file.get_tensors, lambda: part[0]):
            with pytest.raises(errors.UnsupportedDataError, match=r"m\.safetensors: 'c' is F8_E8M0 \[2\]"):
                call()


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta", torch.device("meta")])
def test_devices(files: Path, device: Any) -> None:
    """Also "meta", which gives shapes and reads nothing."""
    with blobstore.safe_open(files / "m.ptd", device=device) as file:
        found = [file.get_tensor("cube"), file.get_slice("cube")[0], file.get_tensors()["long"]]
    found.append(blobstore.load_file(files / "m.ptd", device=device)["cube"])
    assert [tensor.device for tensor in found] == [torch.device(device)] * 4
    assert found[1].shape == (3, 4)


def test_devices_that_are_not_there(files: Path) -> None:
    for device in ("bogus", 3.5, None, object()):
        with pytest.raises(errors.UnsupportedDataError, match="no device"):
            blobstore.safe_open(files / "m.ptd", "pt", device)
    for device in ("cuda", "meta", torch.device("meta"), 0):
        with pytest.raises(errors.UnsupportedDataError, match="numpy has no device"):
            blobstore.safe_open(files / "m.ptd", "np", device)
        with pytest.raises(errors.UnsupportedDataError, match="numpy has no device"):
            blobstore.load_file(files / "m.ptd", "np", device)
    assert blobstore.safe_open(files / "m.ptd", "np", torch.device("cpu")).get_tensor("long")[3] == 3
    if not torch.cuda.is_available():
        with pytest.raises(errors.UnsupportedDataError, match="'cuda:0'"):
            blobstore.load_file(files / "m.ptd", device="cuda:0")


@pytest.mark.parametrize(
    ("framework", "kind"), [("torch", torch.Tensor), ("pytorch", torch.Tensor), ("numpy", np.ndarray)]
)
def test_frameworks_under_the_names_that_safetensors_takes(files: Path, framework: Any, kind: type) -> None:
    assert isinstance(blobstore.safe_open(files / "m.ptd", framework).get_tensor("long"), kind)
    with pytest.raises(errors.UnsupportedDataError, match="'tf' is not"):
        blobstore.safe_open(files / "m.ptd", "tf")  # type: ignore[arg-type]


def test_what_is_not_there(files: Path, tmp_path: Path) -> None:
    with blobstore.safe_open(files / "m.ptd") as file:
        for call in (file.get_tensor, file.get_slice):
            with pytest.raises(KeyError, match=r"m\.ptd: no key 'cubes' among 8 keys; did you mean 'cube'\?"):
                call("cubes")
    with pytest.raises(errors.FileAccessError, match="missing"):
        blobstore.safe_open(tmp_path / "missing")
    (tmp_path / "text").write_text("nothing that has tensors")
    with pytest.raises(errors.InvalidFileError, match=r"text: .*expected a \.ptd, \.safetensors or \.pte"):
        blobstore.safe_open(tmp_path / "text")


def test_a_file_that_is_truncated_under_a_slice(tmp_path: Path) -> None:
    blobstore.save_file({"w": np.ones(100_000)}, tmp_path / "m.ptd")
    with blobstore.safe_open(tmp_path / "m.ptd", "np") as file:
        part = file.get_slice("w")
        os.truncate(tmp_path / "m.ptd", 5000)
        for call in (lambda: part[99_999], lambda: file.get_tensor("w")):
            with pytest.raises(errors.FileAccessError, match=r"m\.ptd.*truncated"):
                call()
