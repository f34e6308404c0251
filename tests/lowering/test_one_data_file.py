"""A model whose weights are tagged for one file has one data file, whatever small constants are in it (D1, U1)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blobstore import save_programs
from blobstore.lowering import BlobStorePartitioner, lower, quiet
from blobstore.runtime import BlobCache, Program
from tests.lowering.live import seeded

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

pytestmark = pytest.mark.long


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)


class Divided(Base):
    """Attention leaves the scalar 8 among the constants of the program."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.softmax(x @ x.transpose(-1, -2) / 8, -1) @ x)


class Positions(Base):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.positions[: x.shape[1]])


class Numbered(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.embedding(torch.arange(x.shape[1])))


INPUT = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))


def lowered(module: nn.Module, tag: str = "model") -> Any:
    return lower(
        {"forward": (module, (INPUT,))},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag=tag)],
        external_constants=lambda node: tag,
    )


@pytest.mark.parametrize("written_out", [True, False])
@pytest.mark.parametrize("make", [Divided, Positions, Numbered])
def test_all_constants_are_in_the_file_of_the_tag(make: type[nn.Module], written_out: bool, tmp_path: Path) -> None:
    """As README opens it: one path, and nothing is missing; the file is named once, or in each option."""
    module = seeded(make)
    program = lowered(module) if written_out else lower(module, (INPUT,), tag="model")
    result = save_programs({"model": program}, tmp_path)
    assert [path.name for path in result.data_files] == ["model.ptd"]
    output = Program(tmp_path / "model.pte", BlobCache(tmp_path / "model.ptd")).method()(INPUT)
    torch.testing.assert_close(output, module(INPUT))


def test_a_name_that_is_given_is_used(tmp_path: Path) -> None:
    result = save_programs({"model": lowered(seeded(Divided))}, tmp_path, data_name="constants.ptd")
    assert {path.name for path in result.data_files} == {"model.ptd", "constants.ptd"}


def test_a_name_without_effect(tmp_path: Path) -> None:
    """The tag wins, and a warning says so."""
    program = lower(seeded(lambda: nn.Linear(8, 8)), (INPUT,), tag="model")
    with pytest.warns(UserWarning, match=r"data_name='other' had no effect: all data was tagged for model\.ptd"):
        result = save_programs({"model": program}, tmp_path, data_name="other")
    assert {path.name for path in result.data_files} == {"model.ptd"}


def test_two_tags_leave_the_rest_to_a_third_file(tmp_path: Path) -> None:
    """It belongs to neither: an adapter, for example, is exchanged."""
    programs = {name: lowered(seeded(Divided), name) for name in ("one", "other")}
    result = save_programs(programs, tmp_path)
    assert {path.name for path in result.data_files} == {"one.ptd", "other.ptd", "shared.ptd"}
