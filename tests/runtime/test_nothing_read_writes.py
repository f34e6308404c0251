"""Whatever is read from a cache, a file or a pool: writing to it is an error, or changes only the caller's copy.

Arrays and views of numpy are read-only, tensors of torch belong to the caller (K4, U1).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import blobstore
from blobstore import MergedDataMap, open_ptd, save_file
from blobstore.core.formats import data_map
from blobstore.runtime import BlobCache, Program, cache, make_working_copy
from blobstore.training import TrainingProgram
from tests.training import nets as training_nets

NAME = "layers.1.weight"
Read = Callable[[BlobCache], Any]


def key_of(blobs: BlobCache) -> str:
    """The key of the blob that holds `NAME`."""
    (key,) = blobs.tensors[NAME].keys
    return key


def over(blobs: BlobCache) -> BlobCache:
    return BlobCache(base=blobs)


def both(blobs: BlobCache) -> MergedDataMap:
    return MergedDataMap([blobs])


TENSORS: dict[str, Read] = {
    "by key": lambda blobs: blobs[key_of(blobs)],
    "by the model's name": lambda blobs: blobs[NAME],
    "get": lambda blobs: blobs.get(key_of(blobs)),
    "items": lambda blobs: dict(blobs.items())[key_of(blobs)],
    "values": lambda blobs: list(blobs.values())[list(blobs).index(key_of(blobs))],
    "of a cache above": lambda blobs: over(blobs)[key_of(blobs)],
    "of a cache above, by name": lambda blobs: over(blobs)[NAME],
    "merged": lambda blobs: both(blobs)[key_of(blobs)],
    "of a file": lambda blobs: blobs.files[0][key_of(blobs)],
}
"""They come as tensors where torch is installed, and else as arrays."""

ONLY_TORCH: dict[str, Read] = {
    "torch": lambda blobs: blobs.torch(key_of(blobs)),
    "torch of floats": lambda blobs: blobs.torch("shift"),
    "torch of a cache above": lambda blobs: over(blobs).torch(key_of(blobs)),
    "torch, merged": lambda blobs: both(blobs).torch(key_of(blobs)),
    "as a parameter": lambda blobs: torch.nn.Parameter(blobs.torch("shift")),
    "through DLPack": lambda blobs: torch.utils.dlpack.from_dlpack(blobs[key_of(blobs)]),
    "as an array": lambda blobs: torch.as_tensor(blobs.torch(key_of(blobs)).numpy()),
}

ONLY_NUMPY: dict[str, Read] = {
    "numpy": lambda blobs: blobs.numpy(key_of(blobs)),
    "numpy of floats": lambda blobs: blobs.numpy("shift"),
    "numpy of a cache above": lambda blobs: over(blobs).numpy(key_of(blobs)),
    "numpy, merged": lambda blobs: both(blobs).numpy(key_of(blobs)),
    "numpy of a file": lambda blobs: blobs.files[0].numpy(key_of(blobs)),
    "asarray": lambda blobs: np.asarray(blobs.numpy(key_of(blobs))),
    "DLPack in numpy": lambda blobs: np.from_dlpack(blobs.numpy(key_of(blobs))),
    "get_data": lambda blobs: blobs.get_data(key_of(blobs)),
    "get_data, merged": lambda blobs: both(blobs).get_data(key_of(blobs)),
    "views": lambda blobs: dict(blobs.views())[key_of(blobs)],
    "what a view is of": lambda blobs: np.asarray(blobs.get_data(key_of(blobs)).obj),
    "bytes": lambda blobs: blobs.bytes(key_of(blobs)),
    "the value of a tensor": lambda blobs: blobs.tensors.value(NAME)[0],
}


def write_to_tensor(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor += 1
        tensor[...] = 2
        tensor.copy_(torch.full_like(tensor, 3))
        tensor.detach().numpy()[...] = 4
        torch.utils.dlpack.from_dlpack(tensor.detach()).fill_(5)
    assert torch.all(tensor == 5)


def refuses_all_writes(data: Any) -> None:
    """An array, a view or bytes."""
    view = memoryview(data)
    array = np.asarray(view)
    before = array.tobytes()
    writes: list[Callable[[], object]] = [
        lambda: view.cast("B").__setitem__(0, 1),
        lambda: view.cast("B").__setitem__(slice(None), bytes(view.nbytes)),
        lambda: array.__setitem__(..., 1),
        lambda: array.view(np.uint8).__setitem__(..., 1),
        lambda: array[:1].fill(1),
        lambda: np.copyto(array, 1),
        lambda: np.add(array, 1, out=array),
        lambda: array.setflags(write=True),
        lambda: np.from_dlpack(array).__setitem__(..., 1),
        lambda: np.frombuffer(view, np.uint8).setflags(write=True),
    ]
    if isinstance(data, np.ndarray):
        writes.append(lambda: data.setflags(write=True))
    for write in writes:
        with pytest.raises((ValueError, TypeError, BufferError)):
            write()
    assert np.asarray(memoryview(data)).tobytes() == before


class Watched:
    """A cache with a program, and what must stay as it is."""

    def __init__(self, mlp: Path, folder: Path, mode: Any) -> None:
        self.path = folder / "live.ptd"
        make_working_copy(mlp / "model.ptd", self.path)  # which records digests
        self.blobs = BlobCache(self.path, mode)
        self.mode = mode
        self.method = Program(mlp / "model.pte", self.blobs).method()
        self.input = torch.linspace(-1, 1, 32).reshape(2, 16)
        self.output = self.method.execute(self.input)[0].clone()
        self.contents = {key: bytes(data) for key, data in open_ptd(mlp / "model.ptd").views()}
        self.file = self.path.read_bytes()

    def check(self) -> None:
        blobs = self.blobs
        assert (blobs.generation, blobs.dirty, blobs.stats.dirty_keys, blobs.stats.dirty_bytes) == (0, (), 0, 0)
        assert {key: bytes(data) for key, data in blobs.views()} == self.contents
        assert torch.equal(self.method.execute(self.input)[0], self.output)
        assert torch.equal(blobs.torch(key_of(blobs)), torch.from_numpy(blobs.numpy(key_of(blobs)).copy()))
        blobs.save(self.path.with_name("delta.ptd"), dirty_only=True)
        assert list(open_ptd(self.path.with_name("delta.ptd"))) == []
        if self.mode != "shared":
            assert blobs.revert() == 0
        assert blobs.verify()
        assert self.path.read_bytes() == self.file


@pytest.fixture(params=["private", "shared", "copy"])
def watched(request: pytest.FixtureRequest, mlp: Path, tmp_path: Path) -> Watched:
    return Watched(mlp, tmp_path, request.param)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (data_map, cache):
        monkeypatch.setattr(module, "default_framework", lambda: "np")


@pytest.mark.parametrize("read", (TENSORS | ONLY_TORCH).values(), ids=(TENSORS | ONLY_TORCH).keys())
def test_a_tensor_belongs_to_the_caller(watched: Watched, read: Read) -> None:
    tensor = read(watched.blobs)
    write_to_tensor(tensor)
    watched.check()
    assert not torch.equal(tensor.detach(), read(watched.blobs).detach())


@pytest.mark.parametrize("read", (TENSORS | ONLY_NUMPY).values(), ids=(TENSORS | ONLY_NUMPY).keys())
@pytest.mark.usefixtures("without_torch")
def test_an_array_cannot_be_written_to(watched: Watched, read: Read) -> None:
    refuses_all_writes(read(watched.blobs))
    watched.check()


def test_outputs_belong_to_the_caller(watched: Watched) -> None:
    """No call writes to what an earlier one returned, and nobody else reads it."""
    [first], [second] = watched.method.execute(watched.input), watched.method.execute(watched.input.numpy())
    write_to_tensor(first)
    second[...] = 6
    watched.check()
    assert torch.all(first == 5) and np.all(second == 6)


def test_a_tensor_is_of_one_generation(watched: Watched) -> None:
    """And stays as it is, while an array shows commits as they happen."""
    key = key_of(watched.blobs)
    tensor, array = watched.blobs.torch(key), watched.blobs.numpy(key)
    before = array.copy()
    watched.blobs.update_blobs({key: np.zeros_like(array)})
    assert np.array_equal(tensor.numpy(), before) and not array.any() and not watched.blobs.torch(key).any()


@pytest.mark.long
def test_a_training_program_trains_a_copy(tmp_path: Path) -> None:
    """Its parameters are there to be written to; the cache gets what it learned when it is published."""
    joint = training_nets.xor(external=True)
    pte = joint.write(tmp_path)
    (data,) = tmp_path.glob("*.ptd")
    before = data.read_bytes()
    with BlobCache(data) as blobs:
        contents = {key: bytes(view) for key, view in blobs.views()}
        training = TrainingProgram(pte, blobs)
        for tensor in training.named_parameters().values():
            tensor.data.fill_(7)
        assert all((tensor == 7).all() for tensor in training.named_parameters().values())
        assert {key: bytes(view) for key, view in blobs.views()} == contents
        assert (blobs.generation, blobs.dirty, data.read_bytes()) == (0, (), before)


LOADED: dict[str, Callable[[Path, Any], Any]] = {
    "load_file": lambda path, framework: blobstore.load_file(path, framework)["w"],
    "load_file, tied": lambda path, framework: blobstore.load_file(path, framework, tied=True)["w"],
    "get_tensor": lambda path, framework: blobstore.safe_open(path, framework).get_tensor("w"),
    "get_tensors": lambda path, framework: blobstore.safe_open(path, framework).get_tensors()["w"],
    "get_slice": lambda path, framework: blobstore.safe_open(path, framework).get_slice("w")[1:],
}


@pytest.mark.parametrize("load", LOADED.values(), ids=LOADED.keys())
@pytest.mark.parametrize("framework", ["pt", "np"])
@pytest.mark.parametrize("kind", ["ptd", "safetensors"])
def test_what_is_loaded_is_private(tmp_path: Path, kind: str, framework: str, load: Callable[[Path, Any], Any]) -> None:
    """In both frameworks it can be written to, as with safetensors; the next one who loads does not see it."""
    path = tmp_path / f"w.{kind}"
    weights = {"w": np.arange(6000, dtype=np.float32).reshape(60, 100)}
    save_file(weights, path) if kind == "ptd" else safetensors.numpy.save_file(weights, path)
    before, tensor = path.read_bytes(), load(path, framework)
    expected = np.asarray(tensor).copy()
    tensor[...] = 1
    assert np.array_equal(np.asarray(load(path, framework)), expected)
    assert path.read_bytes() == before
