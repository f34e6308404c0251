"""Copies of a bucket's table files: shared by processes, bounded, and never in the way (P4, P5)."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.pool.cache import FileCache


def test_a_copy_that_was_cut_is_fetched_again(tmp_path: Path) -> None:
    """As after a crash of the system."""
    cache = FileCache(tmp_path)
    cache.path("a", 7, lambda: b"content").write_bytes(b"con")
    assert cache.path("a", 7, lambda: b"content").read_bytes() == b"content"


def test_others_never_miss_a_copy_that_is_made_anew(tmp_path: Path) -> None:
    copy = FileCache(tmp_path).path("a", 7, lambda: b"damaged")

    def fetch() -> bytes:
        assert copy.read_bytes() == b"damaged"
        return b"content"

    assert FileCache(tmp_path).path("a", 7, fetch, anew=True).read_bytes() == b"content"


def test_many_make_a_copy_at_once(tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    with ThreadPoolExecutor(8) as threads:
        paths = threads.map(lambda _: FileCache(tmp_path).path("a", len(content), lambda: content), range(32))
    assert {path.read_bytes() for path in paths} == {content}
    assert len(list(tmp_path.iterdir())) == 1


def test_the_copies_that_were_used_last_stay(tmp_path: Path) -> None:
    """In the room that there is; those in use here stay in any case."""
    for number, name in enumerate("abcd"):
        path = FileCache(tmp_path).path(name, 100, lambda: bytes(100))
        os.utime(path, (number, number))
    os.utime(FileCache(tmp_path).path("a", 100, lambda: b""))
    (tmp_path / ".new-dead").write_bytes(bytes(100))
    os.utime(tmp_path / ".new-dead", (0, 0))
    (tmp_path / ".new-alive").write_bytes(b"")
    cache = FileCache(tmp_path, limit=250)
    used = cache.path("e", 100, lambda: bytes(100))
    assert len(list(tmp_path.iterdir())) == 3  # a, e, and what is being made
    assert FileCache(tmp_path).path("a", 100, lambda: pytest.fail("it was used last")).exists()
    cache.path("f", 300, lambda: bytes(300))
    assert used.exists()


@pytest.mark.parametrize("broken", ["a file is in the way", "full"])
def test_a_folder_that_cannot_be_used_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    folder = tmp_path / "cache"
    if broken == "full":
        real = Path.write_bytes

        def write_bytes(path: Path, data: bytes) -> int:
            if path.is_relative_to(folder):
                raise OSError(errno.ENOSPC, "no space left on device")
            return real(path, data)

        monkeypatch.setattr(Path, "write_bytes", write_bytes)
    else:
        folder.write_text("not a folder")
    cache = FileCache(folder)
    paths = [cache.path(name, 7, lambda: b"content") for name in "ab"]
    assert [path.read_bytes() for path in paths] == [b"content"] * 2
    assert not any(path.is_relative_to(folder) for path in paths)
    cache.close()
    assert not any(path.exists() for path in paths)
