"""Train a program where it runs: XOR, from the first step to a program that serves the trained weights.

The loss is part of the model, so that ExecuTorch can compute its gradients. The program `train.pte` trains, first with
torch.optim.SGD and then with ExecuTorch's own SGD. Halfway it saves a checkpoint, from which a second instance
continues. `serve.pte` is another program, which runs through XNNPACK and receives the trained weights while it is
loaded.

    python examples/xor.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import blobstore
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import TrainingProgram, lower_training

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.extension.training import get_sgd_optimizer

    from blobstore.lowering import BlobStorePartitioner

INPUTS = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
LABELS = torch.tensor([0, 1, 1, 0])
RATE, MOMENTUM = 0.5, 0.9


class Net(nn.Module):
    """Two inputs, ten hidden units, and a score for each of the two answers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(2, 10)
        self.out = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sigmoid(self.hidden(x)))


class TrainingNet(Net):
    """The same network with its loss as the first output."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = super().forward(x)
        return functional.cross_entropy(scores, labels), scores.detach().argmax(1)


def main() -> None:
    """Train with both optimizers, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="number of steps (default: 200)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder))
        for name, make in OPTIMIZERS.items():
            print(f"\n{name}")
            run(Path(folder), make, arguments.steps)


def export(folder: Path) -> None:
    """Write `train.pte`, `serve.pte`, and `xor.ptd`, which has the weights of both."""
    torch.manual_seed(0)
    network, training = Net(), TrainingNet()
    training.load_state_dict(network.state_dict())
    with quiet():
        train = lower_training(training, (INPUTS, LABELS), tag="xor")
    serve = lower(
        {"forward": (network.eval(), (INPUTS,))},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag="xor")],
    )
    # small constants of the loss stay in the program, so that the data file has only weights
    result = blobstore.save_programs({"train": train, "serve": serve}, folder, keep_small=1024)
    for path in [*(program.path for program in result.programs), *result.data_files]:
        print(f"{path.name:10} {path.stat().st_size:7,} bytes")


def of_torch(training: TrainingProgram) -> torch.optim.SGD:
    """An optimizer of torch, over the runtime's memory."""
    return torch.optim.SGD(training.named_parameters().values(), lr=RATE, momentum=MOMENTUM)


def of_executorch(training: TrainingProgram) -> Any:
    """ExecuTorch's own SGD. It gives no access to its momentum, which could not be saved; here it has none."""
    return get_sgd_optimizer(training.named_parameters(), lr=10 * RATE)


OPTIMIZERS: dict[str, Callable[[TrainingProgram], Any]] = {
    "torch.optim.SGD": of_torch,
    "ExecuTorch's SGD": of_executorch,
}


def run(folder: Path, make: Callable[[TrainingProgram], Any], steps: int) -> tuple[list[float], list[float], Tensor]:
    """Train, save halfway, resume, publish.

    Returns:
        The losses; the losses of the resumed instance, from the checkpoint on; and the scores of `serve.pte` at the
        end.
    """
    cache = BlobCache(folder / "xor.ptd")
    serve = Program(folder / "serve.pte", cache).method()
    print(f"answers before  {answers(serve)}")

    training = TrainingProgram(folder / "train.pte", cache)
    optimizer = make(training)
    losses = [float(training.step(optimizer, INPUTS, LABELS)[0]) for _ in range(steps // 2)]
    kept = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    nbytes = training.save(folder / "half.ptd", kept)
    losses += [float(training.step(optimizer, INPUTS, LABELS)[0]) for _ in range(steps // 2, steps)]
    print(f"loss            {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps")

    resumed = TrainingProgram(folder / "train.pte", cache)
    optimizer = make(resumed)
    resumed.load(folder / "half.ptd", optimizer if kept else None)
    again = [float(resumed.step(optimizer, INPUTS, LABELS)[0]) for _ in range(steps // 2, steps)]
    same = "the same losses" if again == losses[steps // 2 :] else "DIFFERENT LOSSES"
    print(f"resumed         from a checkpoint of {nbytes:,} bytes at step {steps // 2}: {same}")

    generation = training.publish(cache)
    print(f"answers after   {answers(serve)}   (generation {generation}; nothing was loaded again)")
    scores: Tensor = serve(INPUTS)
    return losses, again, scores


def answers(serve: Callable[..., list[Tensor]]) -> str:
    """The truth table that the serving program computes."""
    found = serve(INPUTS).argmax(1).tolist()
    return "  ".join(f"{int(a)} xor {int(b)} = {answer}" for (a, b), answer in zip(INPUTS.tolist(), found, strict=True))


if __name__ == "__main__":
    main()
