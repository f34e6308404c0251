"""Programs that others lowered with the stock partitioner, as they lie in a folder: two input sizes of a convolutional
network and of a transformer with tied embeddings, float and quantized. Dedup, report and live weights (B1, W1, K4)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blobstore import dedup_programs, report, safe_open
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache, Program
from blobstore.torch import save_file
from tests.lowering.live import lower_exported, seeded
from tests.lowering.test_quantized import pt2e

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

pytestmark = pytest.mark.long


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1)
        self.skip = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.norm(self.first(x)))) + self.skip(x))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), Residual(8, 16, 1), Residual(16, 32, 2))
        self.head = nn.Linear(32, 10)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


class Language(nn.Module):
    def __init__(self, width: int = 32, words: int = 200) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(64, width) * 0.02)
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.heads = nn.LayerNorm(width), 2
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.words.weight  # tied

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        batch, length, width = x.shape
        q, k, v = (
            part.reshape(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        x = x + self.joined(attended.transpose(1, 2).reshape(batch, length, width))
        return self.out(x + self.down(nn.functional.gelu(self.up(x))))


def pixels(side: int) -> Tensor:
    return torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(side))


def tokens(length: int) -> Tensor:
    return torch.randint(0, 200, (1, length), generator=torch.Generator().manual_seed(length))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "vision": (Vision, {"vision-32": pixels(32), "vision-48": pixels(48), "vision-32-int8": pixels(32)}),
    "language": (Language, {"language-8": tokens(8), "language-16": tokens(16)}),
}
family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each family a folder of its programs, and its checkpoint beside it."""
    folder = tmp_path_factory.mktemp("old")
    for name, (make, examples) in FAMILIES.items():
        model = seeded(make)
        # as checkpoints have it: a tied weight under its first name
        save_file(
            {key: value for key, value in model.state_dict().items() if key != "out.weight"}, folder / f"{name}.ptd"
        )
        for program, example in examples.items():
            module = pt2e(model, (example,), names=False) if program.endswith("int8") else model
            with quiet():
                exported = torch.export.export(module, (example,), strict=True)
            written = lower_exported(exported, folder / "written", lambda: [XnnpackPartitioner()])
            (folder / name).mkdir(exist_ok=True)
            written.rename(folder / name / f"{program}.pte")
    return folder


@pytest.mark.long_for("vision")
@family
def test_outputs_stay_as_they_are_on_both_runtimes(family: str, old: Path, tmp_path: Path, stock_run: Any) -> None:
    """Bit for bit, and ExecuTorch's own runtime needs nothing of ours."""
    result = dedup_programs(old / family, tmp_path, names=old / f"{family}.ptd")
    assert [path.name for path in result.data_files] == ["shared.ptd"]
    cache = BlobCache(tmp_path / "shared.ptd")
    for name, example in FAMILIES[family][1].items():
        [expected] = stock_run(old / family / f"{name}.pte", (example,))
        [slim] = stock_run(tmp_path / f"{name}.pte", (example,), tmp_path / "shared.ptd")
        own = Program(tmp_path / f"{name}.pte", cache).method()(example)
        assert torch.equal(slim, expected) and torch.equal(own, expected)


@family
def test_the_report_says_what_dedup_saves(family: str, old: Path, tmp_path: Path) -> None:
    """To a percent: programs and the data file have tables, too."""
    found = report(old / family)
    result = dedup_programs(old / family, tmp_path)
    saved = result.bytes_before - result.bytes_after
    assert saved > result.bytes_before / 3
    assert found.command_saves == pytest.approx(saved, abs=result.bytes_before / 20)
    assert report(tmp_path).command_saves == 0


def test_a_second_input_size_costs_no_weights(old: Path, tmp_path: Path) -> None:
    """It is added to the folder later, and the data file stays as it is (D1)."""
    dedup_programs(old / "vision" / "vision-32.pte", tmp_path)
    before = (tmp_path / "shared.ptd").read_bytes()
    dedup_programs(old / "vision" / "vision-48.pte", tmp_path)
    assert (tmp_path / "shared.ptd").read_bytes() == before


def test_tied_embeddings_have_their_name_and_are_there_once(old: Path, tmp_path: Path) -> None:
    dedup_programs(old / "language", tmp_path, names=old / "language.ptd")
    with safe_open(old / "language.ptd", "np") as checkpoint:
        embedding = checkpoint.get_tensor("words.weight")
    with safe_open(tmp_path / "shared.ptd", "np") as data:
        assert np.array_equal(data.get_tensor("words.weight"), embedding)
    assert (tmp_path / "shared.ptd").read_bytes().count(embedding.tobytes()) == 1
