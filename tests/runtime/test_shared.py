"""Several processes on one working copy: commits, kills at any point, and files that change places."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from blobstore import errors, open_ptd, save_file
from blobstore.runtime import BlobCache, make_working_copy
from tests.runtime.blobs import foundation_arrays

SIZE = 200_000
CRASH_POINTS = {
    "before the journal": (1, False),
    "in the journal": (2, False),
    "after the journal": (3, False),
    "after it is pending": (4, True),
    "between two blobs": (5, True),
    "after the blobs": (6, True),
    "before it is done": (7, True),
    "after it is done": (8, True),
}


@pytest.fixture
def copy(tmp_path):
    save_file({"a": np.zeros(SIZE, np.float32), "b": np.zeros(SIZE, np.float32)}, tmp_path / "original.ptd")
    make_working_copy(tmp_path / "original.ptd", tmp_path / "copy.ptd")
    return tmp_path / "copy.ptd"


def weights(n):
    return {"a": np.full(SIZE, n, np.float32), "b": np.full(SIZE, -n, np.float32)}


def value(cache):
    """The generation that the weights are of; -1 if they are a mixture."""
    with cache.reading():
        a, b = cache.numpy("a"), cache.numpy("b")
        whole = a.min() == a.max() and (b == -a[0]).all()
        return int(a[0]) if whole else -1


class Child(subprocess.Popen):
    """Closes its pipes when it has ended."""

    def wait(self, timeout=None):
        code = super().wait(timeout)
        self.stdin.close()
        self.stdout.close()
        return code


def run(script, *arguments):
    return Child(
        [sys.executable, "-c", "from tests.runtime.test_shared import *\n" + script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_see_each_others_commits(copy):
    cache = BlobCache(copy, "shared")
    other = run(
        """
cache = BlobCache(sys.argv[1], "shared")
for line in sys.stdin:
    if int(line) < 0:
        cache.update(weights(-int(line)))
    print(value(cache), cache.generation, cache.version("a"), cache.dirty, flush=True)
""",
        copy,
    )

    def ask(n):
        other.stdin.write(f"{n}\n")
        other.stdin.flush()
        return other.stdout.readline().strip()

    assert ask(0) == "0 0 0 ()"
    cache.update(weights(3))
    assert ask(0) == "3 1 1 ('a', 'b')"
    assert ask(-5) == "5 2 2 ('a', 'b')"
    assert value(cache) == 5 and cache.generation == 2
    cache.update({"a": np.full(SIZE, 6, np.float32)})
    assert ask(0) == "-1 3 3 ('a', 'b')"  # only one of the two was changed, and only its version
    assert cache.version("b") == 2
    other.stdin.close()
    assert other.wait() == 0
    with open_ptd(copy, verify=True) as file:  # its digests follow the commits
        assert np.frombuffer(file["a"], np.float32)[0] == 6
    assert cache.verify()
    with pytest.raises(errors.UnsupportedOperationError, match="load the file that it was made from"):
        cache.revert()
    cache.load(copy.parent / "original.ptd")
    assert value(cache) == 0


@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize("survivor", ["already open", "opened later"])
def test_killed_in_a_commit(copy, point, survivor):
    """At each point: the old or the new weights, whole, for a process that was there and for one that comes later."""
    number, committed = CRASH_POINTS[point]
    before = BlobCache(copy, "shared") if survivor == "already open" else None
    victim = run(
        """
from blobstore.runtime import _native
cache = BlobCache(sys.argv[1], "shared")
cache.update(weights(1))
_native.crash_at(int(sys.argv[2]))
cache.update(weights(2))
""",
        copy,
        number,
    )
    assert victim.wait() == -signal.SIGKILL
    cache = before or BlobCache(copy, "shared")
    expected = 2 if committed else 1
    assert value(cache) == expected
    assert cache.generation == cache.version("a") == cache.version("b") == expected
    assert cache.verify()
    with open_ptd(copy, verify=True) as file:
        assert np.frombuffer(file["a"], np.float32)[0] == expected
    cache.update(weights(7))
    assert value(cache) == 7 and value(BlobCache(copy, "shared")) == 7


def test_killed_at_random_times(copy):
    """Three processes commit and are killed; a fourth must only ever see whole generations."""
    cache = BlobCache(copy, "shared")
    script = """
cache = BlobCache(sys.argv[1], "shared")
n = int(sys.argv[2])
print("ready", flush=True)
while True:
    n = n % 1000 + 1
    cache.update(weights(n))
"""
    rng = random.Random(5)  # noqa: S311 - the moments of the kills
    for turn in range(6):
        victims = [run(script, copy, 100 * i + turn) for i in range(3)]
        for victim in victims:
            assert victim.stdout.readline() == "ready\n"
        end = time.monotonic() + rng.uniform(0.05, 0.3)
        while time.monotonic() < end:
            assert value(cache) >= 0
        for victim in victims:
            time.sleep(rng.uniform(0, 0.02))
            victim.send_signal(signal.SIGKILL)
            assert value(cache) >= 0
        for victim in victims:
            victim.wait()
        assert value(cache) >= 0
        assert cache.verify()
    assert cache.generation > 10


def test_a_process_that_dies_while_it_reads_keeps_nobody_out(copy):
    cache = BlobCache(copy, "shared")
    reader = run(
        """
cache = BlobCache(sys.argv[1], "shared")
with cache.reading():
    print("reading", flush=True)
    time.sleep(60)
""",
        copy,
    )
    assert reader.stdout.readline() == "reading\n"
    reader.kill()
    reader.wait()
    cache.update(weights(2))
    assert value(cache) == 2


def commit_many(path, first, count):
    cache = BlobCache(path, "shared")
    for n in range(first, first + count):
        cache.update(weights(n))


def test_commits_of_several_processes_are_counted(copy):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=commit_many, args=(copy, 100 * i, 25)) for i in range(3)]
    for process in processes:
        process.start()
    cache = BlobCache(copy, "shared")
    while any(process.is_alive() for process in processes):
        assert value(cache) >= 0
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert cache.generation == 75


def test_a_damaged_journal_is_an_error(copy):
    victim = run(
        """
from blobstore.runtime import _native
cache = BlobCache(sys.argv[1], "shared")
_native.crash_at(5)
cache.update(weights(2))
""",
        copy,
    )
    assert victim.wait() == -signal.SIGKILL
    commits = copy.with_name("copy.ptd.commits")
    data = bytearray(commits.read_bytes())
    data[4096 + 1000] ^= 1
    commits.write_bytes(data)
    with pytest.raises(errors.IntegrityError, match=r"copy\.ptd\.commits: .*neither the old nor the new weights"):
        BlobCache(copy, "shared")


def test_replaced_working_copy(copy, tmp_path):
    """Who has the old file open goes on with it; who opens the path now gets the new one and counts from zero."""
    old = BlobCache(copy, "shared")
    old.update(weights(1))
    make_working_copy(tmp_path / "original.ptd", tmp_path / "new.ptd")
    os.replace(tmp_path / "new.ptd", copy)
    new = BlobCache(copy, "shared")
    assert (new.generation, value(new)) == (0, 0)
    new.update(weights(5))
    old.update(weights(2))
    assert (value(old), value(new), old.generation, new.generation) == (2, 5, 2, 1)


def test_copied_working_copy(copy, tmp_path):
    cache = BlobCache(copy, "shared")
    cache.update(weights(1))
    for name in ("copy.ptd", "copy.ptd.commits"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("copy", "second"))
    second = BlobCache(tmp_path / "second.ptd", "shared")
    assert (second.generation, value(second)) == (0, 1)
    second.update(weights(4))
    assert (value(cache), value(second)) == (1, 4)


def test_keys_that_share_bytes_in_a_plain_file(foundation, tmp_path):
    shutil.copy(foundation, tmp_path / "plain.ptd")
    cache = BlobCache(tmp_path / "plain.ptd", "shared")
    new = np.ones((64, 64), np.float32)
    with pytest.raises(errors.UnsupportedOperationError, match="'tied' and 'pages' share|'pages' and 'tied' share"):
        cache.update({"pages": new})
    cache.update({"pages": new, "tied": new})
    with pytest.raises(errors.UnsupportedOperationError, match="share"):
        cache.update({"pages": new, "tied": new * 2})
    assert (cache.numpy("tied") == 1).all() and cache.verify()


def test_working_copy_of_several_files(foundation, tmp_path):
    save_file({"more": np.arange(3.0)}, tmp_path / "more.ptd")
    make_working_copy([foundation, tmp_path / "more.ptd"], tmp_path / "copy.ptd")
    cache = BlobCache(tmp_path / "copy.ptd", "shared")
    expected = {**foundation_arrays(), "more": np.arange(3.0)}
    assert {key: bytes(data) for key, data in cache.items()} == {k: a.tobytes() for k, a in expected.items()}
    for key in cache:
        before = {other: bytes(cache[other]) for other in cache}
        if len(cache[key]):
            cache.update({key: bytes(255 - byte for byte in before[key])})
            assert {other for other in cache if bytes(cache[other]) != before[other]} == {key}
    assert cache.verify()
    with pytest.raises(errors.OutputPathError):
        make_working_copy(foundation, foundation)


def test_read_only_file(tmp_path, copy, monkeypatch):
    if os.geteuid() == 0:
        pytest.skip("root may write anything")
    copy.chmod(0o444)
    with pytest.raises(errors.FileAccessError, match="Permission denied"):
        BlobCache(copy, "shared")


def test_the_file_of_commits_is_made_anew(copy, tmp_path):
    """Its temporary file follows no link that somebody laid where it may be, and leaves nothing."""
    (tmp_path / "precious").write_text("precious")
    for number in range(os.getpid() - 20, os.getpid() + 200):
        (tmp_path / f"{copy.name}.commits.{number}.tmp").symlink_to("precious")
    (tmp_path / f"{copy.name}.commits").symlink_to("precious")
    before = set(os.listdir(tmp_path))
    copy.chmod(0o600)
    BlobCache(copy, mode="shared").update({"a": np.ones(SIZE, np.float32)})
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / f"{copy.name}.commits").is_symlink()
    assert set(os.listdir(tmp_path)) == before
    assert (tmp_path / f"{copy.name}.commits").stat().st_mode & 0o777 == 0o600
