"""AdamW of the native runtime, and the arithmetic of both of its optimizers, beside torch's."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from blobstore import errors
from blobstore.training import AdamW

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"lr": 0.02, "betas": (0.4, 0.7), "weight_decay": 0.3, "eps": 1e-6},
    "halves": {"lr": 0.1, "betas": (0.5, 0.5), "weight_decay": 0},
    "amsgrad": {"lr": 0.1, "amsgrad": True},
    "maximize": {"lr": 0.1, "amsgrad": True, "maximize": True},
}

fuses = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch rounds twice where it multiplies and adds"
)


class _ExactRoots(TorchFunctionMode):
    """Square roots as IEEE 754 has them, where torch may take those of MKL."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.sqrt:
            return torch.from_numpy(np.sqrt(args[0].numpy()))
        return func(*args, **(kwargs or {}))


def gradients(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """Of very different sizes."""
    noise = torch.Generator().manual_seed(5)
    while True:
        size = 10.0 ** torch.randint(-6, 3, shape, generator=noise)
        yield (torch.randn(shape, generator=noise) * size).to(dtype)


def steps(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], start: Tensor, count: int) -> list[Tensor]:
    """The parameter and everything that the optimizer keeps, after some steps."""
    parameter = nn.Parameter(start.clone(memory_format=torch.preserve_format))
    optimizer = make([parameter])
    for _, gradient in zip(range(count), gradients(tuple(start.shape), start.dtype), strict=False):
        parameter.grad = gradient
        optimizer.step()
    return [parameter.detach(), *optimizer.state[parameter].values()]


@fuses
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 7, 31, 33, 1003])
@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_those_of_torch_to_the_bit(options: str, size: int, dtype: torch.dtype) -> None:
    """If torch's square roots are rounded correctly."""
    start = torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with _ExactRoots():
        expected = steps(lambda p: torch.optim.AdamW(p, **OPTIONS[options]), start, 6)
    found = steps(lambda p: AdamW(p, **OPTIONS[options]), start, 6)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", OPTIONS)
def test_steps_are_close_to_those_of_torch(options: str) -> None:
    """With its own square roots, and however it multiplies and adds."""
    start = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = steps(lambda p: torch.optim.AdamW(p, **OPTIONS[options]), start, 6)
    found = steps(lambda p: AdamW(p, **OPTIONS[options]), start, 6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@fuses
def test_any_order_of_dimensions() -> None:
    """A channels-last parameter, gradients in another order, and a state that was saved in another one."""
    start = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    with _ExactRoots():
        expected = steps(torch.optim.AdamW, start, 4)
    found = steps(AdamW, start, 4)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert found[2].stride() == start.stride()


def test_groups_closures_and_states_of_torch() -> None:
    """It takes what torch.optim.AdamW takes, and continues from its state."""
    noise = torch.Generator().manual_seed(2)
    values, pulls = torch.randn(2, 9, generator=noise), torch.randn(3, 2, 9, generator=noise)
    ends = []
    for kind in (torch.optim.AdamW, AdamW):
        parameters = [nn.Parameter(value.clone()) for value in values]
        unused = nn.Parameter(torch.ones(2))
        groups = [{"params": parameters[:1], "lr": 0.1}, {"params": [parameters[1], unused], "weight_decay": 0.5}]
        optimizer = torch.optim.AdamW(groups)
        scheduler: Any = None
        for turn, pull in enumerate(pulls):
            if turn == 1:
                state = optimizer.state_dict()
                optimizer = kind(groups)
                optimizer.load_state_dict(state)
                scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

            def closure(pull: Tensor = pull, parameters: list[nn.Parameter] = parameters) -> Tensor:
                loss = (torch.stack(list(parameters)) * pull).sum()
                loss.backward()
                return loss

            optimizer.zero_grad()
            loss = optimizer.step(closure)
            assert loss is not None
            if scheduler:
                scheduler.step()
        assert torch.equal(unused, torch.ones(2))
        ends.append(torch.stack(list(parameters)).detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)
    assert not torch.equal(ends[0], values)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(4, 4)[:, ::2], torch.zeros(3, device="meta")]
)
def test_tensors_that_it_does_not_step(wrong: Tensor) -> None:
    """They are an error that names them, not a wrong result; the others are not changed either."""
    good, parameter = nn.Parameter(torch.zeros(2)), nn.Parameter(wrong)
    good.grad, parameter.grad = torch.ones(2), torch.ones_like(wrong)
    optimizer = AdamW([good, parameter])
    with pytest.raises(errors.UnsupportedDataError, match=r"AdamW steps float32 or float64.*strides"):
        optimizer.step()
    assert torch.equal(good, torch.zeros(2)) and not optimizer.state
    for options in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError):
            AdamW([nn.Parameter(torch.zeros(2))], **options)
