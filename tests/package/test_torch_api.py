"""blobstore.torch and blobstore.numpy: the calls of safetensors, which is the oracle where both can do something."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import blobstore
import blobstore.numpy
import blobstore.torch
from blobstore import errors


class Tied(torch.nn.Module):
    """A language model in small: the head is the embedding."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(7, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.head = torch.nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_every_call_of_safetensors_with_its_parameters(module: str) -> None:
    """Names, order and defaults; safetensors' choice of how a file is read is not among them."""
    ours = {"torch": blobstore.torch, "numpy": blobstore.numpy}[module]
    theirs = {"torch": safetensors.torch, "numpy": safetensors.numpy}[module]
    for name in ours.__all__:
        mine = inspect.signature(getattr(ours, name)).parameters
        for number, (key, expected) in enumerate(inspect.signature(getattr(theirs, name)).parameters.items()):
            if key != "backend":
                found = list(mine.values())[number]
                assert found.name == key.replace("tensor_dict", "tensors")
                assert (found.kind, found.default) == (expected.kind, expected.default)
    assert set(ours.__all__) >= {"load", "load_file", "save", "save_file"}


def test_files_and_bytes_of_tensors(tmp_path: Path) -> None:
    """Every tensor has its values, dtype and shape again (R4)."""
    tensors = {"w": torch.randn(3, 4), "h": torch.randn(2).bfloat16(), "s": torch.tensor(2), "e": torch.zeros(0, 3)}
    tensors["flags"] = torch.tensor([True, False])
    blobstore.torch.save_file(tensors, tmp_path / "m.ptd", {"a": "b"})
    data = blobstore.torch.save(tensors, {"a": "b"})
    assert data == (tmp_path / "m.ptd").read_bytes()
    expected = safetensors.torch.load(safetensors.torch.save(tensors))
    assert equal(blobstore.torch.load_file(tmp_path / "m.ptd"), expected)
    assert equal(blobstore.torch.load(data), expected)
    assert blobstore.open_ptd(tmp_path / "m.ptd").metadata == {"a": "b"}
    assert all(tensor.is_meta for tensor in blobstore.torch.load_file(tmp_path / "m.ptd", "meta").values())


def test_files_and_bytes_of_arrays(tmp_path: Path) -> None:
    """Also the order of their dimensions (R4)."""
    arrays = {"w": np.arange(6.0).reshape(2, 3), "s": np.float32(2), "f": np.asfortranarray(np.eye(3))}
    blobstore.numpy.save_file(arrays, tmp_path / "m.ptd", {"a": "b"})
    data = blobstore.numpy.save(arrays, {"a": "b"})
    assert data == (tmp_path / "m.ptd").read_bytes()
    for loaded in (blobstore.numpy.load_file(tmp_path / "m.ptd"), blobstore.numpy.load(data)):
        assert loaded.keys() == arrays.keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(loaded[key], array, strict=True)
        assert loaded["f"].flags.f_contiguous


def test_loaded_from_bytes_is_memory_of_its_own() -> None:
    """Writable, and not shared between names; the bytes stay as they were."""
    data = blobstore.torch.save({"a": torch.ones(3), "b": torch.ones(3)})
    before = bytes(data)
    for load in (blobstore.torch.load, blobstore.numpy.load):
        loaded: Any = load(data)
        loaded["a"][0] = 5
        assert loaded["b"].tolist() == [1, 1, 1]
    assert data == before
    assert blobstore.torch.load(memoryview(bytearray(data)))["a"].tolist() == [1, 1, 1]  # type: ignore[arg-type]


def test_bytes_that_are_damaged() -> None:
    data = blobstore.torch.save({"w": torch.randn(100)})
    at = data.index(blobstore.torch.load(data)["w"].numpy().tobytes())
    with pytest.raises(errors.IntegrityError, match="'w'"):
        blobstore.torch.load(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for length in (0, 10, len(data) - 1):
        with pytest.raises(errors.InvalidFileError):
            blobstore.torch.load(data[:length])
    with pytest.raises(errors.UnsupportedDataError):
        blobstore.torch.load(3)  # type: ignore[arg-type]


def test_what_is_saved_from_an_accelerator() -> None:
    """It is copied to the CPU, as safetensors does; here a tensor that says it were elsewhere."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda:0")

        def detach(self) -> Any:
            return self

        def cpu(self, *_: Any) -> torch.Tensor:
            return torch.ones(2)

    data = blobstore.torch.save({"w": torch.zeros(2).as_subclass(Elsewhere)})
    assert blobstore.torch.load(data)["w"].tolist() == [1, 1]
    with pytest.raises(errors.UnsupportedDataError, match="'w'.*meta"):
        blobstore.torch.save({"w": torch.zeros(2, device="meta")})


@pytest.mark.parametrize("strict", [True, False])
def test_a_model_with_tied_weights(tmp_path: Path, strict: bool) -> None:
    """All names are in the file, their bytes are there once; what is loaded is what safetensors loads."""
    model = Tied()
    blobstore.torch.save_model(model, tmp_path / "m.ptd", {"a": "b"})
    with blobstore.open_ptd(tmp_path / "m.ptd") as data_map:
        assert list(data_map) == list(model.state_dict())
        assert data_map.segment_of("embed.weight") == data_map.segment_of("head.weight")
        assert data_map.metadata == {"a": "b"}
    safetensors.torch.save_model(model, tmp_path / "m.safetensors")
    for name in ("m.ptd", "m.safetensors"):
        found = Tied(seed=1)
        memory = found.embed.weight.data_ptr()
        assert blobstore.torch.load_model(found, tmp_path / name, strict) == ([], [])
        assert equal(found.state_dict(), model.state_dict())
        assert found.head.weight is found.embed.weight and found.embed.weight.data_ptr() == memory
    theirs = Tied(seed=1)
    safetensors.torch.load_model(theirs, tmp_path / "m.safetensors")
    assert equal(theirs.state_dict(), found.state_dict())


def saved_without(folder: Path, *names: str, **more: torch.Tensor) -> tuple[Path, Path]:
    """The model's tensors but for some, for us and for safetensors."""
    state = {name: value.clone() for name, value in Tied().state_dict().items() if name not in names}
    blobstore.save_file({**state, **more}, folder / "m.ptd")
    safetensors.torch.save_file({**state, **more}, folder / "m.safetensors")
    return folder / "m.ptd", folder / "m.safetensors"


def test_missing_and_unexpected_names(tmp_path: Path) -> None:
    ours, theirs = saved_without(tmp_path, "norm.weight", "norm.bias", "head.weight", other=torch.zeros(2))
    model, other = Tied(seed=1), Tied(seed=1)
    missing, unexpected = safetensors.torch.load_model(other, theirs, strict=False)
    assert blobstore.torch.load_model(model, ours, strict=False) == (sorted(missing), sorted(unexpected))
    assert (sorted(missing), unexpected) == (["norm.bias", "norm.weight"], ["other"])
    assert equal(model.state_dict(), other.state_dict())


def refused(model: Tied, path: Path, reason: str, strict: bool = True) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(errors.CheckpointError, match=reason):
        blobstore.torch.load_model(model, path, strict)
    assert equal(model.state_dict(), before)


def test_strict_names_what_is_wrong_and_changes_nothing(tmp_path: Path) -> None:
    path, _ = saved_without(tmp_path, "norm.weight", other=torch.zeros(2))
    refused(Tied(seed=1), path, r"m\.ptd: .* this Tied: missing 'norm\.weight'; unexpected 'other'")


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_changes_nothing(tmp_path: Path, strict: bool) -> None:
    blobstore.torch.save_model(Tied(), tmp_path / "m.ptd")
    reason = r"'embed\.weight' is \[7, 4\] in the file and \[7, 5\] in the mod"
    refused(Tied(seed=1, width=5), tmp_path / "m.ptd", reason, strict)


def test_names_that_contradict_each_other(tmp_path: Path) -> None:
    """One tensor in the model, two in the file: the first name of the file counts, and safetensors reports the same."""
    path, theirs = saved_without(tmp_path, "head.weight", **{"head.weight": torch.zeros(7, 4)})
    with pytest.raises(errors.CheckpointError, match=r"unexpected 'head\.weight'"):
        blobstore.torch.load_model(Tied(seed=1), path)
    model = Tied(seed=1)
    assert blobstore.torch.load_model(model, path, strict=False) == ([], ["head.weight"])
    assert torch.equal(model.embed.weight, Tied().embed.weight)
    _, unexpected = safetensors.torch.load_model(Tied(seed=1), theirs, strict=False)
    assert unexpected == ["head.weight"]


def test_orders_of_dimensions(tmp_path: Path) -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for contiguous in (True, False):
        blobstore.torch.save_model(model, tmp_path / "m.ptd", force_contiguous=contiguous)
        loaded = blobstore.torch.load_file(tmp_path / "m.ptd")["weight"]
        assert loaded.is_contiguous() is contiguous
        assert torch.equal(loaded, model.weight)
        other = torch.nn.Conv2d(3, 4, 3)
        assert blobstore.torch.load_model(other, tmp_path / "m.ptd") == ([], [])
        assert torch.equal(other.weight, model.weight)


def test_dtypes_are_converted(tmp_path: Path) -> None:
    blobstore.torch.save_model(Tied(), tmp_path / "m.ptd")
    model = Tied(seed=1).half()
    blobstore.torch.load_model(model, tmp_path / "m.ptd", device=torch.device("cpu"))
    assert torch.equal(model.embed.weight, Tied().embed.weight.half())


def test_what_is_no_model_and_no_weights(tmp_path: Path) -> None:
    class WithState(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"step": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(errors.UnsupportedDataError, match="expected a torch.nn.Module, found a dict"):
        blobstore.torch.save_model({}, tmp_path / "m.ptd")  # type: ignore[arg-type]
    with pytest.raises(errors.UnsupportedDataError, match="_extra_state"):
        blobstore.torch.save_model(WithState(2, 2), tmp_path / "m.ptd")
    assert not list(tmp_path.iterdir())
    blobstore.torch.save_model(torch.nn.Linear(2, 2), tmp_path / "m.ptd")
    with pytest.raises(errors.CheckpointError, match="_extra_state"):
        blobstore.torch.load_model(WithState(2, 2), tmp_path / "m.ptd")
    with pytest.raises(errors.FileAccessError):
        blobstore.torch.load_model(torch.nn.Linear(2, 2), tmp_path / "missing")


def test_a_lazy_model(tmp_path: Path) -> None:
    """It takes its shapes from the file."""
    model = torch.nn.Linear(3, 2)
    blobstore.torch.save_model(model, tmp_path / "m.ptd")
    lazy = torch.nn.LazyLinear(2)
    assert blobstore.torch.load_model(lazy, tmp_path / "m.ptd") == ([], [])
    assert torch.equal(lazy.weight, model.weight)


def test_numpy_works_without_torch(tmp_path: Path) -> None:
    blobstore.save_file({"w": np.arange(3)}, tmp_path / "m.ptd")
    code = f"""
import sys
sys.modules["torch"] = None
import blobstore, blobstore.numpy, blobstore.torch
path = {str(tmp_path / "m.ptd")!r}
assert blobstore.numpy.load_file(path)["w"].tolist() == [0, 1, 2]
assert blobstore.safe_open(path, "np").get_slice("w")[1] == 1
for found in (blobstore.open_ptd(path)["w"], blobstore.load_file(path)["w"], blobstore.safe_open(path).get_tensor("w")):
    assert type(found).__name__ == "ndarray"
for call in (lambda: blobstore.torch.load_file(path), lambda: blobstore.torch.load_model(None, path),
             lambda: blobstore.safe_open(path, "pt", device="meta").get_tensor("w")):
    try:
        call()
    except blobstore.errors.MissingDependencyError:
        continue
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_for_those_who_come_from_safetensors() -> None:
    """The table names calls that exist."""
    page = (Path(__file__).parents[2] / "docs" / "safetensors.md").read_text(encoding="utf-8")
    calls = re.findall(r"`blobstore((?:\.\w+)+)", page)
    assert len(calls) > 8
    for call in calls:
        value: Any = blobstore
        for name in call.split(".")[1:]:
            value = getattr(value, name)
