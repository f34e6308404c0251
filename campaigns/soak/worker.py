"""One process of a soak: threads that use one cache in every way at once.

All weights have one value at a time (`campaigns.network`), so each output, each blob and each saved file shows the
commit that it belongs to. In modes "private" and "copy" one thread commits, and announces the value of each generation
beforehand: a call may only see values that were current between its begin and its end. In mode "shared" every process
commits. There a file that all of them map has a table with the value of each generation. The first process that sees a
generation writes its value, and no process may ever see another one.
"""

import argparse
import faulthandler
import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from blobstore import errors, open_ptd
from blobstore.runtime import BlobCache, Method, Program
from campaigns import network
from campaigns.children import in_child
from campaigns.soak import measure

FIRST = 1  # the value of the files
DELTA = 7  # of the file that is loaded
REMEMBERED = 1 << 16  # generations
PATIENCE = 60  # seconds that a forked child, or the end of a thread, may take


class WrongError(Exception):
    """A thread saw something that must not be seen."""


class Worker:
    """The threads of one process; `run` returns what they did and saw."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder: Path = options.folder
        self.scratch = self.folder / f"scratch-{options.name}"
        self.scratch.mkdir(exist_ok=True)
        self.mode: str = options.mode
        self.seed: int = options.seed
        self.seconds: float = options.seconds
        name = "delegated" if options.delegated else "portable"
        self.program = self.folder / f"{name}.pte"
        data = self.folder / f"{name}.{'copy.ptd' if self.mode == 'shared' else 'ptd'}"
        mode: Any = "private" if self.mode == "nested" else self.mode
        self.owner = BlobCache(data, mode)
        self.cache = BlobCache((), base=self.owner) if self.mode == "nested" else self.owner
        self.delta = self.folder / f"{name}.delta.ptd"
        self.names = list(self.owner.tensors) if options.delegated else network.weight_keys(self.owner)
        self.shapes = {
            name: self.owner.tensors[name].sizes if options.delegated else self.owner.layout(name).sizes
            for name in self.names
        }
        self.keys = network.weight_keys(self.owner)
        self.values = {self.owner.generation: FIRST}
        self.shared = np.memmap(self.folder / f"{name}.values", np.uint64, "r+") if self.mode == "shared" else None
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stop = threading.Event()

    # What may be seen.

    def weights(self, value: int) -> dict[str, np.ndarray]:
        return {name: np.full(shape, value, np.float32) for name, shape in self.shapes.items()}

    def announce(self, value: int) -> None:
        """Announce the value of the next commit here."""
        following = self.owner.generation + 1
        self.values[following] = value
        self.values.pop(following - REMEMBERED, None)

    def saw(self, generation: int, value: int) -> None:
        """In mode "shared": check that no process has seen another value of this generation."""
        assert self.shared is not None
        place = generation % len(self.shared)
        known = int(self.shared[place])
        if known >> 8 == generation + 1 and known & 255 != value:
            raise WrongError(f"generation {generation} has the value {value}, another process saw {known & 255}")
        self.shared[place] = generation + 1 << 8 | value

    def allowed(self, value: int, before: int, after: int) -> None:
        seen = {self.values.get(generation) for generation in range(before, after + 1)}
        if value not in seen:
            raise WrongError(f"the value {value} between generations {before} and {after}, which have {seen}")

    @staticmethod
    def only(array: np.ndarray, what: str) -> float:
        """The one value of all elements."""
        first = array.flat[0]
        if not (array == first).all():
            raise WrongError(f"{what} is of several commits: {np.unique(array)[:5]}")
        return float(first)

    @staticmethod
    def value_of(output: float) -> int:
        """The value of the weights that give an output."""
        value = round((-1 + (1 + 4 * 4160 * output) ** 0.5) / (2 * 4160))
        if network.expected(value) != output:
            raise WrongError(f"the output {output} belongs to no weights")
        return value

    def call(self, method: Method) -> None:
        """Run a method and check its output."""
        if self.shared is not None and random.random() < 0.5:
            with self.cache.reading():
                generation = self.cache.generation
                value = int(self.blobs(self.cache))
                output = self.value_of(self.only(method(network.INPUT), "an output"))
            if output != value:
                raise WrongError(f"in one generation the weights are {value}, the output is that of {output}")
            self.saw(generation, value)
        else:
            before = self.cache.generation
            value = self.value_of(self.only(method(network.INPUT), "an output"))
            if self.shared is None:
                self.allowed(value, before, self.cache.generation)
        self.counts["calls"] += 1

    def blobs(self, cache: BlobCache) -> float:
        """The one value of all weights."""
        return self.only(
            np.concatenate([np.frombuffer(cache.get_data(key), np.float32) for key in self.keys]), "a reading"
        )

    # What the threads do.

    def calls(self, chance: random.Random) -> None:
        program = Program(self.program, self.cache)
        method = program.load_method()
        while not self.stop.is_set():
            self.call(method)
            if chance.random() < 0.002:
                program = Program(self.program, self.cache)
                method = program.load_method()
                self.counts["programs"] += 1

    def commits(self, chance: random.Random) -> None:
        while not self.stop.is_set():
            kind, value = chance.random(), chance.randint(1, network.LARGEST)
            if self.shared is not None:
                # the returned generation may already be that of another process's commit
                if kind < 0.9:
                    self.owner.update(self.weights(value))
                else:
                    self.owner.load(self.delta)
            elif kind < 0.6:
                self.announce(value)
                self.owner.update(self.weights(value))
            elif kind < 0.7:
                self.announce(value)
                with self.owner.transaction() as transaction:
                    transaction.update(self.weights(value))
            elif kind < 0.85:
                if self.owner.dirty:
                    self.announce(FIRST)
                self.owner.revert()
                self.counts["reverts"] += 1
            else:
                self.announce(DELTA)
                self.owner.load(self.delta)
                self.counts["loads"] += 1
            self.counts["commits"] += 1
            if chance.random() < 0.05:
                self.refused(value)
            time.sleep(chance.random() * 0.004)

    def refused(self, value: int) -> None:
        """An update with one part that does not fit; the other parts must not be seen."""
        before = self.owner.generation
        try:
            self.owner.update({**self.weights(value), self.names[-1]: np.zeros(3, np.float32)})
        except errors.LayoutError:
            self.counts["refused"] += 1
        else:
            raise WrongError("an update with a wrong shape was accepted")
        if self.shared is None and self.owner.generation != before:
            raise WrongError("a refused update counted as a commit")

    def saves(self, chance: random.Random) -> None:
        while not self.stop.is_set():
            path = self.scratch / f"saved-{chance.randint(0, 2)}.ptd"
            before = self.owner.generation
            self.owner.save(path)
            after = self.owner.generation
            with open_ptd(path, verify=True) as saved:
                arrays = [np.frombuffer(saved.get_data(key), np.float32) for key in self.keys]
                value = self.only(np.concatenate(arrays), "a saved file")
            if self.shared is None:
                self.allowed(int(value), before, after)
            self.counts["saves"] += 1
            with BlobCache(path) as cache:
                self.blobs(cache)
            self.stop.wait(chance.random() * 0.05)

    def reads(self, chance: random.Random) -> None:
        while not self.stop.is_set():
            with self.cache.reading():
                generation = self.cache.generation
                value = int(self.blobs(self.cache))
            if self.shared is None:
                self.allowed(value, generation, generation)
            else:
                self.saw(generation, value)
            self.counts["readings"] += 1
            if self.cache.stats.keys < len(self.keys):
                raise WrongError("keys were lost")
            self.stop.wait(chance.random() * 0.01)

    def forks(self, chance: random.Random) -> None:
        method = Program(self.program, self.cache).load_method()
        while not self.stop.is_set():
            self.call(method)
            result = in_child(lambda: self.be_a_child(method), PATIENCE)
            if "value" not in result:
                raise WrongError(f"a forked child: {result}")
            self.counts["forks"] += 1
            self.stop.wait(chance.random())

    def be_a_child(self, method: Method) -> None:
        """What a forked process may do: run, commit for itself, and load a program."""
        if self.shared is not None:
            self.call(method)
            return
        generation = self.cache.generation
        for _ in range(2):
            value = self.value_of(self.only(method(network.INPUT), "an output"))
            self.allowed(value, generation, generation)
        self.owner.update(self.weights(11))
        for one in (method, Program(self.program, self.cache).load_method()):
            value = self.value_of(self.only(one(network.INPUT)[0], "an output"))
            if value != 11:
                raise WrongError(f"a child committed 11 and computed with {value}")
        self.owner.revert()
        value = self.value_of(self.only(method(network.INPUT), "an output"))
        if value != FIRST:
            raise WrongError(f"a child reverted to {FIRST} and computed with {value}")

    # All together.

    def run(self) -> dict[str, Any]:
        jobs = [self.calls, self.calls, self.commits, self.saves, self.reads, self.forks]
        threads = [
            threading.Thread(target=self.guard, args=(job, random.Random(f"{self.seed} {number}")), name=job.__name__)
            for number, job in enumerate(jobs)
        ]
        samples = []
        end = time.monotonic() + self.seconds
        for thread in threads:
            thread.start()
        while time.monotonic() < end and not self.stop.is_set():
            gc.collect()  # memory that only waits for the collector is not a leak
            samples.append(measure.sample())
            self.stop.wait(min(1.0, self.seconds / 20))
        self.stop.set()
        for thread in threads:
            thread.join(PATIENCE)
        if hanging := [thread.name for thread in threads if thread.is_alive()]:
            faulthandler.dump_traceback(all_threads=True)
            self.wrong.append(f"threads hang: {hanging}")
        for what, (middle, last) in measure.growth(samples).items():
            self.wrong.append(f"{what} grew from {middle} to {last}")
        last = samples[-1] if samples else {}
        return {"counts": dict(self.counts), "wrong": self.wrong, "size": last}

    def guard(self, job: Callable[[random.Random], None], chance: random.Random) -> None:
        try:
            job(chance)
        except Exception as error:  # every exception is a finding
            self.wrong.append(f"{job.__name__}: {type(error).__name__}: {error}")
            self.stop.set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--mode", choices=["private", "copy", "nested", "shared"], required=True)
    parser.add_argument("--delegated", action="store_true")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    faulthandler.enable()
    result = Worker(parser.parse_args()).run()
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    os._exit(1 if result["wrong"] else 0)  # threads that hang must not keep the process alive


if __name__ == "__main__":
    main()
