"""A pool in which everything is that can be: used, dropped, stored whole and as a difference."""

import hashlib
import itertools
from concurrent.futures import Executor
from pathlib import Path

import numpy as np

from tests.pool.gateway import Gateway
from tests.pool.models import halves, tensors, tuned, write
from tests.pool.places import Place, copied

NEVER = 1e9


class World:
    """A pool with versions that are there, and some that were dropped, whose contents a new one needs again.

    Args:
        place: of the pool.
        files: a folder for the files.
    """

    def __init__(self, place: Place, files: Path) -> None:
        self.place, self.files = place, files

    def make(self) -> None:
        """Make the pool."""
        base = halves(tensors())
        models = {
            "kept": base,
            "gone": tuned(base, 1, 0.02),  # stored against `kept`
            "other": halves(tensors(7)),
            "child": tuned(halves(tensors(7)), 2, 0.02),  # stored against `other`
            "large": {"large": np.random.default_rng(3).integers(0, 256, 11 << 20, np.uint8)},
        }
        for name, model in models.items():
            write(self.files / f"{name}.safetensors", model)
        with self.place.open(create=True) as pool:
            for name in ("kept", "gone", "other"):
                pool.add(self.files / f"{name}.safetensors", f"{name}@1")
            for name in ("gone", "other"):
                pool.drop(f"{name}@1")

    def collect(self, grace: float = NEVER, **options: str) -> None:
        with self.place.open(**options) as pool:
            pool.gc(grace=grace, keep=0)

    def add(self, name: str, version: str = "2", executor: Executor | None = None, **options: str) -> None:
        with self.place.open(**options) as pool:
            paths = [self.files / f"{one}.safetensors" for one in name.split("+")]
            pool.add(paths, f"{name}@{version}", executor=executor)

    def check(self) -> None:
        """Every version is whole, read by a process that knows nothing."""
        with self.place.open() as pool:
            assert pool.verify() == []
            for version in pool.versions():
                for file in version.files:
                    content = (self.files / file.name).read_bytes()
                    assert hashlib.sha256(content).hexdigest() == file.sha256
                    assert b"".join(map(bytes, pool.cat(f"{version.name}@{version.version}", file.name))) == content

    def versions(self) -> set[str]:
        with self.place.open() as pool:
            return {f"{version.name}@{version.version}" for version in pool.versions()}


class Worlds:
    """Makes worlds, all the same.

    Args:
        where: a place without a pool.
        folder: for files.
        gateway: of a bucket; None for a folder.
    """

    def __init__(self, where: Place, folder: Path, gateway: Gateway | None) -> None:
        self._first, self._folder, self.gateway = World(where, folder / "files"), folder, gateway
        self._numbers = itertools.count()
        self._first.make()

    def new(self) -> World:
        """Another one."""
        target = self._folder / str(next(self._numbers))
        return World(copied(self._first.place, self.gateway, target), self._first.files)
