"""Weights that change under XNNPACK, against the plain delegate and reloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import MIB, Row, flush, mib, ratio_row, show, side_by_side, status, without_bar
from benchmarks.lowered import in_process, plugin, save, save_plain
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program

TITLE = "Live weights through XNNPACK"
_WIDTH = 1024  # a layer has 4 MiB


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    yield from _steady(folder)
    for layers in (4, 64):
        _write(folder, layers)
    yield from _one_layer(folder)
    yield from _all_layers(folder)
    yield from _methods(folder)
    yield from _soak(folder)
    yield from _lowering()


def _stack(layers: int, width: int = _WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).eval()


def _steady(folder: Path) -> Iterator[Row]:
    for what, layers, width, calls in (("small", 8, 64, 2000), ("large", 4, _WIDTH, 200)):
        module, x = _stack(layers, width), torch.randn(4, width)
        methods = {"forward": (module, (x,))}
        ours = Program(save(lower(methods, partitioners=plugin), folder / what), BlobCache(folder / what / "model.ptd"))
        theirs = Program(save(lower(methods), folder / f"{what}-plain"))

        def repeat(program: Program, x: Tensor = x, calls: int = calls) -> Callable[[], object]:
            method = program.method()
            return lambda: [method(x) for _ in range(calls)]

        times = side_by_side(repeat(ours), repeat(theirs), rounds=31)
        yield ratio_row(f"forward of a {what} model, against the plain delegate", *times, at_most=1.02)


def _write(folder: Path, layers: int) -> None:
    methods = {"forward": (_stack(layers), (torch.randn(1, _WIDTH),))}
    save(lower(methods, partitioners=plugin), folder / str(layers))
    save_plain(*methods["forward"], folder / f"{layers}-plain")


def _one_layer(folder: Path) -> Iterator[Row]:
    x = torch.randn(1, _WIDTH)
    extra = {}
    for layers in (4, 64):
        cache = BlobCache(folder / str(layers) / "model.ptd")
        method = Program(folder / str(layers) / "model.pte", cache).method()
        weights = [torch.randn(_WIDTH, _WIDTH) for _ in range(2)]
        turn = iter(range(10**6))

        def change(cache: BlobCache = cache, method: Any = method, weights: Any = weights, turn: Any = turn) -> object:
            cache.update({"1.weight": weights[next(turn) % 2]})
            return method(x)

        changed, plain = side_by_side(change, lambda method=method: method(x), rounds=31)  # type: ignore[misc]
        extra[layers] = changed - plain
    write, load = _reload(folder / "64-plain")
    row = ratio_row(
        "change one 4 MiB layer of 64 and run, against writing the new .ptd, loading and running",
        changed,
        write + load,
        at_least=25,
    )
    yield without_bar(replace(row, figure=f"{row.figure}; {show(plain)} of either is the run"))
    alone = "  against loading and running alone, the new .ptd is there already"
    yield without_bar(ratio_row(alone, changed, load, at_least=25))
    yield ratio_row("  the same without the run on either side", extra[64], load - plain, at_least=25)
    yield ratio_row("  without the run, 64 layers against 4", extra[64], extra[4], at_most=2)


def _reload(folder: Path) -> tuple[float, float]:
    """Median seconds to write a data file with ExecuTorch, and to load and run a program with it."""
    with quiet():
        from executorch.exir._serialize._named_data_store import NamedDataStore
        from executorch.exir._serialize.data_serializer import DataPayload
        from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
        from executorch.runtime import Runtime

        from blobstore.core.formats.ptd.reader import open_ptd
    contents = {key: bytes(data) for key, data in open_ptd(folder / "model.ptd").views()}
    x = torch.randn(1, _WIDTH)

    def write() -> object:
        store = NamedDataStore()
        for key, data in contents.items():
            store.add_named_data(key, data, alignment=16, external_tag="model")
        out = store.get_named_data_store_output()
        cord = FlatTensorSerializer().serialize(DataPayload(out.buffers, out.external_data["model"]))
        with (folder / "new.ptd").open("wb") as file:
            cord.write_to_file(file)
        return None

    def load() -> object:
        program = Runtime.get().load_program(folder / "model.pte", data_path=folder / "new.ptd")
        return program.load_method("forward").execute([x])  # type: ignore[union-attr]

    return side_by_side(write, load, rounds=5, before=flush)


_CHANGE_ALL = """
import json, sys, time, torch
from benchmarks.harness import peak_of, status
from blobstore.runtime import BlobCache, Program
path, x = sys.argv[1], torch.randn(1, 1024)
cache, bare = BlobCache(path + "/model.ptd"), BlobCache(path + "/model.ptd")
for key in cache:
    sum(cache.get_data(key)[::4096])  # from the disk
program = Program(path + "/model.pte", cache)
start = time.perf_counter()
method = program.method()
init = time.perf_counter() - start
method(x)
weights = [{f"{i}.weight": torch.randn(1024, 1024) for i in range(64)} for _ in range(2)]
changes = []
for turn in range(9):  # with the program, and the same without a program, which packs nothing
    start = time.perf_counter()
    cache.update(weights[turn % 2])
    middle = time.perf_counter()
    bare.update(weights[turn % 2])
    changes.append(middle - start - (time.perf_counter() - middle))
method(x)
before = status("RssAnon")
with peak_of("RssAnon") as peak:
    cache.update(weights[1])
    method(x)
print(json.dumps([init, sorted(changes)[4], peak.growth, status("RssAnon") - before]))
"""


def _all_layers(folder: Path) -> Iterator[Row]:
    runs = [in_process(_CHANGE_ALL, str(folder / "64")) for _ in range(3)]
    init, change, peak, grown = (median(run[i] for run in runs) for i in range(4))
    packed = 64 * 4 * MIB
    yield ratio_row("change all 64 layers: pack them, against one init", change, init, at_most=1.3)
    yield Row(
        "  memory above the steady state while it lasts",
        f"{peak / packed:.2f} x the packed size",
        "at most 1.05 x",
        peak <= 1.05 * packed,
    )
    yield Row("  and after it", mib(grown), "below 8 MiB", grown < 8 * MIB)


class _Two(nn.Module):
    """The same layers for a prompt and for one token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _stack(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


_MEASURE = """
import json, sys, time, torch
from benchmarks.harness import status
from blobstore.runtime import BlobCache, Program
folder, data, kind = sys.argv[1], sys.argv[2] == "yes", sys.argv[3]
one, many = torch.randn(1, 1024), torch.randn(8, 1024)
cache = BlobCache(folder + "/model.ptd") if data else BlobCache()
before, times = status("RssAnon"), []
programs = [Program(folder + "/model.pte", cache) for _ in range(2)]
for program in programs if kind == "programs" else programs[:1]:
    for name, x in (("prefill", many), ("decode", one)):
        start = time.perf_counter()
        method = program.method(name)
        times.append(time.perf_counter() - start)
        method(x)
print(json.dumps([status("RssAnon") - before, times]))
"""


def _methods(folder: Path) -> Iterator[Row]:
    module = _Two().eval()
    methods = {"prefill": (module, (torch.randn(8, _WIDTH),)), "decode": (module, (torch.randn(1, _WIDTH),))}
    save(lower(methods, partitioners=plugin), folder / "two")
    save(lower(methods), folder / "two-plain")

    def measure(name: str, data: str, kind: str) -> Any:
        return in_process(_MEASURE, str(folder / name), data, kind)

    packed = 16 * 4 * MIB
    stock, _ = measure("two-plain", "no", "methods")
    for kind, what in (("methods", "prefill + decode"), ("programs", "two programs of both")):
        used, _times = measure("two", "yes", kind)
        yield Row(
            f"anonymous memory of {what}, 64 MiB of weights",
            f"{used / packed:.2f} x the packed weights (plain delegate, prefill + decode: {stock / packed:.2f} x)",
            "at most 1.1 x",
            used <= 1.1 * packed,
        )
    share = median(t[1] / t[0] for t in (measure("two", "yes", "methods")[1] for _ in range(5)))
    yield Row("load time of the second method", f"{100 * share:.1f} % of the first", "below 10 %", share < 0.1)


def _soak(folder: Path) -> Iterator[Row]:
    module, x = _stack(4, 256), torch.randn(1, 256)
    path = save(lower({"forward": (module, (x,))}, partitioners=plugin), folder / "soak")
    cache = BlobCache(folder / "soak" / "model.ptd")
    method = Program(path, cache).method()
    weights = [torch.randn(256, 256) for _ in range(3)]

    def repeat(times: int) -> None:
        for i in range(times):
            cache.update({f"{i % 4}.weight": weights[i % 3]})
            method(x)

    repeat(1000)
    before = status("RssAnon")
    repeat(10_000)
    grown = status("RssAnon") - before
    yield Row("growth of memory over 10,000 updates", mib(grown, 2), "below 1 MiB", grown < MIB)


def _lowering() -> Iterator[Row]:
    methods = {"forward": (_stack(16, 512), (torch.randn(1, 512),))}
    times = side_by_side(lambda: lower(methods, partitioners=plugin), lambda: lower(methods), rounds=5)
    yield ratio_row("lower through the plug-in, against plain lowering", *times, at_most=1.1)
    ours, theirs = (in_process(_LOWERING, way) for way in ("ours", "plain"))
    figure = f"{ours / _LOWERED:.2f} x the weights, {theirs / _LOWERED:.2f} x plainly"
    yield Row(
        "  the most memory that this takes for 256 MiB of weights",
        figure,
        "at most 0.2 x more",
        ours - theirs < 0.2 * _LOWERED,
    )


_LOWERED = 256 * MIB
_LOWERING = """
import sys, tempfile, torch
from benchmarks.harness import status
from benchmarks.lowered import plugin
from blobstore import save_programs
from blobstore.lowering import lower
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(64))).eval()
plugin()
before = status("VmRSS")
with tempfile.TemporaryDirectory() as folder:
    if sys.argv[1] == "ours":
        save_programs({"model": lower(model, torch.ones(1, 1024), tag="model")}, folder)
    else:
        program = lower(model, torch.ones(1, 1024))
        with open(folder + "/model.pte", "wb") as file:
            program.write_to_file(file)
print(status("VmHWM") - before)
"""
