"""More lowered models, for tests of programs."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import Lowered, _input, _lowered, counter, portable, quiet


class TwoLayouts(nn.Module):
    """Three constants with equal bytes: ExecuTorch stores them once, the tensors differ in shape and dim order."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(48, generator=torch.Generator().manual_seed(3))
        self.register_buffer("flat", memory.clone())
        self.register_buffer("matrix", memory.clone().reshape(6, 8))
        last = memory.clone().reshape(1, 3, 4, 4).permute(0, 3, 1, 2)
        self.register_buffer("image", last)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.flat).reshape(6, 8) * self.matrix + self.image.sum()


class Dtypes(nn.Module):
    """A constant of each of many dtypes, a scalar and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.arange(-6, 10)
        for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16):
            self.register_buffer(f"as_{dtype}".replace(".", "_"), values.to(dtype))
        self.register_buffer("flags", values % 3 == 0)
        self.register_buffer("scalar", torch.tensor(2.5))
        self.register_buffer("integer", torch.tensor(7))
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        for name, constant in self.named_buffers():
            if name != "empty":
                x = x + constant.to(torch.float32)
        return torch.cat([x, self.empty])


class Branches(nn.Module):
    """Constants on both sides of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.left(x), lambda x: self.right(x) * 2, (x,))


@functools.cache
def two_layouts() -> Lowered:
    return _lowered({"forward": (TwoLayouts(), (_input(48),))}, partitioners=portable)


@functools.cache
def dtypes() -> Lowered:
    return _lowered({"forward": (Dtypes(), (_input(16),))}, partitioners=portable)


@functools.cache
def branches() -> Lowered:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        module = Branches()
    x = torch.ones(2, 8)
    return _lowered({"forward": (module, (x,)), "other": (module, (-x,))}, partitioners=portable)


@functools.cache
def named_counter() -> Lowered:
    """A counter whose state has a name in the program, so that applications can look it up."""
    with quiet():
        from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
    module, inputs = counter().methods["forward"]
    return _lowered(
        {"forward": (type(module)(), inputs)},
        partitioners=portable,
        passes=[InitializedMutableBufferPass(["total"])],
        emit_mutable_buffer_names=True,
    )


@functools.cache
def without_weights() -> Lowered:
    class Add(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x

    return _lowered({"forward": (Add(), (_input(4),))}, partitioners=portable)


def everything() -> dict[str, Any]:
    """Functions that lower a program, by what the program shows."""
    from tests.helpers import models

    return {
        "portable": models.mlp,
        "delegated": functools.partial(models.mlp, delegated=True),
        "convolutions": functools.partial(models.conv, delegated=False),
        "delegated convolutions": models.conv,
        "channels-last": models.channels_last,
        "initial state": models.counter,
        "state without a start": functools.partial(models.counter, initial=False),
        "named state": named_counter,
        "two methods": functools.partial(models.decoder, delegated=False),
        "two delegated methods": models.decoder,
        "already external": functools.partial(models.mlp, external=True),
        "two layouts of one buffer": two_layouts,
        "many dtypes": dtypes,
        "control flow": branches,
        "no weights": without_weights,
    }
