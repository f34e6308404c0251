"""LoRA adapters: exchanging one on a delegated model, and two in use at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Row, flush, mib, ratio_row, settle, show, side_by_side
from benchmarks.lowered import in_process, save, save_plain
from blobstore import open_ptd
from blobstore.adapters import AdapterTags, load_adapter, save_adapter
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program

TITLE = "LoRA adapters through XNNPACK"
_LAYERS, _WIDTH, _RANK, _SCALE = 16, 1024, 5, 2.0  # an adapter has 1 % of the weights


def rows(folder: Path) -> Iterator[Row]:
    """Measure everything; `folder` is for files."""
    path = _write(folder)
    yield from _exchange(folder, path)
    yield from _two(folder)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(_WIDTH, _WIDTH)
        self.lora_a = nn.Linear(_WIDTH, _RANK, bias=False)
        self.lora_b = nn.Linear(_RANK, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + _SCALE * self.lora_b(self.lora_a(x))  # type: ignore[no-any-return]


def _write(folder: Path) -> Path:
    """Write the program with `foundation.ptd` and `adapter.ptd`; adapters `0.ptd` and `1.ptd`, and in the layout of the
    program `stored0.ptd` and `stored1.ptd`; and in `plain` the program of ExecuTorch alone."""
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        from blobstore.lowering import BlobStorePartitioner
    torch.manual_seed(0)
    module, tags = nn.Sequential(*(_Layer() for _ in range(_LAYERS))).eval(), AdapterTags()
    manager = lower(
        {"forward": (module, (torch.randn(1, _WIDTH),))},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag=tags)],
        external_constants=tags,
    )
    path = save(manager, folder)
    for number in range(2):
        tensors = {name: torch.randn_like(t) for name, t in module.state_dict().items() if "lora" in name}
        save_adapter(folder / f"{number}.ptd", tensors, foundation=folder / "foundation.ptd", scale=_SCALE)
        with BlobCache(folder / "adapter.ptd", base=BlobCache(folder / "foundation.ptd")) as cache:
            load_adapter(cache, folder / f"{number}.ptd")
            cache.save(folder / f"stored{number}.ptd")
    # one file for foundation and adapter, because ExecuTorch's Python runtime loads only one
    save_plain(module, (torch.randn(1, _WIDTH),), folder / "plain")
    return path


def _exchange(folder: Path, path: Path) -> Iterator[Row]:
    with quiet():
        from executorch.exir._serialize._named_data_store import NamedDataStore
        from executorch.exir._serialize.data_serializer import DataPayload
        from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer
        from executorch.runtime import Runtime
    x = torch.randn(1, _WIDTH)
    cache = BlobCache(folder / "adapter.ptd", base=BlobCache(folder / "foundation.ptd"))
    method = Program(path, cache).method()
    turn = iter(range(10**6))

    def load_one() -> int:
        return load_adapter(cache, folder / f"{next(turn) % 2}.ptd")

    def exchange() -> object:
        load_one()
        return method(x)

    def load() -> tuple[Any, Any]:
        program = Runtime.get().load_program(folder / "plain" / "model.pte", data_path=folder / "plain" / "model.ptd")
        return program, program.load_method("forward")

    def reload() -> object:
        program, loaded = load()
        return loaded.execute([x]), program

    def merge() -> object:
        store = NamedDataStore()
        for key, data in open_ptd(folder / "plain" / "model.ptd").views():
            store.add_named_data(key, bytes(data), alignment=16, external_tag="model")
        out = store.get_named_data_store_output()
        with (folder / "new.ptd").open("wb") as file:
            FlatTensorSerializer().serialize(DataPayload(out.buffers, out.external_data["model"])).write_to_file(file)
        return None

    fast, slow = side_by_side(exchange, reload, rounds=31, before=settle)
    write, _ = side_by_side(merge, lambda: None, rounds=5, before=flush)
    row = ratio_row(
        "exchange an adapter of 1 % and run, against writing it and its foundation to one .ptd, loading and running",
        fast,
        write + slow,
        at_least=10,
    )
    yield replace(row, figure=f"{row.figure}; {slow / fast:.1f} x as fast as loading and running alone ({show(slow)})")
    exchanged, loaded = side_by_side(load_one, lambda: load()[1], rounds=31, before=settle)
    yield ratio_row(
        "  exchange alone, against loading alone with a .ptd that is written already", exchanged, loaded, at_least=10
    )


_TWO = """
import json, sys, torch
from benchmarks.harness import status
from blobstore.adapters import load_adapter
from blobstore.runtime import BlobCache, Program
folder, how, x = sys.argv[1], sys.argv[2], torch.randn(1, 1024)
base = BlobCache(folder + "/foundation.ptd")

def use(number):
    cache = BlobCache(f"{folder}/stored{number if how == 'mapped' else 0}.ptd", base=base)
    if how == "loaded":
        load_adapter(cache, f"{folder}/{number}.ptd")
    method = Program(folder + "/model.pte", cache).method()
    method(x)
    return cache, method

first, before = use(0), status("RssAnon")
second, after = use(1), status("RssAnon")
print(json.dumps(after - before))
"""

_PACK = """
import json, sys, torch
from benchmarks.harness import status
from blobstore.runtime import Program
x, grown, used = torch.randn(1, 1024), [], []
for layers in (16, 16, 64):
    program = Program(f"{sys.argv[1]}/only{layers}/model.pte")
    before = status("RssAnon")
    used.append(program.method())
    used[-1](x)
    grown.append(status("RssAnon") - before)
print(json.dumps((grown[2] - grown[1]) // 3))
"""


def _two(folder: Path) -> Iterator[Row]:
    for layers in (_LAYERS, 4 * _LAYERS):
        pairs = [(nn.Linear(_WIDTH, _RANK, bias=False), nn.Linear(_RANK, _WIDTH, bias=False)) for _ in range(layers)]
        only = nn.Sequential(*(layer for pair in pairs for layer in pair)).eval()
        save(lower({"forward": (only, (torch.randn(1, _WIDTH),))}), folder / f"only{layers}")
    packed = median(in_process(_PACK, str(folder)) for _ in range(3))
    own = sum(data.nbytes for _, data in open_ptd(folder / "0.ptd").views())
    for how, what in (("mapped", "each in a file of its own"), ("loaded", "each loaded into a cache")):
        used = median(in_process(_TWO, str(folder), how) for _ in range(3))
        yield Row(
            f"two adapters in use, {what}: anonymous memory beyond one",
            f"{used / (own + packed):.2f} x the adapter and its packed form ({mib(own, 2)} + {mib(packed, 2)})",
            "at most 1.2 x",
            used <= 1.2 * (own + packed),
        )
