"""A day with blobstore, as a user of types writes it; `test_types.py` runs it, and looks at the type of all it gets."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

import blobstore
import blobstore.numpy
import blobstore.torch
from blobstore import BlobStore, ScalarType, TensorLayout, dedup_programs, fuse_programs, open_any, open_ptd, open_pte
from blobstore.adapters import inspect_adapters, load_adapter, merge_adapter, read_adapter, save_adapter
from blobstore.errors import BlobStoreError, KeyNotFoundError
from blobstore.lowering import lower
from blobstore.releases import Release, gc, publish, pull
from blobstore.runtime import BlobCache, PackedStore, Program, delegate_stats, make_working_copy, serving
from blobstore.training import TrainingProgram, lower_training


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second.forward(torch.relu(self.first.forward(x)))


class Loss(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def files(at: Path) -> None:
    layer = np.ones((4, 8), np.float32)
    blobstore.save_file({"a": layer, "b": layer, "raw": b"bytes"}, at / "a.ptd", {"made by": "hand"})
    blobstore.torch.save_file({"a": torch.ones(4, 8)}, at / "b.ptd")
    with open_ptd(at / "a.ptd", verify=True) as data:
        for key in data:
            tensor, layout, digest, raw = data[key], data.get_tensor_layout(key), data.digest(key), data.bytes(key)
            print(key, tensor.shape, layout, digest.nbytes, len(raw), data.alignment(key))
        array, maybe, default = data.numpy("a"), data.get("typo"), data.get("typo", layer)
        print(array.shape, maybe is None, default is layer, data.torch("a").sum(), data.metadata, len(data))
    everything, arrays = blobstore.load_file(at / "a.ptd"), blobstore.load_file(at / "a.ptd", "np")
    tensors, more = blobstore.torch.load_file(at / "b.ptd"), blobstore.numpy.load_file(at / "b.ptd")
    print(list(everything), arrays["a"] * 2, tensors["a"] @ torch.ones(8), more["a"].T)
    with blobstore.safe_open(at / "b.ptd", "pt") as file:
        whole, part, shape = file.get_tensor("a"), file.get_slice("a")[0:2], file.get_slice("a").get_shape()
        print(whole.dtype, part, shape, file.metadata(), file.keys())
    store = BlobStore()
    address = store.add("half", b"\0\0" * 3, layout=TensorLayout(ScalarType.HALF, (3,)), alignment=64)
    size, stats, some = store.write_ptd(at / "c.ptd"), store.stats, open_any(at / "c.ptd")
    print(address, size, stats.saved_bytes, some.get_num_keys(), some.get_key(0))
    try:
        open_ptd(at / "a.ptd").bytes("typo")
    except KeyNotFoundError as error:
        print(error)
    except BlobStoreError as other:
        raise SystemExit(1) from other


def programs(at: Path, x: torch.Tensor) -> None:
    model = Net().eval()
    program, plain = lower(model, (x,), tag="net"), lower({"forward": (model, (x,))})
    saved = blobstore.save_programs({"net": program}, at / "live")
    with (at / "plain.pte").open("wb") as out:
        plain.write_to_file(out)
    slim = dedup_programs(at / "plain.pte", at / "slim")
    fused = fuse_programs([at / "live/net.pte", *saved.data_files], at / "one.pte")
    report, first = blobstore.report([at]), slim.programs[0]
    print(
        saved.bytes_after,
        first.moved,
        fused.shared,
        report.total_saves,
        [finding.command for finding in report.findings],
    )
    with open_pte(at / "plain.pte") as weights:
        print(sorted(weights), weights.program.methods)
    packed = PackedStore(at / "packed")
    with BlobCache(at / "live/net.ptd", packed=packed) as cache:
        method = Program(at / "live/net.pte", cache).method()
        one, several, named, of_arrays = (
            method(x),
            method.execute(x),
            method(x=x),
            method.execute(np.ones((1, 8), np.float32)),
        )
        print(one.argmax(1), several[0], named.sum(), of_arrays, method.inputs[0].layout, method.name)
        generation = cache.update({"first.bias": torch.zeros(4)}) + cache.update_state_dict(
            dict(model.named_parameters())
        )
        bias, value, kinds = cache["first.bias"], cache.numpy(next(iter(cache))), cache.tensors["first.weight"]
        print(generation, bias.shape, value.dtype, kinds.sizes, cache.dirty, cache.stats.commits, packed.stats.hits)
        with cache.transaction() as transaction:
            transaction["first.bias"] = np.ones(4, np.float32)
        print(cache.revert(), cache.save(at / "delta.ptd", dirty_only=True), cache.files[0].has_digests)
        with serving(cache):
            print(delegate_stats().handles)
    copied = make_working_copy(at / "live/net.ptd", at / "working.ptd")
    shared = BlobCache(at / "working.ptd", "shared")
    print(copied, shared.generation, shared.version(next(iter(shared))))


def training(at: Path, x: torch.Tensor) -> None:
    joint = lower_training(Loss(), (x,), tag="joint")
    blobstore.save_programs({"joint": joint}, at / "train")
    trained = TrainingProgram(at / "train/joint.pte", BlobCache(at / "train/joint.ptd"))
    parameters, gradients = trained.named_parameters(), trained.named_gradients()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    loss, *rest = trained.step(optimizer, x)
    print(loss.item() > 0, rest, trained.publish(), trained.save(at / "checkpoint.ptd", optimizer), len(gradients))


def adapters(at: Path) -> None:
    pair = {"first.lora_a.weight": torch.ones(2, 8), "first.lora_b.weight": torch.ones(4, 2)}
    written = save_adapter(at / "lora.ptd", pair, foundation=at / "live/net.ptd", scale=0.5)
    adapter, info = read_adapter(at / "lora.ptd"), inspect_adapters(at / "live/net.ptd", at / "lora.ptd")
    factors, (values, kind), reason = adapter.tensors, adapter.value("first.lora_a.weight"), info.adapters[0].problems
    merged = merge_adapter(BlobCache(at / "live/net.ptd"), at / "lora.ptd")
    print(
        written, adapter.pairs[0].rank, list(factors), values, kind, reason, merged.weights, merged.undo(), load_adapter
    )


def releases(at: Path) -> None:
    published = publish([at / "live"], at / "releases", name="net", version="1")
    pulled, collected = pull(published.path, at / "device"), gc(at / "device")
    with Release.open(at / "device") as release:
        followed, running = release.follow(), release.cache
        print(published.sha256, pulled.fetched_bytes, collected.files, followed.taken, list(running))


if __name__ == "__main__":
    place, example = Path(sys.argv[1]), torch.ones(1, 8)
    files(place)
    programs(place, example)
    training(place, example)
    adapters(place)
    releases(place)
