"""A packed store on an ExecuTorch that cannot keep packed weights in files (K1, B3)."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blobstore.lowering.export import lower
from tests.helpers import native_build
from tests.lowering import nets
from tests.lowering.live import close, lower_through, seeded, write

pytestmark = pytest.mark.long

X = torch.ones(2, 16)
# Loads the program twice, updates and reverts; prints the outputs and what the store counted
RUN = """
import json, sys
import numpy as np
from blobstore.runtime import BlobCache, PackedStore, Program
program, data, folder, follows = sys.argv[1:]
store = PackedStore(folder)
cache = BlobCache(data, packed=store)
x = np.ones((2, 16), np.float32)
forward = Program(program, cache).method()
outputs = [np.asarray(forward(x))]
if follows == "follows":
    cache.update({"layers.0.weight": np.zeros((24, 16), np.float32)})
    outputs.append(np.asarray(forward(x)))
    cache.revert()
again = Program(program, cache).method()
outputs.append(np.asarray(again(x)))
stats = store.stats
print(json.dumps([[each.tolist() for each in outputs], stats.hits, stats.fallbacks, list(stats.reasons)]))
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What makes this ExecuTorch an older one."""
    native_build.need()
    spec = importlib.util.find_spec("executorch")
    assert spec and spec.submodule_search_locations
    executorch = Path(next(iter(spec.submodule_search_locations)))
    include, libraries = executorch / "include", executorch / "lib"
    library = tmp_path_factory.mktemp("older") / "older_executorch.so"
    native_build.run(
        *(os.environ.get("CXX", "c++"), "-std=c++17", "-shared", "-fPIC", "-DC10_USING_CUSTOM_GENERATED_MACROS"),
        *(f"-I{include}", f"-I{include}/executorch/runtime/core/portable_type/c10"),
        *(Path(__file__).with_name("older_executorch.cpp"), "-o", library),
        *(f"-L{libraries}", "-lexecutorch", f"-Wl,-rpath,{libraries}"),
    )
    return library


@pytest.mark.parametrize("partitioner", ["blobstore", "stock"])
def test_weights_are_packed_on_the_heap_with_one_warning(older: Path, partitioner: str, tmp_path: Path) -> None:
    """Programs load, updates follow, and neither the counts nor the log say otherwise."""
    module = seeded(nets.MLP)
    if partitioner == "blobstore":
        path = lower_through({"forward": (module, (X,))}, tmp_path)
    else:
        path = write(lower(module, (X,), external_constants=lambda _: "model"), tmp_path)
    with torch.no_grad():
        expected = [module(X)]
        if partitioner == "blobstore":
            module.layers[0].weight.zero_()
            expected.append(module(X))
        expected.append(expected[0])
    follows = "follows" if partitioner == "blobstore" else "stays"
    done = subprocess.run(
        [sys.executable, "-c", RUN, path, path.with_name("model.ptd"), tmp_path / "packed", follows],
        env={**os.environ, "LD_PRELOAD": str(older)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    outputs, hits, fallbacks, reasons = json.loads(done.stdout.splitlines()[-1])
    assert len(outputs) == len(expected)
    for found, wanted in zip(outputs, expected, strict=True):
        close(torch.tensor(found), wanted)
    assert (hits, fallbacks) == (0, 2) and len(reasons) == 1 and "keeps no packed weights in files" in str(reasons[0])
    assert done.stderr.count("keeps no packed weights in files") == 1
