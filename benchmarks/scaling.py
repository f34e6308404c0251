"""How cost grows with keys, bytes, methods and programs: ours, a peer and the least possible, drawn.

`make plots` measures and writes `docs/img/scaling.svg`, and the numbers beside it as `scaling.json`. Times are medians of
work done in turns; bytes and memory are measured once, as they do not vary.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import safetensors
import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator
from safetensors.torch import save_file as save_safetensors

import blobstore
from benchmarks.harness import flush, settle, side_by_side
from benchmarks.lowered import in_process, plugin, save
from blobstore.lowering.export import lower
from blobstore.programs import dedup_programs

IMAGES = Path(__file__).parents[1] / "docs" / "img"
_MIB = 1 << 20
_ROUNDS = 5


@dataclass
class Curve:
    """One panel.

    Attributes:
        title, x, y: what is drawn, and the units of both axes.
        at: places on the x axis.
        series: values by name; the first is ours, "limit" is the least possible.
        from_zero: the y axis is linear; else it is logarithmic, as the x axis, so that proportional cost is a diagonal.
    """

    title: str
    x: str
    y: str
    at: list[int]
    series: dict[str, list[float]] = field(default_factory=dict)
    from_zero: bool = False

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.series.setdefault(name.replace("_", " "), []).append(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make plots", description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--again", action="store_true", help="draw what was measured before")
    options = parser.parse_args()
    numbers = options.out / "scaling.json"
    if options.again:
        curves = [Curve(**found) for found in json.loads(numbers.read_text(encoding="utf-8"))]
    else:
        curves = []
        for measure in (of_keys, of_bytes, of_methods, of_programs):
            with tempfile.TemporaryDirectory() as folder:
                curves.append(measure(Path(folder)))
        numbers.write_text(json.dumps([asdict(curve) for curve in curves], indent=1) + "\n", encoding="utf-8")
    draw(curves, options.out / "scaling.svg")


def of_keys(folder: Path) -> Curve:
    """Opening a file and reading each layout, against safetensors."""
    curve = Curve("Open, and read every layout", "keys", "ms", [100, 1_000, 10_000, 50_000])
    for count in curve.at:
        tensors = {f"layers.{i}.weight": torch.zeros(16) + i for i in range(count)}
        ours, theirs = folder / "a.ptd", folder / "a.safetensors"
        blobstore.save_file(tensors, ours)
        save_safetensors(tensors, theirs)
        seconds = side_by_side(lambda ours=ours: _layouts(ours), lambda theirs=theirs: _shapes(theirs), rounds=_ROUNDS)
        curve.add(blobstore=1e3 * seconds[0], safetensors=1e3 * seconds[1])
    return curve


def _layouts(path: Path) -> list[Any]:
    with blobstore.open_ptd(path) as data_map:
        return [data_map.get_tensor_layout(key) for key in data_map]


def _shapes(path: Path) -> list[Any]:
    with safetensors.safe_open(path, "pt") as opened:
        return [opened.get_slice(key).get_shape() for key in list(opened.keys())]  # it is no mapping


def of_bytes(folder: Path) -> Curve:
    """Writing tensors, against safetensors; the limit is to write as many bytes and wait for the disk, as we do."""
    curve = Curve("Write a file", "MiB", "ms", [16, 64, 256, 1024])
    for size in curve.at:
        tensors = {f"layers.{i}.weight": torch.randn(_MIB) for i in range(size // 4)}
        pair = [
            lambda tensors=tensors: blobstore.save_file(tensors, folder / "a.ptd"),
            lambda tensors=tensors: save_safetensors(tensors, folder / "a.safetensors"),
        ]
        ours, theirs = side_by_side(*pair, rounds=_ROUNDS, before=flush)
        _, limit = side_by_side(pair[0], lambda tensors=tensors: _raw(tensors, folder / "a"), rounds=3, before=flush)
        curve.add(blobstore=1e3 * ours, safetensors=1e3 * theirs, limit=1e3 * limit)
        settle()
    return curve


def _raw(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        for tensor in tensors.values():
            file.write(memoryview(tensor.numpy()).cast("B"))
        file.flush()
        os.fsync(file.fileno())


class _Layers(torch.nn.Module):
    """Four layers of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def of_methods(folder: Path) -> Curve:
    """Bytes of one model for several input lengths, a program each, lowered by stock XNNPACK and then deduplicated."""
    curve = Curve("Bytes of one model for n input lengths", "programs", "MiB", [1, 2, 4, 8], from_zero=True)
    model = _Layers().eval()
    limit = sum(tensor.nbytes for tensor in model.state_dict().values()) / _MIB
    paths = []
    for i in range(max(curve.at)):
        paths.append(folder / f"{i}.pte")
        paths[-1].write_bytes(lower({"forward": (model, (torch.randn(8 * (i + 1), 1024),))}).buffer)
    for count in curve.at:
        out = folder / f"out{count}"
        dedup_programs(paths[:count], out)
        ours = sum(path.stat().st_size for path in out.iterdir())
        theirs = sum(path.stat().st_size for path in paths[:count])
        curve.add(blobstore=ours / _MIB, ExecuTorch=theirs / _MIB, limit=limit)
        shutil.rmtree(out)
    return curve


_MEMORY = """
import json, re, sys
from pathlib import Path
def anonymous():
    return int(re.search(r"Anonymous: +(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])
import torch
x = torch.randn(8, 1024)
programs = sys.argv[2:]
kept = []
if sys.argv[1] == "ours":
    from blobstore.runtime import BlobCache, Program
    folder = Path(programs[0]).parent
    before = anonymous()
    cache = BlobCache(folder / "model.ptd")
    for path in programs:
        kept.append(Program(path, cache).method())
        kept[-1](x)
else:
    from executorch.runtime import Runtime
    runtime = Runtime.get()
    before = anonymous()
    for path in programs:
        program = runtime.load_program(path)
        kept.append((program, program.load_method("forward")))
        kept[-1][1].execute([x])
print(json.dumps(anonymous() - before))
"""


def of_programs(folder: Path) -> Curve:
    """Anonymous memory of programs with the same weights in one process: their packed copies."""
    curve = Curve("Memory of n programs with equal weights", "programs", "MiB", [1, 2, 4, 8], from_zero=True)
    model = _Layers().eval()
    limit = sum(tensor.nbytes for tensor in model.state_dict().values()) / _MIB
    x = (torch.randn(8, 1024),)
    save(lower({"forward": (model, x)}, partitioners=plugin, external_constants=True), folder)
    for path in folder.glob("*.ptd"):
        path.rename(folder / "model.ptd")
    stock = folder / "stock.pte"
    stock.write_bytes(lower({"forward": (model, x)}).buffer)
    for count in curve.at:
        run: Callable[[str, Path], float] = lambda kind, path, count=count: in_process(  # noqa: E731
            _MEMORY, kind, *[str(path)] * count
        )
        curve.add(
            blobstore=run("ours", folder / "model.pte") / 1024, ExecuTorch=run("stock", stock) / 1024, limit=limit
        )
    return curve


_STYLES = {"blobstore": ("#0b6e99", "o", "-"), "limit": ("#8a8a8a", "", "--")}
_PEER = ("#d1495b", "s", "-")


def draw(curves: list[Curve], path: Path) -> None:
    """All panels in one picture."""
    mpl.rcParams.update({"svg.hashsalt": "blobstore", "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold"})
    figure, panels = plt.subplots(2, 2, figsize=(8, 5.6), layout="constrained")
    for curve, panel in zip(curves, panels.flat, strict=True):
        for name, values in curve.series.items():
            colour, marker, line = _STYLES.get(name, _PEER)
            panel.plot(curve.at, values, line, marker=marker, color=colour, label=name, linewidth=1.6, markersize=5)
        panel.set(
            xscale="log",
            yscale="linear" if curve.from_zero else "log",
            title=curve.title,
            xlabel=curve.x,
            ylabel=curve.y,
            xticks=curve.at,
        )
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
        if curve.from_zero:
            panel.set_ylim(bottom=0)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(True, which="major", color="#e4e4e4", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None}, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    main()
