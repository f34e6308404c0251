"""A new file on its way to the disk: created exclusively, synced while it grows, followed by progress (B5)."""

import errno

import pytest

from blobstore.disk.output import Output
from blobstore.disk.staging import Staging
from blobstore.errors import FileAccessError
from tests.disk.outputs import fail, files


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
    monkeypatch.setattr("blobstore.disk.output._SYNC", 1000)
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
    monkeypatch.setattr("blobstore.disk.output._SYNC", 1000)
    fail(monkeypatch, "fdatasync", 1, errno.EIO)
    with (
        pytest.raises(FileAccessError, match=r"w: Input/output error"),
        Staging() as staging,
        staging.open(tmp_path / "w") as file,
    ):
        file.write(bytes(2 << 20))
        file.write(bytes(2 << 20))
    assert files(tmp_path) == {"w": b"old"}
