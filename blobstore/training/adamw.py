"""AdamW that computes in Python what it computes in C++ and Java."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blobstore.core.errors import UnsupportedDataError
from blobstore.runtime.native import native

__all__ = ["AdamW"]

_DTYPES = (torch.float32, torch.float64)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with the steps of the native runtime, so that a run goes on in C++ or Java to the bit.

    State, groups, schedulers and checkpoints are those of `torch.optim.AdamW`. torch's own steps differ from these in the
    last bits: where it takes square roots by MKL, they are not always rounded correctly. A step of this class gives the
    same bits on each processor, and passes once over the memory.

    Args:
        params: parameters or groups of them, float32 or float64 on the CPU, dense in memory.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in `torch.optim.AdamW`.

    Raises:
        UnsupportedDataError: by `step`: a parameter has another dtype, or is not dense in the memory of the CPU. None was
            changed.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change the parameters that have gradients. A closure is called first, and its result returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = [(one, group) for group in self.param_groups for one in group["params"] if one.grad is not None]
        for parameter, _ in steps:
            _check(parameter)
        for parameter, group in steps:
            self._step_one(parameter, group)
        return loss

    def _step_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        averages = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        for name in averages:
            state[name] = _in_order_of(parameter, state[name])
        gradient = _in_order_of(parameter, parameter.grad)
        state["step"] += 1
        memory = [parameter.data_ptr(), gradient.data_ptr(), *(state[name].data_ptr() for name in averages)]
        beta1, beta2 = group["betas"]
        native.step_adamw(
            [*memory, 0][:5],
            parameter.numel(),
            parameter.dtype == torch.float64,
            float(state["step"]),
            [float(value) for value in (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])],
            group["maximize"],
        )


def _check(parameter: Tensor) -> None:
    """Raise UnsupportedDataError if there is no step for a parameter."""
    if parameter.dtype not in _DTYPES or parameter.device.type != "cpu" or not _is_dense(parameter):
        raise UnsupportedDataError(
            f"AdamW steps float32 or float64 that is dense in the memory of the CPU, not {parameter.dtype} with shape "
            f"{list(parameter.shape)} and strides {list(parameter.stride())} on {parameter.device}"
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one piece of memory, in any order."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != step:
            return tensor.numel() == 0
        step *= size
    return True


def _in_order_of(parameter: Tensor, tensor: Any) -> Any:
    """A tensor with the dtype and the strides of a parameter; a copy if it has others."""
    if tensor.dtype == parameter.dtype and tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(tensor)
