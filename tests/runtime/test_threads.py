"""Threads that run methods while others commit, and processes that fork (B3, B4)."""

import contextlib
import functools
import itertools
import os
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

from blobstore import save_file
from blobstore.runtime import BlobCache, Program, make_working_copy
from tests.helpers import models
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
    seen, problems, stop = set(), [], threading.Event()

    def execute(method):
        x = np.zeros(WIDTH, np.float32)
        while not stop.is_set():
            out = method(x)
            if out.min() != out.max() or out[0] % total(1):
                problems.append((out.min(), out.max()))
                return
            seen.add(int(out[0]) // total(1))

    shared = program.method()
    threads = [threading.Thread(target=execute, args=(m,)) for m in (program.load_method(), shared, shared)]
    for thread in threads:
        thread.start()
    until(
        lambda: problems or (len(seen) > 5 and cache.generation > 200),
        meanwhile=lambda: cache.update(generation(cache.generation % 50 + 1)),
    )
    stop.set()
    for thread in threads:
        thread.join()
    assert not problems
    assert seen <= set(range(51))


def test_commits_are_not_kept_out_by_calls(three):
    """While four threads call without pause, commits still get their turn."""
    pte, ptd = three
    cache = BlobCache(ptd)
    program = Program(pte, cache)
    stop = threading.Event()

    def execute():
        method = program.load_method()
        x = np.zeros(WIDTH, np.float32)
        while not stop.is_set():
            method(x)

    threads = [threading.Thread(target=execute) for _ in range(4)]
    for thread in threads:
        thread.start()
    commits = threading.Thread(target=lambda: [cache.update(generation(n)) for n in range(50)], daemon=True)
    commits.start()
    try:
        until(lambda: not commits.is_alive())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert cache.generation == 50


def test_reverts_and_loads_are_commits_too(three, tmp_path):
    """Calls see them as a whole (B3)."""
    pte, ptd = three
    cache = BlobCache(ptd)
    program = Program(pte, cache)
    save_file(generation(3), tmp_path / "three.ptd")
    seen, problems, stop = set(), [], threading.Event()

    def execute():
        method = program.load_method()
        x = np.zeros(WIDTH, np.float32)
        while not stop.is_set():
            out = method(x)
            seen.add(out[0])
            if out.min() != out.max():
                problems.append(out)

    def change():
        cache.load(tmp_path / "three.ptd")
        with cache.transaction() as pending:
            pending.update(generation(5))
        cache.revert()

    thread = threading.Thread(target=execute)
    thread.start()
    until(lambda: problems or (len(seen) >= 3 and cache.generation >= 600), meanwhile=change)
    stop.set()
    thread.join()
    assert not problems
    assert seen == {0, total(3), total(5)}


def test_load_methods_while_committing(three):
    """A method that is loaded during commits sees whole generations too (B3)."""
    pte, ptd = three
    cache = BlobCache(ptd)
    stop = threading.Event()

    def commit():
        n = 0
        while not stop.is_set():
            n += 1
            cache.update(generation(n % 50))

    seen = []

    def load():
        out = Program(pte, cache).method()(np.zeros(WIDTH, np.float32))
        assert out.min() == out.max()
        seen.append(out[0])

    thread = threading.Thread(target=commit)
    thread.start()
    try:
        until(lambda: len(seen) >= 100 and len(set(seen)) > 5, meanwhile=load)
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def running(*loops):
    """Call each of these again and again in a thread of its own, until the block ends."""
    stop = threading.Event()

    def repeat(loop):
        while not stop.is_set():
            loop()

    threads = [threading.Thread(target=repeat, args=(loop,)) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def in_child(work):
    """Run `work` in a forked process; its exit code is 0 if the result is true."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("mode", ["private", "copy", "shared"])
def test_fork(three, mode, tmp_path):
    """A child has the weights of the moment of the fork; its commits are visible outside in mode "shared" only."""
    pte, ptd = three
    path = tmp_path / "w.ptd"
    make_working_copy(ptd, path)
    cache = BlobCache(path, mode)
    method = Program(pte, cache).method()
    x = np.zeros(WIDTH, np.float32)
    cache.update(generation(2))

    def child():
        before = method(x)
        cache.update(generation(4))
        after = method(x)
        return set(before) == {total(2)} and set(after) == {total(4)}

    assert in_child(child) == 0
    assert set(method(x)) == {total(4 if mode == "shared" else 2)}
    cache.update(generation(6))
    assert set(method(x)) == {total(6)}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork_while_other_threads_commit_and_execute(three):
    """The child has whole weights and can call and commit."""
    pte, ptd = three
    cache = BlobCache(ptd)
    program = Program(pte, cache)
    method = program.method()
    x = np.zeros(WIDTH, np.float32)
    numbers = itertools.count(1)

    def child():
        out = method(x)
        cache.update(generation(3))
        after = method(x)
        return out.min() == out.max() and set(after) == {total(3)}

    with running(lambda: cache.update(generation(next(numbers) % 50)), lambda: method(x)):
        assert [in_child(child) for _ in range(20)] == [0] * 20


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
        return np.array_equal(method(x), expected)

    with running(*(functools.partial(other, x) for other in others)):
        assert [in_child(child) for _ in range(20)] == [0] * 20
