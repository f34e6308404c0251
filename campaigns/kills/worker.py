"""One process on a pool: adds, drops, collects and reads at random, until it is killed.

It writes a line for each thing that it did, and one that begins with `wrong` for an error that no other process explains.
Versions are drawn from few, so processes meet.
"""

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from blobstore.errors import BlobStoreError, PoolError
from blobstore.pool import Pool
from tests.pool.places import Place

__all__ = ["work"]

GRACE = 3.0
"""Seconds after which a version is given up; adding one takes less, or ends with an error."""

_VERSIONS = 1
_EXPECTED = (
    "is in the pool already",
    "there is no ",
    "is being added and dropped by others",
    "a collection gave it up",
    "others change the table all the time",
)


def work(models: Path, where: Place, log: Path, seed: int) -> None:
    """Change and read a pool, until this process or the campaign is killed.

    Args:
        models: a folder for each model, with its files.
        where: the pool.
        log: a new file for the lines.
        seed: of chance.
    """
    chance, parent = random.Random(seed), os.getppid()
    folders = sorted(models.iterdir())
    with (
        log.open("w", buffering=1) as lines,
        where.open() as pool,
        tempfile.TemporaryDirectory(dir=models.parent) as out,
    ):

        def say(line: str) -> None:
            lines.write(" ".join(line.split()) + "\n")

        while os.getppid() == parent:
            try:
                step(pool, chance, folders, Path(out), say)
            except BlobStoreError as error:
                if not any(text in str(error) for text in _EXPECTED):
                    say(f"wrong {type(error).__name__}: {error}")
            except Exception as error:
                say(f"wrong {type(error).__name__}: {error}")
                raise


def step(pool: Pool, chance: random.Random, models: list[Path], out: Path, say: Callable[[str], None]) -> None:
    """One thing that can be done to a pool."""
    model = chance.choice(models)
    number = chance.randrange(_VERSIONS)
    reference = f"{model.name}@{number}"  # the version says which files it has
    kind = chance.choices(("add", "drop", "gc", "get"), (5, 3, 1, 2))[0]
    if kind == "add":
        pool.add(model, reference)
        say(f"added {reference}")
    elif kind == "drop":
        pool.drop(reference)
        say(f"dropped {reference}")
    elif kind == "gc":
        pool.gc(grace=GRACE, keep=chance.choice((0, GRACE)))
        say("collected")
    else:
        before = ids(pool)
        try:
            pool.get(reference, out / "got", force=True)
        except PoolError:
            if reference in before and before[reference] == ids(pool).get(reference):
                raise  # it was there all the time
            return
        for file in model.iterdir():
            if (out / "got" / file.name).read_bytes() != file.read_bytes():
                say(f"wrong bytes of {reference}: {file.name}")


def ids(pool: Pool) -> dict[str, str]:
    """The versions that are there, with their ids."""
    return {f"{version.name}@{version.version}": version.id for version in pool.versions()}
