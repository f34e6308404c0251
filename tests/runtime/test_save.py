"""Files that the native library writes (N1): the bytes that the Python writer would write, complete or not at all."""

import ctypes
import errno
import json
import os
import re
import resource
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blobstore import BlobStore, errors, open_ptd, save_file
from blobstore.core.disk.locks import Lock
from blobstore.core.disk.names import journal_name, temporary_beside
from blobstore.core.formats.keys import OF_PROGRAMS
from blobstore.core.formats.ptd.writer import BlobEntry, write_ptd
from blobstore.core.memory.digest import digest
from blobstore.core.memory.layout import ScalarType, TensorLayout
from blobstore.runtime import BlobCache, make_working_copy
from blobstore.testing import strategies
from tests.core.disk.outputs import files, leftovers
from tests.core.formats.ptd.test_bad_files import ENTRY, SEGMENTS, with_manifest
from tests.helpers.beside import running

BLOBS = st.dictionaries(strategies.keys, st.tuples(strategies.tensors(), strategies.alignments), max_size=12)


def store_of(blobs):
    store = BlobStore()
    for key, ((data, layout), alignment) in blobs.items():
        store.add(key, data, layout=layout, alignment=alignment)
    return store


def changed(data):
    return bytes(byte ^ 1 for byte in data)


@pytest.mark.long
@given(blobs=BLOBS, data=st.data(), mode=st.sampled_from(["private", "copy"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_bytes_are_those_of_the_python_writer(tmp_path, blobs, data, mode):
    """N1: keys, layouts, alignments, equal and empty blobs; all keys, or only those that were changed."""
    store_of(blobs).write_ptd(tmp_path / "x.ptd", metadata={"not": "kept"})
    changes = data.draw(st.sets(st.sampled_from(sorted(blobs)))) if blobs else set()
    new = {k: ((changed(v[0][0]), v[0][1]), v[1]) if k in changes else v for k, v in blobs.items()}
    with BlobCache(tmp_path / "x.ptd", mode) as cache:
        cache.update_blobs({key: new[key][0][0] for key in changes})
        for dirty_only in (False, True):
            wanted = {key: blob for key, blob in new.items() if not dirty_only or key in changes}
            expected = store_of(wanted).to_bytes()
            assert cache.save(tmp_path / "saved.ptd", dirty_only=dirty_only) == len(expected)
            assert (tmp_path / "saved.ptd").read_bytes() == expected
    assert leftovers(tmp_path) == []


@pytest.mark.long
@given(blobs=BLOBS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_working_copy_is_that_of_the_python_writer(tmp_path, blobs):
    """N1: every key has its own bytes, and the copy an identity of its own."""
    store_of(blobs).write_ptd(tmp_path / "x.ptd")
    size = make_working_copy(tmp_path / "x.ptd", tmp_path / "copy.ptd")
    metadata = dict(open_ptd(tmp_path / "copy.ptd").metadata)
    assert re.fullmatch("[0-9a-f]{32}", metadata["blobstore.working_copy"])
    assert json.loads(metadata["blobstore.working_copy.files"]) == [[0, len(blobs)] if blobs else []]
    with (tmp_path / "expected.ptd").open("wb") as file:
        entries = [
            BlobEntry(key, memoryview(data), digest(data), number, alignment, layout)
            for number, (key, ((data, layout), alignment)) in enumerate(blobs.items())
        ]
        assert write_ptd(file, entries, metadata) == size
    assert (tmp_path / "copy.ptd").read_bytes() == (tmp_path / "expected.ptd").read_bytes()


def test_large_blobs_and_thousands_of_keys(tmp_path):
    """N1: blobs longer than a piece, of lengths around it, and a table of a megabyte."""
    blobs = {f"layers.{i}.weight": ((bytes([i % 7]) * (i % 50), None), 1 + i % 3) for i in range(20_000)}
    for nbytes in (2**18 - 1, 2**18, 2**18 + 1, 3 * 2**18 + 5):
        blobs[f"large.{nbytes}"] = ((np.random.default_rng(nbytes).bytes(nbytes), None), 4096)
    store = store_of(blobs)
    store.write_ptd(tmp_path / "x.ptd")
    with BlobCache(tmp_path / "x.ptd") as cache:
        cache.save(tmp_path / "saved.ptd")
    assert (tmp_path / "saved.ptd").read_bytes() == store.to_bytes()


def test_a_cache_on_a_base_saves_its_own_keys(tmp_path, foundation):
    """N1."""
    save_file({"mine": np.ones(3, np.float32)}, tmp_path / "mine.ptd")
    base = BlobCache(foundation)
    with BlobCache(tmp_path / "mine.ptd", base=base) as cache:
        cache.save(tmp_path / "saved.ptd")
        assert list(open_ptd(tmp_path / "saved.ptd")) == ["mine"]
        with pytest.raises(errors.OutputPathError, match="one of the inputs"):
            cache.save(foundation)


# What a file of another writer has, and this one does not write


@pytest.mark.parametrize(("key", "reason"), [("", "non-empty"), ("a\0b", "NUL")])
def test_keys_that_are_not_written(tmp_path, key, reason):
    """N1: a file with such a key can be read."""
    with BlobCache(foreign(tmp_path, key=key)) as cache, pytest.raises(errors.InvalidKeyError, match=reason):
        cache.save(tmp_path / "saved.ptd")
    with pytest.raises(errors.InvalidKeyError, match=reason):
        make_working_copy(tmp_path / "f.ptd", tmp_path / "saved.ptd")
    assert not (tmp_path / "saved.ptd").exists()
    assert leftovers(tmp_path) == []


def foreign(folder, **entry):
    path = with_manifest(folder, table={"version": 0, "segments": SEGMENTS, "named_data": [{**ENTRY, **entry}]})
    return path.rename(folder / "f.ptd")


def aligned(folder, *blobs):
    """Write `a.ptd` and `b.ptd`, each with one blob of an alignment."""
    for name, (key, alignment) in zip("ab", blobs, strict=True):
        store = BlobStore()
        store.add(key, b"same", alignment=alignment)
        store.write_ptd(folder / f"{name}.ptd")


def test_alignments_without_a_common_multiple(tmp_path):
    """N1: 3**8 and 5**5 are possible each, but not together."""
    aligned(tmp_path, ("a", 3**8), ("b", 5**5))
    with pytest.raises(errors.InvalidAlignmentError, match=f"{128 * 5**5}, {128 * 3**8}.* common multiple above"):
        make_working_copy([tmp_path / "a.ptd", tmp_path / "b.ptd"], tmp_path / "copy.ptd")


# Working copies of several files


def test_a_key_of_two_files_gets_the_common_alignment(tmp_path):
    """N1."""
    aligned(tmp_path, ("k", 48), ("k", 64))
    make_working_copy([tmp_path / "a.ptd", tmp_path / "b.ptd"], tmp_path / "copy.ptd")
    assert open_ptd(tmp_path / "copy.ptd").alignment("k") == 192


@pytest.mark.parametrize(
    "other", [np.zeros(4, np.float32), np.ones(4, np.int32), np.ones((2, 2), np.float32), np.ones(5, np.float32)]
)
def test_files_that_contradict_each_other(tmp_path, other):
    """N1."""
    save_file({"k": np.ones(4, np.float32)}, tmp_path / "a.ptd")
    save_file({"k": other}, tmp_path / "b.ptd")
    with pytest.raises(errors.KeyConflictError, match=r"'k'.*a\.ptd.*b\.ptd"):
        make_working_copy([tmp_path / "a.ptd", tmp_path / "b.ptd"], tmp_path / "copy.ptd")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ptd", "b.ptd"]


def test_a_damaged_file_is_not_copied(tmp_path):
    """N1: neither as the first file with a key nor as the second one."""
    save_file({"k": np.ones(4, np.float32)}, tmp_path / "good.ptd")
    data = bytearray((tmp_path / "good.ptd").read_bytes())
    start, _ = open_ptd(tmp_path / "good.ptd").byte_range("k")
    data[start] ^= 1
    (tmp_path / "bad.ptd").write_bytes(data)
    for paths in (["bad.ptd"], ["good.ptd", "bad.ptd"]):
        with pytest.raises(errors.IntegrityError, match=r"bad\.ptd.*'k' are damaged"):
            make_working_copy([tmp_path / name for name in paths], tmp_path / "copy.ptd")


# One file that appears complete


@pytest.fixture(params=["save", "make_working_copy"])
def write(request, tmp_path):
    """Writes a file to a path."""
    (tmp_path / "in").mkdir()
    save_file({"w": np.arange(1000, dtype=np.float32)}, source := tmp_path / "in" / "source.ptd")
    (tmp_path / "out").mkdir()
    if request.param == "save":
        return BlobCache(source).save
    return lambda path: make_working_copy(source, path)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o400])
def test_a_file_keeps_its_mode(tmp_path, write, mode):
    """N1: a replaced file keeps its mode; for a new one the umask applies."""
    path = tmp_path / "out" / "w.ptd"
    write(path)
    path.chmod(mode)
    umask = os.umask(0o027)
    try:
        write(tmp_path / "out" / "new.ptd")
        write(path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "out" / "new.ptd").stat().st_mode) == 0o640
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_root_keeps_the_owner(tmp_path, write):
    """N1: of a file that is replaced."""
    write(path := tmp_path / "out" / "w.ptd")
    os.chown(path, 12345, 54321)
    write(path)
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


def test_a_link_stays_a_link(tmp_path, write, monkeypatch):
    """N1: the file that it leads to is replaced, in its own folder; relative paths and chains of links work."""
    (tmp_path / "links").mkdir()
    link, target = tmp_path / "links" / "w.ptd", tmp_path / "out" / "w.ptd"
    link.symlink_to("../out/w.ptd")
    (tmp_path / "links" / "again.ptd").symlink_to("w.ptd")
    monkeypatch.chdir(tmp_path / "links")
    for path in (link, tmp_path / "links" / "again.ptd", Path("w.ptd"), Path("again.ptd"), Path("../links/w.ptd")):
        target.unlink(missing_ok=True)
        for _ in range(2):
            write(path)
            assert list(open_ptd(target)) == ["w"]
            target.write_bytes(b"")
    assert link.is_symlink()
    assert leftovers(tmp_path) == []
    (tmp_path / "links" / "loop").symlink_to("loop")
    with pytest.raises(errors.FileAccessError, match="loop") as raised:
        write(tmp_path / "links" / "loop")
    assert raised.value.errno == errno.ELOOP


def test_inputs_are_not_replaced(tmp_path, write):
    """N1: under no name, also if the file was deleted."""
    source = tmp_path / "in" / "source.ptd"
    (tmp_path / "link.ptd").symlink_to(source)
    os.link(source, tmp_path / "second.ptd")
    (tmp_path / "folder").symlink_to("in")
    for name in ("in/source.ptd", "link.ptd", "second.ptd", "folder/source.ptd", "out/../in/source.ptd"):
        with pytest.raises(errors.OutputPathError, match=r"the output is one of the inputs, .*in/source\.ptd"):
            write(tmp_path / name)


def test_a_deleted_input_is_not_written(tmp_path, foundation):
    """N1: the cache may still be used on the deleted file."""
    (path := tmp_path / "x.ptd").write_bytes(foundation.read_bytes())
    cache = BlobCache(path)
    path.unlink()
    (tmp_path / "link.ptd").symlink_to("x.ptd")
    for name in ("x.ptd", "link.ptd"):
        with pytest.raises(errors.OutputPathError, match="one of the inputs"):
            cache.save(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x08\0\0\0ET12" + bytes(50), "this is a .pte program and would be replaced by a .ptd data file"),
        (b"\x02\0\0\0\0\0\0\0{}", "this is a .safetensors file"),
        (b"  <!DOCTYPE html>", "this is an HTML page"),
        (b"some text", "this is a file of an unknown format"),
        (b"\x02", "this is a file of an unknown format"),
        (
            BlobStore().to_bytes(metadata=OF_PROGRAMS),
            "together with programs",
        ),  # which would not find their weights any more
    ],
)
def test_files_of_other_kinds_are_not_replaced(tmp_path, write, content, reason):
    """N1: with the words of the Python writer."""
    (path := tmp_path / "out" / "w.ptd").write_bytes(content)
    with pytest.raises(errors.OutputPathError, match=reason) as raised:
        write(path)
    with pytest.raises(errors.OutputPathError) as expected:
        BlobStore().write_ptd(path)
    assert str(raised.value) == str(expected.value)
    assert path.read_bytes() == content


def test_places_where_no_file_can_be(tmp_path, write):
    """N1."""
    os.mkfifo(tmp_path / "out" / "fifo")
    for name, number in (
        ("out", errno.EISDIR),
        ("out/fifo", errno.EINVAL),
        ("missing/w.ptd", errno.ENOENT),
        ("in/source.ptd/w.ptd", errno.ENOTDIR),
        ("out/" + 300 * "x", errno.ENAMETOOLONG),
    ):
        with pytest.raises(errors.FileAccessError, match=name[-40:]) as raised:
            write(tmp_path / name)
        assert raised.value.errno == number


@pytest.mark.parametrize("old", [None, b""])
def test_a_full_disk_leaves_the_old_file(tmp_path, write, old):
    """N1: a limit on the size of files stands for it."""
    path = tmp_path / "out" / "w.ptd"
    path.write_bytes(old) if old is not None else None
    before = files(tmp_path / "out")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(errors.FileAccessError, match=r"w\.ptd: File too large"):
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path / "out") == before


def test_a_blob_that_changes_while_it_is_written(tmp_path, foundation):
    """N1: a write beside all commits is found; the file is not replaced."""
    cache = BlobCache(foundation, "copy")
    array = cache.numpy("large")
    live = np.ctypeslib.as_array((ctypes.c_float * array.size).from_address(array.ctypes.data))

    def scribble():
        live[:] = live + 1

    with running(scribble):
        for _ in range(200):
            try:
                cache.save(tmp_path / "saved.ptd")
            except errors.DataChangedError as error:
                assert "'large' changed after they were added" in str(error)
                break
            open_ptd(tmp_path / "saved.ptd", verify=True).close()
    assert leftovers(tmp_path) == []


# What killed processes left


def test_abandoned_temporary_files_are_removed(tmp_path, write):
    """N1: only those that no process has locked, and nothing else."""
    folder = tmp_path / "out"
    (abandoned := temporary_beside(folder / "w.ptd")).write_bytes(b"half a file")
    (used := temporary_beside(folder / "w.ptd")).write_bytes(b"of a running process")
    (folder / ".blobstore-0.tmp").write_bytes(b"another name")
    (linked := temporary_beside(folder / "w.ptd")).symlink_to(used)
    lock = Lock()
    assert lock.take(used)
    write(folder / "w.ptd")
    assert not abandoned.exists()
    assert set(leftovers(folder)) == {used.name, linked.name, ".blobstore-0.tmp"}
    lock.close()
    write(folder / "w.ptd")
    assert set(leftovers(folder)) == {linked.name, ".blobstore-0.tmp"}


_NATIVE = """
import sys
from blobstore.runtime.native import native, native_path
native.make_working_copy([native_path(sys.argv[1])], native_path(sys.argv[2]))
"""


def test_files_of_an_interrupted_group_stay(tmp_path, foundation):
    """N1: the native library does not read journals; the next Python writer finishes the group."""
    (left := temporary_beside(tmp_path / "w.ptd")).write_bytes(b"of the group")
    (journal := tmp_path / journal_name()).write_text("{}")
    command = [sys.executable, "-c", _NATIVE, str(foundation), str(tmp_path / "w.ptd")]
    subprocess.run(command, check=True)
    assert set(leftovers(tmp_path)) == {left.name, journal.name}
    journal.unlink()
    subprocess.run(command, check=True)
    assert leftovers(tmp_path) == []


@pytest.mark.long
def test_it_takes_little_memory(tmp_path):
    """N1: blobs are not copied into memory."""
    nbytes = 1 << 27
    with (tmp_path / "x.ptd").open("wb") as file:
        data = memoryview(bytes(nbytes))
        write_ptd(file, [BlobEntry("k", data, digest(data), 0, 1, TensorLayout(ScalarType.BYTE, (nbytes,)))], {})
    code = (
        "import sys; from blobstore.runtime import BlobCache; cache = BlobCache(sys.argv[1], 'private')\n"
        "def private():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon')) * 1024\n"
        "import threading; most = before = private(); stop = threading.Event()\n"
        "def watch():\n"
        "    global most\n"
        "    while not stop.is_set(): most = max(most, private())\n"
        "thread = threading.Thread(target=watch); thread.start(); cache.save(sys.argv[2]); stop.set(); thread.join()\n"
        "print(most - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x.ptd"), str(tmp_path / "y.ptd")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(done.stdout) < nbytes // 8
