"""Locks against other processes: held by one at a time, and released when their process ends."""

import subprocess
import sys
import threading

from blobstore.core.disk import locks
from blobstore.core.disk.locks import Lock, exclusive
from tests.helpers.waiting import until

HOLD = """
import sys
from pathlib import Path
from blobstore.core.disk.locks import Lock
lock = Lock()
assert lock.take(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_lock_excludes_other_processes_until_its_process_dies(tmp_path):
    """A file and a folder alike; a killed process keeps no lock."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path):
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, stdin=subprocess.PIPE
        ) as process:
            assert process.stdout.readline() == b"locked\n"
            lock = Lock()
            assert not lock.take(path)
            lock.close()
            process.kill()
        lock = Lock()
        assert lock.take(path)
        lock.close()


def test_shared_locks_do_not_exclude_each_other(tmp_path):
    """An exclusive one does."""
    first, second, third = Lock(), Lock(), Lock()
    assert first.take(tmp_path, shared=True) and second.take(tmp_path, shared=True)
    assert not third.take(tmp_path)


def test_exclusive_keeps_others_out_and_is_released_after_an_error(tmp_path):
    """The next caller can enter."""
    for _ in range(2):
        try:
            with exclusive(tmp_path):
                assert not Lock().take(tmp_path)
                raise KeyError
        except KeyError:
            pass
    assert Lock().take(tmp_path)


def test_a_long_wait_is_not_silent(tmp_path, caplog, monkeypatch):
    """The log names what is waited for, once; a lock that is free at once needs no word (S3)."""
    monkeypatch.setattr(locks, "_SILENCE", 0.0)
    with exclusive(tmp_path):
        pass
    assert not caplog.records
    holder = Lock()
    assert holder.take(tmp_path, shared=True)  # as anybody can who may read the folder
    entered = threading.Event()

    def enter():
        with exclusive(tmp_path):
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    try:
        until(lambda: caplog.records)
        assert not entered.is_set()
    finally:
        holder.close()
        thread.join()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: waiting for another process, which has locked it"
    ]
