"""The scenarios, one for each thing that writes: the state of the folder before, and the work on it.

`prepare` makes the old state in a folder that has the empty folders `in` and `out`. `act` is the work in which system calls fail. `look` describes the
state in JSON values, and runs in a process of its own.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # otherwise the first optimizer imports it in each of thousands of processes
from torch import nn

import blobstore
from blobstore import BlobStore, open_ptd, save_file
from blobstore.core.disk.kinds import Format
from blobstore.core.disk.staging import Staging
from blobstore.core.errors import BlobStoreError
from blobstore.core.files import save
from blobstore.core.tools.convert import convert
from blobstore.runtime import BlobCache, PackedStore, Program, make_working_copy
from blobstore.training import TrainingProgram, lower_training
from campaigns import network
from campaigns.lowered import Learner, lower_embedded

State = Any


def files(folder: Path) -> State:
    """Names and contents of all files in the folder `out`, without temporary ones; data files are verified."""
    state = {}
    for path in sorted((folder / "out").rglob("*")):
        if path.is_file() and not path.name.startswith(".blobstore-"):
            state[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
            if path.suffix == ".ptd":
                open_ptd(path, verify=True).close()
    return state


@dataclass(frozen=True)
class Scenario:
    """Something that writes.

    Attributes:
        name: for the table.
        prepare, act, look: see above.
        usable: for groups of files, which a kill may leave between two renames; raises if the files are unusable in that
            state.
        points: the number of places in a shared commit where it can be killed outside system calls.
    """

    name: str
    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    look: Callable[[Path], State] = files
    usable: Callable[[Path], None] | None = None
    points: int = 0


# Single files.


def _prepare_saved(folder: Path) -> None:
    save_file(network.weights(1), folder / "out" / "model.ptd")


def _save(folder: Path) -> None:
    save_file(network.weights(2), folder / "out" / "model.ptd", metadata={"step": "2"})


def _prepare_convert(folder: Path) -> None:
    _prepare_saved(folder)
    save_file(network.weights(2), folder / "in" / "source.ptd")
    convert(folder / "in" / "source.ptd", folder / "in" / "source.safetensors")
    save_file(network.weights(1), folder / "in" / "old.ptd")
    convert(folder / "in" / "old.ptd", folder / "out" / "model.safetensors")


def _prepare_cache(folder: Path) -> None:
    _prepare_saved(folder)
    save_file(network.weights(3), folder / "in" / "foundation.ptd")


def _save_cache(folder: Path, *, dirty_only: bool = False) -> None:
    cache = BlobCache(folder / "in" / "foundation.ptd")
    cache.update({"b.weight": network.weights(5)["b.weight"]})
    cache.save(folder / "out" / "model.ptd", dirty_only=dirty_only)


def _working_copy(folder: Path) -> None:
    make_working_copy(folder / "in" / "foundation.ptd", folder / "out" / "model.ptd")


def _blobs(folder: Path) -> State:
    """As `files`, but of data files what is in them, because each working copy has an id of its own."""
    state = files(folder)
    for name in state:
        if name.endswith(".ptd"):
            with open_ptd(folder / name) as data:
                state[name] = [(key, hashlib.sha256(data.get_data(key)).hexdigest()) for key in data]
    return state


# A group of files.


def _prepare_group(folder: Path) -> None:
    _write_group(folder, 1)


def _write_group(folder: Path, value: int) -> None:
    store = BlobStore()
    for key, array in network.weights(value).items():
        store.add(key, array, tag=key[0])
    store.write(folder / "out")


def _prepare_many(folder: Path) -> None:
    (folder / "out" / "sub").mkdir()
    _write_many(folder, 1)


def _write_many(folder: Path, value: int) -> None:
    """As `pool get` does, in a temporary folder for all."""
    with Staging(folder=folder / "out", many=True) as staging:
        for name in ("x.ptd", "sub/y.ptd"):
            with staging.open(folder / "out" / name, kind=Format.PTD) as file:
                file.write(save(network.weights(value)))


def _prepare_programs(folder: Path) -> None:
    (folder / "old").mkdir()
    for name, values in (("old", (1, 1)), ("in", (2, 2))):
        for program, value in zip("xy", values, strict=True):
            lower_embedded(folder / name / f"{program}.pte", value)
    blobstore.dedup_programs([folder / "old" / "x.pte", folder / "old" / "y.pte"], folder / "out")


def _prepare_new_programs(folder: Path) -> None:
    for program in "xy":
        lower_embedded(folder / "in" / f"{program}.pte", 2)


def _dedup(folder: Path) -> None:
    blobstore.dedup_programs([folder / "in" / "x.pte", folder / "in" / "y.pte"], folder / "out")


def _programs_run(folder: Path) -> None:
    for path in sorted((folder / "out").glob("*.pte")):
        outputs = Program(path, data=sorted((folder / "out").glob("*.ptd"))).method().execute(network.INPUT)
        found = set(outputs[0].ravel().tolist())
        if found not in ({network.expected(1)}, {network.expected(2)}):
            raise ValueError(f"{path.name} computes {sorted(found)[:3]}")


def _group_opens(folder: Path) -> None:
    for path in (folder / "out").rglob("*.ptd"):
        open_ptd(path, verify=True).close()


# Training.


_BATCH = (torch.ones(3, 4), torch.tensor([0, 1, 0]))


def _prepare_training(folder: Path) -> None:
    torch.manual_seed(0)
    manager = lower_training(Learner(4), _BATCH, tag="model")
    blobstore.save_programs({"train": manager}, folder / "in")
    training, optimizer = _training(folder)
    training.save(folder / "out" / "checkpoint.ptd", optimizer)


def _training(folder: Path) -> tuple[TrainingProgram, torch.optim.Optimizer]:
    training = TrainingProgram(folder / "in" / "train.pte", BlobCache(folder / "in" / "model.ptd"))
    return training, torch.optim.Adam(training.named_parameters().values(), lr=0.1)


def _checkpoint(folder: Path) -> None:
    training, optimizer = _training(folder)
    training.step(optimizer, *_BATCH)
    training.save(folder / "out" / "checkpoint.ptd", optimizer)


def _checkpoint_loads(folder: Path) -> State:
    training, optimizer = _training(folder)
    training.load(folder / "out" / "checkpoint.ptd", optimizer)
    return [files(folder), [tensor.tolist() for tensor in training.named_parameters().values()]]


# Commits that processes share.


def _prepare_shared(folder: Path) -> None:
    _prepare_unopened(folder)
    BlobCache(folder / "out" / "model.ptd", "shared").update(network.weights(1))


def _prepare_unopened(folder: Path) -> None:
    save_file(network.weights(1), folder / "out" / "original.ptd")
    make_working_copy(folder / "out" / "original.ptd", folder / "out" / "model.ptd")
    (folder / "out" / "original.ptd").unlink()


def _prepare_interrupted(folder: Path) -> None:
    import os

    from blobstore_runtime import _native  # a test build, see __main__.py

    _prepare_shared(folder)
    child = os.fork()
    if child == 0:
        cache = BlobCache(folder / "out" / "model.ptd", "shared")
        _native.crash_at(5)  # between two blobs: the journal is complete and must be replayed
        cache.update(network.weights(2))
        os._exit(1)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise RuntimeError("the commit was not interrupted")


def _commit(folder: Path) -> None:
    cache = BlobCache(folder / "out" / "model.ptd", "shared")
    if cache.numpy("a.bias")[0] != 2:
        cache.update(network.weights(2))


def _open(folder: Path) -> None:
    BlobCache(folder / "out" / "model.ptd", "shared").verify()


def _shared_values(folder: Path) -> State:
    """What a new process sees, after verification."""
    cache = BlobCache(folder / "out" / "model.ptd", "shared")
    with cache.reading():
        values = {float(value) for key in cache for value in np.unique(cache.numpy(key))}
        cache.verify()
        versions = {cache.version(key) == cache.generation for key in cache}
        return [sorted(values), sorted(versions)]


# Packed weights.


def _prepare_packed(folder: Path) -> None:
    """A program with its data, and what it computes."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    from blobstore.lowering import BlobStorePartitioner, lower

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval()
    manager = lower(
        {"forward": (net, (torch.ones(1, 16),))}, partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner())]
    )
    blobstore.save_programs({"model": manager}, folder)
    np.save(folder / "expected.npy", Program(folder / "model.pte", BlobCache(folder / "model.ptd")).method()(_X))


_X = np.ones((1, 16), np.float32)


def _build_packed(folder: Path) -> None:
    """Load the program, which builds a file. Its outputs are right in any case; a fallback counts as an error."""
    store = PackedStore(folder / "out" / "packed")
    output = Program(folder / "model.pte", BlobCache(folder / "model.ptd", packed=store)).method()(_X)
    try:
        expected = np.load(folder / "expected.npy")
    except OSError:  # a fault that hits this file says nothing
        expected = output
    if not np.array_equal(output, expected):
        raise RuntimeError("the program computed something else")
    if store.stats.fallbacks:
        raise BlobStoreError(f"weights were packed to the heap: {store.stats.reasons}")


def _packed_files(folder: Path) -> State:
    """How many files there are, and what is wrong with them; leftovers go when they are asked to."""
    return [file.problem for file in PackedStore(folder / "out" / "packed").verify()]


def _prepare_packed_copy(folder: Path) -> None:
    _prepare_packed(folder)
    make_working_copy(folder / "model.ptd", folder / "out" / "live.ptd")


def _commit_packed(folder: Path) -> None:
    """Build the packed weights of a working copy, and change both."""
    cache = BlobCache(folder / "out" / "live.ptd", "shared", packed=folder / "out" / "packed")
    method = Program(folder / "model.pte", cache).method()
    method(_X)
    cache.update({"0.bias": np.full(24, 0.5, np.float32)})
    method(_X)


def _packed_copy(folder: Path) -> State:
    """What a new process computes, and what is wrong with the packed weights."""
    store = PackedStore(folder / "out" / "packed")
    cache = BlobCache(folder / "out" / "live.ptd", "shared", packed=store)
    problems = [file.problem for file in store.verify() if file.problem] if store.folder.exists() else []
    output = Program(folder / "model.pte", cache).method()(_X)
    _compare_packed(folder, output)
    return [problems, output.tolist()]


def _compare_packed(folder: Path, output: Any) -> None:
    """Compare an output with that of a process that packs everything now."""
    plain = Program(folder / "model.pte", BlobCache(folder / "out" / "live.ptd", "shared")).method()(_X)
    if not np.array_equal(output, plain):
        raise RuntimeError("packed weights are not those of the working copy")


# Releases. A pull that failed leaves what it fetched, for the next one; tests/releases/test_pull.py kills it.


def _prepare_release(folder: Path) -> None:
    """A device with a first release, and a second one whose data file is assembled from blobs that are here."""
    from blobstore.releases import publish, pull

    tensors = {f"{i}.weight": np.full((64, 64), i, np.float32) for i in range(8)}
    save_file(tensors, folder / "in" / "model.ptd")
    publish(folder / "in", folder / "releases", name="a", version="1")
    pull(folder / "releases" / "a" / "1", folder / "out")
    tensors["3.weight"] += 1
    save_file(tensors, folder / "in" / "model.ptd")
    (folder / "in" / "tokenizer.json").write_text("{}")
    publish(folder / "in", folder / "releases", name="a", version="2")


def _fetch_release(folder: Path) -> None:
    """What an application's own downloader did, for the C++ library."""
    from blobstore.runtime.native import native

    _prepare_release(folder)
    for _ in range(2):
        *_, place, fetches = native.missing(bytes(folder / "releases/a/2/index.json"), bytes(folder / "out"))
        for url, ranged, _, _, name in fetches:
            data = (folder / "releases" / url).read_bytes()
            if ranged is not None:
                first, last = map(int, ranged.removeprefix("bytes=").split("-"))
                data = data[first : last + 1]
            Path(place.decode(), name).write_bytes(data)


def _commit_release(folder: Path) -> None:
    from blobstore.runtime.native import native

    native.commit(bytes(folder / "releases/a/2/index.json"), bytes(folder / "out"))


def _current_release(folder: Path) -> State:
    """The files of the current release, verified."""
    state = {}
    for path in sorted((folder / "out" / "current").iterdir()):
        state[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix == ".ptd":
            open_ptd(path, verify=True).close()
    return state


SCENARIOS = (
    Scenario("save_file, new", lambda folder: None, _save),
    Scenario("save_file, over another", _prepare_saved, _save),
    Scenario(
        "safetensors to .ptd",
        _prepare_convert,
        lambda folder: convert(folder / "in" / "source.safetensors", folder / "out" / "model.ptd"),
    ),
    Scenario(
        ".ptd to safetensors",
        _prepare_convert,
        lambda folder: convert(folder / "in" / "source.ptd", folder / "out" / "model.safetensors"),
    ),
    Scenario("BlobStore.write, two tags", _prepare_group, lambda folder: _write_group(folder, 2), usable=_group_opens),
    Scenario("many files", _prepare_many, lambda folder: _write_many(folder, 2), usable=_group_opens),
    Scenario("dedup, new", _prepare_new_programs, _dedup, usable=_programs_run),
    Scenario("dedup, over another", _prepare_programs, _dedup, usable=_programs_run),
    Scenario("cache.save", _prepare_cache, _save_cache),
    Scenario("cache.save, dirty_only", _prepare_cache, lambda folder: _save_cache(folder, dirty_only=True)),
    Scenario("make_working_copy", _prepare_cache, _working_copy, _blobs),
    Scenario("training checkpoint", _prepare_training, _checkpoint, _checkpoint_loads),
    Scenario("shared cache, first opened", _prepare_unopened, _open, _shared_values),
    Scenario("shared commit", _prepare_shared, _commit, _shared_values, points=8),
    Scenario("shared commit, recovered", _prepare_interrupted, _open, _shared_values),
    Scenario("commit of a release, C++", _fetch_release, _commit_release, _current_release),
    Scenario("packed weights", _prepare_packed, _build_packed, _packed_files),
    Scenario("packed shared commit", _prepare_packed_copy, _commit_packed, _packed_copy, points=10),
)
