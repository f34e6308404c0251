"""Programs of the stock partitioner on a working copy, and processes that have ExecuTorch only: both follow it (K3)."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blobstore import dedup_programs
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, PackedStore, Program, make_working_copy
from tests.helpers.beside import run_script, running
from tests.helpers.native_build import ROOT
from tests.lowering import nets
from tests.lowering.live import lower_exported, seeded
from tests.lowering.test_quantized import pt2e
from tests.runtime import packed_files
from tests.runtime.application import build
from tests.runtime.packed_files import Running, ones

pytestmark = pytest.mark.long

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Alike(nn.Module):
    """Weights of equal sizes that are packed in different orders. All are ones, so that any order fits them."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(16, 16, 4, groups=16, bias=False)
        self.pointwise = nn.Conv2d(16, 16, 1, bias=False)
        self.linear = nn.Linear(16, 16, bias=False)
        for number, parameter in enumerate(self.parameters(), 1):
            nn.init.constant_(parameter, 1 / number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pointwise(self.depthwise(x))
        return self.linear(x.mean((2, 3)))


class Convolutions(nn.Module):
    """Depthwise, grouped, and one-dimensional."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4)
        self.grouped = nn.Conv2d(8, 6, 3, groups=2)
        self.line = nn.Conv1d(6, 5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(torch.relu(self.grouped(torch.relu(self.depthwise(x)))).flatten(2))


@dataclass
class Model:
    """A program of the stock partitioner, deduplicated, and a working copy of its data file."""

    folder: Path
    sizes: tuple[int, ...]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    def lower(cls, module: nn.Module, folder: Path, *sizes: int, quantized: bool = False) -> Model:
        example = (torch.ones(sizes),)
        with quiet():
            lowered = pt2e(module, example, is_per_channel=True) if quantized else module
            exported = torch.export.export(lowered, example, strict=True)
        lower_exported(exported, folder / "made", lambda: [XnnpackPartitioner()])
        dedup_programs([folder / "made"], folder / "slim")
        model = cls(folder, sizes)
        make_working_copy([folder / "slim" / "shared.ptd"], model.live)
        return model

    @property
    def program(self) -> Path:
        return self.folder / "slim" / "model.pte"

    @property
    def live(self) -> Path:
        return self.folder / "live.ptd"

    @property
    def packed(self) -> Path:
        return self.folder / "packed"

    def start(self, packed: PackedStore | None = None) -> Running:
        cache = BlobCache(self.live, "shared", packed=packed)
        program = Program(self.program, cache)
        return Running(cache, program, program.method(), ones(*self.sizes))

    def expected(self) -> list[float]:
        """What a process computes that packs everything now."""
        return values(self.start())

    def change(self, seed: int) -> None:
        """Change all weights, by a process that has the store, and no program."""
        self.elsewhere(f"""
            cache = BlobCache(live, "shared", packed=packed)
            generator = np.random.default_rng({seed})
            sizes = {{key: len(cache.get_data(key)) // 4 for key in cache}}
            cache.update({{key: generator.random(size, np.float32).tobytes() for key, size in sizes.items()}})
        """)

    def elsewhere(self, code: str) -> str:
        """What a process prints that has the store."""
        begin = f"""
            import numpy as np
            from blobstore.runtime import BlobCache, Program
            live, packed, program = {str(self.live)!r}, {str(self.packed)!r}, {str(self.program)!r}
        """
        return run_script(textwrap.dedent(begin) + textwrap.dedent(code))

    def stock(self, application: Path, packed: str | Path, *, user: int | None = None) -> Callable[[], list[float]]:
        """A process of ExecuTorch only. Each call runs it once more."""
        process = subprocess.Popen(
            [application, self.program, self.live, str(packed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            user=user,
        )
        self.processes.append(process)

        def run() -> list[float]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return [float(np.float32(value)) for value in process.stdout.readline().split()]

        return run


def values(running: Running) -> list[float]:
    [output, *_] = running()
    return [float(value) for value in np.frombuffer(output, np.float32)]


def outputs(model: Model, cache: BlobCache) -> list[float]:
    """What a program computes that is loaded now."""
    program = Program(model.program, cache)
    return values(Running(cache, program, program.method(), ones(*model.sizes)))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def made() -> Iterator[Callable[..., Model]]:
    models: list[Model] = []

    def make(*args: Any, **options: Any) -> Model:
        models.append(Model.lower(*args, **options))
        return models[-1]

    yield make
    for process in [process for model in models for process in model.processes]:
        process.communicate("")
        assert process.returncode == 0


@pytest.fixture(scope="module")
def application() -> Path:
    return build(ROOT / "examples" / "cpp", "follow")


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (nets.MLP, (2, 16)),
    "batch norms": (nets.ConvNorm, (2, 3, 6, 6)),
    "convolutions": (Convolutions, (1, 4, 8, 8)),
    "equal sizes": (Alike, (1, 16, 6, 6)),
}


@pytest.mark.slow_for("batch norms", "convolutions")
@pytest.mark.parametrize("kind", MODELS)
def test_a_process_without_the_library_follows(kind: str, made: Any, folder: Path, application: Path) -> None:
    """It computes what a process does that packs the new weights, to the bit; nothing is packed again."""
    net, sizes = MODELS[kind]
    model = made(seeded(net), folder, *sizes)
    store = PackedStore(model.packed)
    ours = model.start(store)
    path = ours.program.packed_cache_path
    assert path is not None and Path(path) == packed_files.only(model.packed)
    assert (store.stats.builds, store.stats.hits, store.stats.fallbacks) == (1, 1, 0)
    packed_files.read(Path(path), changes=True)
    stock = model.stock(application, path)
    first = model.expected()
    assert stock() == values(ours) == first
    for seed in (1, 2):
        model.change(seed)
        changed = model.expected()
        assert stock() == values(ours) == changed != first


def test_a_constant_that_is_not_packed(made: Any, folder: Path) -> None:
    """A program follows; ExecuTorch alone crashes on such a constant of a data file, with any weight cache."""
    model = made(seeded(nets.PReLU), folder, 1, 3, 6, 6)
    store = PackedStore(model.packed)
    running = model.start(store)
    first = values(running)
    model.change(1)
    assert values(running) == model.expected() != first
    assert (store.stats.hits, store.stats.fallbacks) == (1, 0)


@as_root
@pytest.mark.parametrize("user", [None, NOBODY], ids=["root", "another user"])
def test_nobody_else_runs_when_it_starts(user: int | None, made: Any, folder: Path, application: Path) -> None:
    """Also if ExecuTorch locks the file for itself, as it does for a process of root, updates get into it."""
    model = made(seeded(nets.MLP), folder, 2, 16)
    said = model.elsewhere("""
        loaded = Program(program, BlobCache(live, "shared", packed=packed))
        assert loaded.packed_cache_path is None
        loaded.method()
        print(loaded.packed_cache_path)
    """)
    path = said.strip()
    assert Path(path) == packed_files.only(model.packed)
    stock = model.stock(application, path, user=user)
    assert stock() == model.expected()
    for seed in (1, 2):
        model.change(seed)
        assert stock() == model.expected()


class Twice(nn.Module):
    """One weight in two kernels, which pack it in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.ConvTranspose2d(16, 16, 1)
        self.pointwise = nn.Conv2d(16, 16, 1)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pointwise(torch.relu(self.transposed(x))).mean((2, 3))


@pytest.mark.parametrize(
    ("make", "sizes", "built", "reason"),
    [
        (
            nets.Small,
            (2, 3, 8, 8),
            1,
            "some weights cannot be written in a working copy",
        ),  # as their scales are unknown
        (Twice, (1, 16, 3, 3), 0, "operators pack one weight in different ways, under one name"),
    ],
)
def test_what_cannot_follow_has_no_file(
    make: Callable[[], nn.Module], sizes: tuple[int, ...], built: int, reason: str, made: Any, folder: Path
) -> None:
    """The stats say so, and the next load neither builds one nor computes other numbers (K3)."""
    model = made(seeded(make), folder, *sizes, quantized=make is nets.Small)
    for builds in (built, 0):
        store = PackedStore(model.packed)
        running = model.start(store)
        assert values(running) == model.expected()
        assert (running.program.packed_cache_path, store.stats.hits, store.stats.fallbacks) == (None, 0, 1)
        assert (store.stats.builds, [*store.stats.reasons]) == (builds, [reason])


class Transposed(nn.Module):
    """An operator whose weights XNNPACK packs at every load, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(16, 16, 1)
        self.transposed = nn.ConvTranspose2d(16, 16, 3, 2)
        self.after = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.transposed(self.before(x)).mean((2, 3)))


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_packed_at_every_load_is_in_no_file(shared: bool, made: Any, folder: Path) -> None:
    """ExecuTorch compares it with the entry of that name, and the next call crashes if they differ (K2, K3)."""
    model = made(seeded(Transposed), folder, 1, 16, 3, 3)
    data, mode = (model.live, "shared") if shared else (folder / "slim" / "shared.ptd", "private")

    def computed(packed: PackedStore | None, *, changed: bool) -> list[float]:
        cache = BlobCache(data, mode, packed=packed)
        if changed and not shared:
            cache.update(new)
        return outputs(model, cache)

    with BlobCache(data, mode) as cache:
        generator = np.random.default_rng(0)
        new = {key: generator.random(len(cache.get_data(key)) // 4, np.float32).tobytes() for key in cache}
        deconvolution = max(cache, key=lambda key: len(cache.get_data(key)))
    for changed in (False, True):
        if changed and shared:
            BlobCache(data, mode, packed=PackedStore(model.packed)).update(new)
        expected = computed(None, changed=changed)
        for _ in range(2):
            store = PackedStore(model.packed)
            assert computed(store, changed=changed) == expected
        assert store.stats.builds == 0
    names = {
        name for path in packed_files.files(model.packed) for name in packed_files.read(path, changes=shared).names
    }
    assert all(not name.startswith(deconvolution) for name in names)
    assert names  # others are kept


def test_a_bias_in_the_program(made: Any, folder: Path) -> None:
    """A weight that is packed with what is not in the working copy cannot follow (K3)."""
    model = made(seeded(nets.MLP), folder, 2, 16)
    dedup_programs([folder / "made"], folder / "half", keep_small=200)
    make_working_copy([folder / "half" / "shared.ptd"], folder / "half.ptd")
    store = PackedStore(model.packed)
    program = Program(folder / "half" / "model.pte", BlobCache(folder / "half.ptd", "shared", packed=store))
    output = np.asarray(program.method()(*ones(2, 16))).reshape(-1).tolist()
    assert output == model.expected()
    assert (program.packed_cache_path, store.stats.hits, store.stats.fallbacks) == (None, 0, 1)


@pytest.mark.parametrize("shared", [False, True])
def test_a_commit_while_the_first_load_packs(shared: bool, made: Any, folder: Path) -> None:
    """A load that waits packs the weights that it finds then. A private cache's changes are in no file; the next load builds (K2)."""
    model = made(seeded(nets.MLP), folder, 2, 16)
    data = model.live if shared else folder / "slim" / "shared.ptd"
    model.packed.mkdir()

    cache = BlobCache(data, "shared" if shared else "private", packed=model.packed)
    key = max(cache, key=lambda name: len(cache.get_data(name)))
    loaded: list[list[float]] = []
    with (model.packed / "building.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process builds, so the load waits
        thread = threading.Thread(target=lambda: loaded.append(outputs(model, cache)))
        thread.start()
        _wait_for_open(model.packed / "building.lock")
        cache.update({key: bytes(len(cache.get_data(key)))})
        fcntl.flock(lock, fcntl.LOCK_UN)
        thread.join()
    changed = outputs(model, BlobCache(data, "shared")) if shared else outputs(model, cache)
    assert loaded == [changed]
    store = PackedStore(model.packed)
    fresh = BlobCache(data, "shared" if shared else "private", packed=store)
    assert outputs(model, fresh) == outputs(model, BlobCache(data, "shared" if shared else "private"))
    assert (store.stats.builds, store.stats.hits) == (0 if shared else 1, 1)


@pytest.mark.parametrize("shared", [False, True])
def test_commits_while_loads_pack(shared: bool, made: Any, folder: Path) -> None:
    """What is packed while others commit is that of one moment, and a file is never of another one (K2)."""
    model = made(seeded(nets.MLP), folder, 2, 16)
    stores = [PackedStore(folder / f"packed{number}") for number in range(8)]

    def opened(store: PackedStore | None) -> BlobCache:
        if shared:
            return BlobCache(model.live, "shared", packed=store)
        return BlobCache(folder / "slim" / "shared.ptd", packed=store)

    plain = opened(None)
    key = max(plain, key=lambda name: len(plain.get_data(name)))
    base, zeros = bytes(plain.get_data(key)), bytes(len(plain.get_data(key)))
    possible = [outputs(model, plain)]
    plain.update({key: zeros})
    possible.append(outputs(model, plain))
    plain.update({key: base})
    assert possible[0] != possible[1]

    for store in stores:
        cache = opened(store)

        def commit(cache: BlobCache = cache) -> None:
            cache.update({key: zeros})
            if shared:
                cache.update({key: base})
            else:
                cache.revert()

        with running(commit):
            found = outputs(model, cache)
        assert found in possible
        assert [outputs(model, opened(store)) for _ in range(2)] == 2 * [outputs(model, opened(None))]


def _wait_for_open(path: Path) -> None:
    """Until this process has a second descriptor of the file."""
    while True:
        opened = [link for link in Path("/proc/self/fd").iterdir() if _target(link) == str(path)]
        if len(opened) > 1:
            return


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


@pytest.mark.long
def test_looking_at_files_locks_none(made: Any, folder: Path) -> None:
    """An ExecuTorch that starts at that moment could neither load a locked file nor, as root, leave it as it is (K2)."""
    model = made(seeded(nets.MLP), folder, 2, 16)
    model.start(PackedStore(model.packed))
    gc.collect()
    path = packed_files.only(model.packed)
    store = PackedStore(model.packed)
    with running(store.list), path.open("rb") as file:
        for _ in range(20_000):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.flock(file, fcntl.LOCK_SH)
        assert [one.in_use for one in store.list()] == [True]
    assert [one.in_use for one in store.list()] == [False]


def test_a_program_without_xnnpack_has_no_path(tmp_path: Path) -> None:
    """Nor one without a store."""
    manager = lower({"forward": (seeded(nets.MLP), (torch.ones(2, 16),))}, partitioners=list)
    (tmp_path / "model.pte").write_bytes(bytes(manager.buffer))
    for packed in (None, PackedStore(tmp_path / "packed")):
        program = Program(tmp_path / "model.pte", BlobCache([]), packed=packed)
        program.method()
        assert program.packed_cache_path is None


def test_one_of_a_private_cache(made: Any, folder: Path) -> None:
    """Programs whose weights do not change can share their packed weights with processes of ExecuTorch, too (K1)."""
    model = made(seeded(nets.MLP), folder, 2, 16)
    program = Program(model.program, BlobCache(folder / "slim" / "shared.ptd", packed=model.packed))
    program.method()
    assert program.packed_cache_path == str(packed_files.only(model.packed))
