"""Threads, commits and forks that wait for each other: none may wait for ever.

Each case runs in a process of its own. It is killed after a time that only a hang explains."""

import textwrap

import numpy as np
import pytest

from blobstore import save_file
from blobstore.runtime import make_working_copy
from tests.helpers import models
from tests.helpers.beside import run_script

BEGIN = """
import os, sys, threading
import numpy as np
from blobstore import errors
from blobstore.runtime import BlobCache, Program, make_working_copy
from tests.helpers.waiting import until_blocked

mode, path, pte, ptd = sys.argv[1:]


def weights(n):
    return {"a": np.full(300_000, n, np.float32), "b": np.full(300_000, n, np.float32)}


def together(times, *works):
    # each runs in its own thread until all were done this many times
    done, problems = [0] * len(works), []

    def repeat(number):
        try:
            while min(done) < times and not problems:
                works[number]()
                done[number] += 1
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


cache = BlobCache(path, mode)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("waiting")
    save_file({"a": np.zeros(300_000, np.float32), "b": np.zeros(300_000, np.float32)}, folder / "original.ptd")
    pte = models.mlp(external=True).write(folder)
    return folder, pte, next(folder.glob("_default*.ptd"))


@pytest.fixture(params=["private", "copy", "shared"])
def finishes(request, files, tmp_path):
    """A function that runs a script, which must end by itself without an error."""

    def run(script):
        folder, pte, ptd = files
        path = tmp_path / "w.ptd"
        make_working_copy(folder / "original.ptd", path)
        run_script(BEGIN + textwrap.dedent(script), request.param, path, pte, ptd)

    return run


@pytest.mark.long
def test_saving_while_others_commit(finishes, tmp_path):
    """Saving reads one generation and queries the cache meanwhile."""
    finishes(f"""
        def save():
            cache.save({str(tmp_path / "saved.ptd")!r}, dirty_only=True)
            cache.stats, cache.dirty

        def read():
            with cache.reading():
                cache.stats, cache.dirty

        together(100, lambda: cache.update(weights(1)), save, read)
        """)


def test_calling_a_method_of_another_thread_inside_reading(finishes):
    """The other thread is in a call that waits for a commit, which waits for this thread's `reading()`."""
    finishes("""
        make_working_copy(ptd, path)  # the weights of the program
        cache = BlobCache(path, mode)
        program = Program(pte, cache)
        method = program.method()
        x = np.zeros((3, 16), np.float32)
        key = program.external_keys()[0]
        new = np.array(cache.numpy(key))

        for _ in range(20):
            with cache.reading():
                commit = threading.Thread(target=lambda: cache.update({key: new}))
                commit.start()
                until_blocked(commit)
                others = [threading.Thread(target=work) for work in (lambda: method(x), program.load_method)]
                for other in others:
                    other.start()
                    until_blocked(other)
                method(x)
                program.load_method()
            for thread in (commit, *others):
                thread.join()

        def inside():
            with cache.reading():
                method(x)
                program.load_method()

        together(100, inside, lambda: method(x), lambda: program.load_method(), lambda: cache.update({key: new}))
        """)


def test_forking_inside_reading(finishes):
    """Parent and child can both continue and commit."""
    finishes("""
        cache.update(weights(3))
        with cache.reading():  # the other thread's commit waits for this
            other = threading.Thread(target=lambda: cache.update(weights(4)))
            other.start()
            until_blocked(other)
            pid = os.fork()
            if mode != "shared":  # in mode shared, reading starts again in the child
                assert cache.numpy("a")[0] == 3
        other.join() if pid else None
        cache.update(weights(5))
        with cache.reading():
            assert cache.numpy("a")[0] == cache.numpy("b")[-1] in (4, 5)  # 4 if the other one was last
        if pid == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """)


def test_reading_that_ends_in_another_thread(finishes):
    """The lock may be released by another thread than the one that took it."""
    finishes("""
        held = cache.reading()
        begin = threading.Thread(target=held.__enter__)
        begin.start()
        begin.join()
        held.__exit__(None, None, None)
        cache.update(weights(2))
        held = cache.reading()
        held.__enter__()
        end = threading.Thread(target=held.__exit__, args=(None, None, None))
        end.start()
        end.join()
        cache.update(weights(3))
        with cache.reading():
            try:
                cache.update(weights(4))
            except errors.UnsupportedOperationError:
                pass
            else:
                raise AssertionError
        """)


def test_opening_while_others_call_without_pause(finishes):
    """Nearly always one of the other threads is reading."""
    finishes("""
        def read():
            with cache.reading():
                for _ in range(5):
                    cache.numpy("a").sum() + cache.numpy("b").sum()  # numpy releases the interpreter lock

        together(50, read, read, read, read, lambda: BlobCache(path, mode))
        """)
