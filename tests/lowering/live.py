"""Models lowered through the plug-in, running on a cache, with the modules that they were made from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import ExecutorchBackendConfig, to_edge_transform_and_lower

    from blobstore.lowering import BlobStorePartitioner

Inputs = tuple[Tensor, ...]


def plugin(tag: Any = "model") -> Callable[[], list[Any]]:
    return lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag=tag)]


def write(manager: Any, directory: Path, name: str = "model") -> Path:
    """Write a program and its data as ExecuTorch does."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.pte"
    with path.open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(directory))
    return path


def lower_through(
    methods: Mapping[str, tuple[nn.Module, Inputs]], directory: Path, *, tag: Any = "model", **config: Any
) -> Path:
    """Lower modules through the plug-in to one program, with its data in `model.ptd` beside it."""
    config.setdefault("external_constants", lambda node: "model")
    return write(lower(dict(methods), partitioners=plugin(tag), **config), directory)


def lower_exported(exported: Any, directory: Path, partitioners: Callable[[], list[Any]] | None = None) -> Path:
    """As `lower_through`, for exported programs."""
    with quiet():
        edge = to_edge_transform_and_lower(exported, partitioner=(partitioners or plugin())())
        return write(edge.to_executorch(ExecutorchBackendConfig()), directory)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().eval()


def randomize(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Set all parameters and statistics to new values; return the state dict."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                tensor.normal_(std=0.3, generator=generator)
                if name.endswith("running_var"):
                    tensor.abs_().add_(0.1)
    return module.state_dict()


def inputs(*sizes: int, seed: int = 1) -> Inputs:
    return (torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)),)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal, except for the order of float32 sums; the tolerance is relative to the largest number."""
    found, expected = found.detach(), expected.detach()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))


_lowered: dict[str, dict[str, bytes]] = {}


@dataclass
class Live:
    """A module and its program on a cache."""

    module: nn.Module
    program: Program
    cache: BlobCache
    inputs: Inputs
    method: str = "forward"

    @classmethod
    def make(cls, module: nn.Module, example: Inputs, directory: Path, **options: Any) -> Live:
        """Lower a module, or copy the files if an earlier test lowered it."""
        digest = hashlib.sha256(repr((module, [tuple(x.shape) for x in example], sorted(options))).encode())
        for tensor in module.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        name = digest.hexdigest()
        if name not in _lowered:
            lower_through({"forward": (module, example)}, directory, **options)
            _lowered[name] = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        for file, content in _lowered[name].items():
            (directory / file).write_bytes(content)
        path = directory / "model.pte"
        cache = BlobCache(directory / "model.ptd")
        return cls(module, Program(path, cache), cache, example)

    def run(self) -> Tensor:
        result: Tensor = self.program.method(self.method)(*self.inputs)
        return result

    def eager(self) -> Tensor:
        with torch.no_grad():
            result: Tensor = self.module(*self.inputs)
        return result

    def check(self, tolerance: float = 1e-5) -> None:
        """Check that the program computes what the module does."""
        close(self.run(), self.eager(), tolerance)
