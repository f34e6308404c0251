"""Small models for tests, lowered by stock ExecuTorch.

Each function lowers once in a session and returns a `Lowered`, which must not be changed.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blobstore.lowering.export import lower, quiet
from examples.decoder import Decoder, DecoderConfig


@dataclass(frozen=True)
class Lowered:
    """A lowered program, with the modules that it was made from."""

    manager: Any  # ExecutorchProgramManager
    methods: dict[str, tuple[nn.Module, tuple[Tensor, ...]]]

    @functools.cached_property
    def pte(self) -> bytes:
        return bytes(self.manager.buffer)

    def inputs(self, method: str = "forward") -> tuple[Tensor, ...]:
        return self.methods[method][1]

    def eager(self, method: str = "forward") -> list[Tensor]:
        """The outputs of the module itself for the example inputs."""
        module, inputs = self.methods[method]
        with torch.no_grad():
            outputs = module(*inputs)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    def write(self, directory: Path, name: str = "model") -> Path:
        """Write the program and its external data, if any, with ExecuTorch; return the program's path."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{name}.pte"
        path.write_bytes(self.pte)
        self.manager.write_tensor_data_to_file(str(directory))
        return path


def _lowered(methods: dict[str, tuple[nn.Module, tuple[Tensor, ...]]], **options: Any) -> Lowered:
    from executorch.exir import ExecutorchBackendConfig

    own = {name: options.pop(name) for name in ("partitioners", "external_constants") if name in options}
    return Lowered(lower(methods, **own, config=ExecutorchBackendConfig(**options)), methods)


def portable() -> Sequence[Any]:
    """Partitioners for a program without delegates."""
    return []


def _seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().eval()


def _input(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(1))


class MLP(nn.Module):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)
        self.register_buffer("shift", torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))) + self.shift


class ConvNet(nn.Module):
    """A convolution, whose weight XNNPACK stores channels-last, and batch normalization to fold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.depthwise(torch.relu(self.norm(self.conv(x))))


class ChannelsLast(nn.Module):
    """A constant with channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
        self.register_buffer("weight", weight.to(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Counter(nn.Module):
    """State with an initial value in the program."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(64, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x)
        return self.total * 2


class LoRA(nn.Module):
    """Linear layers of a foundation, each with a low-rank adapter."""

    def __init__(self, layers: int = 2, width: int = 16, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.lora_a = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.lora_b = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for base, a, b in zip(self.base, self.lora_a, self.lora_b, strict=True):
            x = torch.relu(base(x) + b(a(x)))
        return x


TINY = DecoderConfig(vocabulary=64, width=32, hidden=48, layers=1, heads=4, kv_heads=2, context=16, prompt=4)


class Viewed(nn.Module):
    """Reads its input only through views, before and after the input's memory could be reused."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(4, 6)
        y = torch.sigmoid(flat @ flat.t())
        return torch.tanh(y @ torch.relu(y)) @ x.view(4, 6)


@functools.cache
def viewed() -> Lowered:
    """A program without operators for its views, which share the planned memory of the input."""
    return _lowered({"forward": (Viewed(), (_input(2, 2, 6),))}, partitioners=portable)


@functools.cache
def mlp(*, delegated: bool = False, external: bool = False, seed: int = 0) -> Lowered:
    """The MLP, by XNNPACK or the portable kernels.

    If `external`, constants that no delegate takes go to `_default_external_constant.ptd`.
    """
    methods = {"forward": (_seeded(MLP, seed), (_input(3, 16),))}
    partitioners = None if delegated else portable
    return _lowered(methods, partitioners=partitioners, external_constants=external)


@functools.cache
def conv(*, delegated: bool = True) -> Lowered:
    """The convolutional net, by XNNPACK or the portable kernels."""
    module = _seeded(ConvNet)
    with torch.no_grad():
        module.norm.running_mean.uniform_(-1, 1, generator=torch.Generator().manual_seed(2))
    return _lowered({"forward": (module, (_input(1, 3, 8, 8),))}, partitioners=None if delegated else portable)


@functools.cache
def channels_last() -> Lowered:
    """A program with a channels-last constant."""
    x = _input(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return _lowered({"forward": (ChannelsLast(), (x,))}, partitioners=portable)


@functools.cache
def counter(*, initial: bool = True) -> Lowered:
    """A program with mutable state, whose first value is part of the program or is undefined."""
    with quiet():
        from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
    passes = [InitializedMutableBufferPass(["total"])] if initial else []
    return _lowered({"forward": (Counter(), (torch.ones(64),))}, partitioners=portable, passes=passes)


@functools.cache
def decoder(*, delegated: bool = True, external: bool = False) -> Lowered:
    """A tiny Llama with the methods `prefill` and `decode`, and tied embeddings."""
    module = Decoder(TINY)
    methods = {"prefill": (module, module.example(TINY.prompt)), "decode": (module, module.example(1))}
    partitioners = None if delegated else portable
    return _lowered(methods, partitioners=partitioners, external_constants=external)


@functools.cache
def adapters(*, delegated: bool = False, seed: int = 0) -> Lowered:
    """A LoRA whose constants go to two files, `foundation.ptd` and `adapter.ptd`."""
    module: nn.Module = _seeded(LoRA, seed)
    inputs = (_input(3, 16),)
    if not delegated:
        return _lowered(
            {"forward": (module, inputs)},
            partitioners=portable,
            external_constants=lambda node: _adapter_tag(node.name),
        )
    with quiet():
        from executorch.exir.passes.external_constants_pass import delegate_external_constants_pass_unlifted

        # a delegate's constants are tagged before it sees them, on a graph that still knows their names
        tagged = torch.export.export(module, inputs, strict=True).module()
        delegate_external_constants_pass_unlifted(module=tagged, gen_tag_fn=lambda node: _adapter_tag(str(node.target)))
    return Lowered(_lowered({"forward": (tagged, inputs)}).manager, {"forward": (module, inputs)})


def _adapter_tag(name: str) -> str:
    return "adapter" if "lora_" in name else "foundation"
