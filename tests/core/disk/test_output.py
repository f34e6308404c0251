"""A new file on its way to the disk: created exclusively, synced while it grows, followed by progress (B5)."""

import errno
import io
import os

import pytest

from blobstore.core.disk.output import Output, write_view
from blobstore.core.disk.staging import Staging
from blobstore.core.memory.mapped_file import map_file
from blobstore.errors import FileAccessError
from tests.core.disk.outputs import fail, files


def test_progress_follows_every_write_up_to_the_total(tmp_path):
    """More bytes than announced are not reported."""
    seen = []
    with Output(tmp_path / "x", 0o600, "writing", 10, lambda *step: seen.append(step)) as output:
        output.write(b"1234")
        output.write(bytes(20))
        output.sync()
    assert seen == [("writing", 4, 10), ("writing", 10, 10)]
    assert (tmp_path / "x").stat().st_size == 24


def test_an_existing_file_or_link_is_never_opened(tmp_path):
    """No file can be planted under a temporary name."""
    (tmp_path / "x").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("x", "link"):
        with pytest.raises(FileExistsError):
            Output(tmp_path / name, 0o600, "writing", 0, None)
    assert (tmp_path / "x").read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()


def test_bytes_are_synced_while_more_are_written(tmp_path, monkeypatch):
    """The last sync then has little left to wait for."""
    synced = []
    monkeypatch.setattr("blobstore.core.disk.output._SYNC", 1000)
    monkeypatch.setattr("os.fdatasync", synced.append)
    with Output(tmp_path / "x", 0o600, "writing", 0, None) as output:
        output.write(bytes(999))
        assert synced == []
        output.write(b"1")
        output.sync()
        assert synced == [output.fileno()]


def test_a_disk_failure_in_the_background_is_reported(tmp_path, monkeypatch):
    """The system reports the failure once, to the sync in the background; the last sync then succeeds."""
    (tmp_path / "w").write_bytes(b"old")
    monkeypatch.setattr("blobstore.core.disk.output._SYNC", 1000)
    fail(monkeypatch, "fdatasync", 1, errno.EIO)
    with (
        pytest.raises(FileAccessError, match=r"w: Input/output error"),
        Staging() as staging,
        staging.open(tmp_path / "w") as file,
    ):
        file.write(bytes(2 << 20))
        file.write(bytes(2 << 20))
    assert files(tmp_path) == {"w": b"old"}


@pytest.mark.parametrize("possible", [True, False])
def test_parts_of_mapped_files_are_copied(tmp_path, monkeypatch, possible):
    """By the system if it can, else through this process; also behind bytes that are still gathered."""
    large = os.urandom(3 << 20)
    (tmp_path / "source").write_bytes(b"begin" + large + b"end")
    data, called = map_file(tmp_path / "source"), []
    copy = getattr(os, "copy_file_range", None)

    def copied(*arguments):
        called.append(arguments)
        if not possible or copy is None:
            raise OSError(errno.EXDEV, "not between these")
        return copy(*arguments)

    monkeypatch.setattr(os, "copy_file_range", copied, raising=False)
    seen = []
    with Staging(lambda *step: seen.append(step[1])) as staging, staging.open(tmp_path / "x", len(large)) as file:
        file.write(b"head")
        write_view(file, data[5 : 5 + len(large)])
        write_view(file, data[-3:])
        write_view(file, memoryview(b"tail"))
        write_view(file, memoryview(large))
    assert (tmp_path / "x").read_bytes() == b"head" + large + b"end" + b"tail" + large
    assert called
    assert seen == sorted(seen)


def test_failures_of_a_copy_name_the_target(tmp_path, monkeypatch):
    """A full disk, a source that became shorter: the target stays as it was."""
    (tmp_path / "source").write_bytes(bytes(2 << 20))
    (tmp_path / "x").write_bytes(b"old")
    data = map_file(tmp_path / "source")
    for result in (OSError(errno.ENOSPC, "full"), 0):

        def copied(*arguments, result=result):
            if isinstance(result, OSError):
                raise result
            return result

        monkeypatch.setattr(os, "copy_file_range", copied, raising=False)
        with (
            pytest.raises(FileAccessError, match=r"x: .*(full|truncated)"),
            Staging() as staging,
            staging.open(tmp_path / "x") as file,
        ):
            write_view(file, data)
        assert files(tmp_path) == {"source": bytes(2 << 20), "x": b"old"}


def test_memory_goes_to_any_file(tmp_path):
    """Also to one in memory."""
    (tmp_path / "source").write_bytes(bytes(range(256)) * 8192)
    file = io.BytesIO()
    write_view(file, map_file(tmp_path / "source"))
    assert file.getvalue() == bytes(range(256)) * 8192
