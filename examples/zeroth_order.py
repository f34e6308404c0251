"""Fine-tune a delegated program where it runs, without gradients (MeZO).

One step moves the weights in a random direction and runs forward, then moves them equally far to the other side and
runs forward again. The difference of the two losses determines the size and the sign of the step. All this needs is a
program whose weights can change between two calls. Eager PyTorch then runs with the tuned weights for comparison.

    python examples/zeroth_order.py digits       # a small network on scikit-learn's digits
    python examples/zeroth_order.py sentences    # all-MiniLM-L6-v2 with a classification head
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import MeZO
from examples.demo.models import encode, load_encoder, load_tokenizer

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    from blobstore.lowering import BlobStorePartitioner

Batch = tuple[tuple[Tensor, ...], Tensor]
"""Inputs and labels."""


@dataclass
class Task:
    """A model, and the data to tune it on.

    Attributes:
        module: the model, in eager mode.
        tuned: the names of the parameters to change.
        train, test: batches of equal size.
        scale, rate: the distance to either side, and the learning rate.
    """

    module: nn.Module
    tuned: list[str]
    train: list[Batch]
    test: list[Batch]
    scale: float
    rate: float


def main() -> None:
    """Tune the program, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["digits", "sentences"])
    parser.add_argument("--steps", type=int, help="number of steps (default: 3000 for digits, 150 for sentences)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    task = digits() if arguments.task == "digits" else sentences()
    steps = arguments.steps or {"digits": 3000, "sentences": 150}[arguments.task]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        run(task, steps, Path(folder))


def run(task: Task, steps: int, folder: Path) -> tuple[float, float, float]:
    """Tune the program; its accuracy before and after, and that of the module with the tuned weights."""
    cache, forward = lowered(task.module, task.train[0][0], folder)
    optimizer = MeZO(cache, lr=task.rate, eps=task.scale, names=task.tuned)
    before = accuracy(forward, task.test)
    batches, start = itertools.cycle(task.train), time.perf_counter()
    for inputs, labels in itertools.islice(batches, steps):
        optimizer.step(lambda: functional.cross_entropy(forward(*inputs), labels))  # noqa: B023
    milliseconds = 1e3 * (time.perf_counter() - start) / steps
    tuned = {name: torch.from_numpy(cache.tensors.value(name)[0].copy()) for name in optimizer.names}
    task.module.load_state_dict(tuned, strict=False)
    after, eager = accuracy(forward, task.test), accuracy(task.module, task.test)
    print(f"{sum(w.numel() for w in tuned.values()):,} weights in {len(tuned)} tensors, {steps} steps")
    print(f"accuracy {before:6.1%} -> {after:6.1%}, in eager PyTorch {eager:6.1%}   {milliseconds:.2f} ms a step")
    return before, after, eager


def lowered(module: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> tuple[BlobCache, Callable[..., Tensor]]:
    """The module, lowered to a program that runs through XNNPACK on a cache."""
    manager = lower(
        {"forward": (module, inputs)},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag="model")],
        external_constants=lambda node: "model",
    )
    with (folder / "model.pte").open("wb") as file:
        manager.write_to_file(file)
    manager.write_tensor_data_to_file(str(folder))
    cache = BlobCache(folder / "model.ptd")
    method = Program(folder / "model.pte", cache).method()
    return cache, method


def accuracy(compute: Callable[..., Tensor], batches: list[Batch]) -> float:
    """The fraction of correct answers."""
    right = sum(int((compute(*inputs).argmax(1) == labels).sum()) for inputs, labels in batches)
    return right / sum(len(labels) for _, labels in batches)


# ------------------------------------------------------------------------------------------------------ the tasks


def digits() -> Task:
    """A network that was trained on upright digits must adapt to tilted ones."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    upright = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(data.target)[order]
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for _ in range(15):
        for chosen in torch.arange(1280).split(64):
            optimizer.zero_grad()
            functional.cross_entropy(module(upright[chosen]), labels[chosen]).backward()
            optimizer.step()
    angle = torch.tensor(0.5)  # radians
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    matrix = torch.cat([turn, torch.zeros(2, 1)], 1).expand(len(upright), 2, 3)
    grid = functional.affine_grid(matrix, list(upright.shape), align_corners=False)
    tilted = functional.grid_sample(upright, grid, align_corners=False)

    def batches(start: int, stop: int) -> list[Batch]:
        return [((tilted[i : i + 64],), labels[i : i + 64]) for i in range(start, stop - 63, 64)]

    tuned = [name for name, _ in module.named_parameters()]
    return Task(module.eval(), tuned, batches(0, 1280), batches(1280, 1792), scale=1e-2, rate=1e-3)


class Classifier(nn.Module):
    """The sentence encoder, followed by a linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = load_encoder()
        self.head = nn.Linear(384, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.head(10 * self.encoder(ids, mask))  # the encoder returns unit vectors
        return result


def sentences() -> Task:
    """Classify sentences by topic. Every third sentence is kept for testing."""
    lines = (Path(__file__).parent / "sentences.txt").read_text().splitlines()
    pairs = [line.split("\t") for line in lines if line]
    topics = sorted({topic for topic, _ in pairs})
    tokenizer = load_tokenizer()
    module = Classifier(len(topics)).eval()

    def batch(chosen: list[list[str]]) -> Batch:
        encoded = [encode(tokenizer, text, 16) for _, text in chosen]
        ids, mask = (torch.cat([pair[i] for pair in encoded]) for i in range(2))
        return (ids, mask), torch.tensor([topics.index(topic) for topic, _ in chosen])

    size = len(topics) * 4
    train = [pair for i, pair in enumerate(pairs) if i % 3]
    test = [pair for i, pair in enumerate(pairs) if i % 3 == 0]
    groups = [[chunk[i : i + size] for i in range(0, len(chunk) - size + 1, size)] for chunk in (train, test)]
    # the head, which XNNPACK packs, and the normalization of the last layer, which kernels read directly
    last = ("head.", "encoder.bert.encoder.layer.5.output.LayerNorm.")
    tuned = [name for name, _ in module.named_parameters() if name.startswith(last)]
    return Task(module, tuned, [batch(g) for g in groups[0]], [batch(g) for g in groups[1]], scale=1e-2, rate=3e-3)


if __name__ == "__main__":
    main()
