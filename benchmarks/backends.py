"""Weights that change under OpenVINO, against its own delegate; nothing is measured without openvino."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import nn

from benchmarks.harness import Row, ratio_row, side_by_side
from benchmarks.lowered import in_process, save
from blobstore.lowering import BlobStorePartitioner, lower
from blobstore.lowering.openvino import openvino_partitioner
from blobstore.runtime import BlobCache, Program

TITLE = "Live weights through OpenVINO"
_WIDTH = 1024  # a layer has 4 MiB
_LAYERS = 16


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    if importlib.util.find_spec("openvino") is None:
        return
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS))).eval()
    one, many = (module, (torch.randn(1, _WIDTH),)), (module, (torch.randn(8, _WIDTH),))
    with redirect_stdout(io.StringIO()):  # which operators OpenVINO does not take
        save(lower({"decode": one}, partitioners=lambda: [openvino_partitioner()]), folder / "plain")
        for name, methods in (("one", {"decode": one}), ("two", {"decode": one, "prefill": many})):
            partitioners = lambda: [BlobStorePartitioner(openvino_partitioner())]  # noqa: E731
            save(lower(methods, partitioners=partitioners), folder / name)
    sizes = [float((folder / name / "model.ptd").stat().st_size) for name in ("two", "one")]
    yield Row(
        "data file of two methods, against that of one",
        f"{sizes[0] / sizes[1]:.4f} x its size",
        "at most 1.05 x",
        sizes[0] <= 1.05 * sizes[1],
    )
    loads, changes, alone = in_process(_MEASURE, str(folder))
    yield ratio_row("load a method of 64 MiB, against the plain delegate", *loads, at_most=1.2)
    yield ratio_row(
        "change one of 16 layers, against loading with the plain delegate and dropping the old method",
        *changes,
        at_most=1.1,
    )
    yield ratio_row("  against loading alone; the change drops the old handle", *alone, at_most=1.1)


# In a process of its own: lowering leaves memory behind, which one of two ways may get again.
_MEASURE = """
import json, sys
from pathlib import Path
from benchmarks.backends import measure
print(json.dumps(measure(Path(sys.argv[1]))))
"""


def measure(folder: Path) -> list[tuple[float, float]]:
    """The seconds of loads, of changes and loads that drop a method, and of changes and loads."""
    cache = BlobCache(folder / "one" / "model.ptd")
    ours, theirs = Program(folder / "one" / "model.pte", cache), Program(folder / "plain" / "model.pte")

    def load() -> object:
        return ours.load_method("decode")

    def load_plain() -> object:
        return theirs.load_method("decode")

    times = [side_by_side(load, load_plain, rounds=31)]
    held = ours.method("decode")
    weights = [{"1.weight": torch.randn(_WIDTH, _WIDTH)} for _ in range(2)]
    turn = iter(range(10**6))

    def change() -> object:
        return cache.update(weights[next(turn) % 2])

    def replace() -> None:
        load_plain()

    times.append(side_by_side(change, replace, rounds=31))
    times.append(side_by_side(change, load_plain, rounds=31))
    del held
    return times
