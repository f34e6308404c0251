"""ExecuTorch's own Module on a cache, in C++: what docs/cpp.md says that follows a commit, and what does not (N1, B3)."""

import copy
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import blobstore
from blobstore.adapters import AdapterTags, save_adapter
from blobstore.lowering.export import lower, quiet
from tests.runtime.application import ROOT, build

pytestmark = pytest.mark.long

X = torch.tensor([[1.0, -2, 3, -4, 5, -6, 7, -8]])
MAPPED = ("Mmap", "MmapUseMlock", "MmapUseMlockIgnoreErrors", "MmapUseMadvise")


class Net(nn.Module):
    """A normalization, which no delegate takes, and a linear layer with an adapter, which XNNPACK does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.base = nn.Linear(8, 4)
        self.lora_a = nn.Linear(8, 2, bias=False)
        self.lora_b = nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        result: Tensor = self.base(y) + self.lora_b(self.lora_a(y))
        return result

    def output(self) -> np.ndarray:
        with torch.no_grad():
            return self(X)[0].numpy()


def seeded(seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net().eval()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return net


def mixed(foundation: Net, adapter: Net) -> Net:
    """The foundation of one network with the adapter of another one."""
    net = copy.deepcopy(foundation)
    net.load_state_dict({name: value for name, value in adapter.state_dict().items() if "lora_" in name}, strict=False)
    return net


def off(net: Net) -> Net:
    """Without the adapter."""
    net = copy.deepcopy(net)
    nn.init.zeros_(net.lora_b.weight)
    return net


NET, OTHER, TUNED = (seeded(seed) for seed in range(3))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the application takes."""
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        from blobstore.lowering import BlobStorePartitioner
    folder = tmp_path_factory.mktemp("module")
    for net, place in ((NET, folder), (TUNED, folder / "tuned"), (NET, folder / "embedded")):
        tags = AdapterTags()
        lowered = lower(
            {"forward": (net, (X,))},
            partitioners=lambda tags=tags: [BlobStorePartitioner(XnnpackPartitioner(), tag=tags)],
            external_constants=None if place.name == "embedded" else tags,
        )
        place.mkdir(exist_ok=True)
        blobstore.save_programs({"serve": lowered}, place, keep_small=1 << 20 if place.name == "embedded" else 0)
    blobstore.save_programs({"stock": lower(NET, (X,), external_constants=lambda _: "stock")}, folder)
    state = TUNED.state_dict()
    save_file({name: value for name, value in state.items() if "lora_" not in name}, folder / "fine_tune.safetensors")
    for name, net, foundation in (("other", OTHER, folder), ("of_tuned", TUNED, folder / "tuned")):
        tensors = {key: value for key, value in net.state_dict().items() if "lora_" in key}
        save_adapter(folder / f"{name}.ptd", tensors, foundation=foundation / "foundation.ptd", scale=1)
    for name in ("fine_tune.safetensors", "of_tuned.ptd"):
        shutil.copy(folder / name, folder / "embedded")
    return folder


@pytest.fixture(scope="module")
def application() -> Path:
    return build(ROOT / "tests" / "runtime" / "module", "module_on_cache")


def steps(application: Path, *arguments: object) -> list[str]:
    """What the application prints."""
    command = [str(part) for part in (application, *arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def same(line: str, net: Net) -> bool:
    return np.allclose([float(number) for number in line.split()], net.output(), atol=1e-4)


def test_the_networks_differ() -> None:
    """Otherwise nothing below says anything."""
    nets = [NET, OTHER, TUNED, mixed(NET, OTHER), off(NET), mixed(NET, TUNED)]
    outputs = [net.output() for net in nets]
    assert all(not np.allclose(a, b, atol=1e-2) for i, a in enumerate(outputs) for b in outputs[:i])


def test_without_a_scope_nothing_follows(application: Path, files: Path) -> None:
    before, *lines = steps(application, "without_a_scope", files)
    assert before == "done" and lines[1] == "done" and all(same(line, NET) for line in (lines[0], lines[2]))


@pytest.mark.parametrize("step", ["scope_of_the_program", "scope_of_another_thread"])
def test_a_scope_that_does_not_load_the_method_has_no_effect(application: Path, files: Path, step: str) -> None:
    """It counts where a method is loaded, and for its own thread."""
    assert all(same(line, NET) for line in steps(application, step, files)[-2:])


def test_delegates_follow_a_cache_on_a_base(application: Path, files: Path) -> None:
    """Adapters are exchanged, turned off and reverted; what is outside of delegates cannot follow, and is refused (D2, U1)."""
    loaded, one, other, without, back, refused, still, served, gone = steps(application, "adapters", files)
    assert loaded == "done"
    assert same(one, NET) and same(other, mixed(NET, OTHER)) and same(without, off(NET)) and same(back, NET)
    assert "norm.weight" in refused and "LoadMode::Mmap" in refused and same(still, NET)
    assert int(served.split()[0]) > 0 and gone == "0 served"


@pytest.mark.parametrize("mode", MAPPED)
def test_all_weights_follow_a_working_copy_that_the_module_maps(
    application: Path, files: Path, tmp_path: Path, mode: str
) -> None:
    """A fine-tune and its adapter come in one commit, and the old ones with another one (U1, D2)."""
    folder = shutil.copytree(files, tmp_path / "files")
    loaded, before, committed, after, restored, again = steps(application, "load_mode", folder, mode)
    assert (loaded, committed, restored) == ("done",) * 3
    assert same(before, NET) and same(after, TUNED) and same(again, NET)


def test_a_module_that_reads_its_file_does_not_follow(application: Path, files: Path, tmp_path: Path) -> None:
    """`LoadMode::File`, the default. The update is refused as a whole; only `load_all` does what it can (B3)."""
    folder = shutil.copytree(files, tmp_path / "files")
    loaded, before, refused, after, _, again = steps(application, "load_mode", folder, "File")
    assert loaded == "done" and refused.startswith("refused: ") and "LoadMode::Mmap" in refused
    assert all(same(line, NET) for line in (before, after, again))


def test_constants_inside_the_program_are_refused(application: Path, files: Path, tmp_path: Path) -> None:
    """The normalization is in the program, so a fine-tune would reach only a part (B3)."""
    folder = shutil.copytree(files / "embedded", tmp_path / "files")
    loaded, before, refused, after, *_ = steps(application, "load_mode", folder, "Mmap")
    assert loaded == "done" and refused.startswith("refused: ") and "serve.pte" in refused
    assert same(before, NET) and same(after, NET)


def test_delegates_of_another_partitioner_do_not_follow(application: Path, files: Path, tmp_path: Path) -> None:
    """They are unknown, so the commit happens; only what is outside of them follows the working copy."""
    folder = shutil.copytree(files, tmp_path / "files")
    loaded, before, served, committed, after = steps(application, "another_partitioner", folder)
    assert (loaded, served, committed) == ("done", "0 served", "done") and same(before, NET)
    expected = copy.deepcopy(NET)  # the normalization changed, which no delegate has
    nn.init.constant_(expected.norm.weight, 2)
    nn.init.constant_(expected.norm.bias, 2)
    assert same(after, expected)
