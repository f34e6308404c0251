"""The files that the C++ tests take: `python -m runtime_bindings.tests.inputs FOLDER ...` writes them into each folder.

A test may change its files, so each test has a folder of its own.
"""

from __future__ import annotations

import shutil
import struct
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file as save_safetensors

from blobstore import BlobStore, save_file
from blobstore.adapters import save_adapter
from blobstore.core.formats.payload import Constant, find_places, wrap
from blobstore.runtime import make_working_copy
from tests.helpers.bombs import payload_bomb
from tests.logical import native_tensors
from tests.runtime import native_programs


def main(folders: list[Path]) -> None:
    first, *others = folders
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    first.mkdir(parents=True)
    write_tensors(first)
    write_delegates(first / "delegates")
    write_adapters(first / "adapters")
    native_programs.write(first / "programs")
    native_programs.write_quantized(first / "quantized")
    native_tensors.write(first / "tensors.ptd")
    native_tensors.write_shapes(first / "shapes.ptd")
    for folder in others:
        shutil.copytree(first, folder)


def write_tensors(folder: Path) -> None:
    """plain.ptd, and copy.ptd, a working copy of it; "opaque" is not a tensor in them."""
    tensors = {"a": np.zeros(60_000, np.float32), "b": np.ones(60_000, np.float32)}
    tensors["tied"] = tensors["a"].copy()
    store = BlobStore()
    for key, array in tensors.items():
        store.add(key, array)
    store.add("opaque", bytes(range(100)))
    store.write_ptd(folder / "plain.ptd")
    make_working_copy(folder / "plain.ptd", folder / "copy.ptd")


def write_adapters(folder: Path) -> None:
    """A foundation, the file of a program's adapter, and two adapters; a fine-tune with an adapter of its own; and a folder
    of PEFT with rank 1."""
    folder.mkdir()
    save_file({"m.weight": np.arange(35, dtype=np.float32).reshape(7, 5)}, folder / "foundation.ptd")
    shapes = {"m.lora_a": (2, 5), "m.lora_b": (7, 2)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "adapter.ptd")
    for number in (1, 2):
        tensors = {name: np.full(shape, number, np.float32) for name, shape in shapes.items()}
        save_adapter(folder / f"{number}.ptd", tensors, foundation=folder / "foundation.ptd", scale=1)
    save_file({"m.weight": np.full((7, 5), 9, np.float32)}, folder / "tuned.ptd")
    save_adapter(folder / "of_tuned.ptd", tensors, foundation=folder / "tuned.ptd", scale=1)
    peft = folder / "peft"
    peft.mkdir()
    (peft / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 0.5}')
    halves = {"A": np.full((1, 5), 3, np.float32), "B": np.full((7, 1), 4, np.float32)}
    named = {f"base_model.model.m.lora_{half}.weight": tensor for half, tensor in halves.items()}
    save_safetensors(named, peft / "adapter_model.safetensors")


def write_delegates(folder: Path) -> None:
    """Weights, and payloads for an inner backend that reads a list of keys."""
    folder.mkdir()
    mark = "@0123456789abcdef"
    ones = np.ones(3000, np.float32)
    save_file({f"packed{mark}": ones, f"kept{mark}": ones}, folder / "base.ptd")
    save_file({f"own{mark}": ones}, folder / "adapter.ptd")
    make_working_copy(folder / "base.ptd", folder / "copy.ptd")
    for name, own in (("base", False), ("both", True)):
        kinds = {f"packed{mark}": True, f"kept{mark}": False} | ({f"own{mark}": True} if own else {})
        inner = b"".join(
            struct.pack("<I", len(key)) + key.encode() + b"\0" + (b"p" if packed else b"k")
            for key, packed in kinds.items()
        )
        constants = [
            Constant(key, ones.nbytes, number, find_places(inner, key), packed, packing=b"one way")
            for number, (key, packed) in enumerate(kinds.items())
        ]
        (folder / f"{name}.payload").write_bytes(wrap(inner, "ToyBackend", constants))
    key = f"packed{mark}"
    inner = 2 * (struct.pack("<I", len(key)) + key.encode() + b"\0p")
    ways = zip(find_places(inner, key), (b"one way", b"another"), strict=True)
    constants = [
        Constant(key, ones.nbytes, n, (place,), packed=True, packing=way) for n, (place, way) in enumerate(ways)
    ]
    (folder / "ways.payload").write_bytes(wrap(inner, "ToyBackend", constants))
    inside = b"head" + ones.tobytes() + b"between " + ones.tobytes() + b"tail"
    hole = Constant(f"packed{mark}", ones.nbytes, 0, (), packed=True, holes=(4, ones.nbytes + 12))
    (folder / "holes.payload").write_bytes(wrap(inside, "InsideBackend", [hole]))
    (folder / "costly.payload").write_bytes(payload_bomb(40_000))


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
