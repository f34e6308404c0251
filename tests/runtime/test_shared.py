"""Several processes on one working copy: commits, kills at any point, replaced files (B3, B4)."""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from blobstore import BlobStore, errors, open_ptd, save_file
from blobstore.core.formats.ptd.writer import write_ptd
from blobstore.runtime import BlobCache, make_working_copy
from tests.helpers.waiting import until
from tests.runtime.blobs import foundation_arrays
from tests.runtime.hooks import environment

SIZE = 200_000
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
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
    """The generation of the weights, or -1 if they are a mixture."""
    with cache.reading():
        a, b = cache.numpy("a"), cache.numpy("b")
        whole = a.min() == a.max() and (b == -a[0]).all()
        return int(a[0]) if whole else -1


class Child(subprocess.Popen):
    """A process that closes its pipes when it has ended."""

    def wait(self, timeout=None):
        code = super().wait(timeout)
        self.stdin.close()
        self.stdout.close()
        return code

    def ask(self, text=""):
        """Say a line to it, and return its next one."""
        self.stdin.write(f"{text}\n")
        self.stdin.flush()
        return self.stdout.readline().strip()


def run(script, *arguments, hooks=None):
    return Child(
        [sys.executable, "-c", "from tests.runtime.test_shared import *\n" + script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(hooks) if hooks else None,
    )


def test_processes_see_each_others_commits(copy):
    """With generation, versions and dirty keys; the file's digests follow (B4, B5)."""
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
    assert other.ask(0) == "0 0 0 ()"
    cache.update(weights(3))
    assert other.ask(0) == "3 1 1 ('a', 'b')"
    assert other.ask(-5) == "5 2 2 ('a', 'b')"
    assert value(cache) == 5 and cache.generation == 2
    cache.update({"a": np.full(SIZE, 6, np.float32)})
    assert other.ask(0) == "-1 3 3 ('a', 'b')"  # only one of the two and its version were changed
    assert cache.version("b") == 2
    other.stdin.close()
    assert other.wait() == 0
    with open_ptd(copy, verify=True) as file:  # the digests are those of the last commit
        assert np.frombuffer(file.get_data("a"), np.float32)[0] == 6
    assert cache.verify()
    with pytest.raises(errors.UnsupportedOperationError, match="load the file that it was made from"):
        cache.revert()
    cache.load(copy.parent / "original.ptd")
    assert value(cache) == 0


def kill_in_a_commit(copy, hooks, point):
    """Let a process be killed at a point of its second commit."""
    victim = run(
        """
from blobstore_runtime import _native
cache = BlobCache(sys.argv[1], "shared")
cache.update(weights(1))
_native.crash_at(int(sys.argv[2]))
cache.update(weights(2))
""",
        copy,
        point,
        hooks=hooks,
    )
    assert victim.wait() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("point", CRASH_POINTS)
@pytest.mark.parametrize("survivor", ["already open", "opened later"])
def test_killed_in_a_commit(copy, hooks, point, survivor):
    """Killed at each point, a commit leaves the old or the new weights, for processes that were there and for later
    ones (B3)."""
    number, committed = CRASH_POINTS[point]
    before = BlobCache(copy, "shared") if survivor == "already open" else None
    kill_in_a_commit(copy, hooks, number)
    cache = before or BlobCache(copy, "shared")
    expected = 2 if committed else 1
    assert value(cache) == expected
    assert cache.generation == cache.version("a") == cache.version("b") == expected
    assert cache.verify()
    with open_ptd(copy, verify=True) as file:
        assert np.frombuffer(file.get_data("a"), np.float32)[0] == expected
    cache.update(weights(7))
    assert value(cache) == 7 and value(BlobCache(copy, "shared")) == 7


def test_a_killed_reader_holds_no_lock(copy):
    """The kernel releases its locks."""
    cache = BlobCache(copy, "shared")
    reader = run(
        """
cache = BlobCache(sys.argv[1], "shared")
with cache.reading():
    print("reading", flush=True)
    signal.pause()  # until it is killed
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


@pytest.mark.long
def test_commits_of_several_processes_are_counted(copy):
    """Each commit makes one generation (B4)."""
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


def patch(path, at, data):
    """Write over bytes of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def commits_of(copy):
    return copy.with_name(f"{copy.name}.commits")


def test_a_damaged_journal_is_an_error(copy, hooks):
    """An interrupted commit that cannot be finished is reported (B5)."""
    kill_in_a_commit(copy, hooks, 5)  # between two blobs
    patch(commits_of(copy), 4096 + 1000, b"damaged")
    with pytest.raises(errors.IntegrityError, match=r"copy\.ptd\.commits: .*neither the old nor the new weights"):
        BlobCache(copy, "shared")


def journal(copy, words, body=b""):
    """Write a journal as a killed process would have left it."""
    BlobCache(copy, "shared").close()
    made = b"".join(map(word, words)) + body
    patch(commits_of(copy), 56, word(len(made)))
    patch(commits_of(copy), 4096, made + xxhash.xxh3_128_digest(made))


def word(number):
    return number.to_bytes(8, "little")


def interrupt(copy):
    """Leave what a process leaves that was killed in a commit, which turns the first number into a 9."""
    journal(copy, [7, 1, 1, 0, open_ptd(copy).byte_range("a")[0], 4], np.float32(9).tobytes())


def test_a_journal_is_replayed(copy):
    """So the other tests leave what would count, if they did not change it (B3)."""
    interrupt(copy)
    cache = BlobCache(copy, "shared")
    assert (cache.generation, cache.version("a"), cache.numpy("a")[0]) == (7, 7, 9)


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ([5, 0, 1 << 40], b""),
        ([5, 0, (1 << 64) - 1], b""),
        ([5, 0, 1 << 61], b""),
        ([5, (1 << 63) + 1, 0], b""),
        ([5, 1, 0, 0, 1 << 20], b""),
        ([5, 1, 0, 1 << 30, 8], bytes(8)),
        ([5, 1, 0, (1 << 64) - 4, 8], bytes(8)),
        ([5, 2, 0, 0, 8, 8, (1 << 64) - 8], b""),
        ([5, 1, 0, 0, 8], bytes(16)),
        ([5, 1, 0, 0], b""),
    ],
)
def test_a_hostile_journal_is_refused(copy, words, body):
    """Its digest says nothing, as anyone can compute it; the weights stay as they are (B5)."""
    before = copy.read_bytes()
    journal(copy, words, body)
    with pytest.raises(errors.IntegrityError, match="journal is damaged"):
        BlobCache(copy, "shared")
    assert copy.read_bytes() == before


def test_a_journal_that_names_keys_that_are_not_there(copy):
    """Their versions would lie behind the file; the weights are whole (B5)."""
    at = open_ptd(copy).byte_range("a")[0]
    journal(copy, [7, 1, 2, 1 << 40, 0, at, 4], np.float32(9).tobytes())
    cache = BlobCache(copy, "shared")
    assert (cache.generation, cache.version("a"), cache.numpy("a")[0]) == (7, 7, 9)


@pytest.mark.parametrize("nbytes", [1, 23, 1 << 20, 1 << 40, (1 << 64) - 16])
def test_a_journal_that_its_file_does_not_hold(copy, nbytes):
    """Nothing behind the end of the file is read (B5)."""
    journal(copy, [5, 0, 0])
    patch(commits_of(copy), 56, word(nbytes))
    with pytest.raises(errors.IntegrityError, match="journal is damaged"):
        BlobCache(copy, "shared")


@pytest.mark.parametrize(
    ("at", "number"), [(32, 1 << 40), (40, 1 << 40), (40, (1 << 64) - 1)], ids=["size", "keys", "all"]
)
def test_a_file_of_commits_that_contradicts_the_copy(copy, at, number):
    """It does not count, and a new one replaces it (B5)."""
    BlobCache(copy, "shared").update(weights(2))
    patch(commits_of(copy), at, word(number))
    cache = BlobCache(copy, "shared")
    assert (cache.generation, value(cache)) == (0, 2)


@pytest.mark.long
def test_a_working_copy_that_is_replaced_while_it_is_opened(copy, tmp_path):
    """Otherwise one process would replace the locks of those that have the new file (B4)."""
    make_working_copy(tmp_path / "original.ptd", tmp_path / "new.ptd")
    with copy.open("rb") as old:
        fcntl.flock(old, fcntl.LOCK_SH)  # as a process that replaces it does
        child = run(
            """
cache = BlobCache(sys.argv[1], "shared")
print("open", flush=True)
input()
print(cache.generation, value(cache), flush=True)
""",
            copy,
        )
        until(lambda: opened(child.pid, copy) >= 2)  # it waits for the lock
        os.replace(tmp_path / "new.ptd", copy)
        other = BlobCache(copy, "shared")
        other.update(weights(3))
    assert child.stdout.readline() == "open\n"
    third = BlobCache(copy, "shared")
    other.update(weights(4))
    assert (third.generation, value(third)) == (2, 4)
    assert child.ask() == "2 4"
    assert child.wait() == 0


def opened(process, path):
    """How many descriptors of a file a process has."""
    count = 0
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += link.readlink() == path
    return count


def test_replaced_working_copy(copy, tmp_path):
    """A cache keeps the file that it opened; the path now has the new file, which counts from zero."""
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
    """A copy of both files starts a history of its own."""
    cache = BlobCache(copy, "shared")
    cache.update(weights(1))
    for name in ("copy.ptd", "copy.ptd.commits"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("copy", "second"))
    second = BlobCache(tmp_path / "second.ptd", "shared")
    assert (second.generation, value(second)) == (0, 1)
    second.update(weights(4))
    assert (value(cache), value(second)) == (1, 4)


def test_keys_that_share_bytes_in_a_file_of_somebody_else(foundation, tmp_path):
    """A commit that would make two such keys differ is refused. `make_working_copy` writes no such file."""
    with open_ptd(foundation) as data_map, (tmp_path / "plain.ptd").open("wb") as file:
        store = BlobStore()
        store.merge(data_map)
        write_ptd(file, store.entries(), {"blobstore.working_copy": "0" * 32})
    cache = BlobCache(tmp_path / "plain.ptd", "shared")
    new = np.ones((64, 64), np.float32)
    with pytest.raises(errors.UnsupportedOperationError, match="'tied' and 'pages' share|'pages' and 'tied' share"):
        cache.update({"pages": new})
    cache.update({"pages": new, "tied": new})
    with pytest.raises(errors.UnsupportedOperationError, match="share"):
        cache.update({"pages": new, "tied": new * 2})
    assert (cache.numpy("tied") == 1).all() and cache.verify()


def test_working_copy_of_several_files(foundation, tmp_path):
    """Every key has its own bytes in a working copy."""
    save_file({"more": np.arange(3.0)}, tmp_path / "more.ptd")
    make_working_copy([foundation, tmp_path / "more.ptd"], tmp_path / "copy.ptd")
    cache = BlobCache(tmp_path / "copy.ptd", "shared")
    expected = {**foundation_arrays(), "more": np.arange(3.0)}
    assert {key: bytes(data) for key, data in cache.views()} == {k: a.tobytes() for k, a in expected.items()}
    for key in cache:
        before = {other: cache.bytes(other) for other in cache}
        if len(cache.get_data(key)):
            cache.update({key: bytes(255 - byte for byte in before[key])})
            assert {other for other in cache if cache.bytes(other) != before[other]} == {key}
    assert cache.verify()
    with pytest.raises(errors.OutputPathError):
        make_working_copy(foundation, foundation)


def test_read_only_file(tmp_path, copy, monkeypatch):
    """The file must be writable."""
    if os.geteuid() == 0:
        pytest.skip("root may write anything")
    copy.chmod(0o444)
    with pytest.raises(errors.FileAccessError, match="Permission denied"):
        BlobCache(copy, "shared")


# Full disks


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or not mount:
        pytest.skip("mounting takes root")
    done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=1200k", "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"this system mounts nothing: {done.stderr}")
    yield folder
    subprocess.run([shutil.which("umount"), "--lazy", folder], check=True)  # caches may still map files there


MANY = {f"k{i:05}": np.full(4, 1, np.float32) for i in range(2500)}  # so that their versions need several pages


def fill(disk, leave):
    """Fill a disk except for a number of bytes."""
    with (disk / "fill").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(file.tell() // 4096 * 4096 - leave)


OPEN_AND_COMMIT = """
try:
    cache = BlobCache(sys.argv[1], "shared")
    cache.update({"k02499": np.full(4, 2, np.float32)})
    print("done", cache.numpy("k02499")[0])
except errors.FileAccessError as error:
    print(error.errno, error)
"""


def outcome(path):
    child = run(OPEN_AND_COMMIT, path)
    out, _ = child.communicate()
    assert child.returncode == 0
    return out


@pytest.mark.long
@pytest.mark.parametrize("opened_before", [False, True])
@pytest.mark.parametrize("pages", [0, 3])
def test_a_full_disk_is_an_error(small_disk, opened_before, pages):
    """Neither the committing process nor the next one is killed by a signal; the old weights stay (B3)."""
    save_file(MANY, small_disk / "original.ptd")
    make_working_copy(small_disk / "original.ptd", path := small_disk / "copy.ptd")
    if opened_before:
        BlobCache(path, "shared").close()
    fill(small_disk, 4096 * pages)
    assert "copy.ptd.commits: No space left on device" in outcome(path)
    assert [entry.name for entry in small_disk.iterdir() if "tmp" in entry.name] == []
    if opened_before:  # reading needs no space
        cache = BlobCache(path, "shared")
        assert (cache.generation, cache.numpy("k02499")[0], cache.verify()) == (0, 1, True)
    (small_disk / "fill").unlink()
    assert outcome(path) == "done 2.0\n"


def test_a_working_copy_with_holes_on_a_full_disk(small_disk, tmp_path):
    """Space for holes, which some tools make of pages of zeros, is reserved when the file is opened."""
    save_file({"a": np.zeros(20_000, np.float32)}, tmp_path / "original.ptd")
    make_working_copy(tmp_path / "original.ptd", tmp_path / "copy.ptd")
    data = (tmp_path / "copy.ptd").read_bytes()
    with (path := small_disk / "copy.ptd").open("wb") as file:
        for start in range(0, len(data), 4096):
            if any(page := data[start : start + 4096]):
                file.seek(start)
                file.write(page)
    fill(small_disk, 4096 * 8)
    with pytest.raises(errors.FileAccessError, match=r"copy\.ptd: No space left on device"):
        BlobCache(path, "shared")
    (small_disk / "fill").unlink()
    cache = BlobCache(path, "shared")
    fill(small_disk, 4096 * 40)
    cache.update({"a": np.ones(20_000, np.float32)})
    assert cache.verify() and (cache.numpy("a") == 1).all()


def test_a_file_that_may_not_grow_is_an_error(copy):
    """The limit on file sizes of a process has the same effect as a full disk."""
    child = run(
        """
import resource
cache = BlobCache(sys.argv[1], "shared")
cache.update(weights(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
try:
    cache.update(weights(2))
except errors.FileAccessError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(value(cache), cache.generation)
cache.update(weights(3))
print(value(cache), cache.generation)
""",
        copy,
    )
    out, _ = child.communicate()
    assert out.splitlines() == [f"{copy}.commits: File too large", "1 1", "3 2"]


# Forks


def commits(path):
    """Whether a process commits, or waits for readers to leave while new readers are held back."""
    with Path(f"{path}.commits").open("rb") as gate:
        try:
            fcntl.flock(gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.long
def test_a_child_keeps_no_lock_of_a_commit_of_its_parent(copy, hooks):
    """A process forks while its commit waits for a reader, continues, and is killed in the middle. The child lives on
    without its locks: other processes find the commit and finish it (B3)."""
    cache = BlobCache(copy, "shared")
    parent = run(
        """
import threading
from blobstore_runtime import _native
from tests.helpers.waiting import until
cache = BlobCache(sys.argv[1], "shared")
print("open", flush=True)
input()
threading.Thread(target=lambda: cache.update(weights(2)), daemon=True).start()
until(lambda: commits(sys.argv[1]))
pid = os.fork()
if pid == 0:
    os.close(1)
    sys.stdin.read()  # waits for the end of the test
    os._exit(0)
_native.crash_at(5)  # between two blobs
print(pid, flush=True)
signal.pause()  # until it is killed
""",
        copy,
        hooks=hooks,
    )
    assert parent.stdout.readline() == "open\n"
    with cache.reading():
        child = int(parent.ask())
    try:
        assert subprocess.Popen.wait(parent, 30) == -signal.SIGKILL
        later = run("cache = BlobCache(sys.argv[1], 'shared'); print(value(cache), cache.generation)", copy)
        assert later.communicate(timeout=30)[0] == "2 1\n"
        cache.update(weights(3))
        os.kill(child, 0)  # the child still exists
    finally:
        parent.stdin.close()
        parent.stdout.close()


def test_a_link_instead_of_the_file_of_commits_is_not_followed(copy, tmp_path):
    """Not even a link to a valid file, which another user may be able to write."""
    BlobCache(copy, mode="shared").update({"a": np.ones(SIZE, np.float32)})
    commits = commits_of(copy)
    commits.rename(tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    commits.symlink_to("elsewhere")
    copy.chmod(0o600)
    BlobCache(copy, mode="shared").update({"a": np.zeros(SIZE, np.float32)})
    assert (tmp_path / "elsewhere").read_bytes() == before
    assert not commits.is_symlink() and commits.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("how", ["removed first", "replaced"])
def test_the_commits_of_a_dead_working_copy_do_not_count(copy, how):
    """Not even if the system gives its inode to the next one (S2)."""
    interrupt(copy)
    dead = commits_of(copy).read_bytes()
    if how == "removed first":
        copy.unlink()
    make_working_copy(copy.with_name("original.ptd"), copy)
    assert not commits_of(copy).exists()
    commits_of(copy).write_bytes(dead)
    patch(commits_of(copy), 24, word(copy.stat().st_ino))
    commits_of(copy).chmod(0o600)
    assert value(BlobCache(copy, "shared")) == 0


def test_every_working_copy_has_its_own_mark(copy):
    """32 digits that cannot be guessed; files derived from a working copy are not working copies (S2)."""
    make_working_copy(copy, copy.with_name("second.ptd"))
    with open_ptd(copy) as data_map:
        store = BlobStore()
        store.merge(data_map)
        copy.with_name("third.ptd").write_bytes(store.to_bytes(metadata=data_map.metadata))
    marks = []
    for name in ("copy.ptd", "second.ptd", "third.ptd"):
        with open_ptd(copy.with_name(name), verify=True) as data_map:
            marks.append(data_map.metadata.get("blobstore.working_copy"))
    assert marks[0] != marks[1] and [len(bytes.fromhex(mark)) for mark in marks[:2]] == [16, 16] and marks[2] is None


@pytest.mark.parametrize("mark", [None, "", "0" * 31, "g" * 32, "A" * 32])
def test_what_nobody_marked_is_not_opened(copy, mark, tmp_path):
    """A deployed file would change for good (S2)."""
    plain = tmp_path / "plain.ptd"
    with open_ptd(copy) as data_map, plain.open("wb") as file:
        store = BlobStore()
        store.merge(data_map)
        write_ptd(file, store.entries(), {} if mark is None else {"blobstore.working_copy": mark})
    before = plain.read_bytes()
    with pytest.raises(
        errors.UnsupportedOperationError, match=r"plain\.ptd: this is not a working copy.*make_working_copy"
    ):
        BlobCache(plain, "shared")
    assert plain.read_bytes() == before and not Path(f"{plain}.commits").exists()


def test_a_copy_of_a_copy_in_the_middle_of_a_commit(copy, tmp_path):
    """It holds neither the old nor the new weights, and its journal speaks of another file (B3)."""
    interrupt(copy)
    other = tmp_path / "other.ptd"
    shutil.copy(copy, other)
    shutil.copy(commits_of(copy), commits_of(other))
    before = other.read_bytes()
    with pytest.raises(errors.IntegrityError, match=r"other\.ptd: it was copied while a commit was under way"):
        BlobCache(other, "shared")
    assert other.read_bytes() == before


@pytest.mark.parametrize(
    ("owner", "mode", "reason"),
    [
        pytest.param(65534, 0o600, "user 65534 owns it", marks=as_root),
        *((-1, mode, ".*others may write to it") for mode in (0o666, 0o620, 0o602)),
    ],
)
def test_commits_that_others_may_write_are_refused(copy, owner, mode, reason):
    """Who may not write the weights cannot write them through a journal (S2)."""
    interrupt(copy)
    copy.chmod(0o600)
    commits_of(copy).chmod(mode)
    os.chown(commits_of(copy), owner, owner)
    before = copy.read_bytes()
    with pytest.raises(errors.FileAccessError, match=rf"copy\.ptd\.commits: {reason}"):
        BlobCache(copy, "shared")
    assert copy.read_bytes() == before


@pytest.mark.parametrize("what", ["pipe", "folder link", "link"])
def test_what_is_no_file_of_commits_is_replaced(copy, what, tmp_path):
    """Nobody can hold up a process with it (S2)."""
    commits = commits_of(copy)
    if what == "pipe":
        os.mkfifo(commits)
    else:
        commits.symlink_to(tmp_path if what == "folder link" else tmp_path / "elsewhere")
    assert value(BlobCache(copy, "shared")) == 0
    assert commits.is_file() and not commits.is_symlink() and not (tmp_path / "elsewhere").exists()
