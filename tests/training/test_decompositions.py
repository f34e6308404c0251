"""Backward passes in terms of other operators are the derivatives of the forward passes (T1)."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blobstore.training.decompositions import TABLE

aten = torch.ops.aten


def derivative(forward: Any, backward: Any) -> Any:
    """A function of autograd that computes `forward`, and its gradient by `backward(gradient, x, outputs)`."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            outputs = forward(x)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            context.save_for_backward(x, *outputs)
            return outputs[0].clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            x, *outputs = context.saved_tensors
            result: Tensor = backward(gradient, x, outputs)
            return result

    return Function.apply


def distinct(sizes: tuple[int, ...]) -> Tensor:
    """Elements far enough from each other that no maximum changes where gradcheck moves them."""
    count = torch.Size(sizes).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    return (order.double() / 8).reshape(sizes).requires_grad_()


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], ...]:
    """Kernel, stride and padding as PyTorch allows them."""
    kernel = [draw(st.integers(1, 3)) for _ in range(2)]
    padding = [draw(st.integers(0, size // 2)) for size in kernel]
    return kernel, draw(st.just([]) | st.lists(st.integers(1, 3), min_size=2, max_size=2)), padding


SIZES = st.sampled_from([(2, 3, 6, 7), (3, 5, 6), (1, 1, 8, 5)])


@pytest.mark.long
@given(SIZES, windows(), st.integers(1, 2), st.booleans())
def test_max_pool2d(sizes: tuple[int, ...], window: tuple[list[int], ...], dilation: int, ceil_mode: bool) -> None:
    options = (*window, [dilation, dilation], ceil_mode)
    own = TABLE[aten.max_pool2d_with_indices_backward.default]
    function = derivative(
        lambda x: aten.max_pool2d_with_indices(x, *options),
        lambda gradient, x, outputs: own(gradient, x, *options, outputs[1]),
    )
    assert torch.autograd.gradcheck(function, distinct(sizes))


@pytest.mark.long
@given(SIZES, windows(), st.booleans(), st.booleans(), st.sampled_from([None, 5]))
def test_avg_pool2d(
    sizes: tuple[int, ...], window: tuple[list[int], ...], ceil_mode: bool, padded: bool, divisor: int | None
) -> None:
    options = (*window, ceil_mode, padded, divisor)
    own = TABLE[aten.avg_pool2d_backward.default]
    function = derivative(lambda x: aten.avg_pool2d(x, *options), lambda gradient, x, _: own(gradient, x, *options))
    assert torch.autograd.gradcheck(function, distinct(sizes))


@pytest.mark.long
@given(SIZES, st.integers(1, 6), st.integers(1, 6))
def test_adaptive_avg_pool2d(sizes: tuple[int, ...], height: int, width: int) -> None:
    own = TABLE[aten._adaptive_avg_pool2d_backward.default]
    function = derivative(
        lambda x: aten._adaptive_avg_pool2d(x, [height, width]), lambda gradient, x, _: own(gradient, x)
    )
    assert torch.autograd.gradcheck(function, distinct(sizes))


@given(st.lists(st.integers(-2, 2), min_size=2, max_size=4).filter(lambda pad: len(pad) % 2 == 0))
def test_padding_and_what_undoes_it(pad: list[int]) -> None:
    x = torch.arange(60.0).reshape(2, 5, 6)
    own = TABLE[aten.constant_pad_nd.default](x, pad, 7.0)
    if min(pad) >= 0:
        assert own is NotImplemented  # ExecuTorch's kernel does it
    else:
        torch.testing.assert_close(own, aten.constant_pad_nd(x, pad, 7.0), rtol=0, atol=0)
