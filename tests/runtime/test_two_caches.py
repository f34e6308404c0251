"""A thread that reads a working copy through one cache and uses it through another one never waits for itself (B4).

Other processes wait for a commit that has begun, and that waits for this thread; so would this thread, for ever.
"""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from blobstore.errors import UnsupportedOperationError
from blobstore.runtime import BlobCache, Program, make_working_copy
from tests.helpers.waiting import until_blocked

pytestmark = pytest.mark.long  # each test starts a process, which ends with its stacks if it hangs
SECONDS = 60  # far more than it takes on a busy machine


class Two:
    """Two caches on one working copy, and a thread that can be in a reading of the first."""

    def __init__(self, mlp: Path, folder: Path) -> None:
        self.mlp, self.folder, self.path = mlp, folder, folder / "live.ptd"
        make_working_copy(mlp / "model.ptd", self.path)
        self.first, self.second = BlobCache(self.path, "shared"), BlobCache(self.path, "shared")
        self.above = BlobCache(mlp / "model.ptd", base=self.second)
        self.key = next(key for key in self.second if self.second.layout(key) is not None)
        self.method = Program(mlp / "model.pte", self.second).method()
        self.input = torch.ones(2, 16)
        self.output = self.method.execute(self.input)[0]
        self.new = {self.key: np.ones_like(self.second.numpy(self.key))}

    def commit_in_a_transaction(self) -> None:
        with self.second.transaction() as transaction:
            transaction[self.key] = self.new[self.key]

    def read(self, blobs: BlobCache) -> None:
        with blobs.reading():
            pass

    def another(self) -> None:
        make_working_copy(self.mlp / "model.ptd", self.folder / "other.ptd")
        self.read(BlobCache(self.folder / "other.ptd", "shared"))

    def replaced(self) -> None:
        """Open another working copy at this path, beside which is still the file of the first one."""
        make_working_copy(self.mlp / "model.ptd", self.folder / "new.ptd")
        (self.folder / "new.ptd").replace(self.path)
        BlobCache(self.path, "shared")


REFUSED: dict[str, Callable[[Two], object]] = {
    "reading": lambda two: two.read(two.second),
    "reading of a cache above": lambda two: two.read(two.above),
    "a tensor": lambda two: two.second[two.key],
    "a tensor of the model": lambda two: two.second["layers.1.weight"],
    "load_data_into": lambda two: two.second.load_data_into(two.key, bytearray(1 << 16)),
    "files": lambda two: two.second.files,
    "dirty": lambda two: two.second.dirty,
    "stats": lambda two: two.second.stats,
    "verify": lambda two: two.second.verify(),
    "verify of a cache above": lambda two: two.above.verify(),
    "save": lambda two: two.second.save(two.folder / "saved.ptd"),
    "update": lambda two: two.second.update(two.new),
    "update of blobs": lambda two: two.second.update_blobs(two.new),
    "transaction": lambda two: two.commit_in_a_transaction(),
    "load": lambda two: two.second.load(two.mlp / "model.ptd"),
    "revert": lambda two: two.second.revert(),
    "call": lambda two: two.method(two.input),
    "load of a program": lambda two: Program(two.mlp / "model.pte", two.second).method(),
    "load with packed weights": lambda two: Program(
        two.mlp / "model.pte", BlobCache(base=two.second, packed=two.folder / "packed")
    ).method(),
    "a third cache": lambda two: BlobCache(two.path, "shared"),
    "another working copy at this path": lambda two: make_working_copy(two.mlp / "model.ptd", two.path),
    "a cache on another working copy at this path": lambda two: two.replaced(),
}

ALLOWED: dict[str, Callable[[Two], object]] = {
    "an array": lambda two: two.second.numpy(two.key),
    "bytes": lambda two: two.second.get_data(two.key),
    "what changed": lambda two: (two.second.generation, two.second.version(two.key)),
    "how it looks": lambda two: repr(two.second),
    "a nested reading": lambda two: two.read(two.first),
    "the first cache": lambda two: (two.first.stats, two.first[two.key], two.first.verify()),
    "a private cache": lambda two: BlobCache(two.path)[two.key],
    "a working copy elsewhere": lambda two: two.another(),
}


def nested(mlp: str, folder: str) -> None:
    """Try everything while a commit of another process has passed the gate and waits for this thread."""
    two = Two(Path(mlp), Path(folder))
    with Path(f"{two.path}.commits").open("rb") as gate, two.first.reading():
        fcntl.flock(gate, fcntl.LOCK_EX)
        for use in ALLOWED.values():
            use(two)
        for use in REFUSED.values():
            with pytest.raises(UnsupportedOperationError, match=r"reading the working copy|no older bytes"):
                use(two)
        if os.fork() == 0:
            with pytest.raises(UnsupportedOperationError, match="reading the working copy"):
                two.read(two.second)
            two.read(two.first)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert (two.second.generation, two.second.dirty, two.second.stats.commits) == (0, (), 0)
    assert torch.equal(two.method.execute(two.input)[0], two.output) and two.second.verify()
    two.second.update(two.new)
    assert two.first.generation == 1 and np.array_equal(two.first.numpy(two.key), two.new[two.key])


def in_threads(mlp: str, folder: str) -> None:
    """A thread that reads both, while another thread of this process commits through the second."""
    two = Two(Path(mlp), Path(folder))
    with two.first.reading():
        thread = threading.Thread(target=two.second.update, args=[two.new])
        thread.start()
        until_blocked(thread)
        with pytest.raises(UnsupportedOperationError, match="reading the working copy"):
            two.read(two.second)
        assert two.first.generation == 0
    thread.join()
    two.read(two.second)
    assert np.array_equal(two.first.numpy(two.key), two.new[two.key])


@pytest.mark.parametrize("case", [nested, in_threads])
def test_a_thread_never_waits_for_itself(case: Callable[[str, str], None], mlp: Path, tmp_path: Path) -> None:
    script = f"""
import faulthandler, sys
from tests.runtime import test_two_caches
faulthandler.dump_traceback_later({SECONDS}, exit=True)
test_two_caches.{case.__name__}(*sys.argv[1:])
"""
    done = subprocess.run([sys.executable, "-c", script, mlp, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
