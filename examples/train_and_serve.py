"""One thread trains, another serves, on one cache of weights.

A network that was trained on upright digits must adapt to tilted ones. It keeps answering, through XNNPACK, while it
trains on them: after every few steps the trained weights are published, and the next answer uses them. Each answer is
checked afterwards. It must be what eager PyTorch computes with the weights of a generation that the cache had during
the call, and of no other generation. The time of every answer is plotted.

    python examples/train_and_serve.py --picture train_and_serve.html
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import blobstore
from blobstore.lowering.export import lower, quiet
from blobstore.runtime import BlobCache, Program
from blobstore.training import TrainingProgram, lower_training

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    from blobstore.lowering import BlobStorePartitioner

BATCH = 32  # pictures per training step
PAUSE = 1e-3  # seconds between an answer and the next call
TOLERANCE = 1e-4  # between the float32 kernels of XNNPACK and torch; a generation changes the scores by much more


class Net(nn.Module):
    """From a picture of 8 by 8 to ten scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 256)
        self.out = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))))


class TrainingNet(Net):
    """The same network with its loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return functional.cross_entropy(super().forward(x), labels)


@dataclass
class Digits:
    """Pictures [n, 64] and their labels."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


@dataclass
class Answer:
    """One call of the serving program.

    Attributes:
        picture: the index of the test picture.
        scores: the result, of shape [1, 10].
        start, seconds: when the call began, and how long it took.
        oldest, newest: the cache's generation before and after the call.
    """

    picture: int
    scores: Tensor
    start: float
    seconds: float
    oldest: int
    newest: int


@dataclass
class Run:
    """The record of a run.

    Attributes:
        alone: the duration in seconds of each answer before training.
        answers: the answers during training and after it.
        published: the weights of each generation, by name.
        times: when each generation was published.
        publishing: the duration in seconds of each publishing.
    """

    alone: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    published: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    times: dict[int, float] = field(default_factory=dict)
    publishing: list[float] = field(default_factory=list)


def main() -> None:
    """Train and serve, check every answer, print and plot the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="number of training steps (default: 2000)")
    parser.add_argument("--every", type=int, default=10, help="number of steps between publishing (default: 10)")
    parser.add_argument(
        "--picture", type=Path, default=Path("train_and_serve.html"), help="the page to write the plot to"
    )
    parser.add_argument("--quick", action="store_true", help="200 steps")
    arguments = parser.parse_args()
    digits = tilted_digits()
    with tempfile.TemporaryDirectory() as folder:
        network = upright_network()
        export(network, Path(folder))
        result = run(network, digits, Path(folder), 200 if arguments.quick else arguments.steps, arguments.every)
    print_summary(result, digits)
    torn = [answer for answer, generation in check(network, result, digits) if generation is None]
    print(f"torn or wrong answers: {len(torn)} of {len(result.answers):,}")
    plot(result, digits, arguments.picture)
    print(f"plot: {arguments.picture}")
    if torn:
        raise SystemExit(1)


def tilted_digits() -> Digits:
    """The digits of scikit-learn, rotated by half a radian."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    upright = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(data.target)[order]
    angle = torch.tensor(0.5)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    matrix = torch.cat([turn, torch.zeros(2, 1)], 1).expand(len(upright), 2, 3)
    grid = functional.affine_grid(matrix, list(upright.shape), align_corners=False)
    pictures = functional.grid_sample(upright, grid, align_corners=False).flatten(1)
    return Digits(pictures[:1280], labels[:1280], pictures[1280:], labels[1280:])


def upright_network() -> Net:
    """A network that was trained on the upright digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    pictures, labels = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(data.target)
    torch.manual_seed(0)
    network = Net()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(10):
        for chosen in torch.randperm(len(labels)).split(64):
            optimizer.zero_grad()
            functional.cross_entropy(network(pictures[chosen]), labels[chosen]).backward()
            optimizer.step()
    return network.eval()


def export(network: Net, folder: Path) -> None:
    """Write `train.pte`, `serve.pte`, which takes one picture, and `digits.ptd`, which has the weights of both."""
    training = TrainingNet()
    training.load_state_dict(network.state_dict())
    with quiet():
        train = lower_training(training, (torch.zeros(BATCH, 64), torch.zeros(BATCH, dtype=torch.int64)), tag="digits")
    serve = lower(
        {"forward": (network, (torch.zeros(1, 64),))},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag="digits")],
    )
    blobstore.save_programs({"train": train, "serve": serve}, folder, keep_small=1024)


def run(network: Net, digits: Digits, folder: Path, steps: int, every: int) -> Run:
    """Serve for a while, then train and publish in another thread while serving."""
    cache = BlobCache(folder / "digits.ptd")
    forward = Program(folder / "serve.pte", cache).method()
    training = TrainingProgram(folder / "train.pte", cache)
    optimizer = torch.optim.Adam(training.named_parameters().values(), lr=2e-4)
    result = Run()
    result.published[cache.generation] = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    result.times[cache.generation] = time.perf_counter()
    failures: list[BaseException] = []

    def answer(picture: int) -> Answer:
        oldest, start = cache.generation, time.perf_counter()
        scores = forward(digits.test[picture : picture + 1])
        return Answer(picture, scores, start, time.perf_counter() - start, oldest, cache.generation)

    def train() -> None:
        try:
            for step in range(1, steps + 1):
                chosen = torch.randint(len(digits.train), (BATCH,))
                training.step(optimizer, digits.train[chosen], digits.train_labels[chosen])
                if step % every == 0:
                    weights = {name: tensor.clone() for name, tensor in training.named_parameters().items()}
                    start = time.perf_counter()
                    generation = training.publish(cache)
                    result.publishing.append(time.perf_counter() - start)
                    result.published[generation], result.times[generation] = weights, time.perf_counter()
        except BaseException as error:
            failures.append(error)

    count = len(digits.test)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # otherwise a thread may wait 5 ms for the interpreter lock
    for i in range(500):
        result.alone.append(answer(i).seconds)
        time.sleep(PAUSE)
    trainer = threading.Thread(target=train)
    trainer.start()
    while trainer.is_alive():
        result.answers.append(answer(len(result.answers) % count))
        time.sleep(PAUSE)
    sys.setswitchinterval(interval)
    trainer.join()
    result.answers += [answer(picture) for picture in range(count)]
    if failures:
        raise failures[0]
    return result


def check(network: Net, result: Run, digits: Digits) -> list[tuple[Answer, int | None]]:
    """Each answer with its generation, or None unless it matches exactly one that the cache had at that time."""
    with torch.no_grad():
        expected = {
            generation: torch.func.functional_call(network, weights, (digits.test,))
            for generation, weights in result.published.items()
        }
    pictures = torch.tensor([answer.picture for answer in result.answers])
    scores = torch.cat([answer.scores for answer in result.answers])
    generations = list(expected)
    equal = torch.stack([(expected[g][pictures] - scores).abs().amax(1) < TOLERANCE for g in generations])
    found: list[tuple[Answer, int | None]] = []
    for answer, which in zip(result.answers, equal.T, strict=True):
        own = [generations[i] for i in which.nonzero().flatten().tolist()]
        right = len(own) == 1 and answer.oldest <= own[0] <= answer.newest
        found.append((answer, own[0] if right else None))
    return found


def shares(result: Run, digits: Digits) -> list[tuple[float, float]]:
    """The fraction of correct answers in each group of 100, with the time of the group."""
    first = result.answers[0].start
    groups = [result.answers[i : i + 100] for i in range(0, len(result.answers) - 99, 100)]
    return [
        (
            group[-1].start - first,
            sum(int(a.scores.argmax()) == int(digits.test_labels[a.picture]) for a in group) / 100,
        )
        for group in groups
    ]


def print_summary(result: Run, digits: Digits) -> None:
    """Print percentiles, and the accuracy before and after training."""
    print(f"{'milliseconds':28}{'p50':>8}{'p90':>8}{'p99':>8}{'max':>8}")
    rows = {
        f"{len(result.alone):,} answers alone": result.alone,
        f"{len(result.answers):,} while training": [answer.seconds for answer in result.answers],
        f"{len(result.publishing):,} times publishing": result.publishing,
    }
    for name, seconds in rows.items():
        print(f"{name:28}" + "".join(f"{1e3 * value:8.3f}" for value in np.percentile(seconds, [50, 90, 99, 100])))
    curve = shares(result, digits)
    print(f"correct answers: {curve[0][1]:.0%} of the first 100, {curve[-1][1]:.0%} of the last")


def plot(result: Run, digits: Digits, path: Path) -> None:
    """Write a page with the time of every answer, the moments of publishing, and the fraction of correct answers."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    first = result.answers[0].start
    x = [answer.start - first for answer in result.answers]
    y = [1e3 * answer.seconds for answer in result.answers]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    figure.add_trace(go.Scattergl(x=x, y=y, mode="markers", marker_size=4, name="answer"), 1, 1)
    moments = [moment - first for generation, moment in result.times.items() if generation != min(result.times)]
    figure.add_trace(
        go.Scatter(
            x=moments, y=[min(y) * 0.8] * len(moments), mode="markers", name="published",
            marker={"symbol": "triangle-up", "size": 7},
        ), 1, 1,
    )  # fmt: skip
    for share, name in ((50, "50%"), (99, "99%")):
        value = float(np.percentile(y, share))
        line = {"dash": "dot", "color": "black", "width": 1 if share == 50 else 2}
        label = f"{name} took less than {value:.2f} ms"
        figure.add_trace(go.Scatter(x=[x[0], x[-1]], y=[value, value], mode="lines", line=line, name=label), 1, 1)
    curve = shares(result, digits)
    figure.add_trace(go.Scatter(x=[t for t, _ in curve], y=[s for _, s in curve], name="correct answers of 100"), 2, 1)
    figure.update_yaxes(title_text="milliseconds", type="log", dtick=1, row=1, col=1)
    figure.update_yaxes(title_text="correct", tickformat=".0%", row=2, col=1)
    figure.update_xaxes(title_text="seconds", row=2, col=1)
    figure.update_layout(
        title=f"{len(x):,} answers while another thread trains and publishes {len(moments)} times",
        template="plotly_white",
        height=700,
    )
    figure.write_html(path, include_plotlyjs=True)


if __name__ == "__main__":
    main()
