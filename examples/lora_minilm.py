"""LoRA on the device: two small tasks, two adapters, and one foundation that is neither copied nor changed.

The model is all-MiniLM-L6-v2 with low-rank branches beside the query and value of each attention, followed by a linear
layer; only these are trained. `train.pte` computes loss and gradients, `serve.pte` runs through XNNPACK, and both take
the frozen weights from `foundation.ptd`. Training on each task results in an adapter of a few hundred kilobytes. Then
two callers use both adapters at once on one foundation, and one program exchanges one adapter for the other while it is
loaded. All answers of the programs are compared with eager PyTorch.

    python examples/lora_minilm.py            # about two minutes
    python examples/lora_minilm.py --quick    # two of the six layers, half a minute
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import blobstore
from blobstore.adapters import AdapterTags, load_adapter, read_adapter, save_adapter
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import TrainingProgram, lower_training
from examples.demo.models import encode, load_encoder, load_tokenizer

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    from blobstore.lowering import BlobStorePartitioner

TOKENS = 16  # per sentence
BATCH = 8  # sentences per training step
CLASSES = 4  # of the task that has the most
RANK, ALPHA = 8, 16
TOLERANCE = 1e-3  # of scores around 10, between the float32 kernels of XNNPACK and torch
TASKS = {"topics": "sentences.txt", "intents": "intents.txt"}

# Selects what is trained. Names have underscores for dots.
TAGS = AdapterTags(is_adapter=lambda name: "lora_" in name or name.startswith("head_"))


class Lora(nn.Module):
    """A frozen linear layer, and a branch of low rank that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + ALPHA / RANK * self.lora_b(self.lora_a(x))
        return result


class Classifier(nn.Module):
    """The sentence encoder with branches, followed by a linear layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.encoder = load_encoder().requires_grad_(False)
        bert: Any = self.encoder.bert
        bert.encoder.layer = bert.encoder.layer[:layers]
        for layer in bert.encoder.layer:
            layer.attention.self.query = Lora(layer.attention.self.query)
            layer.attention.self.value = Lora(layer.attention.self.value)
        self.head = nn.Linear(384, CLASSES)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.head(10 * self.encoder(ids, mask))  # the encoder returns unit vectors
        return result


class TrainingClassifier(Classifier):
    """The same network with its loss."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(ids, mask), labels)


@dataclass
class Task:
    """Sentences as ids and mask, both [n, TOKENS], and labels [n]."""

    train: tuple[Tensor, Tensor, Tensor]
    test: tuple[Tensor, Tensor, Tensor]


@dataclass
class Tuned:
    """The result of training on a task.

    Attributes:
        task: the task.
        path: the adapter.
        before, after: the fraction of correct answers to the test sentences.
    """

    task: Task
    path: Path
    before: float
    after: float


def main() -> None:
    """Train on both tasks, then serve both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="number of steps for each task (default: 40)")
    parser.add_argument("--quick", action="store_true", help="two of the six layers, 20 steps")
    parser.add_argument("--folder", type=Path, help="where to keep programs, foundation and adapters")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        network = export(2 if arguments.quick else 6, folder)
        run(network, folder, 20 if arguments.quick else arguments.steps)


def export(layers: int, folder: Path) -> Classifier:
    """Write `train.pte`, `serve.pte`, `foundation.ptd` and `adapter.ptd`, and return the network in eager mode."""
    torch.manual_seed(0)
    network, training = Classifier(layers).eval(), TrainingClassifier(layers).eval()
    training.load_state_dict(network.state_dict())
    ids, mask = (torch.ones(BATCH, TOKENS, dtype=torch.int64) for _ in range(2))
    start = time.perf_counter()
    with quiet():
        train = lower_training(training, (ids, mask, torch.zeros(BATCH, dtype=torch.int64)), tag=TAGS)
    serve = lower(
        {"forward": (network, (ids[:1], mask[:1]))},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag=TAGS)],
        external_constants=TAGS,
    )
    result = blobstore.save_programs({"train": train, "serve": serve}, folder, keep_small=1024)
    print(f"lowered in {time.perf_counter() - start:.0f} s")
    for path in [*(program.path for program in result.programs), *result.data_files]:
        print(f"  {path.name:15}{path.stat().st_size:12,} bytes")
    return network


def run(network: Classifier, folder: Path, steps: int) -> dict[str, Tuned]:
    """Train, serve, and compare with the network in eager mode; returns the result of each task.

    Raises:
        RuntimeError: a program computed something else than eager PyTorch, or the foundation changed.
    """
    foundation = BlobCache(folder / "foundation.ptd")
    digest = hashlib.sha256(foundation.paths[0].read_bytes()).digest()
    tokenizer = load_tokenizer()
    tuned = {name: tune(name, read_task(tokenizer, file), foundation, folder, steps) for name, file in TASKS.items()}
    serve_both(network, tuned, foundation, folder)
    exchange(network, tuned, foundation, folder)
    if foundation.dirty or hashlib.sha256(foundation.paths[0].read_bytes()).digest() != digest:
        raise RuntimeError("the foundation was changed")
    print("foundation.ptd: no byte was changed, neither in the file nor in memory")
    return tuned


def read_task(tokenizer: Any, file: str) -> Task:
    """Read a task. Every third sentence of each label is kept for testing."""
    pairs = [line.split("\t") for line in (Path(__file__).parent / file).read_text().splitlines() if line]
    labels = sorted({label for label, _ in pairs})

    def batch(test: bool) -> tuple[Tensor, Tensor, Tensor]:
        chosen = [
            (text, labels.index(label))
            for label in labels
            for i, text in enumerate(text for own, text in pairs if own == label)
            if (i % 3 == 0) == test
        ]
        encoded = [encode(tokenizer, text, TOKENS) for text, _ in chosen]
        ids, mask = (torch.cat([pair[i] for pair in encoded]) for i in range(2))
        return ids, mask, torch.tensor([label for _, label in chosen])

    return Task(batch(test=False), batch(test=True))


def tune(name: str, task: Task, foundation: BlobCache, folder: Path, steps: int) -> Tuned:
    """Train the branches and the head, publish them, and save them as an adapter."""
    cache = BlobCache(folder / "adapter.ptd", base=foundation)
    serve = Program(folder / "serve.pte", cache).method()
    before = accuracy(serve, task)
    training = TrainingProgram(folder / "train.pte", cache)
    optimizer = torch.optim.Adam(training.named_parameters().values(), lr=3e-3)
    shuffle = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    for _ in range(steps):
        chosen = torch.randperm(len(task.train[2]), generator=shuffle)[:BATCH]
        training.step(optimizer, *(part[chosen] for part in task.train))
    milliseconds = 1e3 * (time.perf_counter() - start) / steps
    training.publish(cache)
    after = accuracy(serve, task)
    path = folder / f"{name}.ptd"
    weights = training.named_parameters()
    nbytes = save_adapter(path, weights, foundation=folder / "foundation.ptd", scale=ALPHA / RANK)
    count = sum(weight.numel() for weight in weights.values())
    print(f"{name}: {count:,} weights in {len(weights)} tensors, {steps} steps of {milliseconds:.0f} ms")
    print(f"  correct answers {before:.0%} -> {after:.0%} of {len(task.test[2])}; {path.name} {nbytes:,} bytes")
    return Tuned(task, path, before, after)


def scores(serve: Callable[..., list[Tensor]], task: Task) -> Tensor:
    """The scores that a program computes for the test sentences, one at a time."""
    ids, mask, labels = task.test
    return torch.cat([serve(ids[i : i + 1], mask[i : i + 1]) for i in range(len(labels))])


def accuracy(serve: Callable[..., list[Tensor]], task: Task) -> float:
    """The fraction of correct answers."""
    return float((scores(serve, task).argmax(1) == task.test[2]).float().mean())


def eager(network: Classifier, tuned: Tuned) -> Tensor:
    """The scores that eager PyTorch computes with an adapter."""
    weights = {name: torch.tensor(tensor) for name, tensor in read_adapter(tuned.path).tensors.items()}
    ids, mask, _ = tuned.task.test
    with torch.no_grad():
        return torch.func.functional_call(network, weights, (ids, mask))


def compare(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise if a program and eager PyTorch differ."""
    worst = float((found - expected).abs().max())
    if worst > TOLERANCE:
        raise RuntimeError(f"{what}: differs from eager PyTorch by {worst}")
    print(f"  {what}: equal to eager PyTorch within {worst:.0e}")


def serve_both(network: Classifier, tuned: dict[str, Tuned], foundation: BlobCache, folder: Path) -> None:
    """Serve two callers at once, each with its own adapter, on one foundation."""
    print("both adapters at once")
    found: dict[str, Tensor] = {}
    caches = {name: BlobCache(folder / "adapter.ptd", base=foundation) for name in tuned}
    for name, cache in caches.items():
        load_adapter(cache, tuned[name].path)
    programs = {name: Program(folder / "serve.pte", cache).method() for name, cache in caches.items()}

    def call(name: str) -> None:
        found[name] = scores(programs[name], tuned[name].task)

    threads = [threading.Thread(target=call, args=(name,)) for name in tuned]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, one in tuned.items():
        compare(found[name], eager(network, one), name)
    private = [cache.stats.private_bytes for cache in caches.values()]
    if None not in private:
        print(f"  private memory: {' and '.join(f'{nbytes:,}' for nbytes in private)} bytes")


def exchange(network: Classifier, tuned: dict[str, Tuned], foundation: BlobCache, folder: Path) -> None:
    """Use one adapter after the other in one program."""
    print("exchanging the adapters of a loaded program")
    cache = BlobCache(folder / "adapter.ptd", base=foundation)
    serve = Program(folder / "serve.pte", cache).method()
    for name in [*tuned, *tuned]:
        start = time.perf_counter()
        load_adapter(cache, tuned[name].path)
        seconds = time.perf_counter() - start
        compare(scores(serve, tuned[name].task), eager(network, tuned[name]), f"{name}, after {1e3 * seconds:.1f} ms")


if __name__ == "__main__":
    main()
