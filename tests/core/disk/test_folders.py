"""Folders for outputs."""

import pytest

from blobstore.core.disk.folders import folders
from blobstore.errors import FileAccessError


def test_folders_stay_after_success(tmp_path):
    with folders([tmp_path / "a" / "b", tmp_path / "a" / "c", tmp_path]):
        pass
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b", "c"]


def test_an_error_removes_what_was_made(tmp_path):
    """Folders that were there stay, and so does one that holds another file."""
    (tmp_path / "old").mkdir()
    with pytest.raises(KeyError), folders([tmp_path / "old" / "new", tmp_path / "used" / "deep"]):
        (tmp_path / "used" / "other").touch()
        raise KeyError
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["old", "used", "used/other"]


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with (
            pytest.raises(FileAccessError, match="Not a directory|File exists") as caught,
            folders([tmp_path / "first", folder]),
        ):
            pytest.fail("it was entered")
        assert caught.value.path == folder
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
