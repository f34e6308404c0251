"""Objects that are fetched whole: hashed as they come, and synced while they do (F4)."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any, cast

import pytest

from blobstore.errors import FileAccessError
from blobstore.releases.device.assembly import Assembly, make
from blobstore.releases.device.spool import Spool
from blobstore.releases.index.index import Object
from tests.core.disk.outputs import fail

GOOD = os.urandom(3 << 20)
WANTED = Object(hashlib.sha256(GOOD).hexdigest(), len(GOOD))


class Again:
    """A transfer that brings the right bytes."""

    def again(self, spool: Spool, start: int, stop: int) -> None:
        spool.write(start, GOOD[start:stop])


def test_a_disk_failure_is_remembered_when_all_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports it once, to the sync in the background; the bytes were wrong, too, and came again."""
    files = tmp_path / "files"
    files.mkdir()
    spool = Spool(tmp_path, WANTED)
    spool.write(0, bytes(len(GOOD)))
    monkeypatch.setattr("blobstore.core.disk.output._SYNC", 1000)
    fail(monkeypatch, "fdatasync", 1, errno.EIO)
    with pytest.raises(FileAccessError, match="Input/output error"):
        make(Assembly(WANTED, spool, None), files, cast(Any, Again()))
    assert list(files.iterdir()) == []
