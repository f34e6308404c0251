"""Models to train, and their joint forward/backward programs as ExecuTorch's own exporter makes them.

Each function lowers once in a session; its result must not be changed."""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional

from blobstore import BlobStore, open_ptd
from blobstore.lowering.export import quiet
from blobstore.runtime import BlobCache
from blobstore.training import TrainingProgram
from tests.helpers import models

with quiet():
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
    from executorch.exir.passes.init_mutable_pass import InitializedMutableBufferPass
    from torch.export.experimental import _export_forward_backward

Batch = tuple[Tensor, ...]


class XOR(nn.Module):
    """The model of ExecuTorch's training example; its outputs are the loss and the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 10)
        self.second = nn.Linear(10, 2)

    def scores(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x)))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.scores(x)
        return functional.cross_entropy(scores, y), scores.detach().argmax(dim=1)


class Convolutions(nn.Module):
    """A convolution, a depthwise one and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.fc = nn.Linear(4, 3)

    def scores(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.depthwise(torch.relu(self.conv(x)))).mean((2, 3)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(x), y)


class WrittenOutNorm(nn.BatchNorm2d):
    """Batch normalization in plain operators, because ExecuTorch has no kernel for the training one."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        self.running_mean.mul_(0.9).add_(0.1 * mean.detach())
        self.running_var.mul_(0.9).add_(0.1 * var.detach())
        scale = self.weight * torch.rsqrt(var + self.eps)
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


class Norm(nn.Module):
    """A net with buffers that a step changes."""

    def __init__(self, norm: Callable[[int], nn.Module] = WrittenOutNorm) -> None:
        super().__init__()
        # the gradient of a bias before a normalization is only rounding noise, which Adam would scale up
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = norm(4)
        self.fc = nn.Linear(4, 3)

    def scores(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.norm(self.conv(x))).mean((2, 3)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(x), y)


class LoRA(models.LoRA):
    """A frozen foundation, and low-rank adapters that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base.requires_grad_(False)

    def scores(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return functional.mse_loss(self.scores(x), y)


class Scores(nn.Module):
    """The inference part of a model, under the same names."""

    def __new__(cls, model: nn.Module) -> Any:
        class Inference(type(model)):  # type: ignore[misc]
            def forward(self, x: Tensor) -> Tensor:
                return self.scores(x)

        clone = copy.deepcopy(model)
        clone.__class__ = Inference
        return clone.eval()


@dataclass(frozen=True)
class Joint:
    """A joint program with the model that it was exported from.

    Attributes:
        model: with the initial weights; `eager` returns a copy.
        batches: the training data.
        files: the program, `train.pte`, and its data files.
    """

    model: nn.Module
    batches: list[Batch]
    files: dict[str, bytes]

    def eager(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder / "train.pte"

    def load(self, folder: Path) -> TrainingProgram:
        pte = self.write(folder)
        return TrainingProgram(pte, BlobCache([folder / name for name in self.files if name.endswith(".ptd")]))


def lower_joint(model: nn.Module, example: Batch, **config: Any) -> Any:
    with quiet():
        joint = _export_forward_backward(torch.export.export(model, example, strict=True))
        edge = to_edge(joint, compile_config=EdgeCompileConfig(_check_ir_validity=False))
        return edge.to_executorch(ExecutorchBackendConfig(**config))


def _joint(model: nn.Module, batches: list[Batch], **config: Any) -> Joint:
    manager = lower_joint(copy.deepcopy(model), batches[0], **config)
    files = {"train.pte": bytes(manager.buffer)}
    for name, cord in manager._tensor_data.items():
        files[f"{name}.ptd"] = bytes(cord)
    return Joint(model, batches, files)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@functools.cache
def xor(*, external: bool = False) -> Joint:
    batch = (torch.tensor([[0.0, 0], [0, 1], [1, 0], [1, 1]]), torch.tensor([0, 1, 1, 0]))
    return _joint(seeded(XOR), [batch], external_mutable_weights=external)


@functools.cache
def convolutions(*, external: bool = False) -> Joint:
    return _joint(seeded(Convolutions), _images(), external_mutable_weights=external)


def _images() -> list[Batch]:
    noise = _generator()
    return [(torch.randn(4, 1, 8, 8, generator=noise), torch.randint(0, 3, (4,), generator=noise)) for _ in range(3)]


@functools.cache
def norm() -> Joint:
    passes = [InitializedMutableBufferPass(["running_mean", "running_var"])]
    return _joint(seeded(Norm), _images(), emit_mutable_buffer_names=True, passes=passes)


@functools.cache
def lora() -> Joint:
    """Frozen weights in `foundation.ptd`, adapters in `adapter.ptd`."""
    noise = _generator()
    batches = [(torch.randn(4, 16, generator=noise), torch.randn(4, 16, generator=noise)) for _ in range(2)]
    return _joint(
        seeded(LoRA), batches, external_constants=lambda node: "adapter" if "lora" in node.name else "foundation"
    )


def rewrite(source: Path, target: Path, change: Callable[[Any, dict[str, Tensor]], None]) -> None:
    """Write a checkpoint with another list and other tensors. Digests of the tensors fit."""
    with open_ptd(source) as file:
        tensors = {key: file.torch(key).clone() for key in file if file.get_tensor_layout(key) is not None}
        (blob,) = (bytes(file.get_data(key)) for key in file if file.get_tensor_layout(key) is None)
    contents = json.loads(blob)
    change(contents, tensors)
    store = BlobStore()
    for key, tensor in tensors.items():
        address = store.add(key, tensor, alignment=16)
        if key in contents.get("tensors", {}):
            contents["tensors"][key] = [address.xxh3_128.hex()]
    blob = json.dumps(contents, separators=(",", ":")).encode()
    store.add("metadata.blobstore." + xxhash.xxh3_128_hexdigest(blob), blob)
    store.write_ptd(target)
