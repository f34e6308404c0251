"""Operators of backward passes in terms of others, where ExecuTorch has no kernel, a wrong one, or a slow one.

`lower_training` gives them to torch's `run_decompositions`. So a program needs no kernels of its own to train, and stock
ExecuTorch runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["TABLE"]

aten = torch.ops.aten


def _addmm(bias: Tensor, one: Tensor, other: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """A product and a sum, for each of which ExecuTorch has a fast kernel; its kernel for both at once is slow."""
    product = torch.mm(one, other)
    return (product if alpha == 1 else product * alpha) + (bias if beta == 1 else bias * beta)


def _empty_permuted(
    size: list[int], layout_in_memory: list[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    """Memory that is not initialized, which the gradient of SiLU asks for to fill it; ExecuTorch has no kernel for it."""
    return torch.full(size, 0, dtype=dtype)


def _constant_pad_nd(x: Tensor, pad: Sequence[int], value: float = 0) -> Any:
    """What undoes padding has negative sizes, which ExecuTorch's kernel refuses: these take a part of the tensor."""
    if min(pad) >= 0:
        return NotImplemented
    for number, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = x.ndim - 1 - number
        cut = max(-before, 0)
        x = x.narrow(axis, cut, x.shape[axis] - cut - max(-behind, 0))
    return aten.constant_pad_nd(x, [max(size, 0) for size in pad], value) if max(pad) > 0 else x.clone()


def _max_pool2d_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Tensor:
    """Each gradient is added where its maximum was. ExecuTorch 1.5 has a kernel that computes something else."""
    flat = torch.full(x.flatten(-2).shape, 0, dtype=gradient.dtype)
    return flat.scatter_add(-1, indices.flatten(-2), gradient.flatten(-2)).view(x.shape)


def _avg_pool2d_backward(
    gradient: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Each gradient, divided by the number of elements of its window, is added to them. ExecuTorch has no kernel."""
    windows, counts = [], []
    for axis in (-2, -1):
        size, most, before = x.shape[axis], _of_axis(kernel, axis), _of_axis(padding, axis)
        first = torch.arange(gradient.shape[axis]) * (_of_axis(stride, axis) if stride else most) - before
        windows.append(_windows(size, first, first + most, gradient.dtype))
        counts.append(((first + most).clamp(max=size + before) - first).to(gradient.dtype))
    if divisor_override is not None:
        return _spread(gradient / divisor_override, x, *windows)
    if not count_include_pad:
        counts = [window.sum(1) for window in windows]
    return _spread(gradient / (counts[0].unsqueeze(1) * counts[1]), x, *windows)


def _adaptive_avg_pool2d_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """The same for windows that share the elements out. ExecuTorch has no kernel."""
    windows = []
    for axis in (-2, -1):
        size, count = x.shape[axis], gradient.shape[axis]
        number = torch.arange(count) * size
        first = torch.div(number, count, rounding_mode="floor")
        past = torch.div(number + size + count - 1, count, rounding_mode="floor")
        windows.append(_windows(size, first, past, gradient.dtype))
    counts = [window.sum(1) for window in windows]
    return _spread(gradient / (counts[0].unsqueeze(1) * counts[1]), x, *windows)


def _of_axis(sizes: Sequence[int], axis: int) -> int:
    return sizes[axis] if len(sizes) == 2 else sizes[0]


def _windows(size: int, first: Tensor, past: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix (windows, size) that has 1 for the elements in a window along one axis, else 0."""
    elements = torch.arange(size)
    return ((elements >= first.unsqueeze(1)) & (elements < past.unsqueeze(1))).to(dtype)


def _spread(shares: Tensor, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Add the share of each window to its elements: windows are rectangles, so these are two products."""
    flat = shares.reshape(-1, *shares.shape[-2:])
    by_rows = torch.bmm(rows.t().expand(flat.shape[0], -1, -1), flat)
    return torch.bmm(by_rows, columns.expand(flat.shape[0], -1, -1)).view(x.shape)


TABLE: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: _addmm,
    aten.empty_permuted.default: _empty_permuted,
    aten.constant_pad_nd.default: _constant_pad_nd,
    aten.max_pool2d_with_indices_backward.default: _max_pool2d_backward,
    aten.avg_pool2d_backward.default: _avg_pool2d_backward,
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool2d_backward,
    # batch normalization in train(): torch's own
    **torch._decomp.get_decompositions([aten._native_batch_norm_legit_functional, aten.native_batch_norm_backward]),
}
"""What replaces an operator, with its arguments."""
