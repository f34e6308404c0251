"""Packed weights on disk: starts, memory and updates in place, against ExecuTorch with and without its own packed file."""

from __future__ import annotations

import functools
import mmap
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from benchmarks.harness import (
    MIB,
    ROUNDS,
    Row,
    flush,
    in_own_process,
    mib,
    ratio_row,
    show,
    side_by_side,
    without_bar,
)
from benchmarks.lowered import in_process, plugin, save
from benchmarks.starting import Application, Start, in_turns, start
from benchmarks.training import publish_all
from blobstore import save_programs
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, PackedStore, Program
from examples.demo.models import load_encoder

TITLE = "Packed weights on disk"
_WIDTH = 1024  # a layer has 4 MiB
_LAYERS = 64
_LENGTH = 128  # tokens
_PROCESSES = 5  # that change one layer
_UPDATED = 128, 2048  # layers and their width, of the update of everything: 2 GiB


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    layers = _lower(folder / "layers", "64 layers of 4 MiB", *stack(_LAYERS))
    yield from _starts(layers, at_256=True)
    yield from _start_of_stock(layers)
    yield from _verification(layers)
    yield from _one_layer(layers, lower_ours(folder / "four", *stack(4)))
    for name, model, bits in (
        ("the same in 4 bits", stack(_LAYERS), 4),
        ("MiniLM", _encoder(), 32),
        ("MiniLM in 4 bits", _encoder(), 4),
    ):
        yield from _starts(_lower(folder / name.replace(" ", "-"), name, *model, bits=bits))
    work = "publish after all of 16 XNNPACK layers changed and run, against writing the .ptd, loading and running"
    (folder / "publish").mkdir()
    yield publish_all(folder / "publish", work, packed=folder / "publish" / "packed")
    yield from _update_of_all(folder / "all")


@dataclass(frozen=True)
class Model:
    """A lowered model.

    Attributes:
        name: for people.
        folder: `model.pte` and data files, through this library; `stock/model.pte`, by ExecuTorch alone.
    """

    name: str
    folder: Path

    @property
    def data(self) -> list[Path]:
        return sorted(self.folder.glob("*.ptd"))

    @property
    def store(self) -> Path:
        return self.folder / "packed"

    @property
    def packed(self) -> Path:
        """The file in the store."""
        [path] = self.store.glob("*.packed")
        return path

    def ours(self, store: Path | None) -> Start:
        return start("ours", self.folder / "model.pte", self.data, store)

    def stock(self, file: Path | None) -> Start:
        return start("stock", self.folder / "stock" / "model.pte", (), file)


# ------------------------------------------------------------------------------------------------ models


def stack(layers: int, width: int = _WIDTH, batch: int = 1) -> tuple[nn.Module, Tensor]:
    """Linear layers, by default of 4 MiB each, and an input for them."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).eval(), torch.ones(batch, width)


def _encoder() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.ones(1, _LENGTH, dtype=torch.int64)
    return load_encoder(), tokens, tokens


def _four_bits(module: nn.Module) -> None:
    with quiet():
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
        from torchao.quantization.granularity import PerGroup

        quantize_(module, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)))


def _lower(folder: Path, name: str, module: nn.Module, *inputs: Tensor, bits: int = 32) -> Model:
    if bits == 4:
        _four_bits(module)
    model = lower_ours(folder, module, *inputs)
    save(lower({"forward": (module, inputs)}), folder / "stock")
    return replace(model, name=name)


def lower_ours(folder: Path, module: nn.Module, *inputs: Tensor) -> Model:
    """As an application gets it: with digests in the data files, so that no load has to read them."""
    program = lower({"forward": (module, inputs)}, partitioners=plugin, external_constants=lambda node: "model")
    save_programs({"model": program}, folder)
    return Model("", folder)


# ------------------------------------------------------------------------------------------------ starts


def _starts(model: Model, *, at_256: bool = False) -> Iterator[Row]:
    """What a start takes, with the files of both sides in the page cache."""
    own_file = model.folder / "stock.packed"
    build = _build(model)
    model.stock(own_file)  # builds it
    stock, own, ours, heap = in_turns(
        [
            lambda: model.stock(None),
            lambda: model.stock(own_file),
            lambda: model.ours(model.store),
            lambda: model.ours(None),
        ],
        rounds=40 if at_256 else 2 * ROUNDS,
    )
    packed = model.packed.stat().st_size
    row = ratio_row(
        f"{model.name}: load and run with a packed file, against ExecuTorch without one",
        ours.load + ours.run,
        stock.load + stock.run,
        at_least=10 if at_256 else 1,
    )
    row = replace(row, figure=f"{row.figure}; with its own file {show(own.load + own.run)}")
    yield row if at_256 else replace(row, bar="", met=True)  # of a small model most is the run
    yield ratio_row("  the load alone, against ExecuTorch's packed_cache_path", ours.load, own.load, at_most=1.1)
    yield _share(
        "  anonymous memory after it",
        # what a method computes with is needed without weights, too
        ours.anonymous - (0 if at_256 else own.anonymous),
        packed,
        2,
        f"; without a store {mib(heap.anonymous)}, ExecuTorch's packed_cache_path {mib(own.anonymous)}",
        "" if at_256 else " above ExecuTorch's packed_cache_path",
    )
    yield from _two_processes(model, packed)
    yield build
    yield _steady(model)


def _share(work: str, nbytes: float, of: int, percent: float, more: str = "", beyond: str = "") -> Row:
    share = nbytes / of
    figure = f"{100 * share:.2f} % of the packed bytes{beyond} ({mib(nbytes)} of {mib(of)}{more})"
    return Row(work, figure, f"at most {percent:g} %", share <= percent / 100)


def _two_processes(model: Model, packed: int) -> Iterator[Row]:
    files = model.folder / "model.pte", model.data, model.store
    with Application("ours", *files) as first, Application("ours", *files) as second:
        before = [one.pss() for one in (first, second)]
        for one in (first, second):
            one.load()
            one.run()
        shares = [one.pss_of(model.packed) for one in (first, second)]
        grown = max(one.pss() - other for one, other in zip((first, second), before, strict=True))
    # programs also touch code, data files and memory to compute with, which counts for little at 256 MiB
    assert min(shares) > packed // 4, "the file is mapped"
    more = f"; all memory of a process grew by {mib(grown)}"
    yield _share("  two processes: the PSS of each in the file", max(shares), packed, 55, more)


def _build(model: Model) -> Row:
    """The load that builds, and leaves the store built."""
    ways: tuple[list[float], list[float]] = ([], [])
    target = model.folder / "written"
    for turn in range(6):
        shutil.rmtree(model.store, ignore_errors=True)
        flush()
        with Application("ours", model.folder / "model.pte", model.data, model.store) as application:
            ours = application.load()
        target.unlink(missing_ok=True)
        flush()
        with Application("stock", model.folder / "stock" / "model.pte") as application:
            theirs = application.load() + application.write(model.packed, target)
        if turn:
            ways[0].append(ours)
            ways[1].append(theirs)
    target.unlink()
    [file] = PackedStore(model.store).list()
    row = ratio_row(
        "  the load that builds, against ExecuTorch's load to the heap plus writing and syncing the bytes",
        median(ways[0]),
        median(ways[1]),
        at_most=3,
    )
    return replace(row, figure=f"{row.figure}; maps of {file.mapped} of {file.entries} entries")


def _steady(model: Model) -> Row:
    files = model.folder / "model.pte", model.data
    with Application("ours", *files, model.store) as ours, Application("ours", *files) as theirs:
        for one in (ours, theirs):
            one.load()
            one.run(3)
        calls = max(1, int(0.1 / ours.run(1)[0]))
        times = _alternate(ours, theirs, calls)
    return ratio_row("  steady forward, against without a store", *times, at_most=1.02)


def _alternate(ours: Application, theirs: Application, calls: int) -> tuple[float, float]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(31):
        for which in (turn % 2, 1 - turn % 2):
            seconds[which].append((ours, theirs)[which].run(calls)[0] / calls)
    return median(seconds[0]), median(seconds[1])


def _start_of_stock(model: Model) -> Iterator[Row]:
    """A program of the stock partitioner, on both sides the same file."""
    program, folder = model.folder / "stock" / "model.pte", model.folder / "packed-stock"
    start("ours", program, (), folder)
    ours, own = in_turns(
        [lambda: start("ours", program, (), folder), lambda: model.stock(model.folder / "stock.packed")], rounds=ROUNDS
    )
    row = ratio_row(
        "  the load alone of the stock partitioner's program, against the same", ours.load, own.load, at_most=1.1
    )
    yield replace(row, bar="", met=True)


# ------------------------------------------------------------------------------------------------ verification


def _verification(model: Model) -> Iterator[Row]:
    path = model.packed
    store = PackedStore(model.store)

    def hash_map() -> bytes:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            return xxhash.xxh3_128_digest(view)

    times = side_by_side(store.verify, hash_map, rounds=15)
    yield ratio_row("  verification, against xxh3-128 over the map", *times, at_most=1.2)

    def load(verify: bool) -> object:
        packed = PackedStore(model.store, verify=verify)
        method = Program(model.folder / "model.pte", BlobCache(model.data, packed=packed)).method()
        assert packed.stats.fallbacks == 0
        return method

    with_it, without = side_by_side(functools.partial(load, True), functools.partial(load, False), rounds=15)
    yield ratio_row("  what verify=True adds to a load, against the same", with_it - without, times[1], at_most=1.2)


# ------------------------------------------------------------------------------------------------ updates


class _Updates:
    """A program on a cache, and one of its layers, whose weight changes."""

    def __init__(self, model: Model, packed: bool) -> None:
        self.store = PackedStore(model.store) if packed else None
        self.cache = BlobCache(model.data, packed=self.store)
        self.method = Program(model.folder / "model.pte", self.cache).method()
        self.x = torch.ones(1, _WIDTH)
        self.method(self.x)
        self.weights = [torch.randn(_WIDTH, _WIDTH) for _ in range(2)]
        self.turn = 0

    def __call__(self) -> None:
        self.turn += 1
        self.cache.update({"1.weight": self.weights[self.turn % 2]})

    def revert(self) -> None:
        self.cache.revert()
        self.method(self.x)

    def check(self, times: int) -> None:
        """All updates were written in place."""
        assert self.store is not None
        assert self.store.stats.written >= times and self.store.stats.repacked == 0, self.store.stats


def _one_layer(large: Model, small: Model) -> Iterator[Row]:
    """Each number is of the process in which the ratio is in the middle: where its pages lie decides about a third of it."""
    runs = [in_own_process(_changes, large, small) for _ in range(_PROCESSES)]
    changed, copied, memcpy, first, few = (
        sorted(pairs, key=lambda pair: pair[0] / pair[1])[_PROCESSES // 2] for pairs in zip(*runs, strict=True)
    )
    yield ratio_row("one 4 MiB float layer of 64 changed, against the new handle without a store", *changed, at_least=2)
    row = ratio_row("  only the copies, into the blob and on from there, against the same", *copied, at_least=2)
    yield without_bar(row)
    yield ratio_row("  against a memcpy of 4 MiB", *memcpy, at_most=4)
    row = ratio_row("  the first time, which takes pages, against the memcpy", *first, at_most=4)
    yield without_bar(row)
    yield ratio_row("  64 layers against 4", *few, at_most=1.1)


def _changes(large: Model, small: Model) -> list[tuple[float, float]]:
    """The seconds of the rows of `_one_layer`, ours and the other ones."""
    ours, handle = _Updates(large, packed=True), _Updates(large, packed=False)
    outputs = []
    for one in (ours, handle):
        one.weights = ours.weights
        one()
        outputs.append(one.method(one.x))
    assert outputs[0].equal(outputs[1])
    target, packed = (np.zeros((_WIDTH, _WIDTH), np.float32) for _ in range(2))
    sources = [weight.numpy() for weight in ours.weights]
    turns = iter(range(10**6))

    def copy() -> None:
        np.copyto(target, sources[next(turns) % 2])

    def twice() -> None:
        copy()
        np.copyto(packed, target)

    times = [
        side_by_side(ours, handle, rounds=31),
        side_by_side(twice, handle, rounds=31),
        side_by_side(ours, copy, rounds=31),
        side_by_side(ours, copy, rounds=15, before=ours.revert),
    ]
    few = _Updates(small, packed=True)
    times.append(side_by_side(ours, few, rounds=101))
    for one in (ours, few):
        one.check(31)
    return times


_UPDATE = """
import json, sys, torch
from benchmarks.harness import peak_of, status
from blobstore.runtime import BlobCache, PackedStore, Program
folder, layers, width = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store, x = PackedStore(folder + "/packed"), torch.ones(1, width)
cache = BlobCache(folder + "/model.ptd", packed=store)
method = Program(folder + "/model.pte", cache).method()
method(x)
new = {f"{i}.weight": torch.full((width, width), 1 / width / (i + 2)) for i in range(layers)}
found = []
for turn in range(2):
    with peak_of("RssAnon") as peak:
        cache.update(new)
    found.append(peak.growth)
assert method(x).isfinite().all()
print(json.dumps([*found, store.stats.written, store.stats.repacked]))
"""


def _update_of_all(folder: Path) -> Iterator[Row]:
    """Twice: the first time the pages of all blobs and all packed weights are taken, the second time they are there."""
    work = "update of all of 2 GiB: memory above the pages of the blobs, the packed pages and the given tensors"
    layers, width = _UPDATED
    nbytes = layers * width * (width + 1) * 4
    if (free := os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _reclaimable()) < 8 * nbytes:
        yield Row(
            work,
            f"not measured: {mib(free, 0)} of memory are free, {mib(8 * nbytes, 0)} are needed",
            "at most 64 MiB",
            True,
        )
        return
    lower_ours(folder, *stack(*_UPDATED))
    build = (
        "from blobstore.runtime import *; import sys; f = sys.argv[1]; "
        "Program(f + '/model.pte', BlobCache(f + '/model.ptd', packed=PackedStore(f + '/packed'))).method(); print(0)"
    )
    in_process(build, str(folder))
    first, second, written, repacked = in_process(_UPDATE, str(folder), str(layers), str(width))
    assert (written, repacked) == (2 * layers, 0)
    above = first - 2 * nbytes
    yield Row(work, mib(above), "at most 64 MiB", above <= 64 * MIB)
    yield Row("  the same again, above the steady state", mib(second), "at most 64 MiB", second <= 64 * MIB)


def _reclaimable() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    return (int(lines["Cached"].split()[0]) + int(lines["Buffers"].split()[0])) << 10
