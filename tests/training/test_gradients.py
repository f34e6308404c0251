"""`lower_training` refuses what ExecuTorch would train wrongly (T1)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from blobstore.errors import BlobStoreError, GradientError, UnsupportedDataError
from blobstore.training import lower_training

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
        return lower_training(module, (x, labels), **{"remove_view_copy": False, **options})
    finally:
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert all(parameter.grad is None for parameter in module.parameters())


def test_a_wrong_gradient_is_refused_with_its_parameters_and_operator() -> None:
    """ExecuTorch 1.5 computes wrong gradients through max_pool2d; its own training module does too."""
    with pytest.raises(GradientError) as caught:
        lower(nn.MaxPool2d(2))
    text = str(caught.value)
    assert "'body.0.weight', 'body.0.bias' of Convolution" in text
    assert "head" not in text
    assert "depend on aten.max_pool2d_with_indices_backward" in text


def test_skipping_the_check() -> None:
    """`check_gradients=False` lowers the same module."""
    assert lower(nn.MaxPool2d(2), check_gradients=False) is not None


def test_right_gradients_pass() -> None:
    """Correct gradients up to rounding pass the check."""
    assert lower(nn.GroupNorm(2, 8), nn.GELU()) is not None


def test_an_operator_without_a_kernel_is_named() -> None:
    """Lowering succeeds, but the step cannot run."""
    with pytest.raises(GradientError, match="does not run: .*avg_pool2d_backward"):
        lower(nn.AvgPool2d(2))


def test_dropout_in_train_cannot_be_compared() -> None:
    """Its gradients differ from call to call."""
    with pytest.raises(GradientError, match="dropout"):
        lower(nn.Dropout(0.5), train=True)


def test_batch_normalization_trains_in_eval_only() -> None:
    """ExecuTorch has a kernel only for eval()."""
    with pytest.raises(UnsupportedDataError, match=r"normalizes batches in train\(\).*eval\(\)"):
        lower(nn.BatchNorm2d(8), train=True)
    assert lower(nn.BatchNorm2d(8)) is not None


def test_a_view_of_a_weight() -> None:
    """PReLU views its weight; the message names the option that helps."""
    with pytest.raises(BlobStoreError, match="as PReLU does, give remove_view_copy=False"):
        lower(nn.PReLU(8), remove_view_copy=True)
