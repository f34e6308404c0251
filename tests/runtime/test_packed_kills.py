"""Processes that are killed at random moments while they build packed weights, and while they commit (K2, K3)."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.runtime import PackedStore
from tests.runtime import packed_files
from tests.runtime.packed_files import Running
from tests.runtime.packed_files import mlp_weights as weights
from tests.runtime.test_packed_copies import Copy

KILLS = 250
pytestmark = pytest.mark.slow


def kill(work: Callable[[int], None], moment: float) -> None:
    """Do some work again and again in a child, which the system ends after some seconds, wherever it is."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, moment)
            for count in itertools.count():
                work(count)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGALRM


def test_while_building(mlp: Path, tmp_path: Path) -> None:
    """The next load has the right weights, and needs no fallback; leftovers go."""
    copy = Copy(mlp, tmp_path)
    expected = Running.open(copy.folder, copy.example)()
    generator = random.Random(0)  # noqa: S311

    def build(_: int) -> None:
        for path in packed_files.files(copy.packed):
            path.unlink()
        Running.open(copy.folder, copy.example, copy.store())

    for _ in range(KILLS):
        kill(build, generator.uniform(0.001, 0.03))
        store = copy.store()
        assert Running.open(copy.folder, copy.example, store)() == expected
        assert (store.stats.fallbacks, store.stats.dropped) == (0, 0)
    copy.store().gc()
    [file] = packed_files.files(copy.packed)
    left = {path.name for path in copy.packed.iterdir()} - {file.name, f"{file.name}.used", "building.lock"}
    assert not left


def test_while_committing(mlp: Path, tmp_path: Path) -> None:
    """Packed weights are always those of the working copy, for a process that runs and for one that starts."""
    copy = Copy(mlp, tmp_path)
    store = copy.store()
    running = copy.start(store)
    running()
    generator = random.Random(0)  # noqa: S311
    outputs = set()

    for number in range(KILLS):
        other = copy.start(PackedStore(copy.packed))

        def commit(count: int, other: Running = other, number: int = number) -> None:
            other.cache.update(weights(1000 * number + count))

        kill(commit, generator.uniform(0.001, 0.03))
        found = running()
        assert found == copy.expected() == other()
        outputs.add(tuple(found))
    assert len(outputs) > KILLS // 2
    assert (store.stats.repacked, store.stats.dropped, store.stats.builds) == (0, 0, 1)
