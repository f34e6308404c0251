"""`lower_training`: the gradients are those of eager PyTorch, and each weight is in the file that its name decides (T1,
D2)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import blobstore
from blobstore.errors import InvalidTagError, UnsupportedDataError
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import lower_training
from tests.lowering.live import close, plugin

pytestmark = pytest.mark.long

with quiet():
    from executorch.extension.pybindings.portable_lib import _load_for_executorch
    from executorch.extension.training import TrainingModule


class Block(nn.Module):
    """The parts of an encoder's layer: attention, normalization, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.lora_a = nn.Linear(8, 2, bias=False)
        self.lora_b = nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name.startswith(("lora_", "head."))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        query, key, value = self.mix(x).chunk(3, dim=-1)
        x = x + torch.softmax(query @ key.transpose(1, 2) / 8**0.5, -1) @ (value + self.lora_b(self.lora_a(x)))
        result: Tensor = self.head(functional.gelu(self.norm(x)).mean(1))
        return result


class Training(Block):
    """The same weights under the same names, with the loss as output."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = super().forward(ids)
        return functional.cross_entropy(scores, labels), scores.detach().argmax(1)


def tag(name: str) -> str:
    return "adapter" if name.startswith(("lora_", "head.")) else "foundation"


@pytest.fixture(scope="module")
def module() -> Training:
    torch.manual_seed(0)
    return Training().eval()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(20, (4, 6), generator=generator), torch.randint(3, (4,), generator=generator)


def eager(module: Training) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    module.zero_grad()
    loss, found = module(*batch())
    loss.backward()
    return loss, found, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_two_files_shared_with_inference(module: Training, tmp_path: Path) -> None:
    """A training and an inference program share a frozen file and a trained one (D1, D2)."""
    inference = Block().eval()
    inference.load_state_dict(module.state_dict())
    with quiet():
        training = lower_training(module, batch(), tag=tag)
    serving = lower({"forward": (inference, batch()[:1])}, partitioners=plugin(tag), external_constants=by_node)
    blobstore.save_programs({"train": training, "serve": serving}, tmp_path, keep_small=1 << 20)
    assert {path.name for path in tmp_path.iterdir()} == {"train.pte", "serve.pte", "foundation.ptd", "adapter.ptd"}
    with (
        blobstore.open_ptd(tmp_path / "foundation.ptd") as foundation,
        blobstore.open_ptd(tmp_path / "adapter.ptd") as own,
    ):
        names = set(dict(module.named_parameters()))
        assert names & set(own) == {"lora_a.weight", "lora_b.weight", "head.weight", "head.bias"}
        assert names & set(foundation) == names - set(own)
    base = BlobCache(tmp_path / "foundation.ptd")
    cache = BlobCache(tmp_path / "adapter.ptd", base=base)
    loss, found, gradients = eager(module)
    outputs = Program(tmp_path / "train.pte", cache).method()(*batch())
    close(outputs[0], loss)
    assert torch.equal(outputs[1], found)
    count = len(gradients)
    assert len(outputs) == 2 + 2 * count
    for output, parameter in zip(outputs[-count:], (p for p in module.parameters() if p.requires_grad), strict=True):
        assert torch.equal(output, parameter)
    for output, name in zip(
        outputs[2:-count], (n for n, p in module.named_parameters() if p.requires_grad), strict=True
    ):
        close(output, gradients[name])
    close(Program(tmp_path / "serve.pte", cache).method()(batch()[0]), inference(batch()[0]))
    assert not base.dirty


def by_node(node: Any) -> str:
    return "adapter" if node.name.startswith(("p_lora_", "p_head_")) else "foundation"


@pytest.mark.parametrize("where", ["model", None])
def test_in_stock_executorch(module: Training, tmp_path: Path, where: str | None) -> None:
    """ExecuTorch's own training module runs the program, with one data file or none (T1)."""
    with quiet():
        manager = lower_training(module, batch(), tag=where)
        with (tmp_path / "train.pte").open("wb") as file:
            manager.write_to_file(file)
        manager.write_tensor_data_to_file(str(tmp_path))
        data = [str(tmp_path / f"{where}.ptd")] if where else []
        stock = TrainingModule(_load_for_executorch(str(tmp_path / "train.pte"), *data))
        outputs = stock.forward_backward("forward", batch())
    loss, found, gradients = eager(module)
    close(outputs[0], loss)
    assert torch.equal(outputs[1], found)
    assert stock.named_gradients().keys() == gradients.keys()
    for name, gradient in stock.named_gradients().items():
        close(gradient, gradients[name])


def test_what_cannot_train(module: Training) -> None:
    """Each reason is an error that names it."""

    class NoLoss(Block):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)

    with pytest.raises(UnsupportedDataError, match=r"first output of NoLoss .*found torch.float32 \[4, 3\]"):
        lower_training(NoLoss().eval(), batch()[:1])
    with pytest.raises(UnsupportedDataError, match="no parameter with requires_grad"):
        lower_training(Training().requires_grad_(False), batch())
    labels = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(UnsupportedDataError, match="two of the inputs are the same tensor"):
        lower_training(module, (labels, labels))
    with pytest.raises(InvalidTagError):
        lower_training(module, batch(), tag="../elsewhere")
    with pytest.raises(InvalidTagError), quiet():
        lower_training(module, batch(), tag=lambda name: "a/b")


class Detached(nn.Module):
    """The gradient of the first layer is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.second(self.first(x).detach()), y)


class MaxNorm(nn.Module):
    """The forward pass changes a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 2, max_norm=0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.table(x.long().abs()[:, 0] % 7), y)


class Logits(nn.Module):
    """An output behind the loss needs a gradient, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x)
        return functional.mse_loss(out, y), out


@pytest.mark.parametrize("kind", [Detached, MaxNorm, Logits])
def test_what_torch_cannot_train_is_refused(kind: type[nn.Module]) -> None:
    """With one of our errors, in one line, that names the module and what torch says."""
    with pytest.raises(
        UnsupportedDataError, match=rf"^torch cannot export the backward pass of {kind.__name__}: \w+"
    ) as caught:
        lower_training(kind(), (torch.randn(3, 4), torch.randn(3, 2)), tag="w")
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_inputs_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(UnsupportedDataError, match=r"^Logits cannot be exported with these inputs: \w+") as caught:
        lower_training(Logits(), (torch.randn(3, 5), torch.randn(3, 2)))
    assert "\n" not in str(caught.value)
