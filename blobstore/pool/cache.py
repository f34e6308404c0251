"""Local copies of immutable files of a bucket: any number of processes share them, and they take a bounded room."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from blobstore.core.memory.mapped_file import named

__all__ = ["FileCache"]

_UNFINISHED = ".new-"
_DAY = 86_400.0


class FileCache:
    """Files by name. A name has one content for ever, so a copy is never out of date.

    Args:
        folder: of the copies; made when it is needed. If it cannot be written to, a temporary folder takes its place.
        limit: bytes of all copies. More are kept only as long as they are in use here.
    """

    def __init__(self, folder: Path, limit: int = 1 << 30) -> None:
        self._folder, self._limit = folder, limit
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._used: set[str] = set()

    def path(self, name: str, size: int, fetch: Callable[[], bytes], *, anew: bool = False) -> Path:
        """The copy of a file, made if there is none.

        Args:
            name: the file.
            size: in bytes.
            fetch: returns its content, if there is no copy.
            anew: also if there is one, because it may be damaged. Others who use it never miss it.

        Raises:
            FileAccessError: there is no room for it, not in a temporary folder either.
        """
        key = hashlib.sha256(name.encode()).hexdigest()
        self._used.add(key)
        place = self._folder / key
        with contextlib.suppress(OSError):
            if place.stat().st_size == size and not anew:
                os.utime(place)  # the copies that were used last stay longest
                return place
        content = fetch()
        try:
            self._write(key, content)
        except OSError:
            with named(Path(tempfile.gettempdir())):
                if self._temporary is None:
                    self._temporary = tempfile.TemporaryDirectory(prefix="blobstore-", ignore_cleanup_errors=True)
                    self._folder = Path(self._temporary.name)
                self._write(key, content)
        self._trim()
        return self._folder / key

    def close(self) -> None:
        """Remove what is in a temporary folder."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _write(self, key: str, content: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f"{_UNFINISHED}{uuid.uuid4().hex}"
        try:
            unfinished.write_bytes(content)
            os.replace(unfinished, self._folder / key)
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _trim(self) -> None:
        """Remove the copies that were not used for longest, and what a process left that died."""
        copies = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                with contextlib.suppress(OSError):  # another process removes, too
                    status = entry.stat()
                    copies.append((status.st_mtime, entry.name, status.st_size))
        room = self._limit - sum(size for _, _, size in copies)
        for used, name, size in sorted(copies):
            is_left = name.startswith(_UNFINISHED)
            if (used < time.time() - _DAY) if is_left else (room < 0 and name not in self._used):
                room += size
                with contextlib.suppress(OSError):
                    os.unlink(self._folder / name)
