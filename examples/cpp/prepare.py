"""Write what `device.cpp` ships to a device: two programs, a foundation and three adapters.

The network classifies points; most of its weights are frozen. `serve.pte` runs it through XNNPACK, `train.pte` computes a
loss and its gradients, and both take the frozen weights from `foundation.ptd`. The rest is an adapter: `adapter.ptd` is
untrained, `left.ptd` and `up.ptd` were trained here, for a task each.

    python examples/cpp/prepare.py build/device-files    # about twenty seconds
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import blobstore
from blobstore.adapters import AdapterTags, save_adapter
from blobstore.lowering.export import lower, quiet
from blobstore.training import lower_training

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    from blobstore.lowering import BlobStorePartitioner

BATCH, RANK, ALPHA = 16, 4, 8
TASKS = {"left": lambda points: points[:, 0] < 0, "up": lambda points: points[:, 1] > 0}
TAGS = AdapterTags(is_adapter=lambda name: "lora_" in name or name.startswith("head"))


class Lora(nn.Module):
    """A frozen linear layer, and a branch of low rank that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + ALPHA / RANK * self.lora_b(self.lora_a(x))
        return result


class Classifier(nn.Module):
    """Points (x, y) to the scores of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 256).requires_grad_(False)
        self.second = Lora(nn.Linear(256, 256))
        self.head = nn.Linear(256, 2)

    def forward(self, points: Tensor) -> Tensor:
        result: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(points)))))
        return result


class TrainingClassifier(Classifier):
    """The same network with its loss."""

    def forward(self, points: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(points), labels)


def main() -> None:
    """Write all files to a folder."""
    if len(sys.argv) != 2:
        sys.exit("usage: prepare.py FOLDER")
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    network, training = Classifier().eval(), TrainingClassifier().eval()
    training.load_state_dict(network.state_dict())
    points, labels = torch.rand(BATCH, 2), torch.zeros(BATCH, dtype=torch.int64)
    with quiet():
        train = lower_training(training, (points, labels), tag=TAGS)
    serve = lower(
        {"forward": (network, (points[:1],))},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag=TAGS)],
        external_constants=TAGS,
    )
    blobstore.save_programs({"train": train, "serve": serve}, folder, keep_small=1024)
    for name, is_first in TASKS.items():
        tune(training, is_first)
        trained = {key: value.detach() for key, value in training.named_parameters() if value.requires_grad}
        save_adapter(folder / f"{name}.ptd", trained, foundation=folder / "foundation.ptd", scale=ALPHA / RANK)
    for path in sorted(folder.iterdir()):
        print(f"{path.name:16}{path.stat().st_size:10,} bytes")


def tune(network: nn.Module, is_first: object) -> None:
    """Train what is not frozen for a task."""
    optimizer = torch.optim.Adam((p for p in network.parameters() if p.requires_grad), lr=1e-2)
    for _ in range(100):
        points = 2 * torch.rand(BATCH, 2) - 1
        optimizer.zero_grad()
        network(points, is_first(points).long()).backward()  # type: ignore[operator]
        optimizer.step()


if __name__ == "__main__":
    main()
