"""ExecuTorch's libraries: a process has each once, those of executorch if it is installed, else those of the wheel (N4)."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from blobstore import save_programs
from blobstore.lowering import lower

pytestmark = pytest.mark.long

LIBRARIES = {
    "libexecutorch.so",
    "libexecutorch_threadpool.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_kernels_quantized.so",
    "libexecutorch_backend_xnnpack.so",
}
# Run the program, and print its output and the paths of ExecuTorch's libraries that are mapped. `None` hides executorch.
HIDE = "import sys; sys.modules['executorch'] = None"
SHOW = "del sys.modules['executorch']"
STOCK = "import executorch.runtime; executorch.runtime.Runtime.get()"
RUN = """
import json, re
import numpy as np
from blobstore.runtime import BlobCache, Program
output = np.asarray(Program("model.pte", BlobCache("model.ptd")).method()(np.ones((1, 8), np.float32)))
"""
PRINT = """
paths = set(re.findall(r"/.*/libexecutorch[^/]*[.]so$", open("/proc/self/maps").read(), re.MULTILINE))
print(json.dumps([output.tolist(), sorted(paths)]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    folder, module = tmp_path_factory.mktemp("program"), torch.nn.Linear(8, 2).eval()
    save_programs({"model": lower(module, (torch.ones(1, 8),), tag="model")}, folder)
    return folder, module


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], "lib").resolve()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "lines"),
    [
        ("blobstore_runtime", [HIDE, RUN]),
        ("blobstore_runtime", [HIDE, RUN, SHOW, STOCK]),  # it was installed while the process ran
        ("executorch", [RUN]),
        ("executorch", [RUN, STOCK]),
        ("executorch", [STOCK, RUN]),
    ],
    ids=["not installed", "installed later", "installed", "imported later", "imported first"],
)
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_each_library_is_there_once(model: tuple[Path, torch.nn.Module], package: str, lines: list[str]) -> None:
    folder, module = model
    code = "\n".join([*lines, PRINT])
    run = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    output, paths = json.loads(done.stdout)
    np.testing.assert_allclose(output, module(torch.ones(1, 8)).detach().numpy(), rtol=1e-6)
    found = [Path(path) for path in paths]
    names = [path.name for path in found]
    assert len(names) == len(set(names)) and set(names) >= LIBRARIES
    assert {path.parent.resolve() for path in found if path.name in LIBRARIES} == {folder_of(package)}
