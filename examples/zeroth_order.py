"""Fine-tune a delegated program where it runs, without gradients (MeZO).

One step moves the weights in a random direction and runs forward, then moves them equally far to the other side and
runs forward again. The difference of the two losses determines the size and the sign of the step. The direction is
never stored, because its seed reproduces it. All this needs is a program whose weights can change between two calls.
The same steps run in eager PyTorch for comparison.

    python examples/zeroth_order.py digits       # a small CNN on scikit-learn's digits
    python examples/zeroth_order.py sentences    # all-MiniLM-L6-v2 with a classification head
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
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
    """Tune the program and the module, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["digits", "sentences"])
    parser.add_argument("--steps", type=int, help="number of steps (default: 3000 for digits, 150 for sentences)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    task = digits() if arguments.task == "digits" else sentences()
    steps = arguments.steps or {"digits": 3000, "sentences": 150}[arguments.task]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        run(task, steps, Path(folder))


def run(task: Task, steps: int, folder: Path) -> tuple[float, float]:
    """Tune the program and the module with the same steps, and return their accuracies afterwards."""
    weights = {name: parameter.clone() for name, parameter in task.module.named_parameters() if name in task.tuned}
    cache, forward = lowered(task.module, task.train[0][0], folder)
    print(f"{sum(w.numel() for w in weights.values()):,} weights in {len(weights)} tensors, {steps} steps")

    def run_program(inputs: tuple[Tensor, ...], weights: dict[str, Tensor] | None) -> Tensor:
        if weights is not None:
            cache.update(weights, finite=True)
        return forward(*inputs)

    def run_module(inputs: tuple[Tensor, ...], weights: dict[str, Tensor] | None) -> Tensor:
        if weights is not None:
            task.module.load_state_dict(weights, strict=False)
        result: Tensor = task.module(*inputs)
        return result

    accuracies = []
    for name, compute in (("program", run_program), ("eager", run_module)):
        before = accuracy(compute, task.test)
        start = time.perf_counter()
        tuned = tune(compute, {name: w.clone() for name, w in weights.items()}, task, steps)
        milliseconds = 1e3 * (time.perf_counter() - start) / steps
        compute(task.test[0][0], tuned)
        accuracies.append(accuracy(compute, task.test))
        print(f"{name:8} accuracy {before:6.1%} -> {accuracies[-1]:6.1%}   {milliseconds:.2f} ms a step")
    return accuracies[0], accuracies[1]


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


Compute = Callable[[tuple[Tensor, ...], "dict[str, Tensor] | None"], Tensor]
"""Runs the model on inputs, with new weights if they are given."""


def tune(compute: Compute, weights: dict[str, Tensor], task: Task, steps: int) -> dict[str, Tensor]:
    """Take zeroth-order steps, which change the weights in place."""
    batches = cycle(task.train)
    for step in range(steps):
        inputs, labels = next(batches)
        perturb(weights, step, task.scale)
        above = float(functional.cross_entropy(compute(inputs, weights), labels))
        perturb(weights, step, -2 * task.scale)
        below = float(functional.cross_entropy(compute(inputs, weights), labels))
        slope = (above - below) / (2 * task.scale)
        perturb(weights, step, task.scale - task.rate * slope)  # back to the middle, then one step down
    return weights


def perturb(weights: dict[str, Tensor], seed: int, amount: float) -> None:
    """Move the weights in the direction of a seed."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=amount)


def cycle(batches: list[Batch]) -> Iterator[Batch]:
    """The batches, repeated for ever."""
    while True:
        yield from batches


def accuracy(compute: Compute, batches: list[Batch]) -> float:
    """The fraction of correct answers."""
    right = sum(int((compute(inputs, None).argmax(1) == labels).sum()) for inputs, labels in batches)
    return right / sum(len(labels) for _, labels in batches)


# ------------------------------------------------------------------------------------------------------ the tasks


class Cnn(nn.Module):
    """Two convolutions and a linear layer for pictures of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.out = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.out(x.flatten(1))


def digits() -> Task:
    """A network that was trained on upright digits must adapt to tilted ones."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    upright = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(data.target)[order]
    module = Cnn()
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
