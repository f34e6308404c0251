"""`lower_training` refuses what ExecuTorch would train wrongly (T1)."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from blobstore.errors import BlobStoreError, GradientError
from blobstore.lowering.export import quiet
from blobstore.training import TrainingProgram, decompositions, lower_training
from tests.lowering.live import close, write

# a warning of ExecuTorch about the gradient of an input, which is not used
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:Function aten.convolution_backward.out:UserWarning")]


class Convolution(nn.Module):
    """A convolution, further layers, and a classifier."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), *body)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(x).mean((2, 3))), labels)


def lower(*body: nn.Module, train: bool = False, **options: object) -> object:
    x, labels = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3])
    module = Convolution(*body).train(train)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    try:
        with quiet():
            return lower_training(module, (x, labels), **{"remove_view_copy": False, **options})
    finally:
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())


@pytest.fixture
def stock_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower max_pool2d as ExecuTorch's own exporter does; its kernel in 1.5 computes wrong gradients."""
    operator = torch.ops.aten.max_pool2d_with_indices_backward.default
    monkeypatch.delitem(decompositions.TABLE, operator)


@pytest.mark.usefixtures("stock_kernels")
def test_a_wrong_gradient_is_refused_with_its_parameters_and_operator() -> None:
    """ExecuTorch's own training module computes it, too; `check_gradients=False` lowers the same module."""
    with pytest.raises(GradientError) as caught:
        lower(nn.MaxPool2d(2))
    text = str(caught.value)
    assert "'body.0.weight', 'body.0.bias' of Convolution" in text
    assert "head" not in text
    assert "depend on aten.max_pool2d_with_indices_backward" in text
    assert lower(nn.MaxPool2d(2), check_gradients=False) is not None


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv1d(2, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(nn.functional.max_pool1d(self.body(x), 2).mean((1, 2)), y)


def test_an_operator_whose_kernel_refuses_is_named() -> None:
    """ExecuTorch says which only in its log."""
    with pytest.raises(GradientError, match=r"does not run: .*; the kernel of aten::\w+\.\w+ refuses it"):
        lower_training(Pooled(), (torch.randn(1, 2, 8), torch.randn(1)))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.ReplicationPad2d(1), "does not run: .*replication_pad2d_backward"),  # there is no kernel
        (nn.Dropout(0.5), "dropout"),  # the gradients differ from call to call
    ],
)
def test_what_cannot_be_compared_is_named(layer: nn.Module, message: str) -> None:
    """Lowering succeeds, but the step cannot run, or tells nothing."""
    with pytest.raises(GradientError, match=message):
        lower(layer, train=True)


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1, dilation=2, ceil_mode=True),
        nn.LPPool2d(2, 2),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        nn.AdaptiveAvgPool2d((2, 5)),
        nn.BatchNorm2d(8),
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.ZeroPad2d((1, 0, 2, 3)),
        nn.Sequential(nn.GroupNorm(2, 8), nn.GELU()),
        nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(8), nn.MaxPool1d(3), nn.AvgPool1d(2), nn.Unflatten(2, (1, -1))),
    ],
    ids=str,
)
def test_layers_whose_gradients_executorch_lacks(layer: nn.Module) -> None:
    """`lower_training` compares with eager PyTorch's gradients; batches are normalized in train()."""
    assert lower(layer, train=True) is not None


@pytest.mark.parametrize("tag", ["model", None])
def test_training_with_batch_normalization_and_pooling(tag: str | None, tmp_path: Path) -> None:
    """Losses, weights and running statistics of some steps are those of PyTorch. These start with the module's values, and
    are in checkpoints (T1)."""
    net = Convolution(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)).train()
    with torch.no_grad():
        net.get_buffer("body.1.running_mean").fill_(3)
    chance = torch.Generator().manual_seed(2)
    batches = [(torch.randn(4, 1, 8, 8, generator=chance), torch.tensor([0, 1, 2, 3])) for _ in range(5)]
    with quiet():
        pte = write(lower_training(net, batches[0], tag=tag, remove_view_copy=False), tmp_path)
    data = sorted(tmp_path.glob("*.ptd"))
    training, resumed = TrainingProgram(pte, data=data), TrainingProgram(pte, data=data)
    assert training.named_buffers().keys() == dict(net.named_buffers()).keys()
    assert all(torch.equal(tensor, net.get_buffer(name)) for name, tensor in training.named_buffers().items())
    own = torch.optim.SGD(training.named_parameters().values(), lr=0.1)
    eager = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in batches:
        eager.zero_grad()
        loss = net(*batch)
        loss.backward()
        eager.step()
        close(training.step(own, *batch)[0], loss)
    training.save(tmp_path / "checkpoint.ptd")
    resumed.load(tmp_path / "checkpoint.ptd")
    state = net.state_dict()
    for program in (training, resumed):
        for name, tensor in {**program.named_parameters(), **program.named_buffers()}.items():
            close(tensor, state[name])


def test_a_view_of_a_weight() -> None:
    """PReLU views its weight; the message names the option that helps."""
    with pytest.raises(BlobStoreError, match="as PReLU does, give remove_view_copy=False"):
        lower(nn.PReLU(8), remove_view_copy=True)
