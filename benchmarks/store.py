"""The store, the .ptd format and the rewriting of programs, against ExecuTorch, safetensors and cp."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import xxhash
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file as save_safetensors

import blobstore
from benchmarks.harness import MIB, Row, copy_synced, flush, memory_row, peak_of, ratio_row, show, side_by_side
from blobstore.lowering.export import lower, quiet
from blobstore.programs import dedup_programs

TITLE = "Store, .ptd and programs"
_LIMIT = 64 * MIB


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    large = {f"layers.{i}.weight": torch.randn(4 * MIB) for i in range(64)}  # 16 MiB each
    yield from _add(large)
    yield from _write(large, folder)
    yield from _open_large(large, folder)
    del large
    yield from _write_small(folder)
    yield from _write_tiny(folder)
    yield from _open_many(folder)
    yield from _rewrite(folder)
    yield from _folders(folder)


def _add(tensors: dict[str, torch.Tensor]) -> Iterator[Row]:
    with quiet():
        from executorch.exir._serialize._named_data_store import NamedDataStore

    copies = {key: tensor.clone() for key, tensor in tensors.items()}  # equal bytes in other memory

    def ours() -> object:
        store = blobstore.BlobStore()
        for key, tensor in tensors.items():
            store.add(key, tensor)
            store.add(f"{key}.copy", copies[key])
        return store

    def theirs() -> object:
        store = NamedDataStore()
        for key, tensor in tensors.items():
            store.add_named_data(key, tensor)
            store.add_named_data(f"{key}.copy", copies[key])
        return store

    work = "add 2 GiB of tensors, each twice, against NamedDataStore"
    yield ratio_row(work, *side_by_side(ours, theirs, rounds=5), at_least=8)  # reading the memory once takes an eighth
    with peak_of("VmRSS") as peak:
        kept = ours()
    del kept
    yield memory_row("  growth of RSS", peak.growth, _LIMIT)


def _write(tensors: dict[str, torch.Tensor], folder: Path) -> Iterator[Row]:
    times = side_by_side(
        lambda: blobstore.save_file(tensors, folder / "large.ptd"),
        lambda: save_safetensors(tensors, folder / "large.safetensors"),
        before=flush,
    )
    yield ratio_row("write 1 GiB, against safetensors save_file", *times, at_most=1.15)
    with peak_of("VmRSS") as peak:
        blobstore.save_file(tensors, folder / "large.ptd")
    yield memory_row("  growth of RSS", peak.growth, _LIMIT)


def _write_small(folder: Path) -> Iterator[Row]:
    tensors = {f"layers.{i}.weight": torch.randn(1024) for i in range(50_000)}
    times = side_by_side(
        lambda: blobstore.save_file(tensors, folder / "small.ptd"),
        lambda: save_safetensors(tensors, folder / "small.safetensors"),
        before=flush,
    )
    yield ratio_row("write 50,000 keys of 4 KiB, against safetensors save_file", *times, at_most=2)


def _tiny(count: int) -> dict[str, np.ndarray]:
    rows = np.arange(16 * count, dtype=np.float32).reshape(-1, 16)
    return {f"model.layers.{i // 10}.block.{i}.weight": row for i, row in enumerate(rows)}


def _write_tiny(folder: Path) -> Iterator[Row]:
    tensors = _tiny(100_000)
    ours, theirs = folder / "tiny.ptd", folder / "tiny.safetensors"
    times = side_by_side(
        lambda: blobstore.save_file(tensors, ours), lambda: save_arrays(tensors, theirs), clock=time.process_time
    )
    yield ratio_row("write 100,000 keys of 64 B, against safetensors save_file, CPU time", *times, at_most=2)
    times = side_by_side(lambda: blobstore.load_file(ours, "np"), lambda: load_arrays(theirs), clock=time.process_time)
    yield ratio_row("  load them as arrays, against safetensors load_file, CPU time", *times, at_most=2)
    tensors = _tiny(1_000_000)
    with peak_of("VmRSS") as peak:
        blobstore.save_file(tensors, ours)
    yield memory_row("  growth of RSS with 1,000,000 of them, which safetensors refuses", peak.growth, 640 * MIB)


def _open_many(folder: Path) -> Iterator[Row]:
    tensors = {f"layers.{i}.weight": torch.randn(8 + i % 61, 16) for i in range(5_000)}
    blobstore.save_file(tensors, folder / "many.ptd")
    save_safetensors(tensors, folder / "many.safetensors")

    def ours() -> None:
        with blobstore.open_ptd(folder / "many.ptd") as data_map:
            for key in data_map:
                data_map.get_tensor_layout(key).sizes  # type: ignore[union-attr]  # noqa: B018

    def theirs() -> None:
        with safetensors.safe_open(folder / "many.safetensors", "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                file.get_slice(key).get_shape()

    work = "open 5,000 keys and read every layout, against safe_open and get_shape"
    yield ratio_row(work, *side_by_side(ours, theirs, rounds=31), at_most=1.5)


def _open_large(tensors: dict[str, torch.Tensor], folder: Path) -> Iterator[Row]:
    ptd, peer = folder / "large.ptd", folder / "large.safetensors"
    key = next(iter(tensors))

    def ours() -> object:
        with blobstore.open_ptd(ptd) as data_map:
            return data_map.get_data(key)[0]

    def theirs() -> object:
        with safetensors.safe_open(peer, "pt") as file:
            return file.get_slice(key)[0:1]

    times = side_by_side(ours, theirs, rounds=101)
    yield ratio_row("open 1 GiB and read the first byte of a blob, against safe_open", *times, at_most=3)
    seconds = _executorch_reader(ptd)
    yield Row("  ExecuTorch's Python reader on the same file, once", show(seconds), "", True)
    with blobstore.open_ptd(ptd) as data_map:
        whole = memoryview(ptd.read_bytes())
        del whole
        view = data_map._data
        times = side_by_side(data_map.verify, lambda: xxhash.xxh3_128_digest(view), rounds=15)
    yield ratio_row("verify 1 GiB in the page cache, against xxh3-128 over the map", *times, at_most=1.5)


def _executorch_reader(path: Path) -> float:
    import time

    with quiet():
        from executorch.exir._serialize._cord import Cord
        from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    start = time.perf_counter()
    FlatTensorSerializer().deserialize(Cord(path.read_bytes()))
    return time.perf_counter() - start


class _Layers(torch.nn.Module):
    """1 GiB of weights in 64 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(2048, 2048) for _ in range(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x + weight
        return x


def _rewrite(folder: Path) -> Iterator[Row]:
    program, copy, out = folder / "large.pte", folder / "copy.pte", folder / "out"
    _lower_large(program)

    def ours() -> object:
        return dedup_programs([program], out)

    def theirs() -> object:
        return copy_synced(program, copy)  # because what is rewritten is on the disk

    def anew() -> None:
        shutil.rmtree(out, ignore_errors=True)  # a run done again would leave the data file as it is
        copy.unlink(missing_ok=True)
        flush()

    times = side_by_side(ours, theirs, before=anew)
    anew()
    yield ratio_row("rewrite a 1 GiB .pte into a .pte and a .ptd, against cp and fsync", *times, at_most=1.25)
    with peak_of("RssAnon") as peak:
        ours()
    yield memory_row("  growth of anonymous memory", peak.growth, _LIMIT)


def _lower_large(path: Path) -> None:
    """In a function of its own, so that the model's memory is free again before anything is measured."""
    manager: Any = lower({"forward": (_Layers().eval(), (torch.zeros(2048, 2048),))}, partitioners=list)
    with path.open("wb") as file:
        manager.write_to_file(file)


class _Small(torch.nn.Module):
    """Twenty layers of 16 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _folders(folder: Path) -> Iterator[Row]:
    """Many programs of one architecture, 9 of whose 20 layers are their own."""
    programs = _tuned(folder / "programs", 1100)
    few, many = (_timed(programs[:count], folder / str(count)) for count in (100, 1000))
    yield Row(
        "deduplicate 1,000 programs of 340 KB, against 100 of them, once",
        f"{many / few:.1f} x its time ({show(many)} against {show(few)})",
        "at most 15 x",
        many <= 15 * few,
    )
    dedup_programs(programs[:10], folder / "10")
    new = iter(programs[1000:])

    def append(where: str) -> object:
        return dedup_programs([next(new)], folder / where, append=True)

    times = side_by_side(lambda: append("1000"), lambda: append("10"))
    yield ratio_row("  append one to the 1,000, against appending one to 10", *times, at_most=3)
    size = max((folder / "1000").glob("shared-*.ptd"), key=lambda path: path.stat().st_mtime_ns).stat().st_size
    own = 9 * 64 * 64 * 4
    yield Row(
        "  the data file that this writes", f"{size / own:.3f} x the new bytes", "at most 1.05 x", size <= 1.05 * own
    )


def _timed(programs: Sequence[Path], out: Path) -> float:
    begin = time.perf_counter()
    dedup_programs(programs, out)
    return time.perf_counter() - begin


def _tuned(folder: Path, count: int) -> list[Path]:
    """Programs of one architecture with weights of their own in nine layers."""
    folder.mkdir()
    model = _Small().eval()
    with quiet():
        pte = bytes(lower({"forward": (model, (torch.zeros(1, 64),))}, partitioners=list).buffer)
    places = [pte.index(layer.weight.detach().numpy().tobytes()) for layer in list(model.layers)[:9]]
    paths = []
    for number in range(count):
        data = bytearray(pte)
        for place in places:
            data[place : place + 16384] = torch.randn(4096).numpy().tobytes()
        paths.append(folder / f"{number}.pte")
        paths[-1].write_bytes(data)
    return paths
