"""Mapped files (D1, D4): the bytes of a file, without a copy, for as long as they are referenced."""

import os
from pathlib import Path

import pytest

from blobstore.core.memory import mapped_file
from blobstore.errors import FileAccessError, InvalidFileError
from tests.helpers.process_memory import mapped_memory


def test_a_map_outlives_the_name_of_its_file(tmp_path):
    """If the file is renamed, replaced or deleted, the view still shows the mapped bytes."""
    path = tmp_path / "file"
    path.write_bytes(b"old bytes")
    view = mapped_file.map_file(path)
    (tmp_path / "new").write_bytes(b"new bytes")
    (tmp_path / "new").replace(path)
    assert bytes(view) == b"old bytes"
    assert bytes(mapped_file.map_file(path)) == b"new bytes"
    path.unlink()
    assert bytes(view[4:]) == b"bytes"


def test_views_of_one_file_share_a_map_and_release_it(tmp_path):
    """Thousands of slices take one descriptor, which is closed with the last of them."""
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    before = len(os.listdir("/proc/self/fd"))
    views = [mapped_file.map_file(path) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    del views
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_private_file_never_reaches_the_file_or_another_view(tmp_path):
    """Each is a private copy, also after it is closed."""
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with mapped_file.PrivateFile(path) as first, mapped_file.PrivateFile(path) as second:
        one, two = first.data, second.data
    one[0] = ord("X")
    assert (bytes(one), bytes(two), path.read_bytes()) == (b"Xbc", b"abc", b"abc")
    assert mapped_file.map_file(path).readonly


def test_what_is_no_file_with_bytes_is_refused(tmp_path):
    """A fifo is refused without waiting for its writer."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").touch()
    for name, error in {
        "missing": FileAccessError, ".": FileAccessError, "fifo": FileAccessError, "empty": InvalidFileError,
    }.items():  # fmt: skip
        with pytest.raises(error):
            mapped_file.map_file(tmp_path / name)


@pytest.mark.parametrize("wrong", [5, None, "a\0b", b"a\0b", {}, 1.5, "\ud800"], ids=repr)
def test_what_is_no_path_is_refused(wrong):
    """The error is the one for files, which callers handle anyway."""
    with pytest.raises(FileAccessError):
        mapped_file.as_path(wrong)
    with pytest.raises(FileAccessError):
        mapped_file.as_paths([wrong] if wrong is not None else wrong)


def test_one_path_or_several(tmp_path):
    """A single path of any type is a list of one."""
    assert mapped_file.as_paths("a") == mapped_file.as_paths(b"a") == mapped_file.as_paths(Path("a")) == [Path("a")]
    assert mapped_file.as_paths(iter(["a", b"b"])) == [Path("a"), Path("b")]


def test_links_lead_to_one_file(tmp_path):
    """Also before the file exists."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert mapped_file.same_file(tmp_path / "link", tmp_path / "file")
    (tmp_path / "file").touch()
    os.link(tmp_path / "file", tmp_path / "hard")
    assert mapped_file.same_file(tmp_path / "hard", tmp_path / "link")
    assert not mapped_file.same_file(tmp_path / "other", tmp_path / "file")


def test_the_file_behind_a_view(tmp_path):
    """A descriptor of the same file, at the place of the view; none for a file that changed, or for other memory."""
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    data = mapped_file.map_file(path)
    with mapped_file.file_behind(data[3:7]) as place:
        assert place is not None
        descriptor, start = place
        assert os.pread(descriptor, 4, start) == b"3456"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    for memory in (memoryview(b"0123"), data[5:5]):
        with mapped_file.file_behind(memory) as place:
            assert place is None
    with mapped_file.PrivateFile(path) as private, mapped_file.file_behind(private.data) as place:
        assert place is None  # what was written there is not in the file
    other = tmp_path / "y"
    other.write_bytes(b"9876543210")
    other.replace(path)
    with mapped_file.file_behind(data) as place:
        assert place is None
    path.unlink()
    with mapped_file.file_behind(data) as place:
        assert place is None


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="there is no /proc/self/smaps")
def test_what_was_read_once_is_given_back(tmp_path):
    """Not what is beside it, and nothing of a file that may have changes of this process."""
    size = 6 << 20
    (tmp_path / "file").write_bytes(content := os.urandom(size))
    view = mapped_file.map_file(tmp_path / "file")
    assert bytes(view) == content and mapped_memory(tmp_path / "file", "Rss") >= size
    mapped_file.give_back(view[1 : 4 << 20])
    assert 2 << 20 <= mapped_memory(tmp_path / "file", "Rss") <= (2 << 20) + 8192
    assert bytes(view) == content
    assert b"".join(map(bytes, mapped_file.read_pieces(view))) == content
    assert mapped_memory(tmp_path / "file", "Rss") == 0
    with mapped_file.PrivateFile(tmp_path / "file") as private:
        private.data[5] = 255 - content[5]
        mapped_file.give_back(memoryview(private.data))
        assert private.data[5] == 255 - content[5]
    mapped_file.give_back(memoryview(bytearray(size)))
