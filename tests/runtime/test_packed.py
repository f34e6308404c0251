"""Packed weights in files: their contents, their users, and outputs that equal those without them, to the bit (K1, K3)."""

import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from blobstore import dedup_programs, save_programs
from blobstore.errors import BlobStoreError, FileAccessError, UnsupportedDataError
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, PackedStore, Program, make_working_copy
from tests.lowering import nets
from tests.lowering.live import inputs, lower_exported, lower_through, seeded, write
from tests.lowering.test_quantized import pt2e
from tests.runtime import packed_files
from tests.runtime.packed_files import Running, ones, read, run_child

pytestmark = pytest.mark.long

with quiet():
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup

MLP_INPUT = ones(2, 16)


def _float(kind: Callable[[], nn.Module], *sizes: int) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        example = inputs(*sizes)
        lower_through({"forward": (module := seeded(kind), example)}, folder)
        return module, example

    return make


def _int8(**config: bool) -> Callable[[Path], Any]:
    def make(folder: Path) -> Any:
        module, example = seeded(nets.Small), inputs(2, 3, 8, 8)
        with quiet():
            lower_exported(torch.export.export(pt2e(module, example, **config), example, strict=True), folder)
        return module, example

    return make


def _four_bits(folder: Path) -> Any:
    module, example = seeded(nets.Linears), inputs(3, 64)
    plain = seeded(nets.Linears)
    with quiet():
        quantize_(module, Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)))
        lower_exported(torch.export.export(module, example, strict=True), folder)
    return plain, example


KINDS = {
    "linear": _float(nets.MLP, 2, 16),
    "batch norms": _float(nets.ConvNorm, 2, 3, 6, 6),
    "convolutions": _float(nets.Convolutions, 1, 4, 8, 8),
    "not packed": _float(nets.PReLU, 1, 3, 6, 6),
    "static int8": _int8(is_per_channel=True),
    "int8 per tensor": _int8(is_per_channel=False),
    "dynamic int8": _int8(is_per_channel=True, is_dynamic=True),
    "4 bits": _four_bits,
}


def test_a_second_load_packs_nothing(large: Path, tmp_path: Path) -> None:
    """Neither into the heap nor into a file: the pages are those of the file (K1, N4)."""
    options = {"folder": large, "sizes": [1, 1024]}
    plain = run_child(**options)
    first = run_child(**options, packed=tmp_path)
    second = run_child(**options, packed=tmp_path)
    assert plain["anonymous"] > 16 << 20
    assert second["anonymous"] < 2 << 20
    assert plain["outputs"] == first["outputs"] == second["outputs"]
    assert (first["stats"]["builds"], second["stats"]["builds"]) == (1, 0)
    assert (second["stats"]["hits"], second["stats"]["fallbacks"]) == (1, 0)
    assert second["stats"]["mapped_bytes"] == packed_files.only(tmp_path).stat().st_size > 16 << 20


@pytest.mark.parametrize("writable", [False, True], ids=["private", "shared"])
def test_ordinary_loads_print_no_errors(mlp: Path, tmp_path: Path, writable: bool, capfd: Any) -> None:
    """ExecuTorch would append to the file, which it must not; it logs that as an error (K3)."""
    data = mlp / "model.ptd"
    if writable:
        data = tmp_path / "live.ptd"
        make_working_copy(mlp / "model.ptd", data)
    for _ in range(3):
        cache = BlobCache(data, "shared" if writable else "private", packed=tmp_path / "packed")
        Program(mlp / "model.pte", cache).method()(*MLP_INPUT)
    lines = capfd.readouterr().err.splitlines()
    assert any("Loaded packed weight cache" in line for line in lines)  # what is no error is there
    assert not [line for line in lines if line.startswith("E ")]


def test_processes_share_pages_also_as_root(large: Path, tmp_path: Path) -> None:
    """ExecuTorch would let the first process lock the file for its life (K1)."""
    options = {"folder": large, "sizes": [1, 1024], "packed": tmp_path}
    expected = run_child(**options)
    processes = [packed_files.child(**options) for _ in range(3)]
    found = [packed_files.report(process) for process in processes]
    shares = []
    for process in processes:  # now all of them have it
        packed_files.tell(process, "pss")
        shares.append(packed_files.report(process)["pss"])
    for process in processes:
        packed_files.end(process)
    for one in found:
        assert one["outputs"] == expected["outputs"]
        assert (one["stats"]["hits"], one["stats"]["fallbacks"]) == (1, 0)
        assert one["anonymous"] < 2 << 20
    assert all(4 << 20 < share < 8 << 20 for share in shares), shares


def test_the_file(mlp: Path, tmp_path: Path) -> None:
    """Read-only, complete, and named by contents, so another process writes the same bytes (K1, K2)."""
    first, second = tmp_path / "first", tmp_path / "second"
    Running.open(mlp, MLP_INPUT, PackedStore(first))
    run_child(folder=mlp, sizes=[2, 16], packed=second)
    path = packed_files.only(first)
    assert stat.S_IMODE(path.stat().st_mode) & 0o222 == 0
    assert [one.name for one in first.iterdir() if one.name.startswith(".")] == []
    packed = read(path)
    # XNNPACK reads bias, weights, and a few words of padding
    assert sum(entry.size for entry in packed.entries) >= 4 * sum(p.numel() for p in seeded(nets.MLP).parameters())
    assert len(packed.entries) == 3 and len(packed.covers) == 1
    other = read(packed_files.only(second))
    assert other.data == packed.data
    name = r"layers\.\d\.weight@[\w-]{16}layers\.\d\.bias@[\w-]{16}"
    assert all(re.fullmatch(name, entry.name) for entry in packed.entries)


class Backwards(nn.Module):
    """Layers whose names are in another order than they are executed in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("b", "a", "d", "c")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("d", "a", "c", "b"):
            x = self.layers[name](x).relu()
        return x


def test_entries_are_in_the_order_of_execution(tmp_path: Path) -> None:
    """So a pass over a file that memory cannot hold reads it from its beginning to its end (K1)."""
    lower_through({"forward": (seeded(Backwards), inputs(2, 16))}, tmp_path / "model")
    store = PackedStore(tmp_path / "packed")
    Running.open(tmp_path / "model", ones(2, 16), store)()
    entries = read(packed_files.only(store.folder)).entries
    assert [entry.name.split(".")[1] for entry in entries] == ["d", "a", "c", "b"]
    assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)


def test_counters_never_reach_the_disk(mlp: Path, tmp_path: Path) -> None:
    """A cache that had changed before the method was loaded has nothing to name its weights by (K2)."""
    store = PackedStore(tmp_path / "packed")
    cache = BlobCache(mlp / "model.ptd", packed=store)
    cache.update({"layers.0.bias": torch.ones(24)})
    plain = BlobCache(mlp / "model.ptd")
    plain.update({"layers.0.bias": torch.ones(24)})
    found, expected = (
        Running(one, program := Program(mlp / "model.pte", one), program.method(), MLP_INPUT)()
        for one in (cache, plain)
    )
    assert found == expected
    assert store.stats.builds == 0 or all(
        b"0000000000" not in entry.name.encode() for entry in read(packed_files.only(store.folder)).entries
    )
    assert store.stats.fallbacks == 1
    assert store.stats.reasons == {"weights had been changed when the method was loaded": 1}


def test_programs_with_other_input_lengths_use_one_file(tmp_path: Path) -> None:
    """On one data file: the second program adds what describes it, and no weights (K1)."""
    module = seeded(nets.MLP)
    save_programs({f"length{n}": lower(module, inputs(n, 16), tag="model") for n in (2, 5)}, tmp_path / "model")
    store = PackedStore(tmp_path / "packed")
    running = []
    for n in (2, 5, 2, 5):
        packed, plain = (Running.open(tmp_path / "model", ones(n, 16), one, name=f"length{n}") for one in (store, None))
        assert packed() == plain()
        running.append(packed)
    packed = read(max(packed_files.files(store.folder), key=lambda path: path.stat().st_size))
    assert len(packed.entries) == 3  # of both
    assert store.stats.fallbacks == 0
    running.clear()
    store.gc()
    assert len(packed_files.files(store.folder)) == 1
    later = PackedStore(tmp_path / "packed")
    for n in (2, 5):
        Running.open(tmp_path / "model", ones(n, 16), later, name=f"length{n}")
    assert (later.stats.builds, later.stats.hits) == (0, 2)


@pytest.mark.slow
def test_equal_integers_with_other_scales_do_not_meet(tmp_path: Path) -> None:
    """Two int8 models whose weights differ by a factor have equal integers, and other names in the file (K2)."""
    example, names, outputs = inputs(2, 3, 8, 8), [], []
    store = PackedStore(tmp_path / "packed")
    for factor in (1.0, 2.0):
        module = seeded(nets.Small)
        with torch.no_grad():
            module.second.weight.mul_(factor)
        folder = tmp_path / str(factor)
        with quiet():
            exported = torch.export.export(pt2e(module, example, is_per_channel=True), example, strict=True)
        lower_exported(exported, folder)
        found = Running.open(folder, example, store)()
        assert found == Running.open(folder, example)()
        outputs.append(found)
        # the newest file is that of this model
        newest = max(packed_files.files(store.folder), key=lambda path: path.stat().st_mtime_ns)
        names.append({name for name in read(newest).names if name.startswith("second.weight")})
    caches = [BlobCache(tmp_path / one / "model.ptd") for one in ("1.0", "2.0")]
    integers = [{bytes(cache.get_data(key)) for key in cache} for cache in caches]
    assert any(len(one) == 36 for one in integers[0] & integers[1])  # those of the layer
    assert outputs[0] != outputs[1]
    assert names[0] and names[0].isdisjoint(names[1])


class Either(nn.Module):
    """One weight as a linear layer or as a convolution of one pixel."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24, bias=False) if linear else nn.Conv2d(16, 24, 1, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-1, 1, 16 * 24).reshape(self.layer.weight.shape))
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x.flatten(1)) if self.linear else self.layer(x).flatten(1)
        return result


def test_the_same_weight_in_other_operators_does_not_meet(tmp_path: Path) -> None:
    """A linear layer and a convolution with equal bytes (K2)."""
    example, names = inputs(2, 16, 1, 1), []
    for linear in (True, False):
        folder = tmp_path / str(linear)
        lower_through({"forward": (Either(linear).eval(), example)}, folder)
        store = PackedStore(folder / "packed")
        assert Running.open(folder, example, store)() == Running.open(folder, example)()
        assert store.stats.builds == 1
        names.append(read(packed_files.only(store.folder)).names)
    assert names[0].isdisjoint(names[1])


@pytest.mark.parametrize("external", [False, True])
def test_programs_of_the_stock_partitioner(external: bool, tmp_path: Path) -> None:
    """As they were lowered, or deduplicated: hits, and the heap on a cache that was changed (K1)."""
    module = seeded(nets.MLP)
    folder = tmp_path / "made"
    write(lower(module, inputs(2, 16)), folder)
    if external:
        dedup_programs([folder], tmp_path / "slim")
        folder = tmp_path / "slim"
    data = list(folder.glob("*.ptd"))

    def start(packed: PackedStore | None, change: bool = False) -> list[bytes]:
        cache = BlobCache(data)
        if change:
            key = max(cache, key=lambda one: len(cache.get_data(one)))
            cache.update({key: bytes(len(cache.get_data(key)))})
        program = Program(folder / "model.pte", cache, packed=packed)
        return Running(cache, program, program.method(), MLP_INPUT)()

    expected = start(None)
    store = PackedStore(tmp_path / "packed")
    assert start(store) == start(store) == expected
    assert (store.stats.builds, store.stats.hits, store.stats.fallbacks) == (1, 2, 0)
    read(packed_files.only(store.folder))
    later = PackedStore(tmp_path / "packed")
    assert start(later) == expected
    assert (later.stats.builds, later.stats.hits, later.stats.fallbacks) == (0, 1, 0)
    if data:
        changed = start(None, change=True)
        assert start(later, change=True) == changed != expected
        assert (later.stats.builds, later.stats.fallbacks) == (0, 1)


def test_what_is_no_store(mlp: Path, tmp_path: Path) -> None:
    """Wrong kinds are refused where they are given (U1)."""
    for wrong in (3, object(), [tmp_path]):
        with pytest.raises(UnsupportedDataError):
            BlobCache(mlp / "model.ptd", packed=wrong)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedDataError):
            Program(mlp / "model.pte", BlobCache(mlp / "model.ptd"), packed=wrong)  # type: ignore[arg-type]
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(FileAccessError):
        PackedStore(file)
    for limit in (-1, 1.5, "1"):
        with pytest.raises(BlobStoreError):
            PackedStore(tmp_path, limit=limit)  # type: ignore[arg-type]


def test_the_cache_of_a_base_gives_its_store(mlp: Path, tmp_path: Path) -> None:
    """A path is enough; a cache above it, and programs, use that of the base unless they have their own (K1)."""
    base = BlobCache(mlp / "model.ptd", packed=tmp_path / "packed")
    over = BlobCache([], base=base)
    assert base.packed is over.packed is Program(mlp / "model.pte", over).packed
    assert isinstance(base.packed, PackedStore)
    own = PackedStore(tmp_path / "own")
    assert Program(mlp / "model.pte", over, packed=own).packed is own
    assert np.asarray(Program(mlp / "model.pte", over).method()(*MLP_INPUT)).size == 16
    assert base.packed.stats.builds == 1 and own.stats.builds == 0
