"""The network of `campaigns.network`, lowered, and one that learns. A module of its own, because most processes of a campaign
need no torch; and other versions of ExecuTorch lower the network without blobstore."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BATCH = (torch.ones(2, 64),)


class Network(nn.Module):
    """Two layers, all of whose weights have one value."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(value)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


class Learner(nn.Module):
    """A layer with two outputs, and its loss."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x), y)


def lower_network(folder: Path, name: str, value: int, *, delegated: bool = False) -> Path:
    """Write `name.pte` and `name.ptd` with weights of one value, for the portable kernels or through the delegate."""
    from blobstore.lowering.export import lower, quiet

    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        from blobstore.lowering import BlobStorePartitioner

    def partitioners() -> list[Any]:
        return [BlobStorePartitioner(XnnpackPartitioner(), tag=name)] if delegated else []

    methods = {"forward": (Network(value).eval(), BATCH)}
    manager = lower(methods, partitioners=partitioners, external_constants=lambda node: name)
    path = folder / f"{name}.pte"
    with path.open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(folder))
    return path


def lower_embedded(path: Path, value: int) -> None:
    """Write a program for the portable kernels with its weights inside."""
    from blobstore.lowering.export import lower

    manager = lower({"forward": (Network(value).eval(), BATCH)}, partitioners=list)
    with path.open("wb") as file:
        manager.write_to_file(file)
