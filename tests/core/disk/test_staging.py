"""Output files (B5): the old one or the new one, on the disk, with nothing left beside it, whatever happens."""

import contextlib
import errno
import gc
import os
import shutil
import signal
import stat
import sys
import warnings
from pathlib import Path

import pytest

import blobstore
from blobstore.core.disk.recovery import ScratchFolder
from blobstore.core.disk.staging import Staging
from blobstore.core.memory.mapped_file import Descriptor
from blobstore.errors import FileAccessError, OutputPathError
from blobstore.programs import dedup_programs
from tests.core.disk.outputs import fail, files, group, leftovers, save


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o400])
def test_a_file_keeps_its_mode(tmp_path, mode):
    """A replaced file keeps its mode; for a new one the umask applies."""
    path = tmp_path / "w.ptd"
    save(path)
    path.chmod(mode)
    save(path, 2.0)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    umask = os.umask(0o027)
    try:
        save(tmp_path / "new.ptd")
        save(path, 3.0)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new.ptd").stat().st_mode) == 0o640
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_private_file_is_never_readable_by_others(tmp_path, monkeypatch):
    """Not even under its temporary name."""
    path = tmp_path / "w.ptd"
    save(path)
    path.chmod(0o600)
    modes = []
    with Staging() as staging, staging.open(path) as file:
        modes += [stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()]
        file.write(b"secret")
    assert modes == [0o600, 0o600]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_root_keeps_the_owner(tmp_path):
    """Of a file that is replaced."""
    save(tmp_path / "w.ptd")
    os.chown(tmp_path / "w.ptd", 12345, 54321)
    save(tmp_path / "w.ptd", 2.0)
    status = (tmp_path / "w.ptd").stat()
    assert (status.st_uid, status.st_gid) == (12345, 54321)


def test_a_link_stays_a_link(tmp_path):
    """The file that it leads to is replaced, in its own folder."""
    (tmp_path / "data").mkdir()
    (tmp_path / "links").mkdir()
    save(tmp_path / "data" / "w.ptd")
    (tmp_path / "links" / "w.ptd").symlink_to("../data/w.ptd")
    (tmp_path / "links" / "new.ptd").symlink_to("../data/new.ptd")  # its target does not exist yet
    for name in ("w.ptd", "new.ptd"):
        save(tmp_path / "links" / name, 2.0)
        assert (tmp_path / "links" / name).is_symlink()
        assert blobstore.load_file(tmp_path / "data" / name)["w"].tolist() == [2.0] * 8
    (tmp_path / "links" / "loop").symlink_to("loop")
    with pytest.raises(FileAccessError, match="loop"):
        save(tmp_path / "links" / "loop")
    with pytest.raises(OutputPathError, match="two outputs"), Staging() as staging:
        with staging.open(tmp_path / "links" / "w.ptd"):
            pass
        with staging.open(tmp_path / "data" / "w.ptd"):
            pass


# On the disk


@pytest.mark.parametrize("number", range(1, 8))
def test_a_sync_that_fails_leaves_the_old_files(tmp_path, monkeypatch, number):
    """The syncs are of three files, of the folder, of the journal, of the folder, and of the folder at the end."""
    group(tmp_path, b"old")
    fail(monkeypatch, "fsync", number, errno.EIO)
    with pytest.raises(FileAccessError, match=r": Input/output error") as raised:
        group(tmp_path)
    assert raised.value.path == (tmp_path if number > 3 else tmp_path / "abc"[number - 1])
    assert files(tmp_path) == dict.fromkeys("abc", b"old")


def test_a_folder_that_cannot_be_synced_is_not_an_error(tmp_path, monkeypatch):
    """Some file systems do not support it."""
    for number in (4, 6, 7):
        fail(monkeypatch, "fsync", number, errno.EINVAL)
    group(tmp_path)
    assert files(tmp_path) == dict.fromkeys("abc", b"new")


# Clean-up


def test_a_clean_up_that_fails_is_not_an_error(tmp_path, monkeypatch):
    """The outputs are in place."""
    group(tmp_path, b"old")

    def refuse(*arguments, **options):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "unlink", refuse)
    group(tmp_path)
    monkeypatch.undo()
    assert [(tmp_path / name).read_bytes() for name in "abc"] == [b"new"] * 3
    group(tmp_path, b"newer")  # also removes the leftovers
    assert files(tmp_path) == dict.fromkeys("abc", b"newer")


# Exceptions from signal handlers


class Boom(BaseException):
    """An exception like KeyboardInterrupt, which a signal handler can raise at any moment."""


@pytest.fixture
def quiet(monkeypatch):
    """Garbage collections skip existing objects, such as all of torch; exceptions in finalizers keep nothing alive."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("kind", [Staging, ScratchFolder, Descriptor])
def test_what_was_not_completed_is_dropped_quietly(kind, monkeypatch):
    """A refused argument, or an earlier exception, is the only thing that is reported (U3)."""
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    kind.__new__(kind)
    with pytest.raises(blobstore.BlobStoreError, match="progress"):
        Staging(5)
    gc.collect()
    assert said == []


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def raise_at(number, run):
    """Run it with an exception at this line of blobstore, counted from 1; return how many lines there were."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        if "/blobstore/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                raise Boom
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    with warnings.catch_warnings(), contextlib.suppress(Boom):
        warnings.simplefilter("ignore")  # about files that a finalizer closes
        try:
            run()
        finally:
            sys.settrace(old)
    gc.collect()
    return lines


@pytest.mark.slow_for("group")
@pytest.mark.long
@pytest.mark.parametrize("job", ["group", "save", "dedup"])
def test_an_exception_at_any_line_leaves_old_or_new_and_nothing_else(lowered, tmp_path, job, quiet):
    """Neither temporary files nor open descriptors. Of a dedup at a sample of its lines, and at all of the last ones,
    where files are renamed."""
    out = tmp_path / "out"
    programs = [lowered.mlp(seed=seed).write(tmp_path, str(seed)) for seed in (1, 2) if job == "dedup"]

    def run(value):
        if job == "dedup":
            dedup_programs(programs[: 2 if value == b"newer" else 1], out)
        elif job == "group":
            group(out, value)
        else:
            save(out / "w.ptd", len(value))

    def begin(value):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        run(value)
        return files(out)

    new, old = begin(b"newer"), begin(b"old")
    before = descriptors()
    lines = raise_at(None, lambda: run(b"newer"))
    assert lines > 50
    sample = [*range(1, lines, lines // 60), *range(lines - 60, lines)] if job == "dedup" else range(1, lines + 1)
    begin(b"old")
    for number in sample:
        assert raise_at(number, lambda: run(b"newer")) >= number
        assert leftovers(out) == []
        assert files(out) in (old, new), number
        assert descriptors() == before, number
        if files(out) != old:
            begin(b"old")


def test_signals_at_any_moment_of_many_saves(tmp_path, quiet):
    """A handler that raises, like that of Ctrl-C, hundreds of times in a row."""

    def handler(number, frame):
        while frame and frame.f_code is not group.__code__:
            frame = frame.f_back
        if frame:  # not in the code of this test
            raise Boom

    old_handler = signal.signal(signal.SIGALRM, handler)
    before = descriptors()
    hits = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        signal.setitimer(signal.ITIMER_REAL, 0.0007, 0.0007)
        try:
            while hits < 500:
                try:
                    group(tmp_path)
                except Boom:
                    hits += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old_handler)
        gc.collect()
    group(tmp_path)
    assert leftovers(tmp_path) == []
    assert descriptors() == before
