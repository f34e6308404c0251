"""The fuzzed functions of adapters: our files, exchanged and merged, and PEFT's files."""

import contextlib
import functools
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from blobstore import adapters, save_file
from blobstore.core.errors import BlobStoreError, InvalidFileError
from blobstore.runtime import BlobCache
from campaigns.fuzz.answers import MemoryFile, insist, temporary_folder

WEIGHTS = {"m.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "n.weight": np.ones((2, 2), np.float32)}
"""Those of the foundation."""


def halves(factor: float) -> dict[str, Any]:
    """An adapter of one module."""
    return {"m.lora_a.weight": np.full((1, 3), factor, np.float32), "m.lora_b.weight": np.ones((2, 1), np.float32)}


@functools.cache
def foundation() -> tuple[Any, Path, Path]:
    """The files of a foundation, and of the adapter that programs were lowered with."""
    folder = temporary_folder()
    base, own = Path(folder.name, "foundation.ptd"), Path(folder.name, "own.ptd")
    save_file(WEIGHTS, base)
    adapters.save_adapter(own, halves(2), foundation=base, scale=0.5)
    return folder, base, own


def adapter(data: bytes) -> None:
    """An adapter's file: it is exchanged and merged as a whole, or not at all, and both can be undone."""
    _, base, own = foundation()
    with MemoryFile(data, ".ptd") as path:
        plain, lora = BlobCache(base), BlobCache(own, base=BlobCache(base))
        before = _bits(plain), _bits(lora)
        with contextlib.suppress(BlobStoreError):
            merged = adapters.merge_adapter(plain, path)
            merged.undo()
        insist(_bits(plain) == before[0], "a merge that was undone, or refused, left other weights")
        try:
            adapters.load_adapter(lora, path)
        except BlobStoreError:
            insist(_bits(lora) == before[1], "an adapter that was refused was loaded in part")
        else:
            loaded = _bits(lora)
            adapters.set_adapter_strength(lora, 0)
            adapters.set_adapter_strength(lora, 1)
            insist(_bits(lora) == loaded, "the full strength is not what was loaded")
        adapters.inspect_adapters(base, path)
        found = adapters.read_adapter(path)
        for name in found.tensors:
            found.value(name)
        found.check()


def _bits(cache: BlobCache) -> dict[str, bytes]:
    return {key: bytes(data) for key, data in cache.views()}


def peft(data: bytes) -> None:
    """PEFT's files: the configuration, and the dtypes and shapes of the tensors, all of which are zeros."""
    try:
        given = json.loads(data)
        tensors = {str(key): (one[0], one[1]) for key, one in given["tensors"].items()}
        config = json.dumps(given["config"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise InvalidFileError("fuzz", "this is no input of this target") from None
    header: dict[str, Any] = {}
    end = 0
    for key, (dtype, shape) in tensors.items():
        width = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8}.get(str(dtype), 1)
        sizes = [size for size in shape if type(size) is int and 0 <= size < 1 << 16] if isinstance(shape, list) else []
        nbytes = min(width * math.prod(sizes), 1 << 20)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    _, base, own = foundation()
    with temporary_folder() as name:
        folder = Path(name)
        (folder / "adapter_config.json").write_text(config)
        (folder / "adapter_model.safetensors").write_bytes(
            struct.pack("<Q", len(text)) + text + bytes(min(end, 1 << 23))
        )
        for number, like in enumerate((None, own)):
            target = folder / f"{number}.ptd"
            try:
                adapters.import_peft(folder, target, foundation=base, like=like)
            except BlobStoreError:
                insist(not target.exists(), "a file that was refused was written")
                if like is not None:
                    raise
            else:
                adapters.read_adapter(target).check()
