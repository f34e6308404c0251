"""Threads that run methods while others commit, and processes that fork (B3, B4)."""

import functools
import itertools
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

from blobstore import save_file
from blobstore.runtime import BlobCache, Program, make_working_copy
from tests.helpers import models
from tests.helpers.beside import in_child, running
from tests.helpers.waiting import until

WIDTH = 4096


class Three(nn.Module):
    """Adds three weights one after the other, so that a torn commit shows as a sum of no generation."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(3))

    def forward(self, x):
        return ((x + self.a) + self.b) + self.c


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    lowered = models._lowered(
        {"forward": (Three(), (torch.zeros(WIDTH),))}, partitioners=models.portable, external_constants=True
    )
    pte = lowered.write(folder)
    return pte, folder / "_default_external_constant.ptd"


def generation(n):
    """Weights such that any two generations differ in every sum."""
    return {key: np.full(WIDTH, 7.0**i * n, np.float32) for i, key in enumerate("abc")}


def total(n):
    return (1 + 7 + 49) * n


@pytest.mark.long
@pytest.mark.parametrize("mode", ["private", "copy", "shared"])
def test_no_call_sees_a_mixture(three, mode, tmp_path):
    """Every call computes with the weights of one generation (B3)."""
    pte, ptd = three
    path = tmp_path / "w.ptd"
    make_working_copy(ptd, path)
    cache = BlobCache(path, mode)
    program = Program(pte, cache)
    save_file(generation(60), tmp_path / "sixty.ptd")
    seen, x = set(), np.zeros(WIDTH, np.float32)

    def change():
        cache.update(generation(cache.generation % 50 + 1))
        cache.load(tmp_path / "sixty.ptd")
        with cache.transaction() as pending:
            pending.update(generation(70))
        if mode != "shared":
            cache.revert()

    def execute(method):
        seen.add(frozenset(method(x).tolist()))

    shared = program.method()
    with running(*(functools.partial(execute, method) for method in (program.load_method(), shared, shared))):
        until(lambda: len(seen) > 5 and cache.generation > 200, meanwhile=change)
    assert seen <= {frozenset([total(n)]) for n in (*range(51), 60, 70)}


def test_commits_are_not_kept_out_by_calls(three):
    """While four threads call without pause, commits still get their turn."""
    pte, ptd = three
    cache = BlobCache(ptd)
    program = Program(pte, cache)
    x = np.zeros(WIDTH, np.float32)
    commits = threading.Thread(target=lambda: [cache.update(generation(n)) for n in range(50)], daemon=True)
    with running(*(functools.partial(program.load_method(), x) for _ in range(4))):
        commits.start()
        until(lambda: not commits.is_alive())
    assert cache.generation == 50


def test_load_methods_while_committing(three):
    """A method that is loaded during commits sees whole generations too (B3)."""
    pte, ptd = three
    cache = BlobCache(ptd)
    numbers, seen = itertools.count(1), []

    def load():
        out = Program(pte, cache).method()(np.zeros(WIDTH, np.float32))
        assert out.min() == out.max()
        seen.append(out[0])

    with running(lambda: cache.update(generation(next(numbers) % 50))):
        until(lambda: len(seen) >= 100 and len(set(seen)) > 5, meanwhile=load)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_while_another_thread_has_the_thread_pool(tmp_path):
    """A fork waits for the calls that hold ExecuTorch's thread pool, which the child could never use otherwise (B4)."""
    x = torch.ones(256, 512)
    lowered = models._lowered({"forward": (nn.Linear(512, 512), (x,))}, partitioners=models.portable)
    program = Program(lowered.write(tmp_path))
    expected = program.method()(x)
    method, *others = (program.load_method() for _ in range(3))

    def child():
        signal.alarm(20)  # ends the child if it hangs
        assert np.array_equal(method(x), expected)

    with running(*(functools.partial(other, x) for other in others)):
        assert [in_child(child)() for _ in range(20)] == [0] * 20
