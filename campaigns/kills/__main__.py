"""Let processes add, drop, collect and read in one pool, and kill each with SIGKILL at a random moment: `make kills KILLS=…`.

After every kill, all versions that are there are read and compared with the files that were added, byte by byte. At the
end, everything is dropped and collected, and nothing may be left. The pool is a folder, or with `--bucket` in a bucket of a
real S3 server (radosgw).
"""

import argparse
import collections
import contextlib
import itertools
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from campaigns.children import say
from campaigns.kills.worker import work
from tests.pool import places
from tests.pool.models import halves, tensors, tuned, write

_LONGEST = {False: 2.0, True: 10.0}  # seconds that a process lives, in a folder and in a bucket
_PROCESSES = get_context("forkserver")  # a new interpreter would take longer than it lives
_PROCESSES.set_forkserver_preload(["campaigns.kills.worker"])


class WrongError(Exception):
    """A version is not as it was added, or a process saw what no kill explains."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=3, help="that run at once")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="of an earlier run")
    parser.add_argument("--bucket", action="store_true", help="in a bucket of radosgw; else in a folder")
    options = parser.parse_args()
    say(f"{options.kills} kills with --seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="kills-") as place, _pool(Path(place), in_bucket=options.bucket) as where:
        campaign = Campaign(Path(place), where, options.seed, options.processes)
        try:
            campaign.run(options.kills)
        except WrongError as error:
            say(f"FAILED after {campaign.kills} kills: {error}")
            sys.exit(1)


class Campaign:
    """Processes on one pool.

    Args:
        folder: for files.
        where: the pool, of which there is none yet.
        seed: of chance.
        processes: how many run at once.

    Attributes:
        kills: how many there were.
        done: how often what was done to the end.
    """

    def __init__(self, folder: Path, where: places.Place, seed: int, processes: int) -> None:
        self._folder, self._where, self._processes = folder, where, processes
        self._chance = random.Random(seed)
        self.kills, self.done = 0, collections.Counter[str]()
        make_models(folder / "models", seed)
        self._numbers = itertools.count()
        self._pool = where.open(create=True)

    def run(self, kills: int) -> None:
        """Kill so many processes.

        Raises:
            WrongError: something is lost, left or wrong.
        """
        begun = time.monotonic()
        running = [self._started() for _ in range(self._processes)]
        try:
            while self.kills < kills:
                victim = running.pop(0)
                time.sleep(self._chance.uniform(0, _LONGEST[self._where.is_bucket] / self._processes))
                self._kill(*victim)
                running.append(self._started())
                self._check()
                if self.kills % 50 == 0:
                    say(f"{self.kills} kills, {time.monotonic() - begun:.0f} s: {self._counted()}")
        finally:
            for process, _ in running:
                process.kill()
                process.join()
        self._check()
        self._empty()
        say(f"{self.kills} kills in {time.monotonic() - begun:.0f} s: {self._counted()}; nothing lost, nothing left")

    def _started(self) -> tuple[BaseProcess, Path]:
        """A process, and the file that it writes to."""
        log = self._folder / f"{next(self._numbers)}.log"
        arguments = (self._folder / "models", self._where, log, self._chance.randrange(1 << 32))
        process = _PROCESSES.Process(target=work, args=arguments, daemon=True)
        process.start()
        return process, log

    def _kill(self, process: BaseProcess, log: Path) -> None:
        ended = not process.is_alive()
        process.kill()
        process.join()
        self.kills += 1
        lines = log.read_text().splitlines() if log.exists() else []
        self.done.update(line.partition(" ")[0] for line in lines)
        if wrong := [line for line in lines if line.startswith("wrong")]:
            raise WrongError("; ".join(wrong))
        if ended:
            raise WrongError("a process ended by itself")

    def _check(self) -> None:
        """All versions are whole, read through the pool and compared with the files."""
        for version in self._pool.versions():
            reference = f"{version.name}@{version.version}"
            model = self._folder / "models" / version.name
            files = {file.name: file.read_bytes() for file in model.iterdir()}
            if {file.name for file in version.files} != set(files):
                raise WrongError(f"{reference} has the files {version.files}")
            for name, content in files.items():
                try:
                    same = b"".join(map(bytes, self._pool.cat(reference, name))) == content
                except Exception as error:
                    if version.id in {one.id for one in self._pool.versions()}:
                        raise WrongError(f"{reference}, {name}: {type(error).__name__}: {error}") from error
                    break  # it was dropped meanwhile
                if not same:
                    raise WrongError(f"{reference}, {name}: other bytes")

    def _empty(self) -> None:
        """Drop everything and collect it: nothing is left."""
        if problems := self._pool.verify():
            raise WrongError(f"damaged: {problems}")
        for version in self._pool.versions():
            self._pool.drop(f"{version.name}@{version.version}")
        time.sleep(1.1)  # times are in seconds
        for _ in range(3):
            self._pool.gc(grace=0, keep=0)
        if left := self._pool.objects.list("packs"):
            raise WrongError(f"{len(left)} packs are left, such as {left[0]}")
        for table in ("parts", "blobs"):
            if rows := self._pool.tables.query(f"SELECT * FROM {table} LIMIT 1"):  # noqa: S608 - of two names
                raise WrongError(f"the table of {table} has rows, such as {rows[0]}")
        if self._pool.stats().contents:
            raise WrongError("there are contents of no version")

    def _counted(self) -> str:
        return ", ".join(f"{self.done[word]} {word}" for word in ("added", "dropped", "collected"))


def make_models(folder: Path, seed: int) -> None:
    """Folders with the files of models that are stored whole, as differences, narrower and quantized."""
    wide = tensors(seed)
    half = halves(wide)
    models = {"wide": wide, "half": half, "other": {**tensors(seed + 1), "layer.bias": wide["layer.bias"]}}
    models |= {f"tuned{number}": tuned(half, number) for number in range(4)}
    weight = wide["embed.weight"]
    models["int8"] = {
        "embed": np.rint(weight / (np.abs(weight).max(1, keepdims=True) / np.float32(127))).astype(np.int8)
    }
    for name, model in models.items():
        write(folder / name / "model.safetensors", model)
    (folder / "wide" / "notes.bin").write_bytes(np.random.default_rng(seed).bytes(20_000))


@contextlib.contextmanager
def _pool(folder: Path, *, in_bucket: bool) -> Iterator[places.Place]:
    """Where the pool of a run is; a server lives as long."""
    if not in_bucket:
        yield places.folder(folder / "pool")
        return
    from tests.pool.gateway import Gateway

    (folder / "ceph").mkdir()
    gateway = Gateway(folder / "ceph")
    try:
        yield places.bucket(gateway, folder / "cache")
    finally:
        gateway.close()


if __name__ == "__main__":
    main()
