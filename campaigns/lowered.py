"""The network of `campaigns.network`, lowered. A module of its own, because most processes of a campaign need no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blobstore.lowering.export import lower, quiet


class Network(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def lower_network(folder: Path, name: str, value: int, *, delegated: bool = False) -> Path:
    """Write `name.pte` and `name.ptd` with weights of one value, for the portable kernels or through the delegate."""
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

        from blobstore.lowering import BlobStorePartitioner

    module = Network().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)

    def partitioners() -> list[Any]:
        return [BlobStorePartitioner(XnnpackPartitioner(), tag=name)] if delegated else []

    methods = {"forward": (module, (torch.ones(2, 64),))}
    manager = lower(methods, partitioners=partitioners, external_constants=lambda node: name)
    path = folder / f"{name}.pte"
    with path.open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(folder))
    return path


def lower_embedded(path: Path, value: int) -> None:
    """Write a program for the portable kernels with its weights inside."""
    module = Network().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    manager = lower({"forward": (module, (torch.ones(2, 64),))}, partitioners=list)
    with path.open("wb") as file:
        manager.write_to_file(file)
