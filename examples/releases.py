"""One process serves, another publishes: ten releases are taken into a running program, and every answer is checked.

A publisher changes a layer of a small network, publishes the weights, and pulls the release into the folder of
the device. The server, another process, follows: it commits what changed while a thread of its own keeps calling the
program through XNNPACK. The weights of each version follow from its number, so every answer can be compared with what
eager PyTorch computes with the weights of one version. It must be one of those that the server had during the call, and
of no other.

    python examples/releases.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import blobstore
from blobstore.lowering.export import lower, quiet
from blobstore.releases import Release, publish, pull
from blobstore.runtime import BlobCache, Program

with quiet():
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    from blobstore.lowering import BlobStorePartitioner

NAME = "digits"
PAUSE = 1e-3  # seconds between an answer and the next call
TOLERANCE = 1e-4  # between the float32 kernels of XNNPACK and torch; a version changes the answers by much more


class Net(nn.Module):
    """From 64 numbers to ten."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(torch.relu(self.second(torch.relu(self.first(x)))))
        return scores


@dataclass
class Answer:
    """One call: its result of shape [1, 10], and the oldest and newest version that the server had during the call."""

    scores: Tensor
    oldest: int
    newest: int


@dataclass
class Served:
    """The record of a server.

    Attributes:
        answers: all of them, in order.
        switches: the duration of each `follow` that took a release, in seconds.
        reasons: why a release was not taken.
    """

    answers: list[Answer] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def network(version: int) -> Net:
    """The weights of a version: each one replaces one layer, and keeps those that earlier ones replaced."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for number in range(1, version + 1):
            layer = (net.first, net.second, net.out)[number % 3]
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(number)) * 0.2)
    return net.eval()


def question() -> Tensor:
    """What the server is asked, of shape [1, 64]."""
    return torch.randn(1, 64, generator=torch.Generator().manual_seed(99))


def publish_first(folder: Path) -> None:
    """Export the program and its weights, publish them as version 0, and pull them."""
    program = lower(
        {"forward": (network(0), (question(),))},
        partitioners=lambda: [BlobStorePartitioner(XnnpackPartitioner(), tag=NAME)],
    )
    blobstore.save_programs({"serve": program}, folder / "build", keep_small=1024)
    publish([folder / "build"], folder / "releases", name=NAME, version="0")
    pull(folder / "releases" / NAME / "0", folder / "device")


def publish_next(folder: Path, version: int) -> None:
    """Publish the weights of a version, and pull it into the folder of the device."""
    data = folder / "build" / f"{NAME}.ptd"
    changed = data.with_name(f"{NAME}.new")
    with BlobCache(data, "copy") as cache:
        cache.update_state_dict(network(version).state_dict())
        cache.save(changed)
    changed.replace(data)
    publish([folder / "build"], folder / "releases", name=NAME, version=str(version))
    pull(folder / "releases" / NAME / str(version), folder / "device")


def serve(folder: Path, last: int) -> Served:
    """Keep answering, and follow the releases until the last one is there."""
    served = Served()
    stop = threading.Event()
    failures: list[BaseException] = []
    with Release.open(folder / "device") as release:
        forward = Program(release.path / "serve.pte", release.cache).method()
        before = after = int(release.version)  # the versions that a call which begins now may have

        def answer() -> None:
            try:
                while not stop.is_set():
                    oldest = before
                    scores = forward(question())
                    served.answers.append(Answer(scores, oldest, after))
                    time.sleep(PAUSE)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            while before < last and not failures:
                after = last  # whatever was pulled may be taken from here on
                start = time.perf_counter()
                done = release.follow()
                if done.keys:
                    served.switches.append(time.perf_counter() - start)
                served.reasons += done.reasons
                before = after = int(release.version)
                time.sleep(0.005)
            count = len(served.answers)
            while len(served.answers) < count + 10 and not failures:  # some of the last version
                time.sleep(0.005)
        finally:
            stop.set()
            thread.join()
    if failures:
        raise failures[0]
    return served


def check(answers: list[Answer], last: int) -> list[int | None]:
    """The version that each answer is of; None if it is of none that the server had during the call."""
    with torch.no_grad():
        expected = [network(version)(question()) for version in range(last + 1)]
    return [
        next(
            (
                version
                for version in range(answer.oldest, answer.newest + 1)
                if torch.allclose(answer.scores, expected[version], rtol=TOLERANCE, atol=TOLERANCE)
            ),
            None,
        )
        for answer in answers
    ]


def main() -> None:
    """Serve here, publish in another process, and check every answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=10, help="number of releases after the first (default: 10)")
    parser.add_argument("--publish", type=Path, metavar="FOLDER", help="be the publisher; the server starts it")
    arguments = parser.parse_args()
    if arguments.publish is not None:
        for version in range(1, arguments.versions + 1):
            publish_next(arguments.publish, version)
        return
    with tempfile.TemporaryDirectory() as name:
        wrong = run(Path(name), arguments.versions)
    if wrong:
        raise SystemExit(1)


def run(folder: Path, versions: int) -> int:
    """Serve while another process publishes; the number of wrong answers."""
    publish_first(folder)
    command = [sys.executable, __file__, "--publish", str(folder), "--versions", str(versions)]
    with subprocess.Popen(command) as publisher:  # noqa: S603 - this file
        served = serve(folder, versions)
    if publisher.returncode or served.reasons:
        raise RuntimeError(f"the publisher ended with {publisher.returncode}; {served.reasons}")
    found = check(served.answers, versions)
    wrong = found.count(None)
    print(f"{len(found):,} answers of {len(set(found) - {None})} versions, {wrong} of them wrong")
    print(f"{len(served.switches)} releases were taken, each in at most {1e3 * max(served.switches):.1f} ms")
    return wrong


if __name__ == "__main__":
    main()
